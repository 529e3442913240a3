// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

// vfCount is how many VFs the PF of each node has in these tests.
const vfCount = 4

const numVFs = "/sys/class/net/" + lab.Uplink + "/device/sriov_numvfs"

// startSRIOV is start on a node whose PF has its VFs, which so are part of what has to be restored.
func startSRIOV(t *testing.T) *T {
	t.Helper()
	e := take(t)
	e.ensureVFs()
	e.guard()
	return e
}

// ensureVFs has the PFs of the test's nodes have their VFs. A test depends on no earlier one for them; they are made
// anew where one that failed left them in disorder.
func (e *T) ensureVFs() {
	e.Helper()
	for _, n := range e.nodes {
		if e.vfsInOrder(n) {
			continue
		}
		e.removeVFs(n)
		e.onNode(n, fmt.Sprintf("ip link set %s up && echo %d > %s", lab.Uplink, vfCount, numVFs))
		e.waitVFNames(n)
	}
}

// vfsInOrder says whether the node has the VFs, as the kernel makes them.
func (e *T) vfsInOrder(n *lab.Node) bool {
	e.Helper()
	state := e.hostState(n)
	for vf := range vfCount {
		link, ok := state.Links[vfName(vf)]
		if !ok || link.Up || link.MTU != 1500 || len(link.AltNames) > 0 {
			return false
		}
	}
	return len(state.VFs) == vfCount && !slices.ContainsFunc(state.VFs, func(vf hostVF) bool { return vf.VLAN != 0 })
}

func (e *T) removeVFs(n *lab.Node) {
	e.Helper()
	e.onNode(n, "echo 0 > "+numVFs)
}

// waitVFNames waits until each VF has an interface with the name that udev gives it.
func (e *T) waitVFNames(n *lab.Node) {
	e.Helper()
	e.eventually("VFs of "+n.Name(), func() string {
		out, _, _, err := n.Exec(e.ctx, "ls /sys/class/net")
		require.NoError(e, err)
		for vf := range vfCount {
			if !slices.Contains(strings.Fields(out), vfName(vf)) {
				return fmt.Sprintf("%s is not among %q", vfName(vf), out)
			}
		}
		return ""
	})
}

// vfName is the name of a VF's interface on the host.
func vfName(vf int) string { return fmt.Sprintf("%sv%d", lab.Uplink, vf) }

// atEnd undoes something at the test's end, whatever became of it, and before the nodes are looked at.
func (e *T) atEnd(undo func()) {
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		e.ctx = ctx
		undo()
	})
}

// bindVF gives a VF to another driver; none if empty.
func (e *T) bindVF(n *lab.Node, addr, driver string) {
	e.Helper()
	script := fmt.Sprintf("cd /sys/bus/pci/devices/%s; [ \"$(basename \"$(readlink driver)\")\" != '%s' ] || exit 0; [ ! -e driver ] || echo %s > driver/unbind", addr, driver, addr)
	if driver != "" {
		script += fmt.Sprintf("; echo %s > driver_override && echo %s > /sys/bus/pci/drivers_probe && echo > driver_override && [ -e driver ]", driver, addr)
	}
	e.onNode(n, "set -e; "+script)
}

// setMAC gives a VF's interface the address that it had before its driver was bound anew, which makes one up.
func (e *T) setMAC(n *lab.Node, vf int, mac string) {
	e.Helper()
	e.onNode(n, fmt.Sprintf("ip link set %s address %s", vfName(vf), mac))
}

// sriovSpec is the SR-IOV example of the documentation: VFs of the PF in one pool.
func sriovSpec() v2alpha1.CiliumNetworkDriverNodeConfigSpec {
	return sriovPools(v2alpha1.CiliumNetworkDriverDevicePoolConfig{
		PoolName: "sriov-pool",
		Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{
			DeviceManagers: []string{"sr-iov"}, PfNames: []string{lab.Uplink},
		},
	})
}

// sriovPools offers VFs of the PF in pools.
func sriovPools(pools ...v2alpha1.CiliumNetworkDriverDevicePoolConfig) v2alpha1.CiliumNetworkDriverNodeConfigSpec {
	return v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
			SRIOV: &v2alpha1.SRIOVDeviceManagerConfig{
				Enabled: true, Ifaces: []v2alpha1.SRIOVDeviceConfig{{IfName: lab.Uplink, VfCount: vfCount}},
			},
		},
		Pools: pools,
	}
}

