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
// has the same networks comes to the same answer.
func (n *CiliumNetworkDriverNetwork) Conflict(all []CiliumNetworkDriverNetwork) string {
	for i := range all {
		other := &all[i]
		if other.Name == n.Name || !other.OlderThan(n) || !other.Spec.sharesWire(&n.Spec) {
			continue
		}
		for _, a := range n.Spec.Subnets {
			for _, b := range other.Spec.Subnets {
				if overlaps(a.CIDR, b.CIDR) {
					return fmt.Sprintf("the older network %s has addresses of %s too, in the same VLAN and on a common pool", other.Name, a.CIDR)
				}
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
