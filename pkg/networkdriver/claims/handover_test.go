// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// handedOver is a node whose claims are looked at when a test says so.
type handedOver struct {
	*fixture
	api *fakeAPI
	*HandOver
	clock time.Time
}

func newHandedOver(t testing.TB, devices ...string) *handedOver {
	h := &handedOver{fixture: newFixture(t, devices...), api: newFakeAPI(), clock: time.Unix(1000, 0)}
	h.HandOver = NewHandOver(slog.New(slog.DiscardHandler), h.Preparer, h.api, h.host)
	h.now = func() time.Time { return h.clock }
	return h
}

// set makes the API's claim this one.
func (h *handedOver) set(claim *resourceapi.ResourceClaim) {
	h.api.mu.Lock()
	defer h.api.mu.Unlock()
	h.api.claims[claim.Namespace+"/"+claim.Name] = claim
}

// wait looks at the claims for so many seconds.
func (h *handedOver) wait(seconds int) {
	for range seconds {
		h.look(h.t.Context())
		h.clock = h.clock.Add(time.Second)
	}
}

// prepareAndRun gives the claim to a pod that runs.
func (h *handedOver) prepareAndRun(claim *resourceapi.ResourceClaim, pod, sandbox string) attachments.Sandbox {
	h.t.Helper()
	h.set(claim)
	_, err := h.Prepare(h.t.Context(), claim)
	require.NoError(h.t, err)
	s := h.host.run(pod, sandbox)
	require.NoError(h.t, h.Room.Attach(h.t.Context(), s))
	h.host.takeCalls()
	return s
}

func also(pod string) claimOption {
	return alsoFor(resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: kubetypes.UID("uid-" + pod)})
}

