// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"net/netip"

	"go4.org/netipx"
)

// Addresses returns what of the network's i-th subnet is given out, for a
// valid network: not the routers that its routes lead to either, since a pod
// that had a router's address would cut all others off.
func (s *CiliumNetworkDriverNetworkSpec) Addresses(i int) (*netipx.IPSet, error) {
	subnet, err := s.Subnets[i].Addresses()
	if err != nil {
		return nil, err
	}
	var set netipx.IPSetBuilder
	set.AddSet(subnet)
	for _, route := range s.Routes {
		if via, err := netip.ParseAddr(route.Via); err == nil {
			set.Remove(via)
		}
	}
	cidr, err := parseSubnet(s.Subnets[i].CIDR)
	if err != nil {
		return nil, fmt.Errorf("cidr: %w", err)
	}
	if p := s.PolicyRouting; p != nil && p.Derive != nil {
		if router, ok := p.Derive.nextHop(cidr); ok {
			set.Remove(router)
		}
	}
	return set.IPSet()
}

// nextHop returns the router that routes derived from addresses of the subnet
// lead to. In a /31 each of the two is the other one's, and which of them a
// router has only ranges can say.
func (d *DerivedRoutes) nextHop(cidr netip.Prefix) (netip.Addr, bool) {
	if !cidr.Addr().Is4() || int(d.RouteDstPrefixLen) >= cidr.Bits() {
		return netip.Addr{}, false
	}
	last := int64(1)<<(32-cidr.Bits()) - 2
	if d.NexthopNetAddrOffset < 1 || d.NexthopNetAddrOffset > last {
		return netip.Addr{}, false
	}
	bytes := cidr.Addr().As4()
	binary.BigEndian.PutUint32(bytes[:], binary.BigEndian.Uint32(bytes[:])+uint32(d.NexthopNetAddrOffset))
	return netip.AddrFrom4(bytes), true
}

// Addresses returns what of the subnet is given out as far as the subnet says
// it, for a valid subnet.
func (s *NetworkSubnet) Addresses() (*netipx.IPSet, error) {
	cidr, err := parseSubnet(s.CIDR)
	if err != nil {
		return nil, fmt.Errorf("cidr: %w", err)
	}
	var set netipx.IPSetBuilder
	if len(s.Ranges) == 0 {
		set.AddPrefix(cidr)
	}
	for i, r := range s.Ranges {
		from, err := netip.ParseAddr(r.From)
		if err != nil {
			return nil, fmt.Errorf("ranges[%d].from: %w", i, err)
		}
		to, err := netip.ParseAddr(r.To)
		if err != nil {
			return nil, fmt.Errorf("ranges[%d].to: %w", i, err)
		}
		set.AddRange(netipx.IPRangeFrom(from, to))
	}
	if cidr.Bits() < cidr.Addr().BitLen()-1 {
		set.Remove(cidr.Addr())
		if cidr.Addr().Is4() {
			set.Remove(netipx.PrefixLastIP(cidr))
		}
	}
	for i, value := range s.Exclude {
		excluded, err := parseExcluded(value)
		if err != nil {
			return nil, fmt.Errorf("exclude[%d]: %w", i, err)
		}
		set.RemovePrefix(excluded)
	}
	if s.Gateway != "" {
		gateway, err := netip.ParseAddr(s.Gateway)
		if err != nil {
			return nil, fmt.Errorf("gateway: %w", err)
		}
		set.Remove(gateway)
	}
	return set.IPSet()
}

// CountAddresses returns the number of addresses in a set, at most MaxInt64.
func CountAddresses(set *netipx.IPSet) int64 {
	count := SizeOfSet(set)
	if !count.IsInt64() {
		return math.MaxInt64
	}
	return count.Int64()
}

// SizeOfSet returns the number of addresses in a set.
func SizeOfSet(set *netipx.IPSet) *big.Int {
	count := new(big.Int)
	for _, r := range set.Ranges() {
		count.Add(count, SizeOfRange(r))
	}
	return count
}

// SizeOfRange returns the number of addresses in a range.
func SizeOfRange(r netipx.IPRange) *big.Int {
	from, to := new(big.Int).SetBytes(r.From().AsSlice()), new(big.Int).SetBytes(r.To().AsSlice())
	return to.Sub(to, from).Add(to, big.NewInt(1))
}
