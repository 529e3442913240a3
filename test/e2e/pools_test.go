// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

// withdrawn waits until a device is neither in the node's slices nor without a reason in its node config's status.
func (e *T) withdrawn(node, device, reason string) {
	e.Helper()
	e.eventually("device "+device+" to be withdrawn", func() string {
		if _, ok := devices(e.slices(node))[device]; ok {
			return "it is offered"
		}
		skipped := e.configStatus(node).SkippedDevices
		for _, s := range skipped {
			if s.Device == device && s.Manager == "sr-iov" && strings.Contains(s.Reason, reason) {
				return ""
			}
		}
		return fmt.Sprintf("no reason %q in the status: %+v", reason, skipped)
	})
}

// offered waits until a device is in the node's slices as it should be.
func (e *T) offered(node, device string, right func(resourceapi.Device) bool) {
	e.Helper()
	e.eventually("device "+device+" to be offered", func() string {
		d, ok := devices(e.slices(node))[device]
		switch {
		case !ok:
			return fmt.Sprintf("it is not: %+v", e.configStatus(node).SkippedDevices)
		case !right(d):
			return fmt.Sprintf("it has %+v", d.Attributes)
		}
		return ""
	})
}

// deviceOf returns the device of a VF.
func deviceOf(e *T, node string, vf int) resourceapi.Device {
	e.Helper()
	for _, d := range devices(e.slices(node)) {
		if attribute(d, "vfID") == fmt.Sprint(vf) {
			return d
		}
	}
	e.Fatalf("node %s offers no VF %d", node, vf)
	return resourceapi.Device{}
}

// TestDriverOfVF: a VF without driver serves no one and is tainted, or withdrawn where the API server keeps no taints; bound to vfio-pci it is offered without an
// interface and can be put in a VLAN; with its own driver again it is what it was.
func TestDriverOfVF(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	mac := e.hostState(n).Links[vfName(3)].MAC
	dpdk := v2alpha1.CiliumNetworkDriverDevicePoolConfig{PoolName: "dpdk", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{Drivers: []string{"vfio-pci"}}}
	kernel := v2alpha1.CiliumNetworkDriverDevicePoolConfig{PoolName: "kernel", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{Drivers: []string{"igbvf"}}}
	e.configure(e.node.Name(), sriovPools(dpdk, kernel))
	e.waitDevices(e.node.Name(), "kernel", vfCount)
	device := deviceOf(e, e.node.Name(), 3).Name
	e.atEnd(func() {
		e.bindVF(n, pciAddr(device), "igbvf")
		e.waitVFNames(n)
		e.setMAC(n, 3, mac)
	})

	e.bindVF(n, pciAddr(device), "")
	e.eventually("a taint of "+device, func() string {
		d, offered := devices(e.slices(e.node.Name()))[device]
		if offered && !slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == "networkdriver.cilium.io/driver-gone" }) {
			return fmt.Sprintf("it has %+v", d.Taints)
		}
		return ""
	})

	e.bindVF(n, pciAddr(device), "vfio-pci")
	e.offered(e.node.Name(), device, func(d resourceapi.Device) bool {
		return attribute(d, "driver") == "vfio-pci" && attribute(d, "pool") == "dpdk" && attribute(d, "kernelIfName") == "" && attribute(d, "mac") == ""
	})
	e.class("dpdk", "dpdk")
	e.template("dpdk", []resourceapi.DeviceRequest{e.request("net", "dpdk")}, config(`{"vlan": 1003}`))
	e.template("named", []resourceapi.DeviceRequest{e.request("net", "dpdk")}, config(`{"vlan": 1003, "podIfName": "sriov0"}`))
	e.pod("named", e.node.Name(), "named")
	e.eventSays("named", "net", "podIfName", "no interface")
	require.Zero(e, e.vlanOf(n, 3))
	e.deletePods("named")
	e.pod("dpdk", e.node.Name(), "dpdk")
	e.running("dpdk")
	require.Equal(e, 1003, e.vlanOf(n, 3))
	e.deletePods("dpdk")
	e.noAllocations(n)
	require.Zero(e, e.vlanOf(n, 3))

	e.bindVF(n, pciAddr(device), "igbvf")
	e.offered(e.node.Name(), device, func(d resourceapi.Device) bool {
		return attribute(d, "driver") == "igbvf" && attribute(d, "pool") == "kernel" && attribute(d, "kernelIfName") == vfName(3)
	})
}

