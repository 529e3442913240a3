// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/nic"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const waitFor, tick = 10 * time.Second, time.Millisecond

func TestSandboxLife(t *testing.T) {
	f := newFixture(t)
	a, b := f.prepare("pod", "a", 1), f.prepare("pod", "b", 2)
	f.prepare("pod", "vfio", -1)
	pod := newSandbox("pod", "s1")
	require.True(t, f.HasDevices("pod"))
	require.False(t, f.InPlace("pod", "s1"))

	require.NoError(t, f.Attach(t.Context(), pod))
	f.at(a, pod.NetNS, "s1")
	f.at(b, pod.NetNS, "s1")
	require.Equal(t, "net-a", f.row("a").Attachment.IfName)
	require.Equal(t, "s1", f.row("vfio").Attachment.SandboxID, "a device without a link is in place at once")
	require.Equal(t, []string{"attach a", "attach b"}, f.world.takeCalls())
	require.True(t, f.InPlace("pod", "s1"))
	require.False(t, f.InPlace("pod", "s2"))

	require.NoError(t, f.Attach(t.Context(), pod))
	require.Empty(t, f.world.takeCalls(), "what is in place is not touched again")

	for range 3 { // stopped twice and removed
		require.NoError(t, f.Detach(t.Context(), pod))
	}
	f.at(a, "", "")
	f.at(b, "", "")
	require.Nil(t, f.row("vfio").Attachment)
}

func TestPodWithoutClaimIsNotTouched(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	other := Sandbox{ID: "x", PodUID: "other"}
	require.False(t, f.HasDevices("other"))
	require.True(t, f.InPlace("other", "x"))
	require.NoError(t, f.Attach(t.Context(), other))
	require.NoError(t, f.Detach(t.Context(), other))
	f.Synchronize(t.Context(), []Sandbox{other})
	require.Empty(t, f.world.takeCalls())
}

// ATT-08, ATT-15: a failure at the second device leaves the first on the host, and the retry succeeds.
func TestFailureLeavesNothingInThePod(t *testing.T) {
	f := newFixture(t)
	a, b := f.prepare("pod", "a", 1), f.prepare("pod", "b", 2)
	f.world.fail["attach b"] = errors.New("name net-b is taken in the pod")

	require.EqualError(t, f.Attach(t.Context(), newSandbox("pod", "s1")),
		"device b (claim default/claim, request net): name net-b is taken in the pod")
	f.at(a, "", "")
	f.at(b, "", "")
	require.Equal(t, "name net-b is taken in the pod", f.row("b").Error)
	require.Empty(t, f.row("a").Error)

	clear(f.world.fail)
	again := newSandbox("pod", "s2")
	require.NoError(t, f.Attach(t.Context(), again))
	f.at(a, again.NetNS, "s2")
	f.at(b, again.NetNS, "s2")
	require.Empty(t, f.row("b").Error)
}

// What cannot be taken back stays known, so that it is tried again.
func TestFailedUndoKeepsTheAttachment(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	f.prepare("pod", "b", 2)
	pod := newSandbox("pod", "s1")
	f.world.fail["attach b"] = errors.New("no")
	f.world.fail["detach a"] = errors.New("busy")
	require.Error(t, f.Attach(t.Context(), pod))
	f.at(a, pod.NetNS, "s1")
	require.Contains(t, f.row("a").Error, "busy")

	clear(f.world.fail)
	require.NoError(t, f.Detach(t.Context(), pod))
	f.at(a, "", "")
	require.Empty(t, f.row("a").Error)
}

// ATT-14
func TestHostNetworkPodIsRefused(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	pod.NetNS = ""
	err := f.Attach(t.Context(), pod)
	require.ErrorIs(t, err, errNone)
	require.ErrorContains(t, err, "pod default/pod: device a (claim default/claim, request net)")
	require.NoError(t, f.Detach(t.Context(), pod))
	f.at(a, "", "")
	require.Empty(t, f.world.takeCalls())
}

