// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func mac(last byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, last} }

func TestIdentity(t *testing.T) {
	pci := func(addr string, perm, current byte, name string) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{
			Name: name, Index: 7, ParentDevBus: "pci", ParentDev: addr, PermHWAddr: mac(perm), HardwareAddr: mac(current),
		}}
	}
	veth := func(current byte, name, alias string, index int) netlink.Link {
		return &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Alias: alias, Index: index, HardwareAddr: mac(current)}}
	}
	ipvlan := func(name string, index int) netlink.Link {
		return &netlink.IPVlan{LinkAttrs: netlink.LinkAttrs{Name: name, Index: index, PermHWAddr: mac(1), HardwareAddr: mac(1)}}
	}
	for name, tt := range map[string]struct {
		nic, link    netlink.Link
		is, isAtHome bool
	}{
		"PCI address, whatever else changed":     {pci("0000:03:00.1", 1, 1, "eth1"), pci("0000:03:00.1", 1, 9, "net1"), true, true},
		"another PCI address, MAC the same":      {pci("0000:03:00.1", 1, 1, "eth1"), pci("0000:03:00.2", 1, 1, "eth1"), false, false},
		"the PCI device's other NIC":             {pci("0000:03:00.1", 1, 1, "eth1"), pci("0000:03:00.1", 2, 1, "eth1"), false, false},
		"virtual link under another name":        {veth(1, "eth1", "", 7), veth(1, "net1", "eth1", 9), true, true},
		"virtual link, MAC changed":              {veth(1, "eth1", "", 7), veth(2, "net1", "eth1", 7), false, true},
		"a link that resembles it":               {veth(1, "eth1", "", 7), veth(2, "net1", "eth1", 9), false, false},
		"the MAC alone":                          {veth(1, "eth1", "", 7), veth(1, "net1", "", 9), false, false},
		"another kind":                           {veth(1, "eth1", "", 7), &netlink.Dummy{LinkAttrs: *veth(1, "eth1", "", 7).Attrs()}, false, false},
		"two ipvlan links of one NIC":            {ipvlan("ipvl0", 7), ipvlan("ipvl1", 8), false, false},
		"virtual link with the MAC of a PCI NIC": {pci("0000:03:00.1", 1, 1, "eth1"), veth(1, "eth1", "eth1", 7), false, false},
	} {
		id := identify(tt.nic)
		require.Equal(t, tt.is, id.Matches(tt.link), name)
		require.Equal(t, tt.isAtHome, id.MatchesAtHome(tt.link), name)
		require.True(t, id.Matches(tt.nic), name)
	}
	require.Equal(t, "pci-0000:03:00.1", identify(pci("0000:03:00.1", 1, 1, "eth1")).Key())
	require.Equal(t, identify(veth(1, "eth1", "", 7)).Key(), identify(veth(1, "net1", "eth1", 9)).Key())
	require.True(t, identify(pci("0000:03:00.1", 1, 1, "eth1")).Physical())
	require.False(t, identify(veth(1, "eth1", "", 7)).Physical())
}
