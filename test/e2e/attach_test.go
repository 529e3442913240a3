// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/lab"
)

// changedPod makes a pod with a claim that is otherwise than those that pod makes.
func (e *T) changedPod(name, node, template string, change func(*corev1.Pod)) {
	e.Helper()
	pod := e.podObject(name, node)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimTemplateName: &template}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	change(pod)
	_, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
}

// TestHostNetwork: a pod on the host's network has no namespace to give a device to, and is refused.
func TestHostNetwork(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.class("first", "first")
	e.vlanTemplate("first", "first", 1001)
	e.changedPod("a", e.node.Name(), "first", func(pod *corev1.Pod) { pod.Spec.HostNetwork = true })
	e.eventSays("a", "host", "network", "claim")
	created, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "a", metav1.GetOptions{})
	require.NoError(e, err)
	require.Equal(e, corev1.PodPending, created.Status.Phase)
	require.Equal(e, before.Links, e.hostState(n).Links)
	e.deletePods("a")
	e.requireRestored(n, before)
}

// TestSandboxAgain: when a pod's sandbox dies, the pod gets another one and its VF with it, in the VLAN and under the
// name it had.
func TestSandboxAgain(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.class("first", "first")
	e.vlanTemplate("first", "first", 1001)
	e.changedPod("a", e.node.Name(), "first", func(pod *corev1.Pod) { pod.Spec.RestartPolicy = corev1.RestartPolicyAlways })
	e.running("a")
	for range 2 {
		old := e.allocationsOf("a")[0].Attachment
		require.NotNil(e, old)
		e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+old.SandboxID)
		e.eventually("another sandbox", func() string {
			rows := e.allocationsOf("a")
			if len(rows) != 1 || rows[0].Attachment == nil || rows[0].Attachment.SandboxID == old.SandboxID {
				return fmt.Sprintf("%+v", rows)
			}
			return ""
		})
		e.running("a")
		now := e.allocationsOf("a")[0].Attachment
		require.NotNil(e, now, "the VF is not in the new sandbox")
		require.NotEqual(e, old.NetNS, now.NetNS)
		require.Contains(e, e.onNode(n, fmt.Sprintf("nsenter --net=%s ip link show sriov0", now.NetNS)), before.Links[vfName(0)].MAC)
		require.Equal(e, 1001, e.vlanOf(n, 0))
	}
	e.deletePods("a")
	e.requireRestored(n, before)
}

// TestAltNames: alternative names travel with a link. One that is in the way of the name in the pod steps aside, and one
// that the host has given to another link meanwhile does not keep the VF from coming home.
func TestAltNames(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.onNode(n, fmt.Sprintf("ip link property add dev %s altname sriov0 altname e2e-other", vfName(0)))
	e.atEnd(func() {
		e.onNode(n, fmt.Sprintf("ip link property del dev %s altname sriov0 altname e2e-other", vfName(0)))
	})
	before := e.hostState(n)
	require.ElementsMatch(e, []string{"sriov0", "e2e-other"}, before.Links[vfName(0)].AltNames)
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.class("first", "first")
	e.vlanTemplate("first", "first", 1001)
	e.pod("a", e.node.Name(), "first")
	e.running("a")
	require.Contains(e, e.mustInPod("a", "ip link show sriov0"), before.Links[vfName(0)].MAC)

	e.onNode(n, "ip link add e2e-other type dummy")
	e.deletePods("a")
	e.noAllocations(n)
	home := e.hostState(n).Links[vfName(0)]
	require.Equal(e, []string{"sriov0"}, home.AltNames)
	e.onNode(n, "ip link del e2e-other")
	e.requireRestoredNames(n, before)
}

// requireRestoredNames is requireRestored where the order of alternative names may differ.
func (e *T) requireRestoredNames(n *lab.Node, before hostState) {
	e.Helper()
	e.eventually("alternative names on "+n.Name(), func() string {
		for name, want := range before.Links {
			have := e.hostState(n).Links[name]
			if len(have.AltNames) != len(want.AltNames) {
				return fmt.Sprintf("%s has %q, want %q", name, have.AltNames, want.AltNames)
			}
		}
		return ""
	})
}

// cniConfig is the configuration of the pod network on a node.
const cniConfig = "/etc/cni/net.d/10-ptp.conflist"

// TestSecondDeviceVanishes: of two VFs the second loses its driver after both were prepared and before the sandbox
// starts. The sandbox is refused with that device named and the first VF is back on the host; when the second is back
// the pod starts.
func TestSecondDeviceVanishes(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	// Sandboxes come as far as their network, until the configuration is good again.
	good, err := n.ReadFile(e.ctx, cniConfig)
	require.NoError(e, err)
	repair := func() { require.NoError(e, n.WriteFile(e.ctx, cniConfig, good, 0o600)) }
	e.atEnd(repair)
	require.NoError(e, n.WriteFile(e.ctx, cniConfig, []byte(`{"cniVersion": "1.0.0", "name": "pod", "plugins": [{"type": "e2e-nothing"}]}`), 0o600))
	twoVFs(e)
	second := pciAddr(deviceOf(e, e.node.Name(), 1).Name)
	e.atEnd(func() {
		e.bindVF(n, second, "igbvf")
		e.waitVFNames(n)
		e.setMAC(n, 1, before.Links[vfName(1)].MAC)
	})
	e.eventSays("two", "e2e-nothing")
	require.Len(e, e.allocations(n), 2)

	e.bindVF(n, second, "")
	repair()
	e.eventSays("two", deviceNameOf(second), "FailedCreatePodSandBox", "its link is neither on the host")
	first := e.hostState(n).Links[vfName(0)]
	require.Equal(e, before.Links[vfName(0)], first)

	e.bindVF(n, second, "igbvf")
	e.running("two")
	require.Contains(e, e.mustInPod("two", "ip link show sriov0"), before.Links[vfName(0)].MAC)
	e.mustInPod("two", "ip link show sriov1")
	e.deletePods("two")
	e.noAllocations(n)
	e.requireRestored(n, before)
}