// TestNodesOwnNetwork: a VF that the node's own network uses is withdrawn for as long as it is.
func TestNodesOwnNetwork(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(e.node.Name(), sriovSpec())
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	names := map[int]string{}
	for vf := range 3 {
		names[vf] = deviceOf(e, e.node.Name(), vf).Name
	}
	undo := fmt.Sprintf(`ip link del e2e-br; ip link del e2e-vlan; ip route del default dev %[1]s metric 9999; ip link set %[1]s down`, vfName(2))
	e.atEnd(func() { _, _, _, _ = n.Exec(e.ctx, undo) })
	e.onNode(n, fmt.Sprintf(`set -e
		ip link add e2e-br type bridge
		ip link set %s master e2e-br
		ip link add link %s name e2e-vlan type vlan id 5
		ip link set %[3]s up
		ip route add default dev %[3]s metric 9999`, vfName(0), vfName(1), vfName(2)))
	e.withdrawn(e.node.Name(), names[0], "upper device e2e-br")
	e.withdrawn(e.node.Name(), names[1], "upper device e2e-vlan")
	e.withdrawn(e.node.Name(), names[2], "default route")
	e.waitDevices(e.node.Name(), "sriov-pool", 1)
	e.onNode(n, undo)
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
}

// TestPinning: a prepared device stays in the pool that it was allotted from, whatever a new node config says, until it
// is freed.
func TestPinning(t *testing.T) {
	e := startSRIOV(t)
	e.configure(e.node.Name(), sriovPools(vfPool("before", 0, 1)))
	e.waitDevices(e.node.Name(), "before", 2)
	e.class("before", "before")
	e.vlanTemplate("before", "before", 1001)
	e.pod("a", e.node.Name(), "before")
	e.running("a")
	device := e.allocationsOf("a")[0].DeviceName
	claim := e.claimOf("a").Status.Allocation.Devices.Results[0]
	require.Equal(e, e.node.Name()+"/before", claim.Pool)

	e.configure(e.node.Name(), sriovPools(vfPool("after", 0, 1)))
	e.waitDevices(e.node.Name(), "after", 1)
	require.Contains(e, devices(e.waitDevices(e.node.Name(), "before", 1)), device)
	require.Equal(e, "before", e.allocationsOf("a")[0].Pool)
	require.Equal(e, vfName(int(*devices(e.slices(e.node.Name()))[device].Attributes["vfID"].IntValue)),
		attribute(devices(e.slices(e.node.Name()))[device], "kernelIfName"), "the host's name stays while the VF is in the pod")
	// A restart of the agent changes nothing about that.
	require.NoError(e, e.RestartAgent(e.ctx, e.node))
	e.eventually("allocations after a restart", func() string {
		out, err := e.DumpTable(e.ctx, e.node, "networkdriver-dra-allocations")
		if err != nil || !strings.Contains(string(out), device) {
			return fmt.Sprintf("%s %v", out, err)
		}
		return ""
	})
	require.Contains(e, devices(e.waitDevices(e.node.Name(), "before", 1)), device)
	e.waitDevices(e.node.Name(), "after", 1)

	e.deletePods("a")
	e.waitDevices(e.node.Name(), "after", 2)
	e.waitDevices(e.node.Name(), "before", 0)
}

// TestSlices: pods come and go without a write to the node's slices, and slices that somebody deletes come back.
func TestSlices(t *testing.T) {
	e := startSRIOV(t)
	e.configure(e.node.Name(), sriovSpec())
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	versions := func() map[string]string {
		versions := map[string]string{}
		for _, s := range e.slices(e.node.Name()) {
			versions[s.Name] = s.ResourceVersion
		}
		return versions
	}
	e.class("sriov", "sriov-pool")
	e.vlanTemplate("sriov", "sriov", 1001)
	before := versions()
	e.pod("a", e.node.Name(), "sriov")
	e.running("a")
	require.NotContains(e, e.links(e.node.Name()), vfName(e.vfOf("a", devices(e.slices(e.node.Name())))))
	require.Equal(e, before, versions(), "attached")
	e.deletePods("a")
	e.noAllocations(e.node)
	// The VF is seen back in the inventory before the slices are looked at.
	e.eventually("inventory", func() string {
		out := string(e.table(e.node, "networkdriver-dra-devices"))
		for vf := range vfCount {
			if !strings.Contains(out, `"`+vfName(vf)+`"`) {
				return vfName(vf) + " is not in it"
			}
		}
		return ""
	})
	require.Equal(e, before, versions(), "detached")

	for range 2 {
		for _, name := range slices.Collect(maps.Keys(versions())) {
			require.NoError(e, e.Client.ResourceV1().ResourceSlices().Delete(e.ctx, name, metav1.DeleteOptions{}))
		}
		e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	}
	for name := range versions() {
		require.NotContains(e, before, name)
	}
	require.Equal(e, lab.Uplink, attribute(deviceOf(e, e.node.Name(), 0), "pfName"))
}
