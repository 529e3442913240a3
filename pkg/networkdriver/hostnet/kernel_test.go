// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostnet

import (
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// inNewNetNS runs the rest of the test in a network namespace of its own.
func inNewNetNS(t *testing.T) {
	t.Helper()
	testenv.Privileged(t)
	// The thread is never unlocked, so that nothing else runs in the namespace.
	runtime.LockOSThread()
	ns, err := netns.New()
	require.NoError(t, err)
	t.Cleanup(func() { ns.Close() })
}

func addVeth(t *testing.T, name string) int {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	require.NoError(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}))
	link, err := netlink.LinkByName(name)
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(link))
	peer, err := netlink.LinkByName(name + "p")
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(peer))
	return link.Attrs().Index
}

func addAddr(t *testing.T, index int, cidr string) {
	t.Helper()
	addr, err := netlink.ParseAddr(cidr)
	require.NoError(t, err)
	addr.Flags = 0x02 // IFA_F_NODAD: usable at once
	require.NoError(t, netlink.AddrAdd(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, addr))
}

func TestKernel(t *testing.T) {
	inNewNetNS(t)
	conn, err := rtlink.DialPath(slog.New(slog.DiscardHandler), "")
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	reason := func(index int) string {
		view, err := Scan(Kernel{conn}, []netip.Addr{netip.MustParseAddr("192.0.2.77")})
		require.NoError(t, err)
		return view.Reason(index)
	}
	plain, port, uplink, uplink6, multi, node :=
		addVeth(t, "plain"), addVeth(t, "port"), addVeth(t, "up4"), addVeth(t, "up6"), addVeth(t, "multi"), addVeth(t, "node")
	for _, index := range []int{plain, port, uplink, uplink6, multi, node} {
		require.Empty(t, reason(index), "nothing is configured yet")
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	require.NoError(t, netlink.LinkAdd(bridge))
	require.NoError(t, netlink.LinkSetMasterByIndex(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: port}}, bridge.Index))
	require.Equal(t, "has the upper device br0", reason(port))

	addAddr(t, uplink, "198.51.100.1/24")
	addAddr(t, multi, "203.0.113.1/24")
	addAddr(t, plain, "203.0.112.1/24")
	require.Empty(t, reason(plain), "an address that is not the node's does not matter")
	addAddr(t, node, "192.0.2.77/24")
	require.Equal(t, "has the node's address 192.0.2.77", reason(node))

	require.NoError(t, netlink.RouteAdd(&netlink.Route{LinkIndex: uplink, Gw: net.ParseIP("198.51.100.254")}))
	require.Equal(t, "carries a default route", reason(uplink))
	_, tenNet, err := net.ParseCIDR("10.0.0.0/8")
	require.NoError(t, err)
	require.NoError(t, netlink.RouteAdd(&netlink.Route{LinkIndex: plain, Dst: tenNet}))
	require.Empty(t, reason(plain), "another route does not matter")

	// A default route over several links, in a table of its own.
	_, any4, err := net.ParseCIDR("0.0.0.0/0")
	require.NoError(t, err)
	require.NoError(t, netlink.RouteAdd(&netlink.Route{Dst: any4, Table: 100, MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: uplink, Gw: net.ParseIP("198.51.100.253")},
		{LinkIndex: multi, Gw: net.ParseIP("203.0.113.254")},
	}}))
	require.Equal(t, "carries a default route", reason(multi))

	addAddr(t, uplink6, "2001:db8::2/64")
	_, any6, err := net.ParseCIDR("::/0")
	require.NoError(t, err)
	require.NoError(t, netlink.RouteAdd(&netlink.Route{LinkIndex: uplink6, Dst: any6, Gw: net.ParseIP("2001:db8::1")}))
	require.Equal(t, "carries a default route", reason(uplink6))
}

func TestStacked(t *testing.T) {
	for name, tc := range map[string]struct {
		link netlink.Link
		want int
	}{
		"vlan":                 {&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 2, NetNsID: -1}}, 2},
		"macvlan":              {&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 2, NetNsID: -1}}, 2},
		"of another namespace": {&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 2, NetNsID: 0}}, 0},
		"veth's peer":          {&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 2, NetNsID: -1}}, 0},
		"netkit's peer":        {&netlink.Netkit{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 2, NetNsID: -1}}, 0},
		"nothing below":        {&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 5, NetNsID: -1}}, 0},
		"itself":               {&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 5, ParentIndex: 5, NetNsID: -1}}, 0},
	} {
		require.Equal(t, tc.want, linkOf(tc.link).Lower, name)
	}
}
