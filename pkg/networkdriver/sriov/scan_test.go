// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	pfAddr = "0000:03:00.0"
	pfName = "ens1f0"
)

// newNode is a PF with two VFs that have interfaces, which is most nodes.
func newNode(tb testing.TB) *tree {
	t := newTree(tb)
	t.pf(pfAddr, pfName, 7)
	t.kernelVF(pfAddr, 0, "0000:03:10.0", pfName+"v0")
	t.kernelVF(pfAddr, 1, "0000:03:10.2", pfName+"v1")
	return t
}

func plainAttrs(attrs map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) map[string]any {
	plain := map[string]any{}
	for name, a := range attrs {
		switch {
		case a.StringValue != nil:
			plain[string(name)] = *a.StringValue
		case a.BoolValue != nil:
			plain[string(name)] = *a.BoolValue
		default:
			plain[string(name)] = *a.IntValue
		}
	}
	return plain
}

func TestScanAttributes(t *testing.T) {
	node := newNode(t)
	node.write(filepath.Join(bus, "0000:03:10.2", "numa_node"), "1")
	devices, skipped := node.scan(node.manager(Params{}))
	require.Empty(t, skipped)
	require.Len(t, devices, 2)
	require.Equal(t, map[string]any{
		"ifName": "0000-03-10-0", "kernelIfName": "ens1f0v0", "mtu": int64(1500), "mac": "02:00:00:00:00:03",
		"pfName": "ens1f0", "vfID": int64(0), "vendor": "0x8086", "deviceID": "0x10ca", "driver": "igbvf", "rdma": false,
		"k8s.cni.cncf.io/deviceID": "0000:03:10.0", "resource.kubernetes.io/pciBusID": "0000:03:10.0", "resource.kubernetes.io/pcieRoot": "pci0000:00",
	}, plainAttrs(devices["0000-03-10-0"].Attrs()), "an unknown NUMA node is left out")
	attrs := plainAttrs(devices["0000-03-10-2"].Attrs())
	require.Equal(t, int64(1), attrs["resource.kubernetes.io/numaNode"])
	require.Equal(t, int64(1), attrs["vfID"])
	require.Equal(t, nic.PCI("0000:03:10.2"), devices["0000-03-10-2"].Link())
}

func TestLongAttributeIsDropped(t *testing.T) {
	d := &Device{Addr: "0000:03:10.0", Driver: strings.Repeat("d", 64)}
	require.Contains(t, d.Attrs(), resourceapi.QualifiedName("driver"))
	d.Driver += "d"
	require.NotContains(t, d.Attrs(), resourceapi.QualifiedName("driver"))
}

func TestScanLeavesOut(t *testing.T) {
	node := newNode(t)
	node.vf(pfAddr, 2, "0000:03:10.4") // no driver
	node.vf(pfAddr, 3, "0000:03:10.6")
	node.bind("0000:03:10.6", "vfio-pci")
	node.vf(pfAddr, 4, "0000:03:11.0")
	node.bind("0000:03:11.0", "igbvf") // in a pod
	broken := node.kernelVF(pfAddr, 5, "0000:03:11.2", pfName+"v5")
	node.remove(filepath.Join(bus, "0000:03:11.2", "vendor"))
	node.mkdir(filepath.Join(bus, "0000:03:11.2", "vendor"))
	uplink := node.kernelVF(pfAddr, 6, "0000:03:11.4", pfName+"v6")
	node.kernel.routes = []int{uplink, 1}
	// A VF that is no Ethernet controller, a device that is no VF, and a PF without an interface.
	node.kernelVF(pfAddr, 7, "0000:03:11.6", pfName+"v7")
	node.write(filepath.Join(bus, "0000:03:11.6", "class"), "0x108000")
	node.device("0000:04:00.0", "0x020000", "0x10c9")
	node.pf("0000:05:00.0", "gone0", 2)
	node.kernelVF("0000:05:00.0", 0, "0000:05:10.0", "gone0v0")
	node.hideNetdev("0000:05:00.0", "gone0")
	require.NotZero(t, broken)

	devices, skipped := node.scan(node.manager(Params{}))
	require.Len(t, devices, 3)
	require.Contains(t, devices, "0000-03-10-0")
	require.Contains(t, devices, "0000-03-10-2")
	require.Equal(t, "vfio-pci", devices["0000-03-10-6"].Driver)
	require.Empty(t, devices["0000-03-10-6"].KernelIfName())
	require.True(t, devices["0000-03-10-6"].Link().IsZero())

	require.Len(t, skipped, 5)
	require.Equal(t, "no driver is bound to it", skipped["0000-03-10-4"])
	require.Contains(t, skipped["0000-03-11-0"], "not in the host's network namespace")
	require.Contains(t, skipped["0000-03-11-2"], "cannot be read")
	require.Contains(t, skipped["0000-03-11-2"], "vendor")
	require.Equal(t, "its interface ens1f0v6 is part of the node's own network: it carries a default route", skipped["0000-03-11-4"])
	require.Contains(t, skipped["0000-05-10-0"], "physical function 0000:05:00.0")
}

