// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"go4.org/netipx"
)

// MaxAddresses and MaxRoutes are how many addresses and routes parameters may have: what a claim's status holds.
const MaxAddresses, MaxRoutes = 16, 64

// Address is an address that is asked for.
type Address struct {
	Addr netip.Addr
	// Bits is the prefix length of its subnet, or -1 for an address of a network, which says what it is.
	Bits int
}

// ByHand says whether the address is one of no network.
func (a Address) ByHand() bool { return a.Bits >= 0 }

// Prefix returns the address with the prefix length of its subnet, for one of no network.
func (a Address) Prefix() netip.Prefix { return netip.PrefixFrom(a.Addr, a.Bits) }

func (a Address) String() string {
	if a.ByHand() {
		return a.Prefix().String()
	}
	return a.Addr.String()
}

// MarshalText implements [encoding.TextMarshaler].
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler]. It takes the one form that each address has.
func (a *Address) UnmarshalText(text []byte) error {
	parsed := Address{Bits: -1}
	prefix, err := netip.ParsePrefix(string(text))
	if err == nil {
		parsed = Address{prefix.Addr(), prefix.Bits()}
	} else {
		parsed.Addr, err = netip.ParseAddr(string(text))
	}
	if err != nil || parsed.Addr.Zone() != "" || parsed.Addr.Is4In6() || parsed.String() != string(text) {
		return fmt.Errorf("%.64q is not an address in canonical form: allowed are one of a network, as 192.0.2.10, and without a network one with "+
			"the prefix length of its subnet, as 192.0.2.10/24", text)
	}
	*a = parsed
	return nil
}

// metric returns the priority that the kernel gives the route (IP6_RT_PRIO_USER for none).
func (r Route) metric() int {
	if r.Metric == 0 && r.To.Addr().Is6() {
		return 1024
	}
	return r.Metric
}

// RouteKey is what a routing table has one route of.
type RouteKey struct {
	To     netip.Prefix
	Metric int // as the kernel has it, which is not 0 for IPv6
}

// MainRoutes returns what of the pod's main routing table the device takes for its routes, as far as that is known before its
// addresses are chosen. Those to the addresses' own subnets do not count: the kernel takes several.
func (c DeviceConfig) MainRoutes() []RouteKey {
	n := c.InPod()
	if n == nil || n.PolicyRouting {
		return nil
	}
	routes := n.Routes
	if n.Offer != nil {
		routes = n.Offer.certainRoutes()
	}
	var keys []RouteKey
	for _, r := range routes {
		keys = append(keys, RouteKey{r.To, r.metric()})
	}
	return keys
}

// certainRoutes returns the routes that a device gets from whichever subnets its addresses are.
func (o *Offer) certainRoutes() []Route {
	var certain []Route
	for _, r := range o.Routes {
		of := 0
		all := true
		for _, s := range o.Subnets {
			if s.Prefix.Addr().Is4() == r.To.Addr().Is4() {
				_, gets := s.Route(r)
				of, all = of+1, all && gets
			}
		}
		if of > 0 && all {
			certain = append(certain, r)
		}
	}
	return certain
}

// InPod returns what the link gets in the pod: what its network says, or what is written by hand. Nil for nothing.
func (c DeviceConfig) InPod() *Network {
	if c.Joined != nil || len(c.Addresses) == 0 && len(c.Routes) == 0 {
		return c.Joined
	}
	n := &Network{Routes: c.Routes}
	for _, a := range c.Addresses {
		n.Addresses = append(n.Addresses, a.Prefix())
	}
	return n
}

// ByHand returns the name of a parameter that says what a network would say otherwise; empty for none.
func (c DeviceConfig) ByHand() string {
	switch {
	case c.Vlan != nil:
		return "vlan"
	case len(c.Addresses) > 0 && c.Addresses[0].ByHand():
		return "addresses"
	case len(c.Routes) > 0:
		return "routes"
	}
	return ""
}

