// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"encoding/binary"
	"log/slog"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// vfMessage builds what the kernel answers for a PF (rtnl_fill_vfinfo in net/core/rtnetlink.c), with data for the
// first of the VFs that the PF has.
func vfMessage(has, listed int) []byte {
	list := nl.NewRtAttr(unix.IFLA_VFINFO_LIST, nil)
	for i := range listed {
		info := list.AddRtAttr(nl.IFLA_VF_INFO, nil)
		mac := nl.VfMac{Vf: uint32(i)}
		if i%2 == 1 {
			copy(mac.Mac[:], net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)})
		}
		info.AddRtAttr(nl.IFLA_VF_MAC, mac.Serialize())
		vlan := nl.VfVlan{Vf: uint32(i), Vlan: uint32(1000 + i), Qos: uint32(i % 8)}
		info.AddRtAttr(nl.IFLA_VF_VLAN, vlan.Serialize())
		proto := unix.ETH_P_8021Q
		if i == 255 {
			proto = unix.ETH_P_8021AD
		}
		entry := make([]byte, nl.SizeofVfVlan+2)
		binary.BigEndian.PutUint16(entry[nl.SizeofVfVlan:], uint16(proto))
		info.AddRtAttr(nl.IFLA_VF_VLAN_LIST, nil).AddRtAttr(nl.IFLA_VF_VLAN_INFO, entry)
		// What is not told of is -1 in a switch (struct ifla_vf_info).
		spoofCheck := nl.VfSpoofchk{Vf: uint32(i), Setting: uint32(i % 2)}
		trust := nl.VfTrust{Vf: uint32(i), Setting: ^uint32(0)}
		if i == 255 {
			trust.Setting = 1
		}
		info.AddRtAttr(nl.IFLA_VF_RATE, (&nl.VfRate{Vf: uint32(i), MinTxRate: uint32(i), MaxTxRate: uint32(2 * i)}).Serialize())
		info.AddRtAttr(nl.IFLA_VF_SPOOFCHK, spoofCheck.Serialize())
		info.AddRtAttr(nl.IFLA_VF_LINK_STATE, (&nl.VfLinkState{Vf: uint32(i), LinkState: uint32(i % 4)}).Serialize())
		info.AddRtAttr(nl.IFLA_VF_TRUST, trust.Serialize())
	}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC).Serialize()
	msg = append(msg, nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("ens1f0")).Serialize()...)
	msg = append(msg, nl.NewRtAttr(unix.IFLA_NUM_VF, nl.Uint32Attr(uint32(has))).Serialize()...)
	if listed > 0 {
		msg = append(msg, list.Serialize()...)
	}
	return msg
}

func TestParseVFs(t *testing.T) {
	vfs, err := parseVFs(vfMessage(256, 256))
	require.NoError(t, err)
	require.Len(t, vfs, 256)
	rights := func(spoofCheck bool, state string, minTx, maxTx int) types.VFRights {
		return types.VFRights{SpoofCheck: &spoofCheck, LinkState: state, MinTxRate: &minTx, MaxTxRate: &maxTx}
	}
	require.Equal(t, VFSettings{VLAN: 1000, Rights: rights(false, "Auto", 0, 0)}, vfs[0])
	require.Equal(t, VFSettings{VLAN: 1254, QoS: 6, Rights: rights(false, "Disable", 254, 508)}, vfs[254])
	last := VFSettings{VLAN: 1255, QoS: 7, VLANProto: unix.ETH_P_8021AD, MAC: "02:00:00:00:00:ff", Rights: rights(true, "", 255, 510)}
	last.Rights.Trust = ptr.To(true)
	require.Equal(t, last, vfs[255], "a link state that is not known is left out")
	require.Equal(t, "Enable", vfs[1].Rights.LinkState)

	vfs, err = parseVFs(vfMessage(7, 0))
	require.NoError(t, err, "the driver keeps no settings")
	require.Empty(t, vfs)

	_, err = parseVFs(vfMessage(256, 200))
	require.ErrorContains(t, err, "cut off after 200 of 256")
	_, err = parseVFs([]byte{1, 2})
	require.Error(t, err)
	whole := vfMessage(2, 2)
	_, err = parseVFs(whole[:len(whole)-40])
	require.Error(t, err)
}

func FuzzParseVFs(f *testing.F) {
	f.Add(vfMessage(2, 2))
	f.Fuzz(func(_ *testing.T, msg []byte) { _, _ = parseVFs(msg) })
}

func TestConcernsVF(t *testing.T) {
	require.True(t, concernsVF(&netlink.Device{LinkAttrs: netlink.LinkAttrs{ParentDev: "0000:03:10.0", ParentDevBus: "pci"}}))
	require.True(t, concernsVF(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 3}}))
	require.False(t, concernsVF(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{ParentIndex: 3}}))
	require.False(t, concernsVF(&netlink.Bridge{}))
}

func TestRtnetlink(t *testing.T) {
	testenv.Privileged(t)
	// The thread is never unlocked, so that nothing else runs in the namespace.
	runtime.LockOSThread()
	ns, err := netns.New()
	require.NoError(t, err)
	defer ns.Close()

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = "br0", 1400, net.HardwareAddr{2, 0, 0, 0, 0, 1}
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	require.NoError(t, netlink.LinkAdd(bridge))
	require.NoError(t, netlink.LinkAddAltName(bridge, "a-long-alternative-name"))

	k := rtnetlink{log: slog.New(slog.DiscardHandler)}
	l, err := k.Link(bridge.Index)
	require.NoError(t, err)
	require.Equal(t, "br0", l.Name)
	require.Equal(t, []string{"a-long-alternative-name"}, l.AltNames)
	require.Equal(t, 1400, l.MTU)
	require.Equal(t, "02:00:00:00:00:01", l.MAC)
	require.False(t, l.Up)
	require.Empty(t, *l.Alias)
	require.Zero(t, *l.Group)
	require.NotNil(t, l.TxQLen)
	require.Empty(t, l.parent)
	view, err := k.HostNetwork(nil)
	require.NoError(t, err)
	require.Empty(t, view.Reason(bridge.Index))

	require.NoError(t, k.SetUp(bridge.Index))
	l, err = k.Link(bridge.Index)
	require.NoError(t, err)
	require.True(t, l.Up)

	vfs, err := k.VFs(bridge.Index)
	require.NoError(t, err)
	require.Empty(t, vfs)
	require.ErrorIs(t, k.SetVFVLAN(bridge.Index, 0, VFSettings{VLAN: 5}), unix.EOPNOTSUPP)
	_, err = k.Link(9999)
	require.ErrorIs(t, err, unix.ENODEV)
}
