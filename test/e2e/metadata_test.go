// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"github.com/cilium/networkdriver/test/lab"
)

// attributesDir is where programs in pods look for what there is to say of their devices.
const attributesDir = "/var/run/kubernetes.io/dra-device-attributes/"

// reads has the pod's container write down what it reads about its device when it starts.
func reads(path string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
		pod.Spec.Containers[0].Command = []string{"sh", "-c", "cat " + path + " > /tmp/part; mv /tmp/part /tmp/read; exec sleep 1000000"}
	}
}

// readBy returns what the pod's container has read when it started.
func (e *T) readBy(pod string) *v1beta1.DeviceMetadata {
	e.Helper()
	m := &v1beta1.DeviceMetadata{}
	out := e.written(pod, "/tmp/read")
	require.NoError(e, json.Unmarshal([]byte(out), m), out)
	require.Equal(e, v1beta1.SchemeGroupVersion.String(), m.APIVersion)
	return m
}

// requireRead checks that the pod has read what slice and claim status say of its only device, with its MTU and VLAN.
func (e *T) requireRead(pod string, claim *resourceapi.ResourceClaim, offered map[string]resourceapi.Device, mtu, vlan int64) {
	e.Helper()
	m := e.readBy(pod)
	require.Equal(e, claim.UID, m.UID)
	require.Len(e, m.Requests, 1)
	require.Len(e, m.Requests[0].Devices, 1)
	read, result := m.Requests[0].Devices[0], claim.Status.Allocation.Devices.Results[0]
	require.Equal(e, result.Request, m.Requests[0].Name)
	require.Equal(e, []string{result.Driver, result.Pool, result.Device}, []string{read.Driver, read.Pool, read.Name})

	want := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"podMTU": {IntValue: &mtu}, "vlan": {IntValue: &vlan}}
	for name, value := range offered[result.Device].Attributes {
		want[name] = value
	}
	require.Equal(e, want, read.Attributes)
	require.Len(e, claim.Status.Devices, 1)
	require.NotEmpty(e, read.NetworkData.IPs)
	require.Equal(e, claim.Status.Devices[0].NetworkData, read.NetworkData)
}

// noMetadata waits until nothing is left on the node of what pods have read.
func (e *T) noMetadata(n *lab.Node) {
	e.Helper()
	e.eventually("metadata on "+n.Name(), func() string {
		return e.onNode(n, fmt.Sprintf("ls -d /var/lib/kubelet/plugins/%[1]s/dra-device-metadata/*/ /var/run/cdi/%[1]s_metadata_* 2>/dev/null || true", driverName))
	})
}

// TestMetadata: the first thing that a program in the pod does is to read about its device, and what it reads is what the slice and
// the claim's status say: from the first start on, in a sandbox that is made anew, also while the agent is away for a while, and when kubelet
// prepares the claim again. When the pod is gone, so is the file.
func TestMetadata(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovPools(vfPool("first", 0)))
	offered := devices(e.waitDevices(n.Name(), "first", 1))
	e.class("first", "first")
	e.network("lan", `{namespaceSelector: {}, vlan: 1001, mtu: 1400, subnets: [{cidr: 10.78.1.0/24}]}`)
	e.networkTemplate("lan", "first", "lan", `{"network": %q, "podIfName": "sriov0"}`)
	e.changedPod("a", n.Name(), "lan", reads(attributesDir+"resourceclaimtemplates/net/net/"+driverName+"-metadata.json"))
	e.running("a")
	e.requireRead("a", e.withAddresses("a"), offered, 1400, 1001)
	first := e.readBy("a").Generation

	for _, away := range []bool{false, true} {
		old := e.sandboxOf("a")
		if away {
			e.killAgent(n)
		}
		e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+old)
		if away {
			e.startAgent(n)
		}
		e.eventually("another sandbox", func() string {
			rows := e.allocationsOf("a")
			if len(rows) != 1 || rows[0].Attachment == nil || rows[0].Attachment.SandboxID == old {
				return fmt.Sprintf("%+v", rows)
			}
			return ""
		})
		e.startedWith("a", "sriov0")
		e.requireRead("a", e.withAddresses("a"), offered, 1400, 1001)
	}
	require.GreaterOrEqual(e, e.readBy("a").Generation, first)

	// A container that is started anew, in the same sandbox.
	container := func() string {
		object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "a", metav1.GetOptions{})
		require.NoError(e, err)
		return strings.TrimPrefix(object.Status.ContainerStatuses[0].ContainerID, "containerd://")
	}
	before := container()
	e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+before)
	e.eventually("another container", func() string {
		if container() == before {
			return "is not there"
		}
		return ""
	})
	e.startedWith("a", "sriov0")
	e.requireRead("a", e.withAddresses("a"), offered, 1400, 1001)
	e.deletePods("a")
	e.noMetadata(n)
}

// sandboxOf returns the sandbox that the pod's only device is in.
func (e *T) sandboxOf(pod string) string {
	e.Helper()
	rows := e.allocationsOf(pod)
	require.Len(e, rows, 1)
	require.NotNil(e, rows[0].Attachment)
	return rows[0].Attachment.SandboxID
}

// withAddresses returns the pod's claim once its status has the addresses of the pod's device.
func (e *T) withAddresses(pod string) (claim *resourceapi.ResourceClaim) {
	e.Helper()
	e.eventually("status of the claim of pod "+pod, func() string {
		claim = e.claimOf(pod)
		if s := claim.Status.Devices; len(s) != 1 || s[0].NetworkData == nil || len(s[0].NetworkData.IPs) == 0 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	return claim
}
