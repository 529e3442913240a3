// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func joined(n types.Network) types.DeviceConfig {
	return types.DeviceConfig{Network: "storage", Joined: &n}
}

func asFound() types.VFRights {
	return types.VFRights{Trust: ptr.To(false), SpoofCheck: ptr.To(true), LinkState: "Auto", MinTxRate: ptr.To(0), MaxTxRate: ptr.To(0)}
}

// everything is a network that sets all that a PF has on record.
var everything = types.Network{VLAN: 7, VLANPriority: 3, VLANProtocol: "802.1ad",
	VF: types.VFRights{Trust: ptr.To(true), SpoofCheck: ptr.To(false), LinkState: "Enable", MaxTxRate: ptr.To(100)}}

// TestRights gives a VF the rights of a network and takes them back, those and no others.
func TestRights(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9, Rights: asFound()}
	prepared, err := d.Setup(t.Context(), joined(everything))
	require.NoError(t, err)
	require.Equal(t, []string{"vf 0 vlan 7 qos 3 proto 34984", "vf 0 trust true", "vf 0 spoofchk false", "vf 0 state Enable", "vf 0 rates 0 100"},
		node.kernel.changes, "the VLAN first")
	require.Equal(t, make([]error, 1), m.Check(t.Context(), []types.Prepared{{Device: prepared, Config: joined(everything)}}))

	// Somebody changes a right under the pod, and it is put back.
	_ = node.kernel.SetVFTrust(pf, 0, false)
	require.EqualError(t, m.Check(t.Context(), []types.Prepared{{Device: prepared, Config: joined(everything)}})[0],
		"the PF has it with trust off instead of trust on")
	node.kernel.changes = nil
	_, err = prepared.Setup(t.Context(), joined(everything))
	require.NoError(t, err)
	require.Equal(t, []string{"vf 0 trust true"}, node.kernel.changes)

	// What the record says is what goes back, also after a restart.
	data, err := prepared.MarshalJSON()
	require.NoError(t, err)
	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	require.NoError(t, restored.Free(t.Context(), joined(everything)))
	require.Equal(t, VFSettings{VLAN: 9, Rights: asFound()}, node.kernel.vfs[pf][0])
}

// TestRatesInSteps takes a PF's steps for the rates that were asked for, also after a restart, and nothing else.
func TestRatesInSteps(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{Rights: asFound()}
	node.kernel.round = func(mbits int) int { return mbits / 50 * 50 }
	cfg := joined(types.Network{VF: types.VFRights{MaxTxRate: ptr.To(120)}})
	prepared, err := d.Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, 100, *node.kernel.vfs[pf][0].Rights.MaxTxRate)
	data, err := prepared.MarshalJSON()
	require.NoError(t, err)
	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	require.Equal(t, make([]error, 2), m.Check(t.Context(), []types.Prepared{{Device: prepared, Config: cfg}, {Device: restored, Config: cfg}}))
	again, err := prepared.Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, prepared, again)

	// Somebody else's change is one, and so is what a record says that steps do not explain.
	changed := 90
	node.kernel.vfs[pf][0] = VFSettings{Rights: types.VFRights{MinTxRate: ptr.To(0), MaxTxRate: &changed}}
	require.EqualError(t, m.Check(t.Context(), []types.Prepared{{Device: restored, Config: cfg}})[0],
		"the PF has it with minTxRate 0 Mbit/s and maxTxRate 90 Mbit/s instead of minTxRate as it is and maxTxRate 100 Mbit/s")
	forged := *restored.(*Device)
	for _, rate := range []int{0, 4000} {
		forged.Rates, changed = &Rates{MaxTx: rate}, rate
		require.ErrorContains(t, m.Check(t.Context(), []types.Prepared{{Device: &forged, Config: cfg}})[0], "maxTxRate 120 Mbit/s")
	}

	// A limit that the PF drops is none, and goes with all that was set.
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9, Rights: asFound()}
	node.kernel.round = func(int) int { return 0 }
	_, err = d.Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "set minTxRate as it is and maxTxRate 120 Mbit/s of VF 0 on PF ens1f0: the PF has made it minTxRate 0 Mbit/s and maxTxRate 0 Mbit/s")
	require.Equal(t, VFSettings{VLAN: 9, Rights: asFound()}, node.kernel.vfs[pf][0])
}

