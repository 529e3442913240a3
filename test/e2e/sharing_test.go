// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// TestForcedDeletion deletes a pod by force while the runtime cannot stop it, since the sandbox's process does not answer.
// The API takes its claim for free at once; the next pod waits until the device is home, and is told who holds it.
func TestForcedDeletion(t *testing.T) {
	e := start(t)
	e.configure(e.node.Name(), dummySpec(1))
	e.waitDevices(e.node.Name(), "fast-net", 1)
	e.class("dummy", "fast-net")
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "dum0"}`))
	n := e.node
	e.pod("first", n.Name(), "dummy")
	e.running("first")
	holder := e.claimOf("first")

	sandbox := e.allocations(n)[0].Attachment.SandboxID
	signal := func(name string) {
		e.onNode(n, fmt.Sprintf("kill -%s $(pgrep -f '[c]ontainerd-shim.*%s')", name, sandbox))
	}
	signal("STOP")
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _, _, _ = n.Exec(ctx, fmt.Sprintf("pkill -CONT -f '[c]ontainerd-shim.*%s'", sandbox))
	})
	now := int64(0)
	require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, "first", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	e.pod("second", n.Name(), "dummy")
	// Once a minute kubelet has the devices freed of pods that the API does not have any more, also when their containers still run.
	e.eventually("the second pod", func() string {
		events := strings.Join(e.events("second"), " | ")
		rows := e.allocations(n) // after the refusal it is still the holder's
		require.Len(e, rows, 1)
		require.Equal(e, string(holder.UID), rows[0].ClaimUID, "the device was freed under a running container")
		refused := strings.Contains(events, fmt.Sprintf(`request "net": device dummy0 is still held by claim %s/%s`, e.ns, holder.Name)) &&
			strings.Contains(events, e.ns+"/first")
		if !refused {
			return "is not refused, and the device is not free: " + events
		}
		return ""
	})

	signal("CONT")
	e.running("second")
	require.Empty(e, e.hasInterface("second", "dum0"))
	rows := e.allocations(n)
	require.Len(e, rows, 1)
	require.Equal(e, string(e.claimOf("second").UID), rows[0].ClaimUID)
	e.deletePods("second")
	e.noAllocations(n)
}

// TestSharedClaim gives one claim to several pods of a node: one has the device, the others are told so and start no
// container, and when it has gone the next one gets it. Kubelet asks the driver for the first pod only.
func TestSharedClaim(t *testing.T) {
	e := start(t)
	n := e.node
	e.sharedClaim()
	e.podShared("one")
	e.running("one")
	require.Empty(e, e.hasInterface("one", "dum0"))

	e.podShared("two")
	e.refusedFor("two", "one")
	require.Empty(e, e.hasInterface("one", "dum0"))
	m := e.mark(n, deploy.Agent)
	e.deletePods("one")
	e.passedOn(m, "two")

	// Kubelet asks again when it is restarted. The pod that has the device keeps it, and what the agent knew of the two it
	// finds out again.
	e.podShared("three")
	e.refusedFor("three", "two")
	require.NoError(e, n.Restart(e.ctx, lab.Kubelet))
	require.NoError(e, e.RestartAgent(e.ctx, n))
	require.Empty(e, e.hasInterface("two", "dum0"))
	e.neverStarted("three")
	m = e.mark(n, deploy.Agent)
	e.deletePods("two")
	e.passedOn(m, "three")
	e.deletePods("three")
	e.noAllocations(n)
}

// TestSharedClaimFromTheBeginning gives one claim to two pods before kubelet asks for either: the first sandbox gets the
// device.
func TestSharedClaimFromTheBeginning(t *testing.T) {
	e := start(t)
	n := e.node
	e.sharedClaim()
	resume := e.pause(n, lab.Kubelet)
	e.podShared("one")
	e.podShared("two")
	e.eventually("claim", func() string {
		claim, err := e.Client.ResourceV1().ResourceClaims(e.ns).Get(e.ctx, "shared", metav1.GetOptions{})
		require.NoError(e, err)
		if n := len(claim.Status.ReservedFor); n != 2 {
			return fmt.Sprintf("is reserved for %d pods, want 2", n)
		}
		return ""
	})
	resume()
	holder, other := "one", "two"
	e.eventually("one of the pods", func() string {
		for _, pod := range []string{"one", "two"} {
			if len(e.allocationsOf(pod)) > 0 && e.isRunning(pod) {
				holder = pod
				return ""
			}
		}
		return "runs"
	})
	if holder == other {
		other = "one"
	}
	require.Empty(e, e.hasInterface(holder, "dum0"))
	e.refusedFor(other, holder)
	m := e.mark(n, deploy.Agent)
	e.deletePods(holder)
	e.passedOn(m, other)
	e.deletePods(other)
	e.noAllocations(n)
}

// sharedClaim makes the claim "shared" for the only device of the node.
func (e *T) sharedClaim() {
	e.Helper()
	e.configure(e.node.Name(), dummySpec(1))
	e.waitDevices(e.node.Name(), "fast-net", 1)
	e.class("dummy", "fast-net")
	_, err := e.Client.ResourceV1().ResourceClaims(e.ns).Create(e.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "shared"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{e.request("net", "dummy")},
			Config:   []resourceapi.DeviceClaimConfiguration{config(`{"podIfName": "dum0"}`)},
		}},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
}

// podShared makes a pod that uses it.
func (e *T) podShared(name string) {
	e.Helper()
	pod := e.podObject(name, e.node.Name())
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: new("shared")}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	_, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
}

// refusedFor waits until the pod has been told who has the device, and what to do.
func (e *T) refusedFor(pod, holder string) {
	e.Helper()
	e.eventSays(pod, "ClaimInUse: claim "+e.ns+"/shared is in use by pod "+e.ns+"/"+holder, "ResourceClaimTemplate", "Recreate")
	e.neverStarted(pod)
}

// passedOn waits until the pod runs with the device. It has not run without it.
func (e *T) passedOn(m logMark, pod string) {
	e.Helper()
	e.running(pod)
	require.Empty(e, e.hasInterface(pod, "dum0"))
	require.NotEmpty(e, e.matching(m, "Device attached to its pod", e.ns+"/"+pod), "from when the device was passed on")
	rows := e.allocationsOf(pod)
	require.Len(e, rows, 1)
	require.NotNil(e, rows[0].Attachment)
	e.neverEnded(pod)
}

// neverEnded asserts that no container of the pod has run and ended. One that was refused while the agent was away has not run.
func (e *T) neverEnded(pod string) *corev1.Pod {
	e.Helper()
	object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
	require.NoError(e, err)
	for _, status := range object.Status.ContainerStatuses {
		if end := status.LastTerminationState.Terminated; end != nil {
			require.Equal(e, "StartError", end.Reason, "container %s: %+v", status.Name, end)
		}
	}
	return object
}

// neverStarted asserts that no container of the pod has started, now or before.
func (e *T) neverStarted(pod string) {
	e.Helper()
	for _, status := range e.neverEnded(pod).Status.ContainerStatuses {
		require.NotNil(e, status.State.Waiting, "container %s: %+v", status.Name, status.State)
	}
}

// isRunning says whether the pod runs.
func (e *T) isRunning(pod string) bool {
	object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
	require.NoError(e, err)
	return object.Status.Phase == corev1.PodRunning
}

// TestAdminAccess asks for administrative access to a device that a pod holds: it is refused, and the holder keeps its
// device as it is.
func TestAdminAccess(t *testing.T) {
	e := start(t)
	n := e.node
	label := func(ctx context.Context, value any) {
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{
			resourceapi.DRAAdminNamespaceLabelKey: value,
		}}})
		require.NoError(e, err)
		_, err = e.Client.CoreV1().Namespaces().Patch(ctx, e.ns, "application/merge-patch+json", patch, metav1.PatchOptions{})
		require.NoError(e, err)
	}
	label(e.ctx, "true")
	t.Cleanup(func() { label(context.Background(), nil) })
	e.configure(e.node.Name(), dummySpec(1))
	e.waitDevices(e.node.Name(), "fast-net", 1)
	e.class("dummy", "fast-net")
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "dum0"}`))
	e.pod("owner", e.node.Name(), "dummy")
	e.running("owner")
	before := e.prepared(n, map[string]string{"owner": "dum0"})

	admin := e.request("net", "dummy")
	admin.Exactly.AdminAccess = new(true)
	e.template("admin", []resourceapi.DeviceRequest{admin})
	e.pod("admin", e.node.Name(), "admin")
	e.eventSays("admin", `request "net"`, "adminAccess to device dummy0 is not supported")
	e.deletePods("admin")
	require.Empty(e, cmp.Diff(before, e.prepared(n, map[string]string{"owner": "dum0"})))
	e.deletePods("owner")
}
