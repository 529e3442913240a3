// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// All that can be wrong with a VF's PF and with what that has of the VF is told of each VF that it concerns, with one look at the PF's
// record, and none where it need not be fresh.
func TestExamine(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	devices, _ := node.scan(m)
	other := devices["0000-03-10-2"]
	speed := filepath.Join(bus, "0000:03:00.0", "net", "ens1f0", "speed")
	require.Equal(t, "0000:03:00.0", node.kernel.links[pf].parent)
	all := []types.Prepared{{Device: d}, {Device: other}}
	examine := func(fresh bool) [][]types.Fault {
		t.Helper()
		node.kernel.with(func() { node.kernel.reads, node.kernel.scans = 0, 0 })
		faults, err := m.Examine(t.Context(), all, fresh)
		require.NoError(t, err)
		require.LessOrEqual(t, node.kernel.reads, 1, "looks at the PF's record")
		if !fresh {
			require.Zero(t, node.kernel.reads)
		}
		require.Zero(t, node.kernel.scans, "looks at the node's network")
		return faults
	}
	both := func(f types.Fault) [][]types.Fault { return [][]types.Fault{{f}, {f}} }
	none := [][]types.Fault{nil, nil}
	require.Equal(t, none, examine(true))

	node.kernel.with(func() { node.kernel.ports = map[int]PortState{pf: {Up: true}} })
	require.Equal(t, both(types.Fault{Cause: types.CauseNoCarrier, Of: types.OfPF,
		Message: "its physical function ens1f0 has no carrier: look at the cable and the switch"}), examine(false))
	node.kernel.with(func() { node.kernel.ports[pf] = PortState{} })
	require.Equal(t, both(types.Fault{Cause: types.CausePFDown, Of: types.OfPF,
		Message: "its physical function ens1f0 is down: ip link set ens1f0 up"}), examine(false))
	node.kernel.with(func() { node.kernel.ports = nil })

	// The speed counts while it is known, and the device has the highest as an attribute, also while the link is down.
	node.write(speed, "10000")
	require.Equal(t, none, examine(false))
	node.write(speed, "1000")
	require.Equal(t, both(types.Fault{Cause: types.CauseSlowLink, Of: types.OfPF,
		Message: "the link of its physical function ens1f0 has 1000 Mbit/s and had 10000"}), examine(false))
	node.write(speed, "-1")
	require.Equal(t, none, examine(false))
	devices, _ = node.scan(m)
	require.EqualValues(t, 10000, *devices[d.IfName()].Attrs()["linkSpeed"].IntValue)
	require.NotContains(t, d.Attrs(), "linkSpeed", "it was not known before")
	node.remove(speed)

	node.kernel.with(func() {
		node.kernel.vfs[pf][0] = VFSettings{MAC: "02:aa:00:00:00:01", Rights: types.VFRights{LinkState: v2alpha1.LinkStateDisable}}
		node.kernel.vfs[pf][1] = VFSettings{MAC: "02:aa:00:00:00:01"}
	})
	require.Equal(t, none, examine(false), "what was read last")
	twice := types.Fault{Cause: types.CauseDuplicateMAC, Of: types.OfVF, Message: "another function of ens1f0 has its address 02:aa:00:00:00:01 too"}
	require.Equal(t, [][]types.Fault{{{Cause: types.CauseNoCarrier, Of: types.OfVF,
		Message: "its physical function keeps its link down: ip link set ens1f0 vf 0 state auto"}, twice}, {twice}}, examine(true))
	node.kernel.with(func() { node.kernel.vfs[pf] = map[int]VFSettings{0: {}, 1: {}} })

	// Of what a pod has it counts too whether its driver is there, and not what the claim asked for.
	all[0] = prepared(t, d, types.DeviceConfig{})
	require.Equal(t, none, examine(true))
	node.bind(d.Addr, "vfio-pci")
	require.Equal(t, [][]types.Fault{{{Cause: types.CauseDriverGone, Of: types.OfVF,
		Message: "the driver vfio-pci is bound to it instead of igbvf"}}, nil}, examine(true))
	node.unbind(d.Addr)
	require.Equal(t, [][]types.Fault{{noDriver()}, nil}, examine(true))
	node.bind(d.Addr, "igbvf")

	// The PF's interface is gone, and then the VF: of which the next scan tells.
	node.hideNetdev("0000:03:00.0", "ens1f0")
	require.Equal(t, both(noInterface("0000:03:00.0")), examine(true))
	node.remove("bus/pci/devices/" + d.Addr)
	require.Equal(t, [][]types.Fault{nil, {noInterface("0000:03:00.0")}}, examine(true))
}

// What a scan leaves out for a fault says which.
func TestSkippedForAFault(t *testing.T) {
	node := newNode(t)
	m, d, _ := discovered(t, node, Params{})
	node.remove(filepath.Join(bus, d.Addr, "driver"))
	s, err := m.scan()
	require.NoError(t, err)
	require.Contains(t, s.Skipped, types.Skipped{Device: d.IfName(), Reason: "no driver is bound to it", Cause: types.CauseDriverGone, Of: types.OfVF})
}

// BenchmarkExamine is one pass over 256 prepared VFs of two PFs.
func BenchmarkExamine(b *testing.B) {
	node := newTree(b)
	var all []types.Prepared
	for pf := range 2 {
		pfAddr := fmt.Sprintf("0000:%02x:00.0", pf+1)
		node.pf(pfAddr, fmt.Sprintf("ens%df0", pf+1), 128)
		for vf := range 128 {
			addr := fmt.Sprintf("0000:%02x:%02x.%d", pf+1, 2+vf/8, vf%8)
			node.kernelVF(pfAddr, vf, addr, fmt.Sprintf("ens%df0v%d", pf+1, vf))
		}
	}
	m := node.manager(Params{})
	s, err := m.scan()
	require.NoError(b, err)
	require.Len(b, s.Devices, 256)
	for _, d := range s.Devices {
		found := *d.(*Device)
		found.Original = &Original{}
		all = append(all, types.Prepared{Device: &found})
	}
	for b.Loop() {
		if _, err := m.Examine(b.Context(), all, true); err != nil {
			b.Fatal(err)
		}
	}
}
