// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// sysctl reads a network setting of the namespace.
func (ns *testNS) sysctl(file string) string {
	ns.tb.Helper()
	opened, err := netnamespace.Open(ns.path)
	require.NoError(ns.tb, err)
	defer opened.Close()
	var value []byte
	require.NoError(ns.tb, osthread.Run(func() (err error) {
		if err = unix.Setns(opened.FD, unix.CLONE_NEWNET); err == nil {
			value, err = os.ReadFile("/proc/sys/net/" + file)
		}
		return err
	}))
	return strings.TrimSpace(string(value))
}

// disableIPv6 has interfaces of the namespace have no IPv6, those named all or default.
func (ns *testNS) disableIPv6(which string) {
	ns.tb.Helper()
	opened, err := netnamespace.Open(ns.path)
	require.NoError(ns.tb, err)
	defer opened.Close()
	require.NoError(ns.tb, osthread.Run(func() error {
		if err := unix.Setns(opened.FD, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+which+"/disable_ipv6", []byte("1"), 0)
	}))
}

func withAddresses(policy bool, routes ...types.Route) types.DeviceConfig {
	return types.DeviceConfig{PodIfName: "net1", Network: "storage", Joined: &types.Network{
		Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("2001:db8::10/64")},
		Routes:    routes, PolicyRouting: policy,
	}}
}

func route(to, via string, metric int) types.Route {
	return types.Route{To: netip.MustParsePrefix(to), Via: netip.MustParseAddr(via), Metric: metric}
}

// routesOf returns what the pod's table has for the link with the index, but what the kernel makes by itself.
func (ns *testNS) routesOf(index, table int) []string {
	ns.tb.Helper()
	var found []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := ns.RouteListFiltered(family, &netlink.Route{LinkIndex: index, Table: table}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		require.NoError(ns.tb, err)
		for _, r := range routes {
			if r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast() {
				continue
			}
			text := r.Dst.String()
			if r.Gw != nil {
				text += " via " + r.Gw.String()
			}
			found = append(found, text)
		}
	}
	slices.Sort(found)
	return found
}

func (ns *testNS) rules() []string {
	ns.tb.Helper()
	var found []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := ns.RuleList(family)
		require.NoError(ns.tb, err)
		for _, r := range rules {
			if r.Protocol == ruleProtocol {
				found = append(found, r.Src.String())
			}
		}
	}
	return found
}

// TestAddresses gives a link its network's addresses, which are usable at once, and routes, and no router of the network may
// install another one.
func TestAddresses(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkSetUp(f.host.link(dev.peer)))
	config := withAddresses(false, route("10.0.0.0/8", "192.0.2.1", 7), route("0.0.0.0/0", "192.0.2.2", 0), route("2001:db8:1::/48", "2001:db8::1", 0))
	att, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	require.Equal(t, []string{"192.0.2.10/24", "2001:db8::10/64"}, att.IPs)
	link := f.pod.link("net1")
	require.True(t, isUp(link))
	addrs, err := f.pod.AddrList(link, netlink.FAMILY_V6)
	require.NoError(t, err)
	for _, a := range addrs {
		if a.Scope == unix.RT_SCOPE_UNIVERSE {
			require.Zero(t, a.Flags&unix.IFA_F_TENTATIVE)
		}
	}
	index := link.Attrs().Index
	want := []string{"0.0.0.0/0 via 192.0.2.2", "10.0.0.0/8 via 192.0.2.1", "192.0.2.0/24", "2001:db8:1::/48 via 2001:db8::1", "2001:db8::/64"}
	require.Equal(t, want, f.pod.routesOf(index, unix.RT_TABLE_MAIN))
	require.Equal(t, "0", f.pod.sysctl("ipv6/conf/net1/accept_ra"))

	// An agent that ended half-way makes up for what is missing, and for nothing else.
	require.NoError(t, f.pod.AddrDel(link, &netlink.Addr{IPNet: netipx.PrefixIPNet(config.Joined.Addresses[0])}))
	again, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	require.ElementsMatch(t, att.IPs, again.IPs)
	require.Equal(t, want, f.pod.routesOf(index, unix.RT_TABLE_MAIN))

	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
	addrs, err = f.host.AddrList(f.host.link("v0"), netlink.FAMILY_V4)
	require.NoError(t, err)
	require.Empty(t, addrs, "none comes home")
}