// ATT-12, DET-03: the sandbox is made anew, and the late stop of the old one does not pull the device out.
func TestNewSandboxBeforeOldStop(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	old, fresh := newSandbox("pod", "old"), newSandbox("pod", "new")
	require.NoError(t, f.Attach(t.Context(), old))
	require.NoError(t, f.Attach(t.Context(), fresh))
	f.at(a, fresh.NetNS, "new")
	require.NoError(t, f.Detach(t.Context(), old))
	f.at(a, fresh.NetNS, "new")
}

// DET-02: the runtime gives no namespace at stop; the one remembered counts.
func TestStopWithoutNamespace(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	bare := pod
	bare.NetNS = ""

	f.world.fail["detach a"] = errors.New("busy")
	require.EqualError(t, f.Detach(t.Context(), bare), "detach device a (claim default/claim, request net): busy")
	f.at(a, pod.NetNS, "s1")
	require.Equal(t, "Failed", f.row("a").State())

	clear(f.world.fail)
	require.NoError(t, f.Detach(t.Context(), bare))
	f.at(a, "", "")
}

// A restored row does not know where its link is.
func TestStopFindsWhatTheTableForgot(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	f.world.put(a.ID, pod.NetNS)
	require.NoError(t, f.Detach(t.Context(), pod))
	f.at(a, "", "")
}

// A virtual link ends with the namespace of the former sandbox and is made anew.
func TestVirtualLinkIsMadeAnew(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "old")))
	f.world.end(a.ID)

	fresh := newSandbox("pod", "new")
	require.NoError(t, f.Attach(t.Context(), fresh))
	now := f.row("a").PreparedDevice
	require.Equal(t, 101, now.Link().Index)
	f.at(now, fresh.NetNS, "new")

	f.world.end(now.Link())
	require.NoError(t, f.release(t.Context(), "pod"), "what is gone need not come home")
	require.Empty(t, f.rows())
}

// A VF whose former sandbox went away unnoticed is fetched from where it is.
func TestPCILinkIsFetched(t *testing.T) {
	f := newFixture(t)
	vf := f.prepare("pod", "vf", 1)
	vf.ID = nic.PCI("0000:03:00.1")
	f.world.put(vf.ID, "somewhere")
	f.insert(f.row("vf").With(func(a *tables.DRAAllocation) { a.PreparedDevice = vf }))
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.at(vf, pod.NetNS, "s1")
	require.Equal(t, []string{"attach vf", "detach vf", "attach vf"}, f.world.takeCalls())
}

// ATT-01, SCL-08: an attach that the runtime does not wait for any more is not entered twice, and delays no other pod. Whether the
// sandbox has ended is up to who was told of it.
func TestLateAttach(t *testing.T) {
	f := newFixture(t)
	a, b := f.prepare("pod", "a", 1), f.prepare("other", "b", 2)
	release := f.world.hold("attach a")
	pod, other := newSandbox("pod", "s1"), newSandbox("other", "s2")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Attach(ctx, pod) }()
	require.Eventually(t, f.world.seen("attach a"), waitFor, tick)
	cancel()

	require.NoError(t, f.Attach(t.Context(), other))
	f.at(b, other.NetNS, "s2")
	require.EqualError(t, f.Attach(ctx, pod), "pod default/pod: an earlier attach or detach is still going on: context canceled")
	require.ErrorContains(t, f.Detach(ctx, pod), "still going on")

	release()
	require.NoError(t, <-done)
	f.at(a, pod.NetNS, "s1")
	require.NoError(t, f.Detach(t.Context(), pod))
	require.NoError(t, f.AttachLate(t.Context(), pod, func() bool { return false }))
	f.at(a, "", "")
}

