// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/nic"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSandboxLife(t *testing.T) {
	f := newFixture(t)
	a, b := f.prepare("pod", "a", 1), f.prepare("pod", "b", 2)
	f.prepare("pod", "vfio", -1)
	pod, netns := newSandbox(t, "pod", "s1")
	ctx := t.Context()

	require.NoError(t, f.hooks.RunPodSandbox(ctx, pod))
	f.at(a, netns, "s1")
	f.at(b, netns, "s1")
	require.Equal(t, "net-a", f.row("a").Attachment.IfName)
	require.Equal(t, "s1", f.row("vfio").Attachment.SandboxID, "a device without a link is in place at once")
	require.Equal(t, []string{"attach a", "attach b"}, f.linker.calls)

	require.NoError(t, f.hooks.RunPodSandbox(ctx, pod))
	_, _, err := f.hooks.CreateContainer(ctx, pod, &api.Container{})
	require.NoError(t, err)
	require.Len(t, f.linker.calls, 2, "what is in place is not touched again")

	require.NoError(t, f.hooks.StopPodSandbox(ctx, pod))
	require.NoError(t, f.hooks.StopPodSandbox(ctx, pod))
	require.NoError(t, f.hooks.RemovePodSandbox(ctx, pod))
	f.at(a, "", "")
	f.at(b, "", "")
	require.Nil(t, f.row("vfio").Attachment)
}

func TestPodWithoutClaimIsNotTouched(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	other := &api.PodSandbox{Id: "x", Uid: "other"}
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), other))
	_, _, err := f.hooks.CreateContainer(t.Context(), other, nil)
	require.NoError(t, err)
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), other))
	require.Empty(t, f.linker.calls)
}

// ATT-08, ATT-15: a failure at the second device leaves the first on the host, and the retry succeeds.
func TestFailureLeavesNothingInThePod(t *testing.T) {
	f := newFixture(t)
	a, b := f.prepare("pod", "a", 1), f.prepare("pod", "b", 2)
	pod, netns := newSandbox(t, "pod", "s1")
	f.linker.attachErr["b"] = errors.New("name net-b is taken in the pod")

	err := f.hooks.RunPodSandbox(t.Context(), pod)
	require.EqualError(t, err, "device b (claim default/claim, request net): name net-b is taken in the pod")
	f.at(a, "", "")
	f.at(b, "", "")
	require.Equal(t, "name net-b is taken in the pod", f.row("b").Error)
	require.Empty(t, f.row("a").Error)

	_, _, err = f.hooks.CreateContainer(t.Context(), pod, &api.Container{Name: "app"})
	require.ErrorContains(t, err, "container app is not started without its pod's devices: device b")

	delete(f.linker.attachErr, "b")
	again, netns2 := newSandbox(t, "pod", "s2")
	require.NotEqual(t, netns, netns2)
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), again))
	f.at(a, netns2, "s2")
	f.at(b, netns2, "s2")
	require.Empty(t, f.row("b").Error)
}

// What cannot be taken back stays known, so that it is tried again.
func TestFailedUndoKeepsTheAttachment(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	f.prepare("pod", "b", 2)
	pod, netns := newSandbox(t, "pod", "s1")
	f.linker.attachErr["b"] = errors.New("no")
	f.linker.detachErr["a"] = errors.New("busy")
	require.Error(t, f.hooks.RunPodSandbox(t.Context(), pod))
	f.at(a, netns, "s1")
	require.Contains(t, f.row("a").Error, "busy")

	delete(f.linker.detachErr, "a")
	require.NoError(t, f.hooks.RemovePodSandbox(t.Context(), pod))
	f.at(a, "", "")
	require.Empty(t, f.row("a").Error)
}

// ATT-14
func TestHostNetworkPodIsRefused(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	none := &api.PodSandbox{Id: "s1", Uid: "pod", Name: "app", Namespace: "default", Linux: &api.LinuxPodSandbox{}}
	same := &api.PodSandbox{Id: "s2", Uid: "pod", Name: "app", Namespace: "default", Linux: &api.LinuxPodSandbox{
		Namespaces: []*api.LinuxNamespace{{Type: "network", Path: "/proc/self/ns/net"}},
	}}
	for _, pod := range []*api.PodSandbox{none, same} {
		err := f.hooks.RunPodSandbox(t.Context(), pod)
		require.ErrorIs(t, err, errHostNetwork)
		require.ErrorContains(t, err, "pod default/app: device a (claim default/claim, request net)")
		_, _, err = f.hooks.CreateContainer(t.Context(), pod, nil)
		require.ErrorIs(t, err, errHostNetwork)
		require.NoError(t, f.hooks.StopPodSandbox(t.Context(), pod))
	}
	f.at(a, "", "")
	require.Empty(t, f.linker.calls)
}