// TestInterfaceSettings writes what a network says of the interface, and nothing else but that no advertisement is taken.
func TestInterfaceSettings(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	one, yes := 1, true
	config := types.DeviceConfig{PodIfName: "net1", Network: "storage", Joined: &types.Network{
		Interface: types.InterfaceSettings{ARPIgnore: &one, RPFilter: new(int), Forwarding: &yes, AcceptRA: &one},
	}}
	_, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	require.True(t, isUp(f.pod.link("net1")))
	for file, want := range map[string]string{
		"ipv4/conf/net1/arp_ignore": "1", "ipv4/conf/net1/rp_filter": "0", "ipv4/conf/net1/forwarding": "1", "ipv6/conf/net1/forwarding": "1",
		"ipv6/conf/net1/accept_ra": "1", "ipv4/conf/net1/arp_announce": f.pod.sysctl("ipv4/conf/default/arp_announce"),
	} {
		require.Equal(t, want, f.pod.sysctl(file), file)
	}
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
	require.Equal(t, f.host.sysctl("ipv4/conf/default/forwarding"), f.host.sysctl("ipv4/conf/v0/forwarding"), "nothing of it comes home")

	_, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1", Network: "plain", Joined: &types.Network{}})
	require.NoError(t, err)
	require.Equal(t, "0", f.pod.sysctl("ipv6/conf/net1/accept_ra"))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))

	_, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.Equal(t, f.pod.sysctl("ipv6/conf/default/accept_ra"), f.pod.sysctl("ipv6/conf/net1/accept_ra"), "without a network it is the pod's own")
	f.cfg.NetSysctls = t.TempDir()
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	_, err = f.Attach(f.ctx, f.pod.path, dev, config)
	require.ErrorContains(t, err, "set interface net1: ")
	f.host.requireHome(dev)
}

// TestPolicyRouting has two links in one subnet, and what is sent from an address leaves by the link that has it.
func TestPolicyRouting(t *testing.T) {
	f := setup(t)
	one, two := f.host.addLink("v0"), f.host.addLink("v1")
	for _, d := range []device{one, two} {
		require.NoError(t, f.host.LinkSetUp(f.host.link(d.peer)))
	}
	first := withAddresses(true, route("0.0.0.0/0", "192.0.2.1", 0))
	second := withAddresses(true, route("0.0.0.0/0", "192.0.2.1", 0))
	second.PodIfName = "net2"
	second.Joined.Addresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.11/24"), netip.MustParsePrefix("2001:db8::11/64")}
	_, err := f.Attach(f.ctx, f.pod.path, one, first)
	require.NoError(t, err)
	_, err = f.Attach(f.ctx, f.pod.path, two, second)
	require.NoError(t, err, "the route of the other one is in another table")
	for name, from := range map[string]string{"net1": "192.0.2.10", "net2": "192.0.2.11"} {
		index := f.pod.link(name).Attrs().Index
		for _, to := range []string{"192.0.2.99", "203.0.113.9"} {
			found, err := f.pod.RouteGetWithOptions(net.ParseIP(to), &netlink.RouteGetOptions{SrcAddr: net.ParseIP(from)})
			require.NoError(t, err)
			require.Equal(t, index, found[0].LinkIndex, "from %s to %s", from, to)
		}
		require.Contains(t, f.pod.routesOf(index, firstTable+index), "0.0.0.0/0 via 192.0.2.1")
	}
	require.Len(t, f.pod.rules(), 4)

	require.NoError(t, f.Detach(f.ctx, f.pod.path, one))
	require.NoError(t, f.Tidy(f.pod.path, first))
	require.ElementsMatch(t, []string{"192.0.2.11/32", "2001:db8::11/128"}, f.pod.rules(), "those of the other link stay")
	for _, path := range []string{"", f.pod.path, "/no/such/path"} {
		require.NoError(t, f.Tidy(path, first))
		require.NoError(t, f.Tidy(path, types.DeviceConfig{}))
	}
}