// TestRightsThatAreNotAskedFor stay whatever they are made meanwhile.
func TestRightsThatAreNotAskedFor(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{Rights: asFound()}
	cfg := joined(types.Network{VF: types.VFRights{Trust: ptr.To(true)}})
	prepared, err := d.Setup(t.Context(), cfg)
	require.NoError(t, err)
	_ = node.kernel.SetVFSpoofCheck(pf, 0, false)
	require.NoError(t, prepared.Free(t.Context(), cfg))
	want := asFound()
	want.SpoofCheck = ptr.To(false)
	require.Equal(t, VFSettings{Rights: want}, node.kernel.vfs[pf][0])
}

// TestForgedRights gives a VF no right that its configuration does not change, whatever a record says that it was found with: it would
// last for the pods after this one.
func TestForgedRights(t *testing.T) {
	for _, cfg := range []types.DeviceConfig{{}, joined(types.Network{VF: types.VFRights{MaxTxRate: ptr.To(100)}})} {
		node := newNode(t)
		m, d, pf := discovered(t, node, Params{})
		node.kernel.vfs[pf][0] = VFSettings{Rights: asFound()}
		prepared, err := d.Setup(t.Context(), cfg)
		require.NoError(t, err)
		forged := *prepared.(*Device)
		original := *forged.Original
		original.VF.Rights.Trust, original.VF.Rights.SpoofCheck, original.VF.Rights.LinkState = ptr.To(true), ptr.To(false), "Disable"
		forged.Original = &original
		data, err := forged.MarshalJSON()
		require.NoError(t, err)
		restored, err := m.RestoreDevice(data)
		require.NoError(t, err)
		require.NoError(t, restored.Free(t.Context(), cfg))
		require.Equal(t, VFSettings{Rights: asFound()}, node.kernel.vfs[pf][0])
	}
}

// TestRightsFail leaves nothing behind when the PF refuses one of them.
func TestRightsFail(t *testing.T) {
	for _, what := range []string{"trust true", "spoofchk false", "state Enable", "rates 0 100"} {
		t.Run(what, func(t *testing.T) {
			node := newNode(t)
			_, d, pf := discovered(t, node, Params{})
			before := VFSettings{VLAN: 9, QoS: 1, Rights: asFound()}
			node.kernel.vfs[pf][0] = before
			node.kernel.refuseRights = func(w string) error {
				if w == what {
					return unix.EOPNOTSUPP
				}
				return nil
			}
			_, err := d.Setup(t.Context(), joined(everything))
			require.ErrorIs(t, err, unix.EOPNOTSUPP)
			require.ErrorContains(t, err, "of VF 0 on PF ens1f0")
			require.Equal(t, before, node.kernel.vfs[pf][0])
		})
	}
}

// TestRightsThatCannotBePutBack are refused before anything is touched, and so is an MTU that the PF does not carry.
func TestRightsThatCannotBePutBack(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9}
	refused := func(n types.Network, want string) {
		t.Helper()
		_, err := d.Setup(t.Context(), joined(n))
		require.ErrorContains(t, err, want)
		require.Empty(t, node.kernel.changes)
	}
	refused(everything, "vf: its PF does not tell what [trust spoofCheck linkState minTxRate and maxTxRate] of its VFs are")
	refused(types.Network{MTU: 1501}, "mtu: 1501 is more than its PF ens1f0 has, 1500")
	delete(node.kernel.vfs[pf], 0)
	refused(types.Network{VF: types.VFRights{Trust: ptr.To(true)}}, "vf: ")

	_, err := d.Setup(t.Context(), joined(types.Network{MTU: 1500}))
	require.NoError(t, err)
}
