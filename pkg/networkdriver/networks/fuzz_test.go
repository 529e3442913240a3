// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// requireSound: a network that is valid can be joined, and no device gets an address that is not to be given out.
func requireSound(t *testing.T, spec *v2alpha1.CiliumNetworkDriverNetworkSpec, claim string) {
	network := &v2alpha1.CiliumNetworkDriverNetwork{Spec: *spec}
	network.Name = "storage"
	if err := network.Validate(); err != nil {
		require.NotEmpty(t, err.Error())
		return
	}
	reader := newReader()
	reader.networks = map[string]*v2alpha1.CiliumNetworkDriverNetworkSpec{"storage": spec}
	reader.namespaces[claim] = nil
	pool := "pool"
	if len(spec.Pools) > 0 {
		pool = spec.Pools[0]
	}
	found, err := newResolver(reader).Resolve(t.Context(), []Query{{"storage", claim, pool}})
	if err != nil {
		require.True(t, strings.Contains(err.Error(), "may not join it") || strings.Contains(err.Error(), "none of its subnets is for this node"), err)
		return
	}
	row := rowFor(claim)
	row.Config = types.DeviceConfig{Network: "storage", Joined: found[0]}
	if found[0].Offer == nil {
		require.NoError(t, row.Config.Check())
		return
	}
	for _, s := range found[0].Offer.Subnets {
		requireGiven(t, spec, s.Prefix, addressAt(s.Addresses, v2alpha1.SizeOfRange(s.Addresses.Ranges()[0]).SetInt64(0)))
		drawn := 0
		for addr := range draws(s.Addresses, claim) {
			requireGiven(t, spec, s.Prefix, addr)
			free := freeIn(s.Addresses, blockOf(addr), map[netip.Addr]bool{addr: true}, claim)
			require.NotContains(t, free, addr)
			for _, other := range free {
				requireGiven(t, spec, s.Prefix, other)
				require.Equal(t, blockOf(addr), blockOf(other))
			}
			if drawn++; drawn == 3 {
				break
			}
		}
		blocks, before := 0, netip.Prefix{}
		for block := range blocksOf(s.Addresses) {
			require.True(t, !before.IsValid() || before.Addr().Less(block.Addr()), "each once, in their order")
			require.NotEmpty(t, freeIn(s.Addresses, block, nil, claim))
			if before, blocks = block, blocks+1; blocks == 3 {
				break
			}
		}
	}

	// Two claims, as long as there is something left.
	objects := newObjects()
	n := newNode(objects, "node1")
	seen := map[netip.Addr]bool{}
	for i := range 2 {
		one := row.With(func(r *tables.DRAAllocation) { r.DeviceName = fmt.Sprint("vf", i) })
		taken, err := n.Take(AtOnce(t.Context()), one, n.note)
		if err != nil {
			require.ErrorIs(t, err, errFull)
			require.Positive(t, i, "a valid network has an address")
			continue
		}
		require.NoError(t, taken.Config.Check(), "what is taken can be stored")
		for _, a := range taken.Config.Joined.Addresses {
			require.False(t, seen[a.Addr()], "%s twice", a)
			seen[a.Addr()] = true
			requireNamed(t, objects, a.Addr())
		}
		for _, r := range taken.Config.Joined.Routes {
			// In a /31 each of the two is the router of the other one.
			pair := slices.ContainsFunc(spec.Subnets, func(s v2alpha1.NetworkSubnet) bool {
				cidr := netip.MustParsePrefix(s.CIDR)
				return cidr.Bits() == 31 && cidr.Contains(r.Via)
			})
			require.False(t, seen[r.Via] && !pair, "route %v goes by a device", r)
		}
	}
}

// requireGiven: the subnet gives the address out.
func requireGiven(t *testing.T, spec *v2alpha1.CiliumNetworkDriverNetworkSpec, cidr netip.Prefix, addr netip.Addr) {
	i := slices.IndexFunc(spec.Subnets, func(s v2alpha1.NetworkSubnet) bool { return s.CIDR == cidr.String() })
	s := &spec.Subnets[i]
	require.True(t, cidr.Contains(addr), "%s is not in %s", addr, cidr)
	require.NotEqual(t, s.Gateway, addr.String())
	if size := addr.BitLen() - cidr.Bits(); size > 1 {
		require.NotEqual(t, cidr.Addr(), addr, "the network's own, or the routers' anycast address")
		require.False(t, addr.Is4() && addr == netipx.PrefixLastIP(cidr), "%s is for broadcasts", addr)
	}
	require.True(t, len(s.Ranges) == 0 || slices.ContainsFunc(s.Ranges, func(r v2alpha1.AddressRange) bool {
		return netipx.IPRangeFrom(netip.MustParseAddr(r.From), netip.MustParseAddr(r.To)).Contains(addr)
	}), "%s is in no range", addr)
	for _, excluded := range s.Exclude {
		prefix, err := netip.ParsePrefix(excluded)
		if err != nil {
			prefix = netip.PrefixFrom(netip.MustParseAddr(excluded), addr.BitLen())
		}
		require.False(t, prefix.Contains(addr), "%s is excluded by %s", addr, excluded)
	}
	for _, r := range spec.Routes {
		require.NotEqual(t, r.Via, addr.String(), "a router's")
	}
}