// A row that is gone although nobody may take it away: what was done for it is taken back.
func TestRowGoneMeanwhile(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	for _, anew := range []bool{false, true} {
		if anew {
			f.prepare("pod", "a", 1)
			f.world.end(a.ID)
		}
		release := f.world.hold("attach a")
		f.world.takeCalls()
		done := make(chan error)
		go func() { done <- f.Attach(context.Background(), newSandbox("pod", "s1")) }()
		require.Eventually(t, f.world.seen("attach a"), waitFor, tick)
		f.delete("a")
		release()
		require.ErrorContains(t, <-done, "the claim was unprepared meanwhile")
		ns, there := f.world.where(a.ID)
		require.Empty(t, ns)
		require.Equal(t, !anew, there)
		if anew {
			require.Equal(t, []string{"attach a", "setup a", "attach a", "detach a", "free a"}, f.world.takeCalls())
		}
	}
}

func TestSynchronize(t *testing.T) {
	f := newFixture(t)
	inside := f.prepare("restored", "a", 1)
	missed := f.prepare("missed", "b", 2)
	waiting := f.prepare("waiting", "c", 3)
	left := f.prepare("stopped", "d", 4)
	anew := f.prepare("anew", "e", 5)
	unclear := f.prepare("unclear", "g", 6)
	f.prepare("restored", "vfio", -1)

	restored, missedSandbox := newSandbox("restored", "s-restored"), newSandbox("missed", "s-missed")
	f.world.put(inside.ID, restored.NetNS)
	stopped := newSandbox("stopped", "s-stopped")
	require.NoError(t, f.Attach(t.Context(), stopped))
	f.world.gone[stopped.NetNS] = true
	oldSandbox := newSandbox("anew", "s-old")
	require.NoError(t, f.Attach(t.Context(), oldSandbox))
	f.world.put(anew.ID, "")
	newest := newSandbox("anew", "s-new")
	newest.Populated = true
	one, two := newSandbox("unclear", "s-one"), newSandbox("unclear", "s-two")

	f.Synchronize(t.Context(), []Sandbox{restored, missedSandbox, stopped, oldSandbox, newest, one, two, newSandbox("bystander", "s-bystander")})

	f.at(inside, restored.NetNS, "s-restored")
	require.Equal(t, "found0", f.row("a").Attachment.IfName)
	require.Equal(t, "s-restored", f.row("vfio").Attachment.SandboxID)
	f.at(missed, missedSandbox.NetNS, "s-missed")
	f.at(waiting, "", "")
	f.at(left, "", "")
	f.at(anew, newest.NetNS, "s-new")
	f.at(unclear, "", "")

	require.NoError(t, f.Attach(t.Context(), two), "as a container tells")
	f.at(unclear, two.NetNS, "s-two")
}

func TestSynchronizeRecordsWhatFails(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	for _, call := range []string{"attach a", "where a"} {
		f.world.fail[call] = errors.New("no")
		f.Synchronize(t.Context(), []Sandbox{pod})
		require.Contains(t, f.row("a").Error, "no")
		f.at(a, "", "")
		clear(f.world.fail)
	}
	f.Synchronize(t.Context(), []Sandbox{pod})
	f.at(a, pod.NetNS, "s1")
	require.Empty(t, f.row("a").Error)

	f.world.fail["detach a"] = errors.New("busy")
	f.Synchronize(t.Context(), nil)
	f.at(a, pod.NetNS, "s1")
	require.Equal(t, "busy", f.row("a").Error)
	clear(f.world.fail)
	f.Synchronize(t.Context(), nil)
	f.at(a, "", "")
}

// asked is a context that tells when somebody waits for its end, as who waits for a lock does.
type asked struct {
	context.Context
	done func() // called once
}

func (c asked) Done() <-chan struct{} {
	c.done()
	return c.Context.Done()
}

// A claim of the pod that is prepared while the event waits for another one's lock is not forgotten.
func TestClaimPreparedWhileAnEventWaits(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	first, err := f.Lock(t.Context(), "claim-of-pod")
	require.NoError(t, err)
	done, waits := make(chan error), make(chan struct{})
	go func() {
		done <- f.Attach(asked{t.Context(), sync.OnceFunc(func() { close(waits) })}, newSandbox("pod", "s1"))
	}()
	<-waits
	second, err := f.Lock(t.Context(), "another")
	require.NoError(t, err)
	row, b := f.newRow("pod", "b", 2)
	f.insert(row.With(func(r *tables.DRAAllocation) { r.ClaimUID = "another" }))
	first.Unlock()
	select {
	case err := <-done:
		t.Fatal("the other claim is being prepared: ", err)
	case <-waited(20):
	}
	second.Unlock()
	require.NoError(t, <-done)
	f.at(a, "/run/netns/s1", "s1")
	f.at(b, "/run/netns/s1", "s1")
}

