// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/wires"
)

type fakeReader struct {
	networks   map[string]*v2alpha1.CiliumNetworkDriverNetworkSpec
	namespaces map[string]labels.Set
	// generation is that of all networks, none of which the operator has looked at.
	generation int64
	err        error
	reads      []string
}

func (r *fakeReader) ListNetworks(context.Context) ([]v2alpha1.CiliumNetworkDriverNetwork, error) {
	r.reads = append(r.reads, "networks")
	var all []v2alpha1.CiliumNetworkDriverNetwork
	for name, spec := range r.networks {
		network := v2alpha1.CiliumNetworkDriverNetwork{Spec: *spec}
		network.Name, network.Generation = name, r.generation
		all = append(all, network)
	}
	return all, r.err
}

func (r *fakeReader) NamespaceLabels(_ context.Context, namespace string) (labels.Set, error) {
	r.reads = append(r.reads, "namespace "+namespace)
	set, ok := r.namespaces[namespace]
	if !ok {
		return nil, errors.New("away")
	}
	return set, nil
}

func selecting(team string) *v2alpha1.LabelSelector {
	return &v2alpha1.LabelSelector{MatchLabels: map[string]v2alpha1.LabelValue{"team": v2alpha1.LabelValue(team)}}
}

func newReader() *fakeReader {
	return &fakeReader{
		networks: map[string]*v2alpha1.CiliumNetworkDriverNetworkSpec{
			"open": {NamespaceSelector: &v2alpha1.LabelSelector{}},
			"storage": {NamespaceSelector: selecting("a"), Pools: []string{"fast", "faster"}, Vlan: 7, VlanPriority: 3, VlanProtocol: v2alpha1.VlanProtocol8021ad,
				MTU: 9000, VF: &v2alpha1.NetworkVF{Trust: ptr.To(true), SpoofCheck: ptr.To(false), LinkState: v2alpha1.LinkStateAuto, MaxTxRate: ptr.To[int32](100)},
				Interface: &v2alpha1.NetworkInterface{ARPIgnore: ptr.To[int32](1), Forwarding: ptr.To(true)}},
			"plain": {NamespaceSelector: selecting("a"), Vlan: 8, VlanProtocol: v2alpha1.VlanProtocol8021Q},
			"bad":   {NamespaceSelector: &v2alpha1.LabelSelector{}, Vlan: 4095},
			"none":  {},
		},
		namespaces: map[string]labels.Set{"team-a": {"team": "a"}, "team-b": {"team": "b"}},
	}
}

func newResolver(r Reader) *Resolver { return newResolverOf(r, wires.NewTable()) }

func newResolverOf(r Reader, table *wires.Table) *Resolver {
	return NewResolver(r, func() labels.Set { return labels.Set{"rack": "r1", "kind": "fast"} }, table.Between)
}

func TestResolve(t *testing.T) {
	reader := newReader()
	found, err := newResolver(reader).Resolve(t.Context(), []Query{
		{"storage", "team-a", "fast"}, {"plain", "team-a", "slow"}, {"storage", "team-a", "faster"}, {"open", "team-a", "fast"},
	})
	require.NoError(t, err)
	storage := &types.Network{VLAN: 7, VLANPriority: 3, VLANProtocol: "802.1ad", MTU: 9000,
		VF:        types.VFRights{Trust: ptr.To(true), SpoofCheck: ptr.To(false), LinkState: "Auto", MaxTxRate: ptr.To(100)},
		Interface: types.InterfaceSettings{ARPIgnore: ptr.To(1), Forwarding: ptr.To(true)}}
	require.Equal(t, []*types.Network{storage, {VLAN: 8}, storage, {}}, found)
	for _, n := range found {
		require.NoError(t, types.DeviceConfig{Network: "n", Joined: n}.Check(), "what is resolved can be stored")
	}
	require.Equal(t, []string{"networks", "namespace team-a"}, reader.reads, "each is read once")

	reader.reads = nil
	_, err = newResolver(reader).Resolve(t.Context(), []Query{{"open", "elsewhere", "fast"}})
	require.NoError(t, err)
	require.Equal(t, []string{"networks"}, reader.reads, "a network for all namespaces asks for no labels")
}