func TestHandOver(t *testing.T) {
	h := newHandedOver(t, "a", "b", "c")
	shared := []claimOption{with("net", "a"), with("more", "b")}
	first := h.prepareAndRun(newClaim("c", append(shared, forPod("first"), also("second"))...), "first", "s1")
	require.Equal(t, kubetypes.UID("uid-first"), h.row("a").PodUID)

	// The second pod comes while the first one runs: nothing is asked of the API.
	second := h.host.run("second", "s2")
	h.wait(30)
	reads, _ := h.api.counts()
	require.Zero(t, reads)

	// The first pod's sandbox ends. While the claim is reserved for it, it may come back.
	h.host.stop("s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.host.takeCalls()
	h.wait(40)
	require.Empty(t, h.host.takeCalls())
	reads, _ = h.api.counts()
	require.Greater(t, reads, 2)
	require.Less(t, reads, 10, "it is asked less often as time goes by")
	events := h.host.takeEvents()
	require.NotEmpty(t, events)
	require.Contains(t, events[0], "second: ClaimInUse: claim default/c is in use by pod default/first")

	// It does not, and the claim has been allotted another device in the place of one.
	h.set(newClaim("c", with("net", "a"), with("more", "c"), forPod("second")))
	h.wait(11)
	require.Equal(t, []string{"return a", "free a", "return b", "free b", "setup a", "setup c", "attach a /s2", "attach c /s2"}, h.host.takeCalls())
	for _, device := range []string{"a", "c"} {
		require.Equal(t, "Attached", h.row(device).State())
		require.Equal(t, second.PodUID, h.row(device).PodUID)
	}
	require.Len(t, h.rows(), 2)
	require.Equal(t, []string{"a", "c"}, h.status.applied["uid-c"])
	require.True(t, h.Room.InPlace(second.PodUID, "s2"))
}

// A hand-over that fails is tried again, also when nothing is prepared any more.
func TestHandOverIsTriedAgain(t *testing.T) {
	h := newHandedOver(t, "a")
	first := h.prepareAndRun(newClaim("c", with("net", "a"), forPod("first")), "first", "s1")
	h.host.stop("s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.host.run("second", "s2")
	h.set(newClaim("c", with("net", "a"), forPod("second")))
	h.host.fail["setup a"] = errors.New("busy")
	h.wait(20)
	require.Empty(t, h.rows())

	clear(h.host.fail)
	h.wait(11)
	require.Equal(t, "Attached", h.row("a").State())
	require.Equal(t, kubetypes.UID("uid-second"), h.row("a").PodUID)
	h.host.takeCalls()
	h.wait(30)
	require.Empty(t, h.host.takeCalls())
}

// What kubelet has unprepared is not prepared again: nobody would free it.
func TestHandOverAfterUnprepare(t *testing.T) {
	h := newHandedOver(t, "a")
	first := h.prepareAndRun(newClaim("c", with("net", "a"), forPod("first")), "first", "s1")
	h.host.stop("s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.host.run("second", "s2")
	h.set(newClaim("c", with("net", "a"), forPod("second")))
	h.api.fail = func(string, string) error { // while the claim is read
		h.api.fail = nil
		h.api.mu.Unlock()
		defer h.api.mu.Lock()
		require.NoError(t, h.Unprepare(t.Context(), "uid-c"))
		h.Unprepared([]kubetypes.UID{"uid-c"})
		return nil
	}
	h.wait(30)
	require.Nil(t, h.api.fail)
	require.Empty(t, h.rows())
	require.NotContains(t, h.host.takeCalls(), "setup a")
}

// The first sandbox of a pod of the claim gets the devices.
func TestFirstSandboxGetsTheDevices(t *testing.T) {
	h := newHandedOver(t, "a")
	claim := newClaim("c", with("net", "a"), forPod("first"), also("second"))
	h.set(claim)
	_, err := h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "first", h.row("a").PodName)
	h.host.run("second", "s2")
	h.wait(3)
	require.Equal(t, "second", h.row("a").PodName)
	require.Equal(t, "Attached", h.row("a").State())

	// From now on it is the second pod's, whatever kubelet asks.
	h.host.run("first", "s1")
	h.host.takeCalls()
	_, err = h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	h.wait(20)
	require.Empty(t, h.host.takeCalls())
	require.Equal(t, "second", h.row("a").PodName)

	// The same when kubelet asks after the second pod's sandbox was made anew.
	h.host.stop("s2")
	require.NoError(t, h.Room.Detach(t.Context(), attachments.Sandbox{ID: "s2", PodUID: "uid-second", PodNamespace: "default"}))
	_, err = h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "second", h.row("a").PodName)
}

// Kubelet prepares a claim anew for whichever pod has a sandbox.
func TestPrepareForThePodThatRuns(t *testing.T) {
	h := newHandedOver(t, "a")
	h.host.run("second", "s2")
	_, err := h.Prepare(t.Context(), newClaim("c", with("net", "a"), forPod("first"), also("second")))
	require.NoError(t, err)
	require.Equal(t, "second", h.row("a").PodName)
}

// A sandbox that started while the agent was away gets its devices without being asked for a container.
func TestLateAttachWithoutContainer(t *testing.T) {
	h := newHandedOver(t, "a")
	claim := newClaim("c", with("net", "a"), forPod("p"))
	h.set(claim)
	_, err := h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	h.wait(5)
	h.host.run("p", "old")
	s := h.host.run("p", "new")
	h.host.fail["attach a /new"] = errors.New("name net1 is taken")
	h.wait(5)
	require.Equal(t, "Failed", h.row("a").State())
	require.Contains(t, h.host.takeEvents()[0], "p: FailedAttach: device a (claim default/c, request net): name net1 is taken")
	clear(h.host.fail)
	h.wait(11)
	require.True(t, h.Room.InPlace(s.PodUID, "new"))
	reads, _ := h.api.counts()
	require.Zero(t, reads)
}

// A sandbox that ends while devices are attached to it does not keep them.
func TestAttachToASandboxThatEnds(t *testing.T) {
	h := newHandedOver(t, "a")
	_, err := h.Prepare(t.Context(), newClaim("c", with("net", "a"), forPod("p")))
	require.NoError(t, err)
	s := h.host.run("p", "s1")
	h.host.stop("s1")
	require.NoError(t, h.HandOver.attach(t.Context(), s))
	require.Nil(t, h.row("a").Attachment)
}

// A device that was restored for a former pod goes to the pod that waits, not back.
func TestHandOverAfterRestart(t *testing.T) {
	h := newHandedOver(t, "a")
	claim := newClaim("c", with("net", "a"), forPod("second"))
	first := h.prepareAndRun(newClaim("c", with("net", "a"), forPod("first")), "first", "s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.insert(h.row("a").With(func(r *tables.DRAAllocation) { r.Releasing = true }))
	h.set(claim)
	h.host.run("second", "s2")
	h.host.takeCalls()
	h.wait(3)
	require.Equal(t, []string{"return a", "free a", "setup a", "attach a /s2"}, h.host.takeCalls())
	require.Equal(t, "second", h.row("a").PodName)
}

// The end of the agent may leave some of the claim's devices with the former pod, which may still be the one to get them,
// and have one of them attached by the time that it is looked at.
func TestHandOverInterruptedBetweenDevices(t *testing.T) {
	for _, attached := range []bool{false, true} {
		h := newHandedOver(t, "a", "b")
		claim := newClaim("c", with("net", "a"), with("more", "b"), forPod("first"), also("second"))
		h.set(claim)
		_, err := h.Prepare(t.Context(), claim)
		require.NoError(t, err)
		h.remove("b")
		h.insert(h.row("a").With(func(r *tables.DRAAllocation) { r.Held = true }))
		require.NoError(t, h.host.OweClaim(RefOf(claim)))
		s := h.host.run("first", "s1")
		if attached {
			require.NoError(t, h.Room.Attach(t.Context(), s))
		}
		h.wait(5)
		for _, device := range []string{"a", "b"} {
			require.Equal(t, "Attached", h.row(device).State())
			require.Equal(t, s.PodUID, h.row(device).PodUID)
		}
		h.host.takeCalls()
		h.wait(30)
		require.Empty(t, h.host.takeCalls())
	}
}

// A claim that kubelet takes for prepared is owed its devices, whatever becomes of it, until kubelet knows better.
func TestClaimThatKubeletTakesForPrepared(t *testing.T) {
	h := newHandedOver(t, "a", "b")
	claim := newClaim("c", with("net", "a"), forPod("first"))
	ref := RefOf(claim)
	h.set(claim)
	require.NoError(t, h.host.OweClaim(ref))
	_, err := h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Empty(t, h.host.owed, "it is prepared")

	// Kubelet is told once the devices are given back, and may not hear of it.
	h.host.onReturn = func() { require.Equal(t, []Ref{ref}, h.host.OwedClaims()) }
	require.NoError(t, h.Unprepare(t.Context(), claim.UID))
	h.host.onReturn = nil
	h.Unprepared([]kubetypes.UID{claim.UID})
	h.clock = time.Now()
	h.host.run("other", "s1")
	h.wait(5)
	require.Equal(t, []Ref{ref}, h.host.owed)
	reads, _ := h.api.counts()
	require.Zero(t, reads)
	h.wait(10)
	require.Empty(t, h.host.owed)

	// Kubelet was not told, since another claim could not be unprepared.
	_, err = h.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.NoError(t, h.Unprepare(t.Context(), claim.UID))
	h.wait(30)
	require.Equal(t, []Ref{ref}, h.host.owed)

	// The next pod of the claim, which has been allotted another device since, gets that without kubelet.
	h.set(newClaim("c", with("net", "b"), forPod("second")))
	h.host.run("second", "s2")
	h.wait(11)
	require.Equal(t, "Attached", h.row("b").State())
	require.Empty(t, h.host.owed)

	// What is gone is owed nothing.
	gone := Ref{Namespace: "default", Name: "c", UID: "uid-former"}
	require.NoError(t, h.host.OweClaim(gone))
	h.wait(11)
	require.Empty(t, h.host.owed)
}

// An agent that ends soon after its answer to Unprepare leaves a claim that is owed its devices. That does not last longer than the
// claim, also where no pod of its namespace ever comes again.
func TestOwedClaimThatIsGone(t *testing.T) {
	h := newHandedOver(t)
	claim := newClaim("c")
	require.NoError(t, h.host.OweClaim(RefOf(claim)))
	h.set(claim)
	h.wait(30)
	require.Equal(t, []Ref{RefOf(claim)}, h.host.owed)
	h.api.mu.Lock()
	clear(h.api.claims)
	h.api.mu.Unlock()
	h.wait(11)
	require.Empty(t, h.host.owed)
}

// What an earlier life of the agent had taken from the former pod, and not yet given to the next one, is not forgotten.
func TestHandOverThatTheEndOfTheAgentInterrupted(t *testing.T) {
	h := newHandedOver(t, "a")
	claim := newClaim("c", with("net", "a"), forPod("second"))
	h.set(claim)
	require.NoError(t, h.host.OweClaim(RefOf(claim)))
	h.wait(5)
	require.Empty(t, h.host.takeCalls(), "there is no sandbox")
	h.host.run("second", "s2")
	h.wait(11)
	require.Equal(t, []string{"setup a", "attach a /s2"}, h.host.takeCalls())
	require.Equal(t, "second", h.row("a").PodName)
}
