// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/policyroute"
)

// ipamConfig is a configuration of the static IPAM plugin.
type ipamConfig struct {
	Type      string         `json:"type"`
	Addresses []ipamAddress  `json:"addresses,omitempty"`
	Routes    []*types.Route `json:"routes,omitempty"`
}

type ipamAddress struct {
	Address netip.Prefix `json:"address"`
}

// staticConfig has the addresses that a NIC keeps, and the routes. It is nil if there is neither.
func staticConfig(addrs []address, routes []policyroute.Route) *ipamConfig {
	c := &ipamConfig{Type: staticIPAM}
	seen := map[string]bool{}
	add := func(route *types.Route) {
		// Two addresses of one network have the same route. The kernel has a table's routes once, and an ADD that repeats
		// one fails; sbr copies it into the table of each address.
		if key := fmt.Sprint(route.Dst.String(), route.GW); !seen[key] {
			seen[key] = true
			c.Routes = append(c.Routes, route)
		}
	}
	for _, a := range addrs {
		prefix, onLink := a.inPod()
		c.Addresses = append(c.Addresses, ipamAddress{Address: prefix})
		if onLink.IsValid() {
			// The link's own network comes before what is routed through it.
			scope := int(unix.RT_SCOPE_LINK)
			add(&types.Route{Dst: ipNet(onLink), Scope: &scope})
		}
	}
	for _, r := range routes {
		add(&types.Route{Dst: ipNet(r.Dst), GW: r.NextHop.AsSlice()})
	}
	if len(c.Addresses) == 0 && len(c.Routes) == 0 {
		return nil
	}
	return c
}

// inPod is the address as static IPAM can express it: without a peer. A network of the peer that the address is not in
// needs a route of its own.
func (a address) inPod() (prefix, onLink netip.Prefix) {
	own := netip.PrefixFrom(a.Local, a.PrefixLen)
	if !a.Peer.IsValid() {
		return own, netip.Prefix{}
	}
	onLink = netip.PrefixFrom(a.Peer, a.PrefixLen).Masked()
	if onLink.Contains(a.Local) {
		return own, netip.Prefix{}
	}
	host := a.Local.BitLen()
	if pair := netip.PrefixFrom(a.Local, host-1); a.PrefixLen == host && pair.Masked().Contains(a.Peer) {
		return pair, netip.Prefix{}
	}
	if a.PrefixLen == host-1 {
		own = netip.PrefixFrom(a.Local, host) // the peer is the other end, and not the pair's other address
	}
	return own, onLink
}

// forRoutes is what of the addresses routes are derived from.
func forRoutes(addrs []address) []policyroute.Address {
	out := make([]policyroute.Address, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, policyroute.Address{Local: a.Local, Peer: a.Peer, PrefixLen: a.PrefixLen})
	}
	return out
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