// ATT-12, DET-03: the sandbox is made anew, and the late stop of the old one does not pull the device out.
func TestNewSandboxBeforeOldStop(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	old, _ := newSandbox(t, "pod", "old")
	fresh, netns := newSandbox(t, "pod", "new")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), old))
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), fresh))
	f.at(a, netns, "new")
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), old))
	require.NoError(t, f.hooks.RemovePodSandbox(t.Context(), old))
	f.at(a, netns, "new")
}

// DET-02: the runtime gives no namespace at stop; the one remembered counts, and a failure does not block the pod.
func TestStopWithoutNamespace(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod, netns := newSandbox(t, "pod", "s1")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), pod))
	bare := &api.PodSandbox{Id: "s1", Uid: "pod", Name: "pod", Namespace: "default"}

	f.linker.detachErr["a"] = errors.New("busy")
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), bare))
	f.at(a, netns, "s1")
	require.Equal(t, "Failed", f.row("a").State())
	require.ErrorContains(t, f.hooks.Return(t.Context(), f.row("a")), "busy")

	delete(f.linker.detachErr, "a")
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), bare))
	f.at(a, "", "")
}

// A restored row does not know where its link is.
func TestStopFindsWhatTheTableForgot(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod, netns := newSandbox(t, "pod", "s1")
	f.linker.place[a.ID] = netns
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), pod))
	f.at(a, "", "")
}

// A virtual link ends with the namespace of the former sandbox and is made anew.
func TestVirtualLinkIsMadeAnew(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	old, _ := newSandbox(t, "pod", "old")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), old))
	delete(f.linker.place, a.ID)

	fresh, netns := newSandbox(t, "pod", "new")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), fresh))
	now := f.row("a").PreparedDevice
	require.Equal(t, 101, now.Link().Index)
	f.at(now, netns, "new")

	delete(f.linker.place, now.Link())
	require.NoError(t, f.hooks.Return(t.Context(), f.row("a")), "what is gone need not come home")
	require.Nil(t, f.row("a").Attachment)
}

// A VF whose former sandbox went away unnoticed is fetched from where it is.
func TestPCILinkIsFetched(t *testing.T) {
	f := newFixture(t)
	vf := f.prepare("pod", "vf", 1)
	vf.ID = nic.PCI("0000:03:00.1")
	f.linker.place[vf.ID] = "somewhere"
	row := f.row("vf").With(func(a *tables.DRAAllocation) { a.PreparedDevice = vf })
	f.write(func(txn statedb.WriteTxn) {
		_, _, err := f.table.Insert(txn, row)
		require.NoError(t, err)
	})
	pod, netns := newSandbox(t, "pod", "s1")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), pod))
	f.at(vf, netns, "s1")
	require.Equal(t, []string{"attach vf", "detach vf", "attach vf"}, f.linker.calls)
}

func TestReturn(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	stale := f.row("a")
	pod, _ := newSandbox(t, "pod", "s1")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), pod))
	require.NoError(t, f.hooks.Return(t.Context(), stale))
	f.at(a, "", "")
}

// ATT-01: the runtime gets its answer in time, and the late success is taken back.
func TestSlowAttachIsUndone(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	a, b := f.prepare("pod", "a", 1), f.prepare("other", "b", 2)
	f.linker.block, f.linker.entered = make(chan struct{}), make(chan struct{})
	release := f.linker.block
	pod, _ := newSandbox(t, "pod", "s1")
	err := f.hooks.RunPodSandbox(t.Context(), pod)
	require.EqualError(t, err, "attach for pod default/pod takes longer than 20ms")
	require.Contains(t, f.hooks.Stuck(0), "attach for pod default/pod")
	require.Empty(t, f.hooks.Stuck(time.Hour))

	// SCL-08: a stuck pod does not delay others, and is not entered twice.
	f.linker.mu.Lock()
	f.linker.block = nil
	f.linker.mu.Unlock()
	other, netns := newSandbox(t, "other", "s2")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), other))
	f.at(b, netns, "s2")
	require.ErrorContains(t, f.hooks.RunPodSandbox(t.Context(), pod), "default/pod")

	close(release)
	f.hooks.Wait()
	f.at(a, "", "")
	require.Contains(t, f.row("a").Error, "attached too late")
	require.Empty(t, f.hooks.Stuck(0))
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), pod))
}

