// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeFields are the two that ask for policy routes.
func routeFields(offset, prefixLen int) string {
	return fmt.Sprintf(`"nexthopNetAddrOffset": %d, "routeDstPrefixLen": %d`, offset, prefixLen)
}

// The specification's examples, by what the kernel has afterwards, with packets that take the policy route to a host
// behind the leaf and come back.
func TestChain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name              string
		nic, port         []string
		offset, prefixLen int
		tables            map[int][]string // routes by table
		rules             []string
		far               string // an address behind the leaf
	}{
		{
			name: "supernet through the leaf", nic: []string{"10.1.2.130/25"}, port: []string{"10.1.2.129/25"}, offset: 1, prefixLen: 19,
			rules:  []string{"from 10.1.2.130 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/19 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"}},
			far:    "10.1.20.1",
		},
		{
			name: "default route through the leaf", nic: []string{"10.1.2.130/25"}, port: []string{"10.1.2.129/25"}, offset: 1, prefixLen: 0,
			rules:  []string{"from 10.1.2.130 lookup 100"},
			tables: map[int][]string{100: {"0.0.0.0/0 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"}},
			far:    "198.51.100.1",
		},
		{
			name: "upper end of a /31", nic: []string{"10.1.2.5/31"}, port: []string{"10.1.2.4/31"}, offset: 0, prefixLen: 16,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/16 via 10.1.2.4 dev net1", "10.1.2.4/31 dev net1"}},
			far:    "10.1.200.1",
		},
		{
			name: "lower end of a /31", nic: []string{"10.1.2.4/31"}, port: []string{"10.1.2.5/31"}, offset: 0, prefixLen: 16,
			rules:  []string{"from 10.1.2.4 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/16 via 10.1.2.5 dev net1", "10.1.2.4/31 dev net1"}},
			far:    "10.1.200.1",
		},
		{
			name: "default route of a /31", nic: []string{"10.1.2.5/31"}, port: []string{"10.1.2.4/31"}, offset: 0, prefixLen: 0,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"0.0.0.0/0 via 10.1.2.4 dev net1", "10.1.2.4/31 dev net1"}},
			far:    "198.51.100.1",
		},
		{
			name: "kernel's peer", nic: []string{"10.1.2.5 peer 10.1.2.4/31"}, port: []string{"10.1.2.4/31"}, offset: 0, prefixLen: 16,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/16 via 10.1.2.4 dev net1", "10.1.2.4/31 dev net1"}},
			far:    "10.1.200.1",
		},
		{
			// The network of a /32 has no other host.
			name: "kernel's peer alone", nic: []string{"10.1.2.5 peer 10.1.2.4/32"}, port: []string{"10.1.2.4/31"}, offset: 1, prefixLen: 16,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"10.1.2.4/31 dev net1"}},
			far:    "10.1.2.4",
		},
		{
			name: "kernel's peer outside the address's network", nic: []string{"10.1.2.5 peer 10.9.3.77/24"}, port: []string{"10.1.2.1/24"},
			offset: 1, prefixLen: 16,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/16 via 10.1.2.1 dev net1", "10.1.2.0/24 dev net1", "10.9.3.0/24 dev net1"}},
			far:    "10.1.200.1",
		},
		{
			name: "a negative offset does not count on a /31", nic: []string{"10.1.2.5/31"}, port: []string{"10.1.2.4/31"}, offset: -1, prefixLen: 16,
			rules:  []string{"from 10.1.2.5 lookup 100"},
			tables: map[int][]string{100: {"10.1.0.0/16 via 10.1.2.4 dev net1", "10.1.2.4/31 dev net1"}},
			far:    "10.1.200.1",
		},
		{
			name: "a negative offset", nic: []string{"10.1.2.130/25"}, port: []string{"10.1.2.129/25"}, offset: -1, prefixLen: 19,
			rules:  []string{"from 10.1.2.130 lookup 100"},
			tables: map[int][]string{100: {"10.1.2.128/25 dev net1"}},
			far:    "10.1.2.129",
		},
		{
			name: "several networks", nic: []string{"10.1.2.130/25", "10.2.2.5/31", "10.3.0.9/32"}, port: []string{"10.1.2.129/25", "10.2.2.4/31"},
			offset: 1, prefixLen: 16,
			rules: []string{"from 10.1.2.130 lookup 100", "from 10.2.2.5 lookup 101", "from 10.3.0.9 lookup 102"},
			tables: map[int][]string{
				100: {"10.1.0.0/16 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"},
				101: {"10.2.0.0/16 via 10.2.2.4 dev net1", "10.2.2.4/31 dev net1"},
				102: {},
			},
			far: "10.1.200.1",
		},
		{
			name: "two addresses of one network", nic: []string{"10.1.2.130/25", "10.1.2.131/25"}, port: []string{"10.1.2.129/25"},
			offset: 1, prefixLen: 19,
			rules: []string{"from 10.1.2.130 lookup 100", "from 10.1.2.131 lookup 101"},
			tables: map[int][]string{
				100: {"10.1.0.0/19 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"},
				101: {"10.1.0.0/19 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"},
			},
			far: "10.1.20.1",
		},
		{
			name: "two networks, one destination", nic: []string{"10.1.2.130/25", "10.1.3.130/25"}, port: []string{"10.1.2.129/25", "10.1.3.129/25"},
			offset: 1, prefixLen: 19,
			rules: []string{"from 10.1.2.130 lookup 100", "from 10.1.3.130 lookup 101"},
			tables: map[int][]string{
				100: {"10.1.0.0/19 via 10.1.2.129 dev net1", "10.1.2.128/25 dev net1"},
				101: {"10.1.0.0/19 via 10.1.3.129 dev net1", "10.1.3.128/25 dev net1"},
			},
			far: "10.1.20.1",
		},
		{
			name: "an address whose offset is out of range beside one that fits", nic: []string{"10.1.2.130/25", "10.1.4.1/30"},
			port: []string{"10.1.2.133/25"}, offset: 5, prefixLen: 19,
			rules: []string{"from 10.1.2.130 lookup 100", "from 10.1.4.1 lookup 101"},
			tables: map[int][]string{
				100: {"10.1.0.0/19 via 10.1.2.133 dev net1", "10.1.2.128/25 dev net1"},
				101: {"10.1.4.0/30 dev net1"},
			},
			far: "10.1.20.1",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host.address(nicName, tt.nic...)
			b.leaf.address(port, tt.port...)
			b.leaf.address("lo", tt.far+"/32")
			b.leaf.serve(tt.far)
			// The pod's primary network, whose default route has to stay the only one.
			b.pod.veth("eth0", b.leaf, "uplink")
			b.pod.address("eth0", "192.0.2.2/24")
			require.NoError(t, b.pod.RouteAdd(&netlink.Route{Gw: net.IPv4(192, 0, 2, 1), LinkIndex: b.pod.mustLink("eth0").Attrs().Index}))
			before, mainBefore := b.host.snapshot(), b.pod.routes(254)

			list := b.list("1.0.0", b.plugin(routeFields(tt.offset, tt.prefixLen)), sbr)
			result := b.add(list)
			require.Nil(t, b.host.link(nicName))
			require.Len(t, result.IPs, len(tt.nic))

			require.Equal(t, tt.rules, b.pod.rules(netlink.FAMILY_V4))
			for table, routes := range tt.tables {
				require.Equal(t, routes, b.pod.routes(table), "table %d", table)
			}
			require.Equal(t, mainBefore, b.pod.routes(254), "the main table")
			from, _ := addressOf(b.mustAddress(0))
			require.NoError(t, b.pod.ping(from.Local.String(), tt.far))
			require.NoError(t, b.check(list))

			b.del(list)
			b.requireHome(before)
			require.Empty(t, b.pod.rules(netlink.FAMILY_V4))
			require.Nil(t, b.pod.link("net1"))
		})
	}
}

// Why a route that two addresses have is passed on once: a second one, added as host-device does, is refused.
func TestKernelHasARouteOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25", "10.1.2.131/25")
	_, dst, err := net.ParseCIDR("10.1.0.0/19")
	require.NoError(t, err)
	b.host.up(nicName)
	route := &netlink.Route{Dst: dst, Gw: net.IPv4(10, 1, 2, 129), LinkIndex: b.host.mustLink(nicName).Attrs().Index}
	require.NoError(t, b.host.RouteAddEcmp(route))
	require.ErrorIs(t, b.host.RouteAddEcmp(route), unix.EEXIST)
}

// mustAddress is the n-th IPv4 address of the NIC in the pod.
func (b *bed) mustAddress(n int) netlink.Addr {
	b.t.Helper()
	addrs, err := b.pod.AddrList(b.pod.mustLink(b.ifName), netlink.FAMILY_V4)
	require.NoError(b.t, err)
	require.Greater(b.t, len(addrs), n)
	return addrs[n]
}
