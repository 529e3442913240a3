// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// prepareVF adds the row of a VF.
func (f *fixture) prepareVF(name, addr string) fakeDevice {
	row, dev := f.newRow("pod", name, 1)
	dev.ID = nic.PCI(addr)
	f.world.put(dev.ID, "")
	f.insert(row.With(func(r *tables.DRAAllocation) { r.PreparedDevice = dev }))
	return dev
}

// A link that its pod has moved on is the pod's, also after a reconnect and a restart of the agent; it is fetched when the
// pod ends.
func TestLinkInANamespaceOfThePodsOwn(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		f := newFixture(t)
		vf := f.prepareVF("vf", "0000:03:00.1")
		pod := newSandbox("pod", "s1")
		require.NoError(t, f.Attach(t.Context(), pod))
		f.world.put(vf.ID, "nested")
		if restarted {
			f.insert(f.row("vf").With(func(r *tables.DRAAllocation) { r.Attachment = nil }))
		}
		f.world.takeCalls()

		pod.Populated = true
		for range 2 {
			f.Synchronize(t.Context(), []Sandbox{pod})
			require.NoError(t, f.Attach(t.Context(), pod))
			require.Empty(t, f.world.takeCalls(), "the pod's link is touched")
			row := f.row("vf")
			require.True(t, f.InPlace("pod", "s1"))
			require.Equal(t, "Moved", row.State())
			require.Empty(t, row.Error)
			require.Equal(t, pod.NetNS, row.Attachment.NetNS)
			if !restarted {
				require.Equal(t, "net-vf", row.Attachment.IfName, "the last known name")
			}
		}
		f.world.put(vf.ID, pod.NetNS)
		f.Synchronize(t.Context(), []Sandbox{pod})
		require.Equal(t, "Attached", f.row("vf").State(), "the pod has moved it back")
		f.world.put(vf.ID, "nested")
		f.Synchronize(t.Context(), []Sandbox{pod})

		require.NoError(t, f.Detach(t.Context(), pod))
		f.at(vf, "", "")
	}
}

// Who has no containers has moved nothing: the link is left over from elsewhere, and fetched. So it is when the sandbox
// that moved it is gone.
func TestLinkInANamespaceOfNobodys(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	f.world.put(vf.ID, "elsewhere")
	pod := newSandbox("pod", "s1")
	f.Synchronize(t.Context(), []Sandbox{pod})
	f.at(vf, pod.NetNS, "s1")

	f.world.put(vf.ID, "nested")
	f.world.gone[pod.NetNS] = true
	anew := newSandbox("pod", "s2")
	anew.Populated = true
	f.Synchronize(t.Context(), []Sandbox{pod, anew})
	f.at(vf, anew.NetNS, "s2")
}

// A VF that lost its driver, or is gone, is not in place: no container starts without it.
func TestLostVF(t *testing.T) {
	f := newFixture(t)
	vf := f.prepareVF("vf", "0000:03:00.1")
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.end(vf.ID)
	f.Synchronize(t.Context(), []Sandbox{pod})
	require.Equal(t, "the device is lost: the device has no driver", f.row("vf").Error)
	require.False(t, f.InPlace("pod", "s1"))

	f.world.put(vf.ID, "")
	f.Synchronize(t.Context(), []Sandbox{pod})
	f.at(vf, pod.NetNS, "s1")
	require.Empty(t, f.row("vf").Error)
}

// A link that an agent, which ended then, has just moved in may lack its addresses, of a network or by hand. It is in place once it was
// attached again, or where containers may have used it, for which the gate was opened: containers that do not list the claim
// start before.
func TestLinkThatMayLackItsAddresses(t *testing.T) {
	network := types.DeviceConfig{Network: "storage", Joined: &types.Network{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.7/24")}}}
	byHand := types.DeviceConfig{Addresses: []types.Address{{Addr: netip.MustParseAddr("192.0.2.7"), Bits: 24}}}
	for _, tt := range []struct {
		config                     types.DeviceConfig
		populated, opened, inPlace bool
	}{
		{config: network}, {config: network, opened: true}, {config: network, populated: true}, {config: network, populated: true, opened: true, inPlace: true},
		{config: byHand, populated: true}, {config: byHand, populated: true, opened: true, inPlace: true},
	} {
		f := newFixture(t)
		vf := f.prepareVF("vf", "0000:03:00.1")
		f.insert(f.row("vf").With(func(r *tables.DRAAllocation) {
			r.Config = tt.config
		}))
		pod := newSandbox("pod", "s1")
		pod.Populated = tt.populated
		if tt.opened {
			f.world.gates[f.row("vf").ClaimUID] = pod.ID + " net"
		}
		f.world.put(vf.ID, pod.NetNS)
		f.Synchronize(t.Context(), []Sandbox{pod})
		f.at(vf, pod.NetNS, "s1")
		require.Equal(t, !tt.inPlace, slices.Contains(f.world.takeCalls(), "attach vf"))
	}
}