// The claim may be unprepared while its device is being attached.
func TestRowGoneMeanwhile(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod, _ := newSandbox(t, "pod", "s1")
	f.linker.block, f.linker.entered = make(chan struct{}), make(chan struct{})
	result := make(chan error)
	go func() { result <- f.hooks.RunPodSandbox(context.Background(), pod) }()
	<-f.linker.entered
	f.delete("a")
	close(f.linker.block)
	require.ErrorContains(t, <-result, "the claim was unprepared meanwhile")
	ns, _ := f.linker.where(a.ID)
	require.Empty(t, ns)
}

func TestSynchronize(t *testing.T) {
	f := newFixture(t)
	inside := f.prepare("restored", "a", 1)
	missed := f.prepare("missed", "b", 2)
	waiting := f.prepare("waiting", "c", 3)
	left := f.prepare("stopped", "d", 4)
	anew := f.prepare("anew", "e", 5)
	unclear := f.prepare("unclear", "g", 6)

	restored, restoredNS := newSandbox(t, "restored", "s-restored")
	f.linker.place[inside.ID] = restoredNS
	missedSandbox, missedNS := newSandbox(t, "missed", "s-missed")
	stopped, stoppedNS := newSandbox(t, "stopped", "s-stopped")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), stopped))
	require.NoError(t, os.Remove(stoppedNS))
	oldSandbox, _ := newSandbox(t, "anew", "s-old")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), oldSandbox))
	f.linker.place[anew.ID] = ""
	newest, newestNS := newSandbox(t, "anew", "s-new")
	one, _ := newSandbox(t, "unclear", "s-one")
	two, twoNS := newSandbox(t, "unclear", "s-two")
	bystander, _ := newSandbox(t, "bystander", "s-bystander")

	_, err := f.hooks.Synchronize(t.Context(),
		[]*api.PodSandbox{restored, missedSandbox, stopped, oldSandbox, newest, one, two, bystander},
		[]*api.Container{{Id: "c", PodSandboxId: "s-new"}})
	require.NoError(t, err)

	f.at(inside, restoredNS, "s-restored")
	require.Equal(t, "found0", f.row("a").Attachment.IfName)
	f.at(missed, missedNS, "s-missed")
	f.at(waiting, "", "")
	f.at(left, "", "")
	f.at(anew, newestNS, "s-new")
	f.at(unclear, "", "")

	_, _, err = f.hooks.CreateContainer(t.Context(), two, &api.Container{})
	require.NoError(t, err)
	f.at(unclear, twoNS, "s-two")
}

func TestSynchronizeRecordsWhatFails(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod, netns := newSandbox(t, "pod", "s1")
	f.linker.attachErr["a"] = errors.New("no")
	_, err := f.hooks.Synchronize(t.Context(), []*api.PodSandbox{pod}, nil)
	require.NoError(t, err)
	require.Equal(t, "no", f.row("a").Error)

	delete(f.linker.attachErr, "a")
	_, err = f.hooks.Synchronize(t.Context(), []*api.PodSandbox{pod}, nil)
	require.NoError(t, err)
	f.at(a, netns, "s1")
	require.Empty(t, f.row("a").Error)
}

func TestSlowSynchronizeGoesOnBehind(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	a := f.prepare("pod", "a", 1)
	f.linker.block, f.linker.entered = make(chan struct{}), make(chan struct{})
	pod, netns := newSandbox(t, "pod", "s1")
	_, err := f.hooks.Synchronize(t.Context(), []*api.PodSandbox{pod}, nil)
	require.NoError(t, err)
	_, _, err = f.hooks.CreateContainer(t.Context(), pod, &api.Container{})
	require.Error(t, err, "refused until the device is in place")
	close(f.linker.block)
	f.hooks.Wait()
	f.at(a, netns, "s1")
	_, _, err = f.hooks.CreateContainer(t.Context(), pod, &api.Container{})
	require.NoError(t, err)
}

// What every pod on the node pays for, with 256 claims of other pods in the table.
func BenchmarkHookWithoutClaim(b *testing.B) {
	f := newFixture(b)
	for i := range 256 {
		f.prepare("pod", "dev"+string(rune('a'+i)), i)
	}
	pod := &api.PodSandbox{Id: "s", Uid: "2c4a1f3e-9f39-4d9c-9d6e-1f2a3b4c5d6e"}
	b.ReportAllocs()
	for b.Loop() {
		if err := f.hooks.RunPodSandbox(b.Context(), pod); err != nil {
			b.Fatal(err)
		}
	}
}
