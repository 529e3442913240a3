// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHooks(t *testing.T) {
	f := newFixture(t)
	f.pods.prepare("pod")
	pod := newSandbox("pod", "s1")
	want := attachments.Sandbox{ID: "s1", PodUID: "pod", PodNamespace: "default", PodName: "pod", NetNS: "/run/netns/s1"}
	ctx := t.Context()

	require.NoError(t, f.hooks.RunPodSandbox(ctx, pod))
	require.Equal(t, []attachments.Sandbox{want}, f.pods.seen)
	_, _, err := f.hooks.CreateContainer(ctx, pod, &api.Container{})
	require.NoError(t, err)
	require.Equal(t, []string{"attach s1"}, f.pods.takeCalls(), "what is in place needs nothing")

	late := newSandbox("pod", "s2")
	_, _, err = f.hooks.CreateContainer(ctx, late, &api.Container{})
	require.NoError(t, err)
	require.Equal(t, []string{"attach s2"}, f.pods.takeCalls())
	f.pods.failWith("attach s1", errors.New("device a: busy"))
	_, _, err = f.hooks.CreateContainer(ctx, pod, &api.Container{Name: "app"})
	require.EqualError(t, err, "container app is not started without its pod's devices: device a: busy")

	// A container that uses another pod's claim, in a pod that has nothing.
	f.pods.takeCalls()
	f.pods.admit = errors.New("claim is in use")
	second := newSandbox("second", "s3")
	_, _, err = f.hooks.CreateContainer(ctx, second, &api.Container{
		Name: "app", Env: []string{"A=b"}, CDIDevices: []*api.CDIDevice{{Name: "d/claim=x"}},
	})
	require.EqualError(t, err, "container app is not started without its pod's devices: claim is in use")
	require.Equal(t, []string{"admit s3 A=b d/claim=x"}, f.pods.takeCalls())

	f.pods.failWith("detach s1", errors.New("busy"))
	require.NoError(t, f.hooks.StopPodSandbox(ctx, pod), "a pod must be able to end")
	require.NoError(t, f.hooks.RemovePodSandbox(ctx, pod))
	require.Equal(t, []string{"detach s1", "detach s1"}, f.pods.takeCalls())
}

// A program that drives a device itself may lock its memory, and no other.
func TestLocksMemory(t *testing.T) {
	f := newFixture(t)
	for _, tt := range []struct {
		env  []string
		want *api.ContainerAdjustment
	}{
		{[]string{"DPDK=no"}, nil},
		{[]string{"DPDK=yes"}, &api.ContainerAdjustment{Rlimits: []*api.POSIXRlimit{{Type: "RLIMIT_MEMLOCK", Hard: 1<<64 - 1, Soft: 1<<64 - 1}}}},
	} {
		adjustment, updates, err := f.hooks.CreateContainer(t.Context(), newSandbox("pod", "s1"), &api.Container{Name: "app", Env: tt.env})
		require.NoError(t, err)
		require.Nil(t, updates)
		require.Equal(t, tt.want, adjustment)
	}
	f.pods.admit = errors.New("claim is in use")
	adjustment, _, err := f.hooks.CreateContainer(t.Context(), newSandbox("pod", "s1"), &api.Container{Env: []string{"DPDK=yes"}})
	require.Error(t, err)
	require.Nil(t, adjustment)
}