// parseList decodes a list of parameters, item by item.
func parseList[T any](field string, raw json.RawMessage, most int, parse func(json.RawMessage, *T) error) ([]T, error) {
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil || len(items) == 0 || len(items) > most {
		return nil, fmt.Errorf("%s: must be a list of 1 to %d %s", field, most, field)
	}
	parsed := make([]T, len(items))
	for i, item := range items {
		if err := parse(item, &parsed[i]); err != nil {
			return nil, fmt.Errorf("%s[%d]%w", field, i, err)
		}
	}
	return parsed, nil
}

// parseAddress decodes an item of addresses. What the error says follows the item's name.
func parseAddress(raw json.RawMessage, a *Address) error {
	text, err := parseString(raw)
	if err == nil {
		err = a.UnmarshalText([]byte(text))
	}
	if err != nil {
		return fmt.Errorf(": %w", err)
	}
	return nil
}

func parseString(raw json.RawMessage) (text string, err error) {
	if !bytes.HasPrefix(raw, []byte(`"`)) {
		return "", errors.New("must be a string")
	}
	return text, json.Unmarshal(raw, &text)
}

// parseRoute decodes an item of routes. What the error says follows the item's name.
func parseRoute(raw json.RawMessage, r *Route) error {
	if !bytes.HasPrefix(raw, []byte("{")) {
		return errors.New(": must be an object of to, via and metric")
	}
	if err := checkFieldNames(raw, "metric", "to", "via"); err != nil {
		return fmt.Errorf(": %w", err)
	}
	var fields struct{ To, Via, Metric json.RawMessage }
	if err := json.Unmarshal(raw, &fields); err != nil {
		return fmt.Errorf(": decode it: %w", err)
	}
	for _, f := range []struct {
		name string
		raw  json.RawMessage
		set  func(string) error
	}{{"to", fields.To, r.setTo}, {"via", fields.Via, r.setVia}} {
		if len(f.raw) == 0 {
			return fmt.Errorf(".%s: is missing", f.name)
		}
		text, err := parseString(f.raw)
		if err == nil {
			err = f.set(text)
		}
		if err != nil {
			return fmt.Errorf(".%s: %w", f.name, err)
		}
	}
	if len(fields.Metric) > 0 {
		if err := json.Unmarshal(fields.Metric, &r.Metric); err != nil || r.Metric < 0 || r.Metric > math.MaxInt32 {
			return fmt.Errorf(".metric: %.64s is not a whole number from 0 to %d", fields.Metric, math.MaxInt32)
		}
	}
	return nil
}

func (r *Route) setTo(text string) (err error) {
	if r.To, err = netip.ParsePrefix(text); err != nil || r.To.Addr().Is4In6() || r.To.Masked().String() != text {
		return fmt.Errorf("%.64q is not a destination with no bit set beyond the prefix length, in canonical form, as 198.51.100.0/24", text)
	}
	return nil
}

func (r *Route) setVia(text string) (err error) {
	if r.Via, err = netip.ParseAddr(text); err != nil || r.Via.Is4In6() || r.Via.Zone() != "" || r.Via.String() != text {
		return fmt.Errorf("%.64q is not an address in canonical form, as 192.0.2.1", text)
	}
	return nil
}

// isHost says whether the address can be a host's in the subnet: not its first address, nor, of IPv4, its last.
func isHost(addr netip.Addr, subnet netip.Prefix) bool {
	if subnet.Bits() >= addr.BitLen()-1 {
		return true
	}
	return addr != subnet.Masked().Addr() && (addr.Is6() || addr != netipx.PrefixLastIP(subnet.Masked()))
}

