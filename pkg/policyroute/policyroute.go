// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package policyroute derives, from the IPv4 addresses of a network interface, the routes by which traffic from each
// address reaches a wider network through the router next to the interface. It is arithmetic only: nothing is read from
// or written to the kernel.
//
// The destination is the interface's own address cut to a shorter prefix. The next hop is the other end of a /31 link,
// or the host with a given number in the address's network otherwise:
//
//	10.1.2.130/25, offset 1, destination /19  ->  10.1.0.0/19 via 10.1.2.129
//	10.1.2.5/31,             destination /16  ->  10.1.0.0/16 via 10.1.2.4
package policyroute

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Config says which routes are wanted.
type Config struct {
	// NexthopOffset is the number of the next hop in the address's network: 1 is the first host. Any value is allowed;
	// an address in whose network it is no host gives no route. It does not count for addresses of /31 links.
	NexthopOffset int64
	// DstPrefixLen is the prefix length of the destination, 0 to 32. 0 is the default route.
	DstPrefixLen int
}

// Address is an address that an interface has.
type Address struct {
	// Local is the interface's own address (IFA_LOCAL).
	Local netip.Addr
	// Peer is the other end of a point-to-point link (IFA_ADDRESS where it differs from IFA_LOCAL), and otherwise zero.
	Peer netip.Addr
	// PrefixLen is the address's prefix length, 0 to 32. With a peer it is the one that the kernel has for the peer's
	// network (IFA_ADDRESS).
	PrefixLen int
}

func (a Address) String() string {
	if a.Peer.IsValid() {
		return fmt.Sprintf("%s peer %s/%d", a.Local, a.Peer, a.PrefixLen)
	}
	return fmt.Sprintf("%s/%d", a.Local, a.PrefixLen)
}

// Route is a route for traffic from one address.
type Route struct {
	// From is the interface's address that the route was derived from.
	From netip.Addr
	// Dst is the destination, with no bit set beyond its prefix length.
	Dst netip.Prefix
	// NextHop is the router. It is never From.
	NextHop netip.Addr
}

func (r Route) String() string { return fmt.Sprintf("%s via %s", r.Dst, r.NextHop) }

// Skip is an IPv4 address that no route comes from.
type Skip struct {
	Address Address
	// Reason says why, in words for people.
	Reason string
}

// Derive returns one route for each IPv4 address that has one, in the order of the addresses, and the IPv4 addresses
// that have none. IPv6 addresses give neither. A destination length beyond 0 to 32 gives no routes.
func Derive(cfg Config, addrs []Address) (routes []Route, skips []Skip) {
	for _, a := range addrs {
		if !a.Local.Is4() {
			continue
		}
		if route, reason := derive(cfg, a); reason != "" {
			skips = append(skips, Skip{Address: a, Reason: reason})
		} else {
			routes = append(routes, route)
		}
	}
	return routes, skips
}

// derive returns the route of one IPv4 address, or why there is none.
func derive(cfg Config, a Address) (Route, string) {
	if a.Peer == a.Local {
		a.Peer = netip.Addr{}
	}
	network := netip.PrefixFrom(a.Local, a.PrefixLen).Masked()
	switch {
	case a.Peer.IsValid() && !a.Peer.Is4():
		return Route{}, fmt.Sprintf("its peer %s is not an IPv4 address", a.Peer)
	case !network.IsValid():
		return Route{}, fmt.Sprintf("its prefix length %d is not within 0 to 32", a.PrefixLen)
	case cfg.DstPrefixLen < 0 || cfg.DstPrefixLen > 32:
		return Route{}, fmt.Sprintf("the destination's prefix length %d is not within 0 to 32", cfg.DstPrefixLen)
	case cfg.DstPrefixLen >= a.PrefixLen:
		return Route{}, fmt.Sprintf("the destination's prefix length %d is not shorter than the interface's %d",
			cfg.DstPrefixLen, a.PrefixLen)
	}
	nextHop, reason := nextHop(cfg, a, network)
	if reason != "" {
		return Route{}, reason
	}
	if nextHop == a.Local {
		return Route{}, fmt.Sprintf("the next hop %s is the interface's own address", nextHop)
	}
	return Route{From: a.Local, Dst: netip.PrefixFrom(a.Local, cfg.DstPrefixLen).Masked(), NextHop: nextHop}, ""
}

// nextHop returns the next hop of one IPv4 address, or why there is none.
func nextHop(cfg Config, a Address, network netip.Prefix) (netip.Addr, string) {
	switch {
	case a.PrefixLen == 32:
		return netip.Addr{}, "the network of a /32 has no other host that could be the next hop"
	case a.PrefixLen == 31 && a.Peer.IsValid():
		return a.Peer, ""
	case a.PrefixLen == 31:
		return fromUint32(toUint32(a.Local) ^ 1), ""
	}
	// The first and the last number of a network are its own and its broadcast address, which the kernel refuses as
	// next hops. In 64 bits nothing can overflow.
	last := int64(1)<<(32-a.PrefixLen) - 2
	if cfg.NexthopOffset < 1 || cfg.NexthopOffset > last {
		return netip.Addr{}, fmt.Sprintf("the next hop's offset %d is not within 1 to %d, the hosts of %s",
			cfg.NexthopOffset, last, network)
	}
	return fromUint32(toUint32(network.Addr()) + uint32(cfg.NexthopOffset)), ""
}

func toUint32(addr netip.Addr) uint32 {
	bytes := addr.As4()
	return binary.BigEndian.Uint32(bytes[:])
}

func fromUint32(n uint32) netip.Addr {
	var bytes [4]byte
	binary.BigEndian.PutUint32(bytes[:], n)
	return netip.AddrFrom4(bytes)
}
