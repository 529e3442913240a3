// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package networks looks up the networks that claims name. A network says who may join it, so that what is not allowed, or
// makes no sense, ends here, before a device is touched.
package networks

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Reader reads from the API server.
type Reader interface {
	// GetNetwork reads the network of the name.
	GetNetwork(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverNetwork, error)
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
type Resolver struct{ reader Reader }

// NewResolver returns one that reads by the reader.
func NewResolver(reader Reader) *Resolver { return &Resolver{reader} }

// Resolve returns for each query the network, as it is now. Each network is read once, and the namespace once and only
// where its labels are asked for. The error names the network and what is allowed.
func (r *Resolver) Resolve(ctx context.Context, queries []Query) ([]*types.Network, error) {
	read := map[string]*v2alpha1.CiliumNetworkDriverNetwork{}
	namespaces := map[string]labels.Set{}
	found := make([]*types.Network, len(queries))
	for i, q := range queries {
		if read[q.Network] == nil {
			network, err := r.read(ctx, q, namespaces)
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
		found[i] = describe(spec)
	}
	return found, nil
}

// read reads a network and checks that it may be joined.
func (r *Resolver) read(ctx context.Context, q Query, namespaces map[string]labels.Set) (*v2alpha1.CiliumNetworkDriverNetwork, error) {
	network, err := r.reader.GetNetwork(ctx, q.Network)
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("there is no CiliumNetworkDriverNetwork of this name (%w)", err)
	case err != nil:
		return nil, fmt.Errorf("read the CiliumNetworkDriverNetwork: %w", err)
	}
	// The schema may be older than this agent, or was when the network was written.
	if err := network.Validate(); err != nil {
		return nil, fmt.Errorf("the CiliumNetworkDriverNetwork is not valid: %w", err)
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
			return nil, fmt.Errorf("read the labels of namespace %s, which say whether it may join: %w", q.Namespace, err)
		}
		namespaces[q.Namespace] = set
	}
	if !selector.Matches(set) {
		return nil, fmt.Errorf("claims of namespace %s may not join it: spec.namespaceSelector asks for %s", q.Namespace, selector)
	}
	return network, nil
}

// describe returns what the network makes of a device's link.
func describe(spec *v2alpha1.CiliumNetworkDriverNetworkSpec) *types.Network {
	n := &types.Network{VLAN: int(spec.Vlan), VLANPriority: int(spec.VlanPriority), MTU: int(spec.MTU)}
	if spec.VlanProtocol != v2alpha1.VlanProtocol8021Q {
		n.VLANProtocol = spec.VlanProtocol
	}
	if vf := spec.VF; vf != nil {
		n.VF = types.VFRights{Trust: vf.Trust, SpoofCheck: vf.SpoofCheck, LinkState: vf.LinkState, MinTxRate: toInt(vf.MinTxRate), MaxTxRate: toInt(vf.MaxTxRate)}
	}
	return n
}

func toInt(n *int32) *int {
	if n == nil {
		return nil
	}
	return ptr.To(int(*n))
}
