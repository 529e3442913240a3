// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package networks looks up the networks that claims name. A network says who may join it, so that what is not allowed, or
// makes no sense, ends here, before a device is touched.
package networks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

// Reader reads from the API server.
type Reader interface {
	// ListNetworks reads all networks.
	ListNetworks(ctx context.Context) ([]v2alpha1.CiliumNetworkDriverNetwork, error)
	// NamespaceLabels reads the labels of a namespace.
	NamespaceLabels(ctx context.Context, namespace string) (labels.Set, error)
}

// Query is a device of a claim that is to join a network.
type Query struct {
	// Network is the network's name.
	Network string
	// Namespace is the claim's.
	Namespace string
	// Pool is the configured name of the pool that the device was allotted from.
	Pool string
}

// Resolver looks networks up.
type Resolver struct {
	reader Reader
	// node returns the labels of the Node, by which subnets are for it or not.
	node func() labels.Set
	// wires knows the node's own pools.
	wires v2alpha1.Wires
}

// NewResolver returns one that reads by the reader, for the node that has the labels and whose devices make the pools one wire that wires
// says.
func NewResolver(reader Reader, node func() labels.Set, wires v2alpha1.Wires) *Resolver {
	return &Resolver{reader, node, wires}
}

// Resolve returns for each query the network, as it is now. The networks are read once, all of them, since one may be in
// conflict with another, and the namespace once and only where its labels are asked for. The error names the network and what is
// allowed, or is one that [client.IsUnanswered] knows.
func (r *Resolver) Resolve(ctx context.Context, queries []Query) ([]*types.Network, error) {
	if len(queries) == 0 {
		return nil, nil
	}
	all, err := r.reader.ListNetworks(ctx)
	if err != nil {
		return nil, fmt.Errorf("network %s: read the CiliumNetworkDriverNetworks: %w", queries[0].Network, client.Unanswered(err))
	}
	read := map[string]*v2alpha1.CiliumNetworkDriverNetwork{}
	namespaces := map[string]labels.Set{}
	found := make([]*types.Network, len(queries))
	for i, q := range queries {
		if read[q.Network] == nil {
			network, err := r.find(ctx, q, all, namespaces)
			if err != nil {
				return nil, fmt.Errorf("network %s: %w", q.Network, err)
			}
			read[q.Network] = network
		}
		spec := &read[q.Network].Spec
		if len(spec.Pools) > 0 && !slices.Contains(spec.Pools, q.Pool) {
			return nil, fmt.Errorf("network %s: the device is of pool %s, which is not on the network's wire: spec.pools are %s",
				q.Network, q.Pool, strings.Join(spec.Pools, ", "))
		}
		if found[i], err = r.describe(spec); err != nil {
			return nil, fmt.Errorf("network %s: %w", q.Network, err)
		}
		if network := read[q.Network]; found[i].Offer != nil {
			found[i].Offer.Unjudged = network.Status.ObservedGeneration != network.Generation || network.HasRival(all, r.wires)
		}
	}
	return found, nil
}

// find finds a network among all and checks that it may be joined.
func (r *Resolver) find(ctx context.Context, q Query, all []v2alpha1.CiliumNetworkDriverNetwork, namespaces map[string]labels.Set,
) (*v2alpha1.CiliumNetworkDriverNetwork, error) {
	i := slices.IndexFunc(all, func(n v2alpha1.CiliumNetworkDriverNetwork) bool { return n.Name == q.Network })
	if i < 0 {
		return nil, errors.New("there is no CiliumNetworkDriverNetwork of this name")
	}
	network := &all[i]
	// The schema may be older than this agent, or was when the network was written.
	if err := network.Validate(); err != nil {
		return nil, fmt.Errorf("the CiliumNetworkDriverNetwork is not valid: %w", err)
	}
	// The operator sees what is still used of networks that are gone, and the wires of other nodes; it may be away.
	conflict := network.Conflict(all, r.wires)
	if c := meta.FindStatusCondition(network.Status.Conditions, v2alpha1.ConditionNetworkConflicting); c != nil && c.Status == metav1.ConditionTrue {
		conflict = cmp.Or(conflict, c.Message)
	}
	if conflict != "" {
		return nil, fmt.Errorf("it is in conflict, and cannot be joined: %s", conflict)
	}
	selector, err := metav1.LabelSelectorAsSelector(network.Spec.NamespaceSelector.AsLabelSelector())
	if err != nil {
		return nil, fmt.Errorf("spec.namespaceSelector: %w", err)
	}
	if selector.Empty() {
		return network, nil
	}
	set, ok := namespaces[q.Namespace]
	if !ok {
		if set, err = r.reader.NamespaceLabels(ctx, q.Namespace); err != nil {
			return nil, fmt.Errorf("read the labels of namespace %s, which say whether it may join: %w", q.Namespace, client.Unanswered(err))
		}
		namespaces[q.Namespace] = set
	}
	if !selector.Matches(set) {
		return nil, fmt.Errorf("claims of namespace %s may not join it: spec.namespaceSelector asks for %s", q.Namespace, selector)
	}
	return network, nil
}