// checkAddressing refuses addresses and routes that are wrong whatever other configurations of the request say.
func (c DeviceConfig) checkAddressing() error {
	if len(c.Addresses) > MaxAddresses {
		return fmt.Errorf("addresses: must be a list of 1 to %d addresses", MaxAddresses)
	}
	if len(c.Routes) > MaxRoutes {
		return fmt.Errorf("routes: must be a list of 1 to %d routes", MaxRoutes)
	}
	seen := map[netip.Addr]bool{}
	families := map[bool]bool{} // of networks' addresses, by whether they are IPv4's
	for i, a := range c.Addresses {
		switch {
		case !a.Addr.IsGlobalUnicast():
			return fmt.Errorf("addresses[%d]: %s is not one that a device can have: allowed are unicast addresses but those of the loopback interface and of a link", i, a)
		case a.ByHand() && c.Network != "":
			return fmt.Errorf("addresses[%d]: %s has a prefix length, which network %s says; write the address alone", i, a, c.Network)
		case a.ByHand() && (a.Bits == 0 || !isHost(a.Addr, a.Prefix())):
			return fmt.Errorf("addresses[%d]: %s is not a host of its subnet: allowed are prefix lengths from 1 on, and neither the first address of a subnet nor, "+
				"of IPv4, the last", i, a)
		case seen[a.Addr]:
			return fmt.Errorf("addresses[%d]: %s is given twice", i, a.Addr)
		case a.ByHand() != c.Addresses[0].ByHand():
			return fmt.Errorf("addresses[%d]: %s and %s: either all have a prefix length, or, in a network, none has", i, c.Addresses[0], a)
		case !a.ByHand() && families[a.Addr.Is4()]:
			return errors.New("addresses: in a network a device has one address of each family at most")
		}
		seen[a.Addr], families[a.Addr.Is4()] = true, true
	}
	return c.checkRoutes()
}

func (c DeviceConfig) checkRoutes() error {
	if c.Network != "" && len(c.Routes) > 0 {
		return fmt.Errorf("routes: cannot be asked for together with network %s, which says what they are; leave one of them out", c.Network)
	}
	taken := map[RouteKey]bool{}
	for i, r := range c.Routes {
		key := RouteKey{r.To, r.metric()}
		switch {
		case !r.To.IsValid() || r.To != r.To.Masked() || r.To.Addr().Is4In6() || !r.Via.IsValid() || r.Via.Is4In6() || r.Via.Zone() != "" ||
			r.Metric < 0 || r.Metric > math.MaxInt32:
			return fmt.Errorf("routes[%d]: is not a route", i) // of a record: parameters are refused before
		case r.To.Addr().Is4() != r.Via.Is4():
			return fmt.Errorf("routes[%d].via: %s is not of the family of %s", i, r.Via, r.To)
		case taken[key]:
			return fmt.Errorf("routes[%d]: there is another one to %s with the same metric", i, r.To)
		}
		taken[key] = true
	}
	return nil
}

// checkByHand refuses what is written by hand and does not fit together, when all of it is known.
func (c DeviceConfig) checkByHand() error {
	if c.Network != "" {
		return nil
	}
	for i, a := range c.Addresses {
		if !a.ByHand() {
			return fmt.Errorf("addresses[%d]: %s has no prefix length, which only an address of a network goes without; name the network, or add the length", i, a)
		}
	}
	for i, r := range c.Routes {
		reached := r.Via.Is6() && r.Via.IsLinkLocalUnicast()
		for _, a := range c.Addresses {
			switch {
			case r.Via == a.Addr:
				return fmt.Errorf("routes[%d].via: %s is an address of the device itself; allowed is another host of its subnet", i, r.Via)
			case r.To == a.Prefix().Masked():
				return fmt.Errorf("routes[%d].to: %s is the subnet of the address %s, which has a route of its own; leave it out", i, r.To, a)
			}
			reached = reached || a.Prefix().Contains(r.Via) && isHost(r.Via, a.Prefix())
		}
		if !reached {
			return fmt.Errorf("routes[%d].via: %s is no host of a subnet of the device's addresses, nor an IPv6 address of a link, so that it cannot be reached", i, r.Via)
		}
	}
	return nil
}