// TestAddressesFail brings the link home, and leaves no rule, when something of its configuration cannot be done.
func TestAddressesFail(t *testing.T) {
	for name, tt := range map[string]struct {
		config types.DeviceConfig
		err    string
	}{
		"a route that the pod has": {withAddresses(false, route("10.0.0.0/8", "192.0.2.1", 0)), "route to 10.0.0.0/8: the pod has one already"},
		"a router out of reach":    {withAddresses(true, route("10.0.0.0/8", "198.51.100.1", 0)), "add route to 10.0.0.0/8 via 198.51.100.1: "},
	} {
		t.Run(name, func(t *testing.T) {
			f := setup(t)
			dev, other := f.host.addLink("v0"), f.pod.addLink("eth0")
			require.NoError(t, f.pod.LinkSetUp(f.pod.link("eth0")))
			require.NoError(t, f.pod.RouteAdd(&netlink.Route{LinkIndex: other.id.Index, Scope: netlink.SCOPE_LINK,
				Dst: netipx.PrefixIPNet(netip.MustParsePrefix("10.0.0.0/8"))}))
			_, err := f.Attach(f.ctx, f.pod.path, dev, tt.config)
			require.ErrorContains(t, err, tt.err)
			f.host.requireHome(dev)
			require.Equal(t, []string{"eth0"}, f.pod.names())
			require.Empty(t, f.pod.rules())
		})
	}
}

// TestAddressesWithoutIPv6 brings the link home, and leaves no rule, where the pod cannot have an address of one family.
func TestAddressesWithoutIPv6(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	f.pod.disableIPv6("default")
	f.pod.disableIPv6("all")
	_, err := f.Attach(f.ctx, f.pod.path, dev, withAddresses(true))
	require.ErrorContains(t, err, "add address 2001:db8::10/64: ")
	f.host.requireHome(dev)
	require.Empty(t, f.pod.names())
	require.Empty(t, f.pod.rules())
}

// TestAddressesByHand gives a link what a claim says of itself, and takes it all back when something of it cannot be done.
func TestAddressesByHand(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkSetUp(f.host.link(dev.peer)))
	config, err := types.ParseDeviceConfig([]byte(`{"podIfName": "net1", "addresses": ["192.0.2.10/24", "192.0.2.11/24", "2001:db8::10/64"], "routes": [
		{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": 7}, {"to": "2001:db8:1::/48", "via": "fe80::1"}]}`))
	require.NoError(t, err)
	require.NoError(t, config.Check())
	att, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"192.0.2.10/24", "192.0.2.11/24", "2001:db8::10/64"}, att.IPs)
	index := f.pod.link("net1").Attrs().Index
	want := []string{"10.0.0.0/8 via 192.0.2.1", "192.0.2.0/24", "2001:db8:1::/48 via fe80::1", "2001:db8::/64"}
	require.Equal(t, want, f.pod.routesOf(index, unix.RT_TABLE_MAIN))
	require.Equal(t, "0", f.pod.sysctl("ipv6/conf/net1/accept_ra"), "no router of the wire may add to it")
	require.NoError(t, f.pod.AddrDel(f.pod.link("net1"), &netlink.Addr{IPNet: netipx.PrefixIPNet(config.Addresses[2].Prefix())}))
	again, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	require.ElementsMatch(t, att.IPs, again.IPs, "what an agent that ended did not come to")
	require.Equal(t, want, f.pod.routesOf(index, unix.RT_TABLE_MAIN))

	second := f.host.addLink("v1")
	require.NoError(t, f.host.LinkSetUp(f.host.link(second.peer)))
	config.PodIfName, config.Addresses = "net2", config.Addresses[1:2]
	_, err = f.Attach(f.ctx, f.pod.path, second, config)
	require.ErrorContains(t, err, "route to 10.0.0.0/8: the pod has one already")
	f.host.requireHome(second)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
}