// TestResolveForTheNode gives a device one address of each family that the network has for its node, and says which family it has for
// others only.
func TestResolveForTheNode(t *testing.T) {
	here, elsewhere := map[string]v2alpha1.LabelValue{"rack": "r1"}, map[string]v2alpha1.LabelValue{"rack": "r2"}
	for _, tt := range []struct {
		v4, v6 map[string]v2alpha1.LabelValue
		lacks  types.Family
		err    string
	}{
		{nil, nil, "", ""},
		{here, here, "", ""},
		{here, elsewhere, types.IPv6, ""},
		{elsewhere, nil, types.IPv4, ""},
		{elsewhere, elsewhere, "", "network racks: none of its subnets is for this node: spec.subnets[].nodeSelector"},
	} {
		reader := newReader()
		subnet := func(cidr string, nodes map[string]v2alpha1.LabelValue) v2alpha1.NetworkSubnet {
			s := v2alpha1.NetworkSubnet{CIDR: cidr}
			if nodes != nil {
				s.NodeSelector = &v2alpha1.SubnetNodeSelector{MatchLabels: nodes}
			}
			return s
		}
		reader.networks["racks"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{},
			Subnets: []v2alpha1.NetworkSubnet{subnet("192.0.2.0/24", tt.v4), subnet("2001:db8::/64", tt.v6)}}
		found, err := newResolver(reader).Resolve(t.Context(), []Query{{"racks", "team-a", "fast"}})
		if tt.err != "" {
			require.EqualError(t, err, tt.err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, tt.lacks, found[0].Lacks)
		want := 2
		if tt.lacks != "" {
			want = 1
		}
		require.Len(t, found[0].Offer.Subnets, want)
		n := newNode(newObjects(), "node1")
		row := rowFor("a")
		row.Config.Joined = found[0]
		taken, err := n.Take(t.Context(), row, n.note)
		require.NoError(t, err)
		require.Len(t, taken.Config.Joined.Addresses, want)
		require.Equal(t, tt.lacks, taken.Config.Joined.Lacks)
	}
}

func TestResolveRefuses(t *testing.T) {
	for want, q := range map[string]Query{
		"network gone: there is no CiliumNetworkDriverNetwork of this name":                                            {"gone", "team-a", "fast"},
		"network storage: claims of namespace team-b may not join it: spec.namespaceSelector asks for team=a":          {"storage", "team-b", "fast"},
		"network storage: read the labels of namespace x, which say whether it may join: away":                         {"storage", "x", "fast"},
		"network storage: the device is of pool slow, which is not on the network's wire: spec.pools are fast, faster": {"storage", "team-a", "slow"},
		"network bad: the CiliumNetworkDriverNetwork is not valid: spec.vlan: Invalid value: 4095: must be 0 to 4094":  {"bad", "team-a", "fast"},
		"network none: the CiliumNetworkDriverNetwork is not valid: spec.namespaceSelector: Required value":            {"none", "team-a", "fast"},
	} {
		_, err := newResolver(newReader()).Resolve(t.Context(), []Query{q})
		require.EqualError(t, err, want)
	}
	reader := newReader()
	reader.err = errors.New("away")
	_, err := newResolver(reader).Resolve(t.Context(), []Query{{"storage", "team-a", "fast"}})
	require.EqualError(t, err, "network storage: read the CiliumNetworkDriverNetworks: away")
}

// TestResolveReuse offers addresses to be kept where the network says so.
func TestResolveReuse(t *testing.T) {
	reader := newReader()
	for mode, want := range map[string]bool{"": false, v2alpha1.AddressReuseNone: false, v2alpha1.AddressReusePodName: true} {
		spec := &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: []v2alpha1.NetworkSubnet{{CIDR: "192.0.2.0/24"}}}
		if mode != "" {
			spec.AddressReuse = &v2alpha1.NetworkAddressReuse{Mode: mode}
		}
		reader.networks["db"] = spec
		found, err := newResolver(reader).Resolve(t.Context(), []Query{{"db", "team-a", "fast"}})
		require.NoError(t, err)
		require.Equal(t, want, found[0].Offer.Reserve, mode)
	}
}

