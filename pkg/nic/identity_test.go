// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
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

// What the network driver knows its devices by: a PCI function's only link, or an alias, or an index.
func TestIdentityOfDriversDevices(t *testing.T) {
	pci := func(bus, addr string, perm byte) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 7, ParentDev: addr, ParentDevBus: bus, PermHWAddr: mac(perm)}}
	}
	dummy := func(index int, alias string) netlink.Link {
		return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index, Alias: alias}}
	}
	vf := PCI("0000:03:00.1")
	byAlias := Identity{Kind: "dummy", Index: 7, Alias: "ours"}
	byIndex := Identity{Kind: "dummy", Index: 7}
	for _, c := range []struct {
		link netlink.Link
		id   Identity
		want bool
	}{
		{pci("pci", "0000:03:00.1", 1), vf, true},
		{pci("pci", "0000:03:00.1", 2), vf, true},
		{pci("pci", "0000:03:00.2", 1), vf, false},
		{pci("usb", "0000:03:00.1", 1), vf, false},
		{dummy(7, "ours"), vf, false},
		{dummy(7, "ours"), byAlias, true},
		{dummy(8, "ours"), byAlias, true},
		{dummy(7, "theirs"), byAlias, false},
		{dummy(7, ""), byIndex, true},
		{dummy(8, ""), byIndex, false},
		{&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Index: 7, Alias: "ours"}}, byAlias, false},
		{dummy(0, ""), Identity{}, false},
	} {
		require.Equal(t, c.want, c.id.Matches(c.link), "%s %+v as %+v", c.link.Type(), c.link.Attrs(), c.id)
	}
}

// A device can have several links, which only their permanent addresses tell apart. Without them, none is taken.
func TestSeveralLinksOfOneDevice(t *testing.T) {
	port := func(index int, perm byte) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{
			Name: fmt.Sprint("p", index), Index: index, ParentDevBus: "pci", ParentDev: "0000:03:00.0", PermHWAddr: mac(perm), HardwareAddr: mac(9),
		}}
	}
	links := []netlink.Link{port(1, 1), port(2, 2)}
	for _, link := range links {
		found, err := identify(link).pick(links, nil)
		require.NoError(t, err)
		require.Equal(t, link, found)
	}
	none, err := identify(port(3, 3)).pick(links, nil)
	require.NoError(t, err)
	require.Nil(t, none)
	_, err = PCI("0000:03:00.0").pick(links, nil)
	require.EqualError(t, err, "pci 0000:03:00.0 has several links, p1 and p2, and it is not known which is meant")
	found, err := PCI("0000:03:00.0").pick(links, func(l netlink.Link) bool { return l.Attrs().Index == 2 })
	require.NoError(t, err)
	require.Equal(t, links[1], found)
	found, err = PCI("0000:03:00.0").pick(links[:1], nil)
	require.NoError(t, err)
	require.Equal(t, links[0], found)
}

// The permanent address of a VF may change, and counts only where it is needed to tell links apart.
func TestIdentify(t *testing.T) {
	const addr = "0000:03:00.1"
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{
		Name: "p1", Index: 1, ParentDevBus: "pci", ParentDev: addr, PermHWAddr: mac(1), HardwareAddr: mac(2),
	}}
	full := Identity{Bus: "pci", Device: addr, PermMAC: mac(1).String(), MAC: mac(2).String(), Name: "p1", Index: 1}
	place := &Place{sysfs: t.TempDir()}
	require.Equal(t, full, (&Place{}).Identify(link), "without sysfs nothing is known of the device")
	dir := filepath.Join(place.sysfs, "bus/pci/devices", addr)
	netdev := func(name, index string) {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "net", name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "net", name, "ifindex"), []byte(index+"\n"), 0o600))
	}
	netdev("p1", "1")
	require.Equal(t, full, place.Identify(link), "a PF")
	require.NoError(t, os.Symlink("../0000:03:00.0", filepath.Join(dir, "physfn")))
	sole := full
	sole.PermMAC = ""
	require.Equal(t, sole, place.Identify(link), "a VF with one link")
	netdev("p2", "2")
	require.Equal(t, full, place.Identify(link), "a VF with several")
}
