// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	drivertypes "github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/wires"
)

// driverNIC is the NIC as a device of the network driver, of which moving it asks no more.
type driverNIC struct {
	drivertypes.Device
	id   nic.Identity
	host nic.State
}

func (d driverNIC) IfName() string       { return nicName }
func (d driverNIC) KernelIfName() string { return nicName }
func (d driverNIC) Link() nic.Identity   { return d.id }
func (d driverNIC) HostState() nic.State { return d.host }

// oneNetwork is an API server with one network, where every address is free.
type oneNetwork struct {
	networks.Objects
	spec v2alpha1.CiliumNetworkDriverNetworkSpec
}

func (o oneNetwork) ListNetworks(context.Context) ([]v2alpha1.CiliumNetworkDriverNetwork, error) {
	network := v2alpha1.CiliumNetworkDriverNetwork{Spec: o.spec}
	network.Name = "fabric"
	return []v2alpha1.CiliumNetworkDriverNetwork{network}, nil
}

func (o oneNetwork) NamespaceLabels(context.Context, string) (labels.Set, error) { return nil, nil }

func (o oneNetwork) Create(context.Context, *v2alpha1.CiliumNetworkDriverAddress) error { return nil }

// tableOf returns the rules for what is sent from the address, and all that the table has that they lead to, but for the table's number
// and the rules' priority, which are for each program to choose.
func (s *space) tableOf(addr netip.Addr) (rules, routes []string) {
	s.t.Helper()
	list, err := s.RuleList(netlink.FAMILY_V4)
	require.NoError(s.t, err)
	table := 0
	for _, r := range list {
		if r.Src != nil && r.Src.String() == netip.PrefixFrom(addr, addr.BitLen()).String() {
			rules = append(rules, fmt.Sprintf("from %s to %v iif %q oif %q mark %d", r.Src, r.Dst, r.IifName, r.OifName, r.Mark))
			table = r.Table
		}
	}
	require.Len(s.t, rules, 1)
	found, err := s.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	require.NoError(s.t, err)
	for _, r := range found {
		link, err := s.LinkByIndex(r.LinkIndex)
		require.NoError(s.t, err)
		routes = append(routes, fmt.Sprintf("%s via %v dev %s scope %s src %v metric %d", r.Dst, r.Gw, link.Attrs().Name, r.Scope, r.Src, r.Priority))
	}
	slices.Sort(routes)
	return rules, routes
}

// A NIC that joins a network of the driver with derived routes gets the table that sbr makes of this plugin's result for the same NIC
// with the same address, route for route, and the same rule.
func TestDerivedAsByTheDriver(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		addr      string
		offset    int
		prefixLen int
		routes    int // of the table
	}{
		{"10.1.2.130/25", 1, 19, 2},
		{"10.1.2.130/25", 126, 0, 2},
		{"10.1.2.5/31", 1, 16, 2},
		{"10.1.2.4/31", 0, 30, 2},
		{"10.1.2.5/24", 255, 16, 1}, // beyond the subnet
		{"10.1.2.5/24", 1, 24, 1},   // not shorter
	} {
		t.Run(fmt.Sprintf("%s+%d to %d", tt.addr, tt.offset, tt.prefixLen), func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			prefix := netip.MustParsePrefix(tt.addr)
			b.host.address(nicName, tt.addr)
			list := b.list("1.0.0", b.plugin(routeFields(tt.offset, tt.prefixLen)), sbr)
			b.add(list)
			rules, routes := b.pod.tableOf(prefix.Addr())
			require.Len(t, routes, tt.routes)
			b.del(list)

			api := oneNetwork{spec: v2alpha1.CiliumNetworkDriverNetworkSpec{
				NamespaceSelector: &v2alpha1.LabelSelector{},
				Subnets: []v2alpha1.NetworkSubnet{{
					CIDR: prefix.Masked().String(), Ranges: []v2alpha1.AddressRange{{From: prefix.Addr().String(), To: prefix.Addr().String()}},
				}},
				PolicyRouting: &v2alpha1.NetworkPolicyRouting{
					Derive: &v2alpha1.DerivedRoutes{NexthopNetAddrOffset: int64(tt.offset), RouteDstPrefixLen: int32(tt.prefixLen)},
				},
			}}
			joined, err := networks.NewResolver(api, func() labels.Set { return nil }, wires.NewTable().Between).Resolve(t.Context(), []networks.Query{{Network: "fabric"}})
			require.NoError(t, err)
			log := slog.New(slog.DiscardHandler)
			row, err := networks.NewKeeper(networks.Params{
				Logger: log, Objects: api, Node: "node1",
				Held:  func() []*tables.DRAAllocation { return nil },
				Waits: func(*tables.DRAAllocation, string) {},
			}).Take(t.Context(),
				&tables.DRAAllocation{Config: drivertypes.DeviceConfig{PodIfName: b.ifName, Network: "fabric", Joined: joined[0]}},
				func(*tables.DRAAllocation) error { return nil })
			require.NoError(t, err)

			host, err := nic.Open(log, b.host.path, "")
			require.NoError(t, err)
			defer host.Close()
			link, err := host.ByName(nicName)
			require.NoError(t, err)
			dev := driverNIC{id: nic.Identity{Kind: "veth", Index: link.Attrs().Index}, host: nic.Read(link)}
			b.pod = newSpace(t)
			mover := podnet.New(log, podnet.Config{HostNetNS: b.host.path})
			_, err = mover.Attach(t.Context(), b.pod.path, dev, link.Attrs().Index, row.Config)
			require.NoError(t, err)
			driverRules, driverRoutes := b.pod.tableOf(prefix.Addr())
			require.Equal(t, rules, driverRules)
			require.Equal(t, routes, driverRoutes)
			require.True(t, isUp(b.pod.mustLink(b.ifName)))
			require.NoError(t, mover.Detach(t.Context(), b.pod.path, dev))
		})
	}
}
