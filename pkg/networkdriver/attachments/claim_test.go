// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var ref = tables.ClaimRef{Namespace: "default", Name: "claim", UID: "claim-of-pod"}

// lock locks the claim of pod "pod".
func (f *fixture) lock() *Claim {
	claim, err := f.Lock(f.tb.Context(), ref.UID)
	require.NoError(f.tb, err)
	return claim
}

func TestPrepareAndRelease(t *testing.T) {
	f := newFixture(t)
	row, a := f.newRow("pod", "a", 1)
	claim := f.lock()
	require.NoError(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}))
	require.Equal(t, []*tables.DRAAllocation{row}, claim.Rows())
	require.Equal(t, []string{"setup a", "apply claim"}, f.world.takeCalls())
	claim.Unlock()

	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.at(a, pod.NetNS, "s1")
	f.world.takeCalls()
	require.NoError(t, f.release(t.Context(), "pod"))
	require.Equal(t, []string{"detach a", "free a", "apply claim"}, f.world.takeCalls())
	require.Empty(t, f.rows())
	require.Empty(t, f.world.statuses[ref.UID])
	require.Empty(t, f.world.withdrawn)

	require.NoError(t, f.release(t.Context(), "pod"))
	require.Empty(t, f.world.takeCalls(), "a claim without rows costs nothing")
}

// A device whose Setup failed may have another driver by then: it is freed as one whose Setup did not, and tried again until that
// succeeds.
func TestSetupWithDriverFails(t *testing.T) {
	errTest := errors.New("test")
	for _, freed := range []bool{true, false} {
		f := newFixture(t)
		row, _ := f.newRow("pod", "a", 1)
		row.Config = types.DeviceConfig{Driver: types.DriverVFIO}
		f.world.fail["setup a"] = errTest
		if !freed {
			f.world.fail["free a"] = errors.New("in use")
		}
		claim := f.lock()
		require.ErrorIs(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}), errTest)
		claim.Unlock()
		require.Equal(t, []string{"setup a", "free a"}, f.world.takeCalls())
		if freed {
			require.Empty(t, f.rows())
			require.Empty(t, f.world.noted, "the journal has no entry any more")
			continue
		}
		require.True(t, f.row("a").Releasing)
		require.Equal(t, map[string]bool{"a": false}, f.world.noted)
		delete(f.world.fail, "free a")
		require.Zero(t, f.giveBackReleasing(t.Context(), none))
		require.Empty(t, f.rows())
	}
}

// Nobody brings a device that is being freed back into its pod: neither a container that is started, nor a runtime that
// comes back with the pod's sandbox. It would be there without its VLAN and without a row, and nobody would fetch it.
func TestNoWayBackWhileReleasing(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.takeCalls()

	release := f.world.hold("free a")
	done := make(chan error)
	go func() { done <- f.release(context.Background(), "pod") }()
	require.Eventually(t, f.world.seen("free a"), waitFor, tick)
	require.Equal(t, "Releasing", f.row("a").State())
	f.at(a, "", "")
	require.False(t, f.InPlace("pod", "s1"))
	synchronized := make(chan struct{})
	go func() {
		defer close(synchronized)
		f.Synchronize(context.Background(), []Sandbox{pod})
	}()
	attached := make(chan error)
	go func() { attached <- f.Attach(context.Background(), pod) }()
	select {
	case <-synchronized:
		t.Fatal("does not wait")
	case <-attached:
		t.Fatal("does not wait")
	case <-waited(20):
	}
	release()
	require.NoError(t, <-done)
	<-synchronized
	require.NoError(t, <-attached, "a pod that has no devices any more")
	require.Equal(t, []string{"detach a", "free a", "apply claim"}, f.world.takeCalls())
	require.Empty(t, f.rows())
	_, there := f.world.where(a.ID)
	require.False(t, there)
}

// The same between a release that failed and the next one: the lock is free, and the row says no.
func TestNoWayBackAfterAFailedRelease(t *testing.T) {
	for _, step := range []string{"free a", "detach a"} {
		t.Run(step, func(t *testing.T) {
			f := newFixture(t)
			a := f.prepare("pod", "a", 1)
			b := f.prepare("pod", "b", 2)
			pod := newSandbox("pod", "s1")
			require.NoError(t, f.Attach(t.Context(), pod))
			f.world.fail[step] = errors.New("busy")
			require.ErrorContains(t, f.release(t.Context(), "pod"), "busy")
			require.Len(t, f.rows(), 1, "the claim's other device is freed")
			_, there := f.world.where(b.ID)
			require.False(t, there)
			row := f.row("a")
			require.True(t, row.Releasing)
			require.Equal(t, "Failed", row.State())
			require.Equal(t, step == "detach a", row.Attachment != nil, "the row says where the link is")
			require.False(t, f.InPlace("pod", "s1"))
			f.world.takeCalls()

			next := newSandbox("pod", "s2")
			f.Synchronize(t.Context(), []Sandbox{pod})
			f.Synchronize(t.Context(), []Sandbox{next})
			require.EqualError(t, f.Attach(t.Context(), next),
				"device a (claim default/claim, request net): the claim is being unprepared, its devices stay out of the pod")
			require.NotContains(t, f.world.takeCalls(), "attach a")

			clear(f.world.fail)
			require.NoError(t, f.Detach(t.Context(), pod))
			f.at(a, "", "")
			require.NoError(t, f.release(t.Context(), "pod"))
			require.Empty(t, f.rows())
		})
	}
}