// describe returns what the network makes of a device's link.
func (r *Resolver) describe(spec *v2alpha1.CiliumNetworkDriverNetworkSpec) (*types.Network, error) {
	n := &types.Network{VLAN: int(spec.Vlan), VLANPriority: int(spec.VlanPriority), MTU: int(spec.MTU)}
	if spec.VlanProtocol != v2alpha1.VlanProtocol8021Q {
		n.VLANProtocol = spec.VlanProtocol
	}
	if vf := spec.VF; vf != nil {
		n.VF = types.VFRights{Trust: vf.Trust, SpoofCheck: vf.SpoofCheck, LinkState: vf.LinkState, MinTxRate: toInt(vf.MinTxRate), MaxTxRate: toInt(vf.MaxTxRate)}
	}
	if i := spec.Interface; i != nil {
		n.Interface = types.InterfaceSettings{
			ARPIgnore: toInt(i.ARPIgnore), ARPAnnounce: toInt(i.ARPAnnounce), RPFilter: toInt(i.RPFilter), Forwarding: i.Forwarding, AcceptRA: toInt(i.AcceptRA),
		}
	}
	if len(spec.Subnets) == 0 {
		return n, nil
	}
	n.PolicyRouting = spec.PolicyRouting != nil
	var err error
	if n.Offer, err = r.offer(spec); err != nil {
		return nil, err
	}
	n.Lacks = lacking(spec, n.Offer)
	return n, nil
}

// lacking returns the family that the network has subnets of, and the offer has none of.
func lacking(spec *v2alpha1.CiliumNetworkDriverNetworkSpec, offer *types.Offer) types.Family {
	for _, s := range spec.Subnets {
		prefix, err := netip.ParsePrefix(s.CIDR)
		family := types.FamilyOf(prefix.Addr())
		if err == nil && !slices.ContainsFunc(offer.Subnets, func(o types.Subnet) bool { return types.FamilyOf(o.Prefix.Addr()) == family }) {
			return family
		}
	}
	return ""
}

// offer returns what of the network's subnets is for the node.
func (r *Resolver) offer(spec *v2alpha1.CiliumNetworkDriverNetworkSpec) (*types.Offer, error) {
	offer := &types.Offer{Reserve: spec.KeepFor() > 0}
	node := r.node()
	for i, s := range spec.Subnets {
		if s.NodeSelector != nil && !labelsMatch(s.NodeSelector.MatchLabels, node) {
			continue
		}
		set, err := spec.Addresses(i)
		if err != nil {
			return nil, fmt.Errorf("spec.subnets[%d].%w", i, err)
		}
		subnet := types.Subnet{Addresses: set}
		if subnet.Prefix, err = netip.ParsePrefix(s.CIDR); err != nil {
			return nil, fmt.Errorf("spec.subnets[%d].cidr: %w", i, err)
		}
		if s.Gateway != "" {
			if subnet.Gateway, err = netip.ParseAddr(s.Gateway); err != nil {
				return nil, fmt.Errorf("spec.subnets[%d].gateway: %w", i, err)
			}
		}
		offer.Subnets = append(offer.Subnets, subnet)
	}
	if len(offer.Subnets) == 0 {
		return nil, errors.New("none of its subnets is for this node: spec.subnets[].nodeSelector")
	}
	for i, written := range spec.Routes {
		route := types.Route{Metric: int(written.Metric)}
		var err error
		if route.To, err = netip.ParsePrefix(written.To); err != nil {
			return nil, fmt.Errorf("spec.routes[%d].to: %w", i, err)
		}
		if written.Via != "" {
			if route.Via, err = netip.ParseAddr(written.Via); err != nil {
				return nil, fmt.Errorf("spec.routes[%d].via: %w", i, err)
			}
		}
		offer.Routes = append(offer.Routes, route)
	}
	if p := spec.PolicyRouting; p != nil && p.Derive != nil {
		offer.Derive = &policyroute.Config{NexthopOffset: p.Derive.NexthopNetAddrOffset, DstPrefixLen: int(p.Derive.RouteDstPrefixLen)}
	}
	return offer, nil
}

func labelsMatch(wanted map[string]v2alpha1.LabelValue, node labels.Set) bool {
	for key, value := range wanted {
		if has, ok := node[key]; !ok || has != string(value) {
			return false
		}
	}
	return true
}

func toInt(n *int32) *int {
	if n == nil {
		return nil
	}
	return ptr.To(int(*n))
}