// Events about pods with claims in common, in whatever order, and preparations do not wait for each other for good.
func TestLocksHaveAnOrder(t *testing.T) {
	f := newFixture(t)
	for i, pod := range []kubetypes.UID{"p", "q"} {
		for j, claim := range []kubetypes.UID{"c1", "c2", "c3"} {
			row, _ := f.newRow(pod, string(pod)+string(rune('0'+(j+i)%3)), 10*i+j+1)
			f.insert(row.With(func(r *tables.DRAAllocation) { r.ClaimUID = claim }))
		}
	}
	require.Equal(t, []kubetypes.UID{"c1", "c2", "c3"}, claimsOf(f.rows()))
	require.Equal(t, []kubetypes.UID{"c1", "c2", "c3"}, claimsOf(f.rowsOfPod("q")))
	const rounds = 100
	done := make(chan struct{})
	work := func(do func()) {
		go func() {
			for range rounds {
				do()
			}
			done <- struct{}{}
		}()
	}
	for _, pod := range []kubetypes.UID{"p", "q"} {
		s := newSandbox(pod, "s-"+string(pod))
		work(func() { _ = f.Attach(t.Context(), s) })
		work(func() { _ = f.Detach(t.Context(), s) })
	}
	work(func() { f.Synchronize(t.Context(), []Sandbox{newSandbox("p", "s-p"), newSandbox("q", "s-q")}) })
	work(func() {
		if claim, err := f.Lock(t.Context(), "c2"); err == nil {
			claim.Unlock()
		}
	})
	for range 6 {
		<-done
	}
}

// What is written is the row as it is, and only if it is still the claim's.
func TestUpdate(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	row := f.row("a")
	foreign := row.With(func(r *tables.DRAAllocation) { r.ClaimUID, r.ClaimName, r.Error = "other", "other", "e" })
	for _, stranger := range []*tables.DRAAllocation{foreign, row.With(func(r *tables.DRAAllocation) { r.PodUID = "other"; r.Error = "e" })} {
		now, err := f.edit(stranger, func(r *tables.DRAAllocation) { r.Error = "changed" })
		require.NoError(t, err)
		require.Nil(t, now)
		require.NoError(t, f.update(remove(stranger)))
		b, _ := f.newRow("pod", "b", 2)
		require.EqualError(t, f.update(put(b), put(stranger)),
			"device a is still held by claim default/claim (uid claim-of-pod) of pod default/pod (uid pod)")
		require.Equal(t, []*tables.DRAAllocation{row}, f.rows(), "all or none")
	}
	before := f.table.Revision(f.db.ReadTxn())
	now, err := f.edit(row, func(*tables.DRAAllocation) {})
	require.NoError(t, err)
	require.Equal(t, row, now)
	require.Equal(t, before, f.table.Revision(f.db.ReadTxn()), "what stays the same is not written")
	require.True(t, f.HasDevices("pod"))
	require.NoError(t, f.update(remove(row), remove(foreign)))
	require.Empty(t, f.rows())
	require.False(t, f.HasDevices("pod"))
}

func TestRestore(t *testing.T) {
	f := newFixture(t)
	initialized := func() bool {
		done, _ := f.table.Initialized(f.db.ReadTxn())
		return done
	}
	require.False(t, initialized())
	a, _ := f.newRow("pod", "a", 1)
	b, _ := f.newRow("pod", "b", 2)
	require.NoError(t, f.Restore([]*tables.DRAAllocation{a, b}))
	require.Equal(t, []*tables.DRAAllocation{a, b}, statedb.Collect(f.table.All(f.db.ReadTxn())))
	require.True(t, initialized())
}