// A pod that ends gets no device late, of another claim neither.
func TestNoLateAttachToAPodThatEnds(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	row, b := f.newRow("pod", "b", 2)
	f.insert(row.With(func(r *tables.DRAAllocation) { r.ClaimUID = "another" }))
	f.world.fail["detach a"] = errors.New("busy")
	require.Error(t, f.release(t.Context(), "pod"))
	f.Synchronize(t.Context(), []Sandbox{pod})
	f.at(a, pod.NetNS, "s1")
	f.at(b, "", "")
}

// Who prepares the claim for the pod again takes the device back.
func TestPrepareEndsARelease(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.fail["detach a"] = errors.New("busy")
	require.Error(t, f.release(t.Context(), "pod"))
	claim := f.lock()
	require.NoError(t, claim.Prepare(t.Context(), Plan{Claim: ref, Keep: claim.Rows()}))
	require.False(t, f.row("a").Releasing)
	claim.Unlock()
	require.NoError(t, f.Attach(t.Context(), pod))
	require.True(t, f.InPlace("pod", "s1"))
}

// A claim that is being prepared is not looked at by events of its pod, and Unprepare waits for an attach.
func TestOneAtAClaim(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	claim := f.lock()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, f.Attach(ended, newSandbox("pod", "s1")), "still going on")
	claim.Unlock()

	release := f.world.hold("attach a")
	done := make(chan error)
	go func() { done <- f.Attach(context.Background(), newSandbox("pod", "s1")) }()
	require.Eventually(t, f.world.seen("attach a"), waitFor, tick)
	_, err := f.Lock(ended, ref.UID)
	require.EqualError(t, err, "wait for an earlier call for the same claim: context canceled")
	release()
	require.NoError(t, <-done)
	require.NoError(t, f.release(t.Context(), "pod"))
	_, there := f.world.where(a.ID)
	require.False(t, there)
}

// A failed Prepare leaves nothing behind, and what it cannot take back stays with the claim, to be freed and not to be
// attached.
func TestPrepareRollsBack(t *testing.T) {
	f := newFixture(t)
	x, _ := f.newRow("pod", "a", 1)
	y, _ := f.newRow("pod", "b", 2)
	plan := Plan{Claim: ref, SetUp: []*tables.DRAAllocation{x, y}}
	claim := f.lock()
	f.world.fail["setup b"] = errors.New("no")
	require.EqualError(t, claim.Prepare(t.Context(), plan), `request "net": set up device b: no`)
	require.Equal(t, []string{"setup a", "setup b", "free a"}, f.world.takeCalls())
	require.Empty(t, f.rows())
	require.Empty(t, f.world.withdrawn)

	delete(f.world.fail, "setup b")
	f.world.fail["apply claim"] = errors.New("no API server")
	f.world.fail["free a"] = errors.New("stuck")
	require.EqualError(t, claim.Prepare(t.Context(), plan), `record the devices in the claim's status: no API server; and device a could not be freed again: stuck`)
	require.Equal(t, []string{"setup a", "setup b", "apply claim", "free b", "free a"}, f.world.takeCalls())
	require.Equal(t, []tables.ClaimRef{ref}, f.world.withdrawn)
	require.Len(t, f.rows(), 1)
	require.Equal(t, "roll back a failed prepare: stuck", f.row("a").Error)
	claim.Unlock()
	require.ErrorContains(t, f.Attach(t.Context(), newSandbox("pod", "s1")), "being unprepared")

	clear(f.world.fail)
	require.NoError(t, f.release(t.Context(), "pod"))
	require.Empty(t, f.rows())
}

// A device that another claim holds is not taken from it, whoever let it come to that.
func TestPrepareOfAnothersDevice(t *testing.T) {
	f := newFixture(t)
	f.prepare("other", "a", 1)
	row, _ := f.newRow("pod", "a", 1)
	claim := f.lock()
	defer claim.Unlock()
	require.EqualError(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}),
		"device a is still held by claim default/claim (uid claim-of-other) of pod default/other (uid other)")
	require.Len(t, f.rows(), 1)
	require.Equal(t, kubetypes.UID("other"), f.row("a").PodUID)
	require.Equal(t, []tables.ClaimRef{ref}, f.world.withdrawn)
}

// Two claims that have one device, by a mistake somewhere: the first that goes leaves it to the other.
func TestReleaseOfAnothersDevice(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Pool, r.PodUID, r.ClaimUID = "pool2", "other", "claim-of-other" }))
	require.NoError(t, f.release(t.Context(), "pod"))
	require.Equal(t, []string{"apply claim"}, f.world.takeCalls())
	require.NoError(t, f.release(t.Context(), "other"))
	require.Equal(t, []string{"detach a", "free a", "apply claim"}, f.world.takeCalls())
	require.Empty(t, f.rows())
	require.Equal(t, []string{"left of claim-of-pod", "a of claim-of-pod", "left of claim-of-other", "a of claim-of-other"}, f.world.returned,
		"the addresses are each claim's own")
	require.NoError(t, f.release(t.Context(), "gone"))
	require.Equal(t, "left of claim-of-gone", f.world.returned[4], "a claim of which nothing is known")
}