// TestResolveConflict refuses the younger of two networks on one wire, also where no operator has said so.
func TestResolveConflict(t *testing.T) {
	reader := newReader()
	subnets := []v2alpha1.NetworkSubnet{{CIDR: "192.0.2.0/24"}}
	reader.networks["one"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets}
	reader.networks["two"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets}
	_, err := newResolver(reader).Resolve(t.Context(), []Query{{"one", "team-a", "fast"}})
	require.NoError(t, err)
	_, err = newResolver(reader).Resolve(t.Context(), []Query{{"two", "team-a", "fast"}})
	require.EqualError(t, err, "network two: it is in conflict, and cannot be joined: the older network one has addresses of 192.0.2.0/24 too, in the same VLAN and on a common pool")
}

// TestResolveConflictOnOneWire refuses the younger of two networks whose pools have devices of one PF of the node, and has the older one
// take care of what devices of the younger one may have from when the pools were others.
func TestResolveConflictOnOneWire(t *testing.T) {
	reader := newReader()
	subnets := []v2alpha1.NetworkSubnet{{CIDR: "192.0.2.0/24"}}
	reader.networks["one"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets, Pools: []string{"fast"}}
	reader.networks["two"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets, Pools: []string{"slow"}}
	table := wires.NewTable()
	for _, shared := range []bool{false, true} {
		table.Set("n1", map[string][]string{"fast": {"eth0"}, "slow": {map[bool]string{false: "eth1", true: "eth0"}[shared]}})
		found, err := newResolverOf(reader, table).Resolve(t.Context(), []Query{{"one", "team-a", "fast"}})
		require.NoError(t, err)
		require.Equal(t, shared, found[0].Offer.Unjudged)
		_, err = newResolverOf(reader, table).Resolve(t.Context(), []Query{{"two", "team-a", "slow"}})
		if !shared {
			require.NoError(t, err, "pools of their own")
			continue
		}
		require.EqualError(t, err, "network two: it is in conflict, and cannot be joined: the older network one has addresses of 192.0.2.0/24 too, "+
			"in the same VLAN and on one wire: pools slow and fast have devices of PF eth0 on node n1")
	}
}

// TestResolveChangedIntoConflict refuses the older of two networks too while nobody has said, of what it was changed to, whether pods
// have its addresses from the younger one.
func TestResolveChangedIntoConflict(t *testing.T) {
	reader := newReader()
	subnets := []v2alpha1.NetworkSubnet{{CIDR: "192.0.2.0/24"}}
	reader.networks["one"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets}
	reader.networks["two"] = &v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Subnets: subnets}
	reader.generation = 2
	_, err := newResolver(reader).Resolve(t.Context(), []Query{{"one", "team-a", "fast"}})
	require.EqualError(t, err, "network one: it is in conflict, and cannot be joined: network two has addresses of 192.0.2.0/24 too, in the same VLAN and on a common pool, "+
		"and the operator has not said yet whether pods use any of them")
	delete(reader.networks, "two")
	found, err := newResolver(reader).Resolve(t.Context(), []Query{{"one", "team-a", "fast"}})
	require.NoError(t, err, "alone it needs no operator")
	require.True(t, found[0].Offer.Unjudged, "devices may have addresses from one that is gone")
	reader.generation = 0
	found, err = newResolver(reader).Resolve(t.Context(), []Query{{"one", "team-a", "fast"}})
	require.NoError(t, err)
	require.False(t, found[0].Offer.Unjudged)
}