// Every pod's sandbox is remembered while it runs, and a pod without a claim costs nothing else.
func TestSandboxesAreRemembered(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	for _, id := range []string{"s1", "s2", "s3"} {
		require.NoError(t, f.hooks.RunPodSandbox(ctx, newSandbox("pod-"+id, id)))
	}
	_, _, err := f.hooks.CreateContainer(ctx, newSandbox("pod-s1", "s1"), nil)
	require.NoError(t, err)
	require.NoError(t, f.hooks.StopPodSandbox(ctx, newSandbox("pod-s1", "s1")))
	require.NoError(t, f.hooks.RemovePodSandbox(ctx, newSandbox("pod-s2", "s2")))
	require.Equal(t, []string{"s3"}, f.hooks.known())
	require.Empty(t, f.pods.takeCalls())

	_, err = f.hooks.Synchronize(ctx, []*api.PodSandbox{newSandbox("p", "s4"), newSandbox("q", "s5")}, []*api.Container{{PodSandboxId: "s5"}})
	require.NoError(t, err)
	require.Equal(t, []string{"s4", "s5"}, f.hooks.known())
	require.False(t, f.pods.seen[0].Populated)
	require.True(t, f.pods.seen[1].Populated)

	// DET-02: the runtime gives no namespace at the stop.
	f.pods.prepare("q")
	bare := newSandbox("q", "s5")
	bare.Linux = nil
	require.NoError(t, f.hooks.StopPodSandbox(ctx, bare))
	require.Equal(t, "/run/netns/s5", f.pods.seen[0].NetNS)
	require.Equal(t, []string{"s4"}, f.hooks.known())
}

// ATT-01: the runtime gets its answer in time, and the attach is told that nobody waits.
func TestSlowAttach(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	f.pods.prepare("pod")
	f.pods.prepare("other")
	release := f.pods.hold("attach s1")
	pod := newSandbox("pod", "s1")
	require.EqualError(t, f.hooks.RunPodSandbox(t.Context(), pod), "attach for pod default/pod takes longer than 20ms")
	require.Contains(t, f.hooks.Stuck(0), "attach for pod default/pod")
	require.Empty(t, f.hooks.Stuck(time.Hour))

	// SCL-08: a stuck pod does not delay others.
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), newSandbox("other", "s2")))
	require.Equal(t, "s2", f.pods.where("other"))

	release()
	f.hooks.Wait()
	require.Empty(t, f.pods.where("pod"), "its context has ended")
	require.Empty(t, f.hooks.Stuck(0))
}

// ATT-01: what was attached when the answer was given already is taken out of a sandbox that the runtime takes down, and stays in
// one that goes on, where the next container finds it.
func TestAttachAfterTheAnswer(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	f.pods.deaf = true
	f.pods.prepare("pod")
	pod := newSandbox("pod", "s1")
	release := f.pods.hold("attach s1")
	require.ErrorContains(t, f.hooks.RunPodSandbox(t.Context(), pod), "takes longer than 20ms")
	require.Empty(t, f.hooks.known())
	release()
	f.hooks.Wait()
	require.Equal(t, []string{"attach s1", "detach s1"}, f.pods.takeCalls())
	require.Empty(t, f.pods.where("pod"))

	// A runtime that did not get the answer in time, and goes on with the sandbox, connects again and lists it.
	release = f.pods.hold("attach s1")
	require.ErrorContains(t, f.hooks.RunPodSandbox(t.Context(), pod), "takes longer than 20ms")
	_, err := f.hooks.Synchronize(t.Context(), []*api.PodSandbox{pod}, nil)
	require.NoError(t, err)
	release()
	f.hooks.Wait()
	require.Equal(t, []string{"attach s1", "synchronize"}, f.pods.takeCalls())
	require.Equal(t, "s1", f.pods.where("pod"))
	require.Equal(t, []string{"s1"}, f.hooks.known())

	f.pods.failWith("attach s1", errors.New("no"))
	require.ErrorContains(t, f.hooks.RunPodSandbox(t.Context(), pod), "no")
	f.hooks.Wait()
	require.Equal(t, []string{"attach s1", "detach s1"}, f.pods.takeCalls(), "others may have attached")
	f.pods.failWith("attach s1", nil)

	release = f.pods.hold("attach s1")
	_, _, err = f.hooks.CreateContainer(t.Context(), pod, &api.Container{Name: "app"})
	require.ErrorContains(t, err, "takes longer than 20ms")
	release()
	f.hooks.Wait()
	require.Equal(t, "s1", f.pods.where("pod"))
	_, _, err = f.hooks.CreateContainer(t.Context(), pod, &api.Container{Name: "app"})
	require.NoError(t, err)
	require.Equal(t, []string{"attach s1"}, f.pods.takeCalls())
}

