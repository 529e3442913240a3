// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package policyroute_test

import (
	"fmt"
	"net/netip"

	"github.com/cilium/networkdriver/pkg/policyroute"
)

// A NIC on a leaf switch with a /25, another one on a /31, and an address that no route can be derived from. The fabric
// that both links reach is a /19.
func ExampleDerive() {
	routes, skips := policyroute.Derive(policyroute.Config{NexthopOffset: 1, DstPrefixLen: 19}, []policyroute.Address{
		{Local: netip.MustParseAddr("10.1.2.130"), PrefixLen: 25},
		{Local: netip.MustParseAddr("10.1.2.5"), PrefixLen: 31},
		{Local: netip.MustParseAddr("10.1.2.6"), PrefixLen: 32},
	})
	for _, r := range routes {
		fmt.Printf("from %s: %s\n", r.From, r)
	}
	for _, s := range skips {
		fmt.Printf("%s: %s\n", s.Address, s.Reason)
	}
	// Output:
	// from 10.1.2.130: 10.1.0.0/19 via 10.1.2.129
	// from 10.1.2.5: 10.1.0.0/19 via 10.1.2.4
	// 10.1.2.6/32: the network of a /32 has no other host that could be the next hop
}
