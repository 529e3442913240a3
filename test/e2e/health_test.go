// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

// taints waits until all VFs of the node have the taint, or none at all for an empty key.
func (e *T) taints(key, value string) {
	e.Helper()
	e.eventually(fmt.Sprintf("taint %q", key), func() string {
		found := devices(e.slices(e.node.Name()))
		if len(found) != vfCount {
			return fmt.Sprintf("%d devices are offered", len(found))
		}
		for name, d := range found {
			has := len(d.Taints) == 1 && d.Taints[0].Key == key && d.Taints[0].Value == value &&
				d.Taints[0].Effect == resourceapi.DeviceTaintEffectNoSchedule && d.Taints[0].TimeAdded != nil
			if key == "" && len(d.Taints) > 0 || key != "" && !has {
				return fmt.Sprintf("%s has %+v", name, d.Taints)
			}
		}
		return ""
	})
}

// healthy waits until claim and pod say that the pod's device is healthy, or not for the cause.
func (e *T) healthy(pod, cause string) {
	e.Helper()
	want, kubelet := metav1.ConditionFalse, corev1.ResourceHealthStatusUnhealthy
	if cause == "" {
		want, cause, kubelet = metav1.ConditionTrue, "Healthy", corev1.ResourceHealthStatusHealthy
	}
	e.eventually("health of the device of pod "+pod, func() string {
		claim := e.claimOf(pod)
		require.Len(e, claim.Status.Devices, 1)
		c := meta.FindStatusCondition(claim.Status.Devices[0].Conditions, "Healthy")
		if c == nil || c.Status != want || c.Reason != cause {
			return fmt.Sprintf("the claim says %+v", claim.Status.Devices[0].Conditions)
		}
		p, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
		require.NoError(e, err)
		for _, s := range p.Status.ContainerStatuses {
			for _, resource := range s.AllocatedResourcesStatus {
				for _, r := range resource.Resources {
					if r.Health == kubelet {
						return ""
					}
				}
			}
		}
		return fmt.Sprintf("kubelet says %+v", p.Status.ContainerStatuses)
	})
}

// TestHealth: a PF that an administrator has set down, and one whose cable was pulled, taint the VFs, the pod that has one hears of it, and
// no other pod gets one. All is well again when the PF is.
func TestHealth(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.class("vf", "sriov-pool")
	e.vlanTemplate("vf", "vf", 1007)
	e.pod("user", n.Name(), "vf")
	e.running("user")
	e.healthy("user", "")
	e.taints("", "")
	carrier := func(up bool) { require.NoError(e, n.SetCarrier(e.ctx, lab.Uplink, up)) }
	e.atEnd(func() {
		carrier(true)
		e.onNode(n, "ip link set "+lab.Uplink+" up")
	})

	for _, fault := range []struct {
		cause, taint string
		begin, end   func()
	}{
		{"NoCarrier", "networkdriver.cilium.io/no-carrier", func() { carrier(false) }, func() { carrier(true) }},
		{
			"PFDown", "networkdriver.cilium.io/pf-down",
			func() { e.onNode(n, "ip link set "+lab.Uplink+" down") },
			func() { e.onNode(n, "ip link set "+lab.Uplink+" up") },
		},
	} {
		fault.begin()
		began := time.Now()
		e.taints(fault.taint, "pf")
		e.Logf("%s: tainted after %s", fault.cause, time.Since(began))
		e.healthy("user", fault.cause)
		e.Logf("%s: claim and pod say so after %s", fault.cause, time.Since(began))
		e.eventSays("user", "DeviceUnhealthy", "its physical function "+lab.Uplink)
		waiting := "waiting-" + map[string]string{"NoCarrier": "carrier", "PFDown": "pf"}[fault.cause]
		e.pod(waiting, n.Name(), "vf")
		e.eventSays(waiting, "FailedScheduling", "cannot allocate all claims")

		ended := time.Now()
		fault.end()
		e.taints("", "")
		e.Logf("%s: no taint %s after the end", fault.cause, time.Since(ended))
		e.healthy("user", "")
		e.running(waiting)
		e.deletePods(waiting)
	}
	e.eventSays("user", "DeviceHealthy", "is healthy again")
}

// TestFaultElsewhere: where the pool has it so, a cable that is pulled ends the pod that has a VF of the PF, and the next one gets a VF of
// another node.
func TestFaultElsewhere(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	spec := sriovSpec()
	spec.Pools[0].FaultEffect = v2alpha1.FaultEffectNoExecute
	for _, n := range e.Nodes() {
		e.configure(n.Name(), spec)
		e.waitDevices(n.Name(), "sriov-pool", vfCount)
	}
	e.class("vf", "sriov-pool")
	e.vlanTemplate("vf", "vf", 1007)
	e.pod("user", e.node.Name(), "vf")
	e.running("user")
	carrier := func(up bool) { require.NoError(e, e.node.SetCarrier(e.ctx, lab.Uplink, up)) }
	e.atEnd(func() { carrier(true) })
	carrier(false)
	pulled := time.Now()
	e.gone("user")
	e.Logf("the pod is gone after %s", time.Since(pulled))
	e.pod("next", "", "vf")
	e.running("next")
	require.NotEqual(e, e.node.Name(), e.podNode("next").Name())
	carrier(true)
	e.taints("", "")
}

// TestFlappingLink: 200 flaps of the link, each of less than a second, taint nothing for long and cost the API server little.
func TestFlappingLink(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.taints("", "")
	carrier := func(up bool) { require.NoError(e, n.SetCarrier(e.ctx, lab.Uplink, up)) }
	e.atEnd(func() { carrier(true) })

	watch, err := e.Client.ResourceV1().ResourceSlices().Watch(e.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.Name()})
	require.NoError(e, err)
	defer watch.Stop()
	began := time.Now()
	pace := time.NewTicker(150 * time.Millisecond)
	defer pace.Stop()
	for range 200 {
		carrier(false)
		<-pace.C
		carrier(true)
		<-pace.C
	}
	e.Logf("200 flaps in %s", time.Since(began))
	e.taints("", "")
	writes := 0
	for {
		select {
		case <-watch.ResultChan():
			writes++
			continue
		default:
		}
		break
	}
	e.Logf("%d writes of slices", writes)
	require.LessOrEqual(e, writes, 30+len(e.slices(n.Name())), "writes of slices; the watch begins with those that are there")
}
