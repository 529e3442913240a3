// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func prepared(t *testing.T, d types.Device, cfg types.DeviceConfig) types.Prepared {
	t.Helper()
	dev, err := d.Setup(t.Context(), cfg)
	require.NoError(t, err)
	return types.Prepared{Device: dev, Config: cfg}
}

// What somebody changes on the PF is seen with one look at each PF, and Setup puts it back without a look at the node's
// own network.
func TestCheck(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	devices, _ := node.scan(m)
	all := []types.Prepared{prepared(t, d, withVLAN(5)), prepared(t, devices["0000-03-10-2"], types.DeviceConfig{}), {Device: d}}
	require.Len(t, all, 3, "the last one is not prepared")
	check := func() []error {
		node.kernel.with(func() { node.kernel.reads, node.kernel.scans = 0, 0 })
		defer func() {
			require.LessOrEqual(t, node.kernel.reads, 1, "looks at the PF's record")
			require.Zero(t, node.kernel.scans, "looks at the node's network")
		}()
		return m.Check(t.Context(), all)
	}
	require.Equal(t, make([]error, 3), check())

	node.hideNetdev(d.Addr, d.KernelIfaceName)
	require.Equal(t, make([]error, 3), check(), "in the pod")

	node.kernel.vfs[pf][0] = VFSettings{VLAN: 6}
	errs := check()
	require.EqualError(t, errs[0], "the PF has it with VLAN 6 instead of VLAN 5")
	require.ErrorAs(t, errs[0], &types.AstrayError{})
	require.NoError(t, errs[1])
	node.kernel.scans = 0
	again, err := all[0].Device.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.Equal(t, all[0].Device, again)
	require.Zero(t, node.kernel.scans)
	require.Equal(t, make([]error, 3), check())

	node.kernel.vfs[pf][1] = VFSettings{VLAN: 9}
	require.EqualError(t, check()[1], "the PF has it with VLAN 9 instead of VLAN 0")
	node.kernel.vfs[pf] = nil
	require.Equal(t, make([]error, 3), check(), "a PF without a record")

	node.hideNetdev(pfAddr, "ens1f0")
	require.ErrorContains(t, check()[0], "read the VFs of PF "+pfAddr+": it has no interface")
	node.remove(filepath.Join(bus, pfAddr, "virtfn0"))
	require.EqualError(t, check()[0], "it is not VF 0 of PF "+pfAddr+" any more")
	node.remove(filepath.Join(bus, d.Addr))
	require.ErrorIs(t, check()[0], errGone)
}

// A VF that was made anew while it was a claim's is put into its VLAN, and keeps its own address.
func TestVFMadeAnew(t *testing.T) {
	node := newNode(t)
	var log bytes.Buffer
	m, d, pf := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 7, MAC: d.MAC}
	p := prepared(t, d, withVLAN(5))

	node.remake(d.Addr, d.KernelIfaceName)
	index := node.netdev(d.Addr, "eth0")
	l, err := node.kernel.Link(index)
	require.NoError(t, err)
	node.kernel.vfs[pf][0] = VFSettings{MAC: l.MAC}
	require.Error(t, m.Check(t.Context(), []types.Prepared{p})[0])
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 5, MAC: l.MAC}
	require.EqualError(t, m.Check(t.Context(), []types.Prepared{p})[0], "it was made anew")

	node.kernel.vfs[pf][0] = VFSettings{MAC: l.MAC}
	anew, err := p.Device.Setup(t.Context(), p.Config)
	require.NoError(t, err)
	require.Equal(t, VFSettings{VLAN: 5, MAC: l.MAC}, node.kernel.vfs[pf][0])
	require.Contains(t, log.String(), "A VF was made anew while it was a claim's")
	require.Empty(t, p.Device.HostState().MAC, "the former address is not for the new VF")
	want := p.Device.HostState()
	want.MAC = l.MAC
	require.Equal(t, want, anew.HostState(), "name and the rest are the old ones")
	require.Equal(t, []error{nil}, m.Check(t.Context(), []types.Prepared{{Device: anew, Config: p.Config}}))

	// It came into the pod before anybody noticed.
	node.hideNetdev(d.Addr, "eth0")
	node.kernel.vfs[pf][0] = VFSettings{MAC: l.MAC}
	inPod, err := p.Device.Setup(t.Context(), p.Config)
	require.NoError(t, err)
	unknown, original := *anew.(*Device), *anew.(*Device).Original
	original.Settings, unknown.Original = nil, &original // what the host had is not known of an interface that is in a pod
	require.Equal(t, &unknown, inPod)
	require.Equal(t, VFSettings{VLAN: 5, MAC: l.MAC}, node.kernel.vfs[pf][0])
	node.showNetdev(l)

	for _, device := range []types.Device{anew, p.Device} {
		node.kernel.vfs[pf][0] = VFSettings{VLAN: 5, MAC: l.MAC}
		require.NoError(t, device.Free(t.Context(), p.Config))
		require.Equal(t, VFSettings{VLAN: 7, MAC: l.MAC}, node.kernel.vfs[pf][0], "the VLAN is the PF's, the address the VF's")
	}

	// An address that a pod set does not make another VF of it, whatever the driver says of its permanent one.
	l.MAC = "02:00:00:00:ff:ff"
	node.kernel.set(l)
	node.hideNetdev(l.parent, l.Name)
	node.showNetdev(l)
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 5, MAC: l.MAC}
	require.Equal(t, []error{nil}, m.Check(t.Context(), []types.Prepared{{Device: anew, Config: p.Config}}))
	// Neither does another start of its driver, which makes up an address.
	node.remove(filepath.Join(bus, d.Addr, "net"))
	node.netdev(d.Addr, "eth1")
	require.Equal(t, []error{nil}, m.Check(t.Context(), []types.Prepared{{Device: anew, Config: p.Config}}))
	again, err := anew.Setup(t.Context(), p.Config)
	require.NoError(t, err)
	require.Equal(t, anew, again, "it gets its address back")
}

// BenchmarkCheck is what every start of a pod with a VF pays for the look at its PF: sysfs, and a request to the kernel,
// here about lo, which has no VFs.
func BenchmarkCheck(b *testing.B) {
	node := newTree(b)
	node.pf(pfAddr, "ens1f0", 64)
	for i := range 64 {
		node.kernelVF(pfAddr, i, fmt.Sprintf("0000:03:%02x.%d", 16+i/8, i%8), fmt.Sprint("ens1f0v", i))
	}
	m := node.manager(Params{})
	devices, _ := node.scan(m)
	dev, err := devices[vf0].Setup(b.Context(), withVLAN(0))
	require.NoError(b, err)
	node.write(filepath.Join(bus, pfAddr, "net/ens1f0/ifindex"), "1")
	m.kernel = rtnetlink{log: slog.New(slog.DiscardHandler)}
	one := []types.Prepared{{Device: dev}}
	for b.Loop() {
		if err := m.Check(b.Context(), one)[0]; err != nil {
			b.Fatal(err)
		}
	}
}