// The PF may well be the node's uplink: its VFs are not.
func TestVFsOfUplinkAreOffered(t *testing.T) {
	node := newTree(t)
	node.kernel.routes = []int{node.pf(pfAddr, pfName, 7)}
	node.kernelVF(pfAddr, 0, "0000:03:10.0", pfName+"v0")
	devices, skipped := node.scan(node.manager(Params{}))
	require.Len(t, devices, 1)
	require.Empty(t, skipped)
}

func TestScanPreparedVFInPod(t *testing.T) {
	node := newNode(t)
	m := node.manager(Params{Prepared: func(name string) bool { return name == "0000-03-10-0" }})
	before, _ := node.scan(m)
	prepared, err := before["0000-03-10-0"].Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)

	node.hideNetdev("0000:03:10.0", "ens1f0v0")
	node.hideNetdev("0000:03:10.2", "ens1f0v1")
	devices, skipped := node.scan(m)
	require.Contains(t, devices, "0000-03-10-0", "its link is in the pod")
	require.Contains(t, skipped, "0000-03-10-2", "no one knows where its link is")
	require.Empty(t, devices["0000-03-10-0"].KernelIfName())

	merged := devices["0000-03-10-0"].Merge(prepared)
	require.Equal(t, plainAttrs(before["0000-03-10-0"].Attrs()), plainAttrs(merged.Attrs()))
	require.Zero(t, merged.HostState(), "the row of the inventory is not prepared")
	require.Same(t, before["0000-03-10-2"], before["0000-03-10-2"].Merge(prepared), "another device's state is not taken")

	// A driver that is lost inside the pod is withdrawn all the same.
	node.remove(filepath.Join(bus, "0000:03:10.0", "driver"))
	_, skipped = node.scan(m)
	require.Equal(t, "no driver is bound to it", skipped["0000-03-10-0"])
}

// In switchdev mode the representors of the VFs, and on a DPU that of the host's PF, hang at the PF's PCI device too.
func TestScanIgnoresRepresentors(t *testing.T) {
	node := newNode(t)
	for name, port := range map[string]string{"aaa0": "pf0vf0", "aaa1": "c1pf0vf1", "aaa2": "c1pf0", pfName: "p0"} {
		dir := filepath.Join(bus, pfAddr, "net", name)
		node.mkdir(dir)
		node.write(dir+"/phys_port_name", port)
	}
	devices, _ := node.scan(node.manager(Params{}))
	require.Len(t, devices, 2)
	for _, d := range devices {
		require.Equal(t, pfName, d.PFName)
	}
}

func TestScanErrors(t *testing.T) {
	node := newNode(t)
	node.kernel.scanErr = errors.New("boom")
	_, err := node.manager(Params{}).scan()
	require.ErrorContains(t, err, "read the node's own network: list links: boom")
	node.kernel.scanErr = nil

	node.remove("bus/pci/devices")
	devices, skipped := node.scan(node.manager(Params{}))
	require.Empty(t, devices, "a machine without PCI has no VFs")
	require.Empty(t, skipped)

	node.write("bus/pci/devices", "")
	_, err = node.manager(Params{}).scan()
	require.ErrorContains(t, err, "list PCI devices")
}