// The sandbox goes away whether or not its runtime still waits.
func TestSlowDetachGoesOn(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	f.pods.prepare("pod")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), pod))
	release := f.pods.hold("detach s1")
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), pod))
	require.Equal(t, "s1", f.pods.where("pod"))
	release()
	f.hooks.Wait()
	require.Empty(t, f.pods.where("pod"))
}

func TestSlowSynchronizeGoesOnBehind(t *testing.T) {
	f := newFixture(t)
	f.hooks.timeout.Store(int64(20 * time.Millisecond))
	f.pods.prepare("pod")
	release := f.pods.hold("synchronize")
	pod := newSandbox("pod", "s1")
	_, err := f.hooks.Synchronize(t.Context(), []*api.PodSandbox{pod}, nil)
	require.NoError(t, err)
	require.Contains(t, f.hooks.Stuck(0), "synchronize with the runtime")
	require.Empty(t, f.pods.where("pod"))
	release()
	f.hooks.Wait()
	require.Equal(t, "s1", f.pods.where("pod"))
}

// What every pod on the node pays for, with 256 claims of other pods in the table.
func BenchmarkHookWithoutClaim(b *testing.B) {
	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(b, err)
	metrics, err := attachments.NewMetrics(prometheus.NewRegistry())
	require.NoError(b, err)
	log := slog.New(slog.DiscardHandler)
	room := attachments.New(log, db, table, &attachments.Outside{Gate: cdi.NewFiles(cdi.Params{Logger: log, Folder: b.TempDir(), Driver: "driver"})}, metrics)
	var rows []*tables.DRAAllocation
	for i := range 256 {
		rows = append(rows, &tables.DRAAllocation{
			DeviceName: "dev" + string(rune('a'+i)), Pool: "pool", PodUID: "pod", ClaimUID: kubetypes.UID("claim-of-pod"),
		})
	}
	require.NoError(b, room.Restore(rows))
	hooks := NewHooks(room, log)
	pod := &api.PodSandbox{Id: "s", Uid: "2c4a1f3e-9f39-4d9c-9d6e-1f2a3b4c5d6e"}
	b.ReportAllocs()
	for b.Loop() {
		if err := hooks.RunPodSandbox(b.Context(), pod); err != nil {
			b.Fatal(err)
		}
	}
}

// The sandboxes of a namespace are told in their order, without those that were refused or have ended.
func TestSandboxesOfANamespace(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	_, err := f.hooks.Synchronize(ctx, []*api.PodSandbox{newSandbox("z", "s9"), {Id: "x", Namespace: "elsewhere"}}, nil)
	require.NoError(t, err)
	f.pods.prepare("refused")
	f.pods.failWith("attach s3", errors.New("no"))
	for _, id := range []string{"s8", "s1", "s7"} {
		require.NoError(t, f.hooks.RunPodSandbox(ctx, newSandbox("pod-"+id, id)))
	}
	require.Error(t, f.hooks.RunPodSandbox(ctx, newSandbox("refused", "s3")))
	require.NoError(t, f.hooks.StopPodSandbox(ctx, newSandbox("pod-s1", "s1")))
	var ids []string
	for _, s := range f.hooks.Sandboxes("default") {
		ids = append(ids, s.ID)
	}
	require.Equal(t, []string{"s9", "s8", "s7"}, ids)
}

// What is put back in between is told the sandboxes that a pod has at that time.
func TestEnsureKnowsTheSandboxes(t *testing.T) {
	f := newFixture(t)
	f.pods.prepare("pod")
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), newSandbox("pod", "s1")))
	require.NoError(t, f.hooks.RunPodSandbox(t.Context(), newSandbox("other", "s2")))
	f.hooks.Ensure(t.Context())
	require.Len(t, f.pods.seen, 1)
	require.Equal(t, "s1", f.pods.seen[0].ID)
	require.NoError(t, f.hooks.StopPodSandbox(t.Context(), newSandbox("pod", "s1")))
	f.hooks.Ensure(t.Context())
	require.Empty(t, f.pods.seen)
}
