// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
)

// Wires says in words how devices of some pools reach those of others although none is in both, as pools that have devices of one
// physical function are one wire, whatever networks say; empty where they do not, as far as is known. No list is empty.
// +kubebuilder:object:generate=false
type Wires func(pools, others []string) string

// Conflict says which older one of all networks has addresses of this one, on
// the same wire, so that claims cannot join this one; empty for none. Whoever
// has the same networks and wires comes to the same answer. While the operator has
// not looked at the network as it is, a younger one counts too: devices may have its
// addresses from before this one was changed.
func (n *CiliumNetworkDriverNetwork) Conflict(all []CiliumNetworkDriverNetwork, wires Wires) string {
	for other, how := range n.rivals(all, wires) {
		switch {
		case other.OlderThan(n):
			return fmt.Sprintf("the older network %s has addresses of %s", other.Name, how)
		case n.Status.ObservedGeneration != n.Generation:
			return fmt.Sprintf("network %s has addresses of %s, and the operator has not said yet whether pods use any of them", other.Name, how)
		}
	}
	return ""
}

// HasRival says whether another of all networks has addresses of this one, on the same wire, be it a younger one.
func (n *CiliumNetworkDriverNetwork) HasRival(all []CiliumNetworkDriverNetwork, wires Wires) bool {
	for range n.rivals(all, wires) {
		return true
	}
	return false
}

// rivals yields the other networks that have addresses of this one on the same wire, and which and how.
func (n *CiliumNetworkDriverNetwork) rivals(all []CiliumNetworkDriverNetwork, wires Wires) iter.Seq2[*CiliumNetworkDriverNetwork, string] {
	return func(yield func(*CiliumNetworkDriverNetwork, string) bool) {
		for i := range all {
			other := &all[i]
			if other.Name == n.Name || other.Spec.Vlan != n.Spec.Vlan {
				continue
			}
			cidr := n.Spec.overlap(&other.Spec)
			if cidr == "" {
				continue
			}
			if how := n.Spec.Reaches(other.Spec.Vlan, other.Spec.Pools, wires); how != "" && !yield(other, cidr+" too, "+how) {
				return
			}
		}
	}
}

// overlap returns which of the subnets has addresses in common with one of the other's; empty for none.
func (s *CiliumNetworkDriverNetworkSpec) overlap(other *CiliumNetworkDriverNetworkSpec) string {
	for _, a := range s.Subnets {
		for _, b := range other.Subnets {
			if overlaps(a.CIDR, b.CIDR) {
				return a.CIDR
			}
		}
	}
	return ""
}

// OlderThan says whether the network was made before the other one, which is
// younger than it then.
func (n *CiliumNetworkDriverNetwork) OlderThan(other *CiliumNetworkDriverNetwork) bool {
	return cmp.Or(n.CreationTimestamp.Compare(other.CreationTimestamp.Time), cmp.Compare(n.Name, other.Name)) < 0
}

// Reaches says in words how devices of the network reach others in the VLAN, of one of the pools, all pools for none; empty where they
// do not.
func (s *CiliumNetworkDriverNetworkSpec) Reaches(vlan int32, pools []string, wires Wires) string {
	if s.Vlan != vlan {
		return ""
	}
	if len(s.Pools) == 0 || len(pools) == 0 || slices.ContainsFunc(s.Pools, func(pool string) bool { return slices.Contains(pools, pool) }) {
		return "in the same VLAN and on a common pool"
	}
	if how := wires(s.Pools, pools); how != "" {
		return "in the same VLAN and on one wire: " + how
	}
	return ""
}

func overlaps(a, b string) bool {
	one, err1 := netip.ParsePrefix(a)
	two, err2 := netip.ParsePrefix(b)
	return err1 == nil && err2 == nil && one.Overlaps(two)
}
