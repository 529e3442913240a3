// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/cilium/networkdriver/test/lab"
)

// TestSRIOV is the SR-IOV example of the documentation on a PF without VFs: they are made, pods in one VLAN reach each
// other over them and pods in another do not, and afterwards every VF is as it was.
func TestSRIOV(t *testing.T) {
	e := take(t)
	n := e.node
	e.removeVFs(n)
	e.guard()
	e.configure(e.node.Name(), sriovSpec())
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	require.Equal(e, fmt.Sprint(vfCount), e.onNode(n, "cat "+numVFs))
	e.waitVFNames(n)
	before := e.hostState(n)
	require.Len(e, before.VFs, vfCount)
	var offered map[string]resourceapi.Device
	e.eventually("slices", func() string {
		offered = devices(e.slices(e.node.Name()))
		for name, d := range offered {
			if want := lab.Uplink + "v" + attribute(d, "vfID"); attribute(d, "kernelIfName") != want {
				return fmt.Sprintf("device %s has not the name %s: %+v", name, want, d.Attributes)
			}
		}
		return ""
	})
	for name, d := range offered {
		require.Equal(e, name, attribute(d, "ifName"))
		require.Equal(e, "sriov-pool", attribute(d, "pool"))
		require.Equal(e, "sr-iov", attribute(d, "deviceManager"))
		require.Equal(e, lab.Uplink, attribute(d, "pfName"))
		require.Equal(e, "igbvf", attribute(d, "driver"))
		require.Equal(e, "0x8086", attribute(d, "vendor"))
		require.Equal(e, "0x10ca", attribute(d, "deviceID"))
		require.Equal(e, "1500", attribute(d, "mtu"))
		require.Equal(e, pciAddr(name), attribute(d, "resource.kubernetes.io/pciBusID"))
		link := before.Links[attribute(d, "kernelIfName")]
		require.Equal(e, link.MAC, attribute(d, "mac"))
		require.Equal(e, pciAddr(name), link.Parent)
	}

	e.class("sriov-pool.networkdriver.cilium.io", "sriov-pool")
	vlans := map[string]int{"a": 1001, "b": 1001, "c": 1002, "d": 1002}
	ips := map[string]string{"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3", "d": "10.77.0.4"}
	for _, vlan := range []int{1001, 1002} {
		e.vlanTemplate(fmt.Sprintf("sriov-claim-%d", vlan), "sriov-pool.networkdriver.cilium.io", vlan)
	}
	for pod, vlan := range vlans {
		e.pod(pod, e.node.Name(), fmt.Sprintf("sriov-claim-%d", vlan))
	}
	e.running("a", "b", "c", "d")
	for pod, ip := range ips {
		e.address(pod, ip)
	}
	e.reaches("a", ips["b"])
	e.reaches("b", ips["a"])
	e.reaches("c", ips["d"])
	e.doesNotReach("a", ips["c"])
	e.doesNotReach("d", ips["b"])

	for pod, vlan := range vlans {
		require.Equal(e, vlan, e.vlanOf(n, e.vfOf(pod, offered)), "VLAN of pod %s in the PF's table", pod)
		rows := e.allocationsOf(pod)
		require.Equal(e, map[string]any{"podIfName": "sriov0", "vlan": float64(vlan)}, rows[0].Config)
		require.Equal(e, "sriov-pool", rows[0].Pool)
		mac := attribute(offered[rows[0].DeviceName], "mac")
		require.Equal(e, mac, e.mustInPod(pod, "cat /sys/class/net/sriov0/address"))
		e.eventually("claim of pod "+pod, func() string { return e.claimMissing(pod, rows[0].DeviceName, mac) })
	}

	e.deletePods("a", "b", "c", "d")
	e.noAllocations(n)
	e.eventually("VFs", func() string { return cmp.Diff(before, e.hostState(n)) })
}

// claimMissing says what the status of the pod's claim does not tell of its device.
func (e *T) claimMissing(pod, device, mac string) string {
	status := e.claimOf(pod).Status.Devices
	if len(status) != 1 {
		return fmt.Sprintf("status of %d devices, want 1", len(status))
	}
	d := status[0]
	switch {
	case d.Driver != driverName || d.Pool != e.node.Name()+"/sriov-pool" || d.Device != device:
		return fmt.Sprintf("is of %s %s %s", d.Driver, d.Pool, d.Device)
	case !meta.IsStatusConditionTrue(d.Conditions, "Ready"):
		return fmt.Sprintf("is not ready: %+v", d.Conditions)
	case d.NetworkData == nil || d.NetworkData.InterfaceName != "sriov0" || d.NetworkData.HardwareAddress != mac:
		return fmt.Sprintf("has network data %+v, want sriov0 and %s", d.NetworkData, mac)
	}
	return ""
}
