// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

// blockBits is how many bits of an address are its own in its block.
const blockBits = 8

// Choose returns the network with nothing left to choose from but the addresses, where some of a family are asked for. The error begins with the
// field's name and says what is allowed.
func Choose(n *types.Network, asked []types.Address) (*types.Network, error) {
	if len(asked) == 0 {
		return n, nil
	}
	if n.Offer == nil {
		return nil, errors.New("addresses: the network has no subnets, and gives devices no addresses; leave the parameter out")
	}
	chosen, offer := *n, *n.Offer
	for i, a := range asked {
		var inFamily []string
		var subnet *types.Subnet
		var others []types.Subnet
		for _, s := range offer.Subnets {
			if s.Prefix.Addr().Is4() != a.Addr.Is4() {
				others = append(others, s)
				continue
			}
			inFamily = append(inFamily, s.Prefix.String())
			if s.Prefix.Contains(a.Addr) {
				subnet = &s
			}
		}
		switch {
		case len(inFamily) == 0:
			return nil, fmt.Errorf("addresses[%d]: %s is of a family that the network has no subnet of for this node", i, a)
		case subnet == nil:
			return nil, fmt.Errorf("addresses[%d]: %s is in none of the network's subnets for this node: allowed are addresses of %s", i, a, strings.Join(inFamily, ", "))
		case !subnet.Addresses.Contains(a.Addr):
			return nil, fmt.Errorf("addresses[%d]: %s is an address of %s that the network gives to no device: it is outside of ranges, in exclude, a router's or the subnet's own",
				i, a, subnet.Prefix)
		}
		var only netipx.IPSetBuilder
		only.Add(a.Addr)
		set, err := only.IPSet()
		if err != nil {
			return nil, fmt.Errorf("addresses[%d]: %w", i, err)
		}
		subnet.Addresses, subnet.Certain = set, true
		offer.Subnets = append(others, *subnet)
	}
	chosen.Offer = &offer
	return &chosen, nil
}

// addressAt returns the address of a set that has the number, counted from 0; the number is below the set's size.
func addressAt(set *netipx.IPSet, number *big.Int) netip.Addr {
	rest := new(big.Int).Set(number)
	for _, r := range set.Ranges() {
		size := v2alpha1.SizeOfRange(r)
		if rest.Cmp(size) >= 0 {
			rest.Sub(rest, size)
			continue
		}
		from := new(big.Int).SetBytes(r.From().AsSlice())
		bytes := make([]byte, r.From().BitLen()/8)
		addr, _ := netip.AddrFromSlice(from.Add(from, rest).FillBytes(bytes))
		return addr
	}
	return netip.Addr{}
}

// draws returns addresses of the set in an order that the seed decides: each seed begins somewhere else, so that few choose
// the same at the same time, and one that tries again begins where it began before.
func draws(set *netipx.IPSet, seed string) iter.Seq[netip.Addr] {
	size := new(big.Int)
	for _, r := range set.Ranges() {
		size.Add(size, v2alpha1.SizeOfRange(r))
	}
	return func(yield func(netip.Addr) bool) {
		for i := byte(0); ; i++ {
			hash := fnv.New128a()
			_, _ = hash.Write(append([]byte(seed), 0, i))
			number := new(big.Int).SetBytes(hash.Sum(nil))
			if !yield(addressAt(set, number.Mod(number, size))) {
				return
			}
		}
	}
}

// blocksOf returns the blocks that the set has addresses in, in their order.
func blocksOf(set *netipx.IPSet) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		var last netip.Prefix
		for _, r := range set.Ranges() {
			for block := blockOf(r.From()); ; block = blockOf(netipx.PrefixLastIP(block).Next()) {
				if block != last && !yield(block) {
					return
				}
				last = block
				if !netipx.PrefixLastIP(block).Less(r.To()) {
					break
				}
			}
		}
	}
}

// blockOf returns the block of 256 that the address is in.
func blockOf(addr netip.Addr) netip.Prefix {
	return netip.PrefixFrom(addr, addr.BitLen()-blockBits).Masked()
}

// freeIn returns the addresses of the set in the block that are not taken, those from the seed's on first.
func freeIn(set *netipx.IPSet, block netip.Prefix, taken map[netip.Addr]bool, seed string) []netip.Addr {
	var free []netip.Addr
	for addr := block.Addr(); block.Contains(addr); addr = addr.Next() {
		if set.Contains(addr) && !taken[addr] {
			free = append(free, addr)
		}
	}
	if len(free) == 0 {
		return nil
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(seed))
	first := int(hash.Sum32() % uint32(len(free)))
	return append(free[first:], free[:first]...)
}

// complete returns the network with the chosen addresses, which are of these subnets, and the routes that they make.
func complete(n *types.Network, addrs []netip.Prefix, subnets []types.Subnet) *types.Network {
	done := *n
	done.Offer, done.Addresses = nil, addrs
	for _, route := range n.Offer.Routes {
		i := slices.IndexFunc(subnets, func(s types.Subnet) bool { return s.Prefix.Addr().Is4() == route.To.Addr().Is4() })
		if i < 0 {
			continue
		}
		if of, ok := subnets[i].Route(route); ok {
			done.Routes = append(done.Routes, of)
		}
	}
	if n.Offer.Derive == nil {
		return &done
	}
	var own []policyroute.Address
	for _, a := range addrs {
		own = append(own, policyroute.Address{Local: a.Addr(), PrefixLen: a.Bits()})
	}
	derived, _ := policyroute.Derive(*n.Offer.Derive, own)
	for _, r := range derived {
		done.Routes = append(done.Routes, types.Route{To: r.Dst, Via: r.NextHop})
	}
	return &done
}