func TestMatch(t *testing.T) {
	d := &Device{
		Addr: "0000:03:10.0", KernelIfaceName: "ens1f0v0", PFName: "ens1f0", Vendor: "0x8086", DeviceID: "0x10ca", Driver: "igbvf",
	}
	dpdk := &Device{Addr: "0000:03:10.2", PFName: "ens1f0", Vendor: "0x8086", DeviceID: "0x10ca", Driver: "vfio-pci"}
	for i, tc := range []struct {
		filter     *v2alpha1.CiliumNetworkDriverDeviceFilter
		want, dpdk bool
	}{
		{nil, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceManagers: []string{"sr-iov"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceManagers: []string{"dummy"}}, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceManagers: []string{"dummy", "sr-iov"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{"ens1f0v0"}}, true, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{"0000-03-10-0", ""}}, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{PfNames: []string{"ens1f1", "ens1f0"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{PfNames: []string{"ens1f1"}}, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{ParentIfNames: []string{"nothing"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{PciAddrs: []string{"0000:03:10.0"}}, true, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{VendorIDs: []string{"0x8086"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{VendorIDs: []string{"0x15b3"}}, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceIDs: []string{"0x10ca"}}, true, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceIDs: []string{"0x10c9"}}, false, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{Drivers: []string{"vfio-pci"}}, false, true},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{Drivers: []string{"igbvf"}, PfNames: []string{"ens1f0"}}, true, false},
		{&v2alpha1.CiliumNetworkDriverDeviceFilter{Drivers: []string{"igbvf"}, PfNames: []string{"ens1f1"}}, false, false},
	} {
		require.Equal(t, tc.want, d.Match(tc.filter), "case %d", i)
		require.Equal(t, tc.dpdk, dpdk.Match(tc.filter), "case %d, vfio-pci", i)
	}
}

func TestValidate(t *testing.T) {
	vlan := func(id int) *int { return &id }
	kernelVF := &Device{Addr: "0000:03:10.0", Driver: "igbvf"}
	dpdk := &Device{Addr: "0000:03:10.0", Driver: "vfio-pci"}
	require.NoError(t, kernelVF.Validate(types.DeviceConfig{}))
	require.NoError(t, kernelVF.Validate(types.DeviceConfig{PodIfName: "net1", Vlan: vlan(4094)}))
	require.NoError(t, dpdk.Validate(types.DeviceConfig{Vlan: vlan(0)}))
	require.ErrorContains(t, kernelVF.Validate(types.DeviceConfig{Vlan: vlan(4095)}), "vlan: 4095 is not in 0..4094")
	require.ErrorContains(t, kernelVF.Validate(types.DeviceConfig{Vlan: vlan(-1)}), "vlan: -1")
	require.ErrorContains(t, kernelVF.Validate(types.DeviceConfig{PodIfName: "a/b"}), "podIfName")
	require.ErrorContains(t, dpdk.Validate(types.DeviceConfig{PodIfName: "net1"}), "vfio-pci")
	byHand := types.DeviceConfig{Routes: []types.Route{{To: netip.MustParsePrefix("2001:db8::/32"), Via: netip.MustParseAddr("fe80::1")}}}
	require.NoError(t, kernelVF.Validate(byHand))
	require.ErrorContains(t, dpdk.Validate(byHand), "addresses and routes: 0000-03-10-0 has no interface that could have them, it is bound to the driver vfio-pci")
}

func BenchmarkScan256(b *testing.B) {
	node := newTree(b)
	node.pf(pfAddr, pfName, 256)
	for i := range 256 {
		node.kernelVF(pfAddr, i, fmt.Sprintf("0000:04:%02x.%d", i/8, i%8), fmt.Sprintf("%sv%d", pfName, i))
	}
	m := node.manager(Params{})
	b.ReportAllocs()
	for b.Loop() {
		s, err := m.scan()
		if err != nil || len(s.Devices) != 256 {
			b.Fatalf("%d devices, error %v", len(s.Devices), err)
		}
	}
}

// TestNoPCI tells a machine without a PCI bus from a sysfs that is not there, such as a mount that is missing.
func TestNoPCI(t *testing.T) {
	node := newTree(t)
	node.remove("bus/pci")
	addrs, err := sysfs{root: node.path()}.pciAddrs()
	require.NoError(t, err)
	require.Empty(t, addrs)
	node.remove("bus")
	_, err = sysfs{root: node.path()}.pciAddrs()
	require.ErrorContains(t, err, "list PCI devices: open "+node.path("bus/pci/devices")+": no such file")
}
