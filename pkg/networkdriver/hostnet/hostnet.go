// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package hostnet answers one question: is this link part of the node's own network? Such a link is never offered to
// a pod, because taking it cuts the node off. It is one that carries a default route or an address of the node, or that
// has an upper device (bond, bridge, team, VLAN, macvlan), whatever that is used for.
package hostnet

import (
	"fmt"
	"net/netip"
	"slices"
)

// Link is what of a network interface matters here.
type Link struct {
	// Index is the interface index.
	Index int
	// Name is the interface name.
	Name string
	// Master is the index of the device that this link is a port of, 0 for none.
	Master int
	// Lower is the index of the link in the same namespace that this one is stacked on, 0 for none.
	Lower int
}

// Address is an address that an interface has.
type Address struct {
	// Index is the interface's index.
	Index int
	// Addr is the address without its prefix length.
	Addr netip.Addr
}

// Source reads the network configuration of one namespace.
type Source interface {
	Links() ([]Link, error)
	// DefaultRouteLinks returns the indexes of the interfaces that IPv4 and IPv6 default routes of any table leave by.
	DefaultRouteLinks() ([]int, error)
	Addresses() ([]Address, error)
}

// View is the node's own network at one moment.
type View struct {
	reasons map[int]string
}

// Scan reads the network configuration once, so that one reading serves a whole discovery. nodeIPs are the addresses
// that the cluster knows the node by.
func Scan(src Source, nodeIPs []netip.Addr) (*View, error) {
	links, err := src.Links()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	routes, err := src.DefaultRouteLinks()
	if err != nil {
		return nil, fmt.Errorf("list default routes: %w", err)
	}
	addrs, err := src.Addresses()
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}

	v := &View{reasons: map[int]string{}}
	for _, index := range routes {
		v.add(index, "carries a default route")
	}
	for _, a := range addrs {
		if addr := a.Addr.Unmap(); slices.ContainsFunc(nodeIPs, func(ip netip.Addr) bool { return ip.Unmap() == addr }) {
			v.add(a.Index, fmt.Sprintf("has the node's address %s", addr))
		}
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Index] = l.Name
	}
	for _, l := range links {
		if l.Master != 0 {
			upper, known := names[l.Master]
			if !known {
				upper = fmt.Sprintf("with index %d", l.Master)
			}
			v.add(l.Index, "has the upper device "+upper)
		}
		if l.Lower != 0 {
			v.add(l.Lower, "has the upper device "+l.Name)
		}
	}
	return v, nil
}

// add keeps the first reason, so that the order of adding is the order of weight.
func (v *View) add(index int, reason string) {
	if _, ok := v.reasons[index]; !ok {
		v.reasons[index] = reason
	}
}

// Reason says for people why the link with this index is part of the node's own network, such as "has the upper
// device br0". It is empty for a link that is not.
func (v *View) Reason(index int) string { return v.reasons[index] }