// requireNamed: the object of the address has a name and labels that the API server takes, and that nothing else has.
func requireNamed(t *testing.T, objects *fakeObjects, addr netip.Addr) {
	name := v2alpha1.AddressName("storage", addr)
	require.Contains(t, objects.objects, name)
	require.Empty(t, validation.IsDNS1123Subdomain(name))
	for _, label := range objects.objects[name].Labels {
		require.Empty(t, validation.IsValidLabelValue(label))
	}
	label, _ := strings.CutPrefix(name, "storage.")
	if addr.Is6() {
		label = strings.ReplaceAll(label, "-", ":")
	}
	require.Equal(t, addr, netip.MustParseAddr(label))
	require.Equal(t, v2alpha1.AddressBlock(blockOf(addr).Addr()), objects.objects[name].Labels[v2alpha1.LabelBlock])
}

// FuzzNetwork is what somebody may write into an API server whose schema is older than the agent.
func FuzzNetwork(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"namespaceSelector":{}}`,
		`{"namespaceSelector":{"matchLabels":{"team":"a"}},"vlan":7,"vlanPriority":3,"vlanProtocol":"802.1ad","mtu":9000,"pools":["fast"]}`,
		`{"namespaceSelector":{},"subnets":[{"cidr":"192.0.2.0/24","gateway":"192.0.2.1","exclude":["192.0.2.128/25","192.0.2.2"]},{"cidr":"2001:db8::/64"}],
			"routes":[{"to":"10.0.0.0/8"},{"to":"0.0.0.0/0","via":"192.0.2.3","metric":5}],"policyRouting":{"derive":{"nexthopNetAddrOffset":1,"routeDstPrefixLen":16}}}`,
		`{"namespaceSelector":{},"subnets":[{"cidr":"10.0.0.0/31","nodeSelector":{"matchLabels":{"rack":"r1"}}},{"cidr":"10.1.0.0/32"},{"cidr":"2001:db8::4/126","gateway":"2001:db8::5"}]}`,
		`{"namespaceSelector":{},"subnets":[{"cidr":"10.0.0.0/8","ranges":[{"from":"10.0.0.0","to":"10.0.0.9"},{"from":"10.0.0.255","to":"10.255.255.255"}]}]}`,
	} {
		f.Add([]byte(seed), "claim")
	}
	f.Fuzz(func(t *testing.T, raw []byte, claim string) {
		spec := &v2alpha1.CiliumNetworkDriverNetworkSpec{}
		if json.Unmarshal(raw, spec) == nil {
			requireSound(t, spec, claim)
		}
	})
}

// FuzzSubnet is a subnet of any size, with what its fields may say of addresses in it and around it.
func FuzzSubnet(f *testing.F) {
	f.Add([]byte{10, 0, 0, 0}, uint8(24), uint32(0), uint32(255), uint32(1), uint32(4), uint8(30), uint32(9), int64(3), uint8(16), "claim")
	f.Add([]byte{192, 0, 2, 6}, uint8(31), uint32(0), uint32(1), uint32(0), uint32(1), uint8(32), uint32(0), int64(0), uint8(0), "claim")
	f.Add([]byte{0x20, 1, 13, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, uint8(120), uint32(250), uint32(300), uint32(1), uint32(0), uint8(128), uint32(2), int64(1), uint8(32), "claim")
	f.Fuzz(func(t *testing.T, base []byte, bits uint8, from, to, gateway, exclude uint32, excluded uint8, via uint32, offset int64, derived uint8, claim string) {
		first, ok := netip.AddrFromSlice(base)
		if !ok || int(bits) > first.BitLen() {
			return
		}
		cidr := netip.PrefixFrom(first, int(bits)).Masked()
		at := func(n uint32) netip.Addr {
			bytes := cidr.Addr().AsSlice()
			low := bytes[len(bytes)-4:]
			binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)+n)
			addr, _ := netip.AddrFromSlice(bytes)
			return addr
		}
		subnet := v2alpha1.NetworkSubnet{CIDR: cidr.String()}
		if from != 0 || to != 0 {
			subnet.Ranges = []v2alpha1.AddressRange{{From: at(from).String(), To: at(to).String()}}
		}
		if gateway != 0 {
			subnet.Gateway = at(gateway).String()
		}
		if exclude != 0 {
			subnet.Exclude = []string{netip.PrefixFrom(at(exclude), int(excluded)).Masked().String()}
		}
		spec := &v2alpha1.CiliumNetworkDriverNetworkSpec{
			NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: []v2alpha1.NetworkSubnet{subnet},
			PolicyRouting: &v2alpha1.NetworkPolicyRouting{Derive: &v2alpha1.DerivedRoutes{NexthopNetAddrOffset: offset, RouteDstPrefixLen: int32(derived)}},
		}
		if via != 0 {
			to := "0.0.0.0/0"
			if first.Is6() {
				to = "::/0"
			}
			spec.Routes = []v2alpha1.NetworkRoute{{To: to, Via: at(via).String()}}
		}
		requireSound(t, spec, claim)
	})
}