// vfPool is a pool of the VFs with these numbers.
func vfPool(name string, vfs ...int) v2alpha1.CiliumNetworkDriverDevicePoolConfig {
	filter := &v2alpha1.CiliumNetworkDriverDeviceFilter{}
	for _, vf := range vfs {
		filter.IfNames = append(filter.IfNames, vfName(vf))
	}
	return v2alpha1.CiliumNetworkDriverDevicePoolConfig{PoolName: name, Filter: filter}
}

// vlanTemplate makes a claim template for one device of a class, in a VLAN and as sriov0.
func (e *T) vlanTemplate(name, class string, vlan int) {
	e.Helper()
	e.template(name, []resourceapi.DeviceRequest{e.request("net", class)},
		config(fmt.Sprintf(`{"vlan": %d, "podIfName": "sriov0"}`, vlan), "net"))
}

// devices returns what slices advertise, by name.
func devices(slices []resourceapi.ResourceSlice) map[string]resourceapi.Device {
	found := map[string]resourceapi.Device{}
	for _, s := range slices {
		for _, d := range s.Spec.Devices {
			found[d.Name] = d
		}
	}
	return found
}

// attribute returns an attribute of a device as text, empty if it has none.
func attribute(d resourceapi.Device, name resourceapi.QualifiedName) string {
	a, ok := d.Attributes[name]
	switch {
	case !ok:
		return ""
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	}
	return fmt.Sprintf("%+v", a)
}

// pciAddr is the PCI address in a device's name.
func pciAddr(device string) string {
	parts := strings.Split(device, "-")
	return strings.Join(parts[:3], ":") + "." + parts[3]
}

// allocationsOf returns the rows of a pod.
func (e *T) allocationsOf(pod string) []allocation {
	e.Helper()
	object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
	require.NoError(e, err)
	return slices.DeleteFunc(e.allocations(e.Node(object.Spec.NodeName)), func(a allocation) bool {
		return a.PodUID != string(object.UID)
	})
}

// claimOf returns the pod's only claim.
func (e *T) claimOf(pod string) *resourceapi.ResourceClaim {
	e.Helper()
	object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
	require.NoError(e, err)
	require.Len(e, object.Status.ResourceClaimStatuses, 1)
	claim, err := e.Client.ResourceV1().ResourceClaims(e.ns).Get(e.ctx, *object.Status.ResourceClaimStatuses[0].ResourceClaimName, metav1.GetOptions{})
	require.NoError(e, err)
	return claim
}

// vfOf returns the number of the VF that the pod has.
func (e *T) vfOf(pod string, offered map[string]resourceapi.Device) int {
	e.Helper()
	rows := e.allocationsOf(pod)
	require.Len(e, rows, 1)
	device, ok := offered[rows[0].DeviceName]
	require.True(e, ok, "device %s of pod %s is offered", rows[0].DeviceName, pod)
	id := device.Attributes["vfID"].IntValue
	require.NotNil(e, id)
	return int(*id)
}

// vlanOf returns the VLAN that the node's PF has for a VF.
func (e *T) vlanOf(n *lab.Node, vf int) int {
	e.Helper()
	for _, row := range e.hostState(n).VFs {
		if row.VF == vf {
			return row.VLAN
		}
	}
	e.Fatalf("PF of %s has no VF %d", n.Name(), vf)
	return 0
}

// address gives the pod's interface sriov0 an address.
func (e *T) address(pod, ip string) {
	e.Helper()
	e.mustInPod(pod, "ip addr add "+ip+"/24 dev sriov0")
}

// reaches waits until the pod has answers from the address.
func (e *T) reaches(pod, ip string) {
	e.Helper()
	e.eventually("pod "+pod+" pings "+ip, func() string {
		if out, ok := e.inPod(pod, "ping -c 1 -W 2 "+ip); !ok {
			return out
		}
		return ""
	})
}

// doesNotReach checks that the pod has no answer from the address. It means something only where both pods have been
// seen to reach others.
func (e *T) doesNotReach(pod, ip string) {
	e.Helper()
	out, ok := e.inPod(pod, "ping -c 3 -W 2 "+ip)
	require.False(e, ok, "pod %s reaches %s: %s", pod, ip, out)
	require.Contains(e, out, "100% packet loss")
}

// deviceNameOf is the name of the device with a PCI address.
func deviceNameOf(addr string) string { return strings.NewReplacer(":", "-", ".", "-").Replace(addr) }
