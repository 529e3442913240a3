// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestExtendedResource: a pod that knows nothing of claims, and asks for one of a resource, has a VF in the VLAN and under the name that the
// class says, in its next sandbox too, and while the agent was away. What it reads about the device says the same, and afterwards nothing is left.
func TestExtendedResource(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	e.configure(n.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(n.Name(), "first", 1)
	name := "e2e.example.com/" + n.Name() + "-vf"
	_, err := e.Client.ResourceV1().DeviceClasses().Create(e.ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.className("vf")},
		Spec: resourceapi.DeviceClassSpec{
			ExtendedResourceName: &name,
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf(`device.driver == %q && device.attributes[%q].pool == "first"`, driverName, driverName),
			}}},
			Config: []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: opaque(`{"vlan": 1001, "podIfName": "sriov0"}`)}},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)

	pod := e.podObject("a", n.Name())
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}
	// The claim's name is not known before, and it is the only one.
	reads(attributesDir + "resourceclaims/*/container-0-request-0/" + driverName + "-metadata.json")(pod)
	_, err = e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
	e.running("a")

	check := func() {
		t.Helper()
		require.Empty(e, e.hasInterface("a", "sriov0"))
		require.Equal(e, 1001, e.vlanOf(n, 0))
		object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "a", metav1.GetOptions{})
		require.NoError(e, err)
		require.NotNil(e, object.Status.ExtendedResourceClaimStatus)
		claim, err := e.Client.ResourceV1().ResourceClaims(e.ns).Get(e.ctx, object.Status.ExtendedResourceClaimStatus.ResourceClaimName, metav1.GetOptions{})
		require.NoError(e, err)
		require.True(e, strings.HasPrefix(claim.Name, "a-extended-resources-"), claim.Name)
		require.Len(e, claim.Status.Devices, 1)
		m := e.readBy("a")
		require.Equal(e, claim.UID, m.UID)
		require.Equal(e, claim.Status.Devices[0].NetworkData, m.Requests[0].Devices[0].NetworkData)
		require.Equal(e, int64(1001), *m.Requests[0].Devices[0].Attributes["vlan"].IntValue)
		require.Len(e, e.allocationsOf("a"), 1)
	}
	check()

	// The agent knows the claim again after a restart, and the pod's next sandbox has the VF.
	old := e.sandboxOf("a")
	e.killAgent(n)
	e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+old)
	e.startAgent(n)
	e.eventually("another sandbox", func() string {
		rows := e.allocationsOf("a")
		if len(rows) != 1 || rows[0].Attachment == nil || rows[0].Attachment.SandboxID == old {
			return fmt.Sprintf("%+v", rows)
		}
		return ""
	})
	e.startedWith("a", "sriov0")
	check()

	e.deletePods("a")
	e.noAllocations(n)
	e.noMetadata(n)
	e.requireRestored(n, before)
}
