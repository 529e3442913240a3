// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Conflict says which older one of all networks has addresses of this one, on
// the same wire, so that claims cannot join this one; empty for none. Whoever
// has the same networks comes to the same answer. While the operator has not
// looked at the network as it is, a younger one counts too: devices may have its
// addresses from before this one was changed.
func (n *CiliumNetworkDriverNetwork) Conflict(all []CiliumNetworkDriverNetwork) string {
	for i := range all {
		other := &all[i]
		if other.Name == n.Name || !other.Spec.sharesWire(&n.Spec) {
			continue
		}
		cidr := n.Spec.overlap(&other.Spec)
		switch {
		case cidr == "":
		case other.OlderThan(n):
			return fmt.Sprintf("the older network %s has addresses of %s too, in the same VLAN and on a common pool", other.Name, cidr)
		case n.Status.ObservedGeneration != n.Generation:
			return fmt.Sprintf("network %s has addresses of %s too, in the same VLAN and on a common pool, and the operator has not said yet whether pods "+
				"use any of them", other.Name, cidr)
		}
	}
	return ""
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

// sharesWire says whether devices of the two may reach each other.
func (s *CiliumNetworkDriverNetworkSpec) sharesWire(other *CiliumNetworkDriverNetworkSpec) bool {
	return s.Vlan == other.Vlan && (len(s.Pools) == 0 || len(other.Pools) == 0 ||
		slices.ContainsFunc(s.Pools, func(pool string) bool { return slices.Contains(other.Pools, pool) }))
}

func overlaps(a, b string) bool {
	one, err1 := netip.ParsePrefix(a)
	two, err2 := netip.ParsePrefix(b)
	return err1 == nil && err2 == nil && one.Overlaps(two)
}
