// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package policyroute

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// addr reads "10.1.2.5/31" or "10.1.2.5 peer 10.1.2.4/31".
func addr(t testing.TB, s string) Address {
	t.Helper()
	local, peer, pointToPoint := strings.Cut(s, " peer ")
	if !pointToPoint {
		p, err := netip.ParsePrefix(local)
		require.NoError(t, err)
		return Address{Local: p.Addr(), PrefixLen: p.Bits()}
	}
	p, err := netip.ParsePrefix(peer)
	require.NoError(t, err)
	return Address{Local: netip.MustParseAddr(local), Peer: p.Addr(), PrefixLen: p.Bits()}
}

func TestDerive(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
		addr string
		want string // the route
		skip string // or part of the reason why there is none
	}{
		{name: "supernet through the leaf", cfg: Config{1, 19}, addr: "10.1.2.130/25", want: "10.1.0.0/19 via 10.1.2.129"},
		{name: "default route through the leaf", cfg: Config{1, 0}, addr: "10.1.2.130/25", want: "0.0.0.0/0 via 10.1.2.129"},
		{name: "supernet, upper end of a /31", cfg: Config{0, 16}, addr: "10.1.2.5/31", want: "10.1.0.0/16 via 10.1.2.4"},
		{name: "supernet, lower end of a /31", cfg: Config{0, 16}, addr: "10.1.2.4/31", want: "10.1.0.0/16 via 10.1.2.5"},
		{name: "default route, /31", cfg: Config{0, 0}, addr: "10.1.2.5/31", want: "0.0.0.0/0 via 10.1.2.4"},

		{name: "offset does not count on a /31", cfg: Config{math.MaxInt64, 16}, addr: "10.1.2.5/31", want: "10.1.0.0/16 via 10.1.2.4"},
		{name: "negative offset does not count on a /31", cfg: Config{-1, 16}, addr: "10.1.2.5/31", want: "10.1.0.0/16 via 10.1.2.4"},
		{name: "nor beside the kernel's peer", cfg: Config{-1, 16}, addr: "10.1.2.5 peer 10.9.0.7/31", want: "10.1.0.0/16 via 10.9.0.7"},
		{name: "kernel's peer on a /31", cfg: Config{0, 16}, addr: "10.1.2.5 peer 10.1.2.4/31", want: "10.1.0.0/16 via 10.1.2.4"},
		{name: "kernel's peer elsewhere on a /31", cfg: Config{0, 16}, addr: "10.1.2.5 peer 10.9.0.7/31", want: "10.1.0.0/16 via 10.9.0.7"},
		{name: "a peer that is the address itself is none", cfg: Config{0, 16}, addr: "10.1.2.5 peer 10.1.2.5/31", want: "10.1.0.0/16 via 10.1.2.4"},
		{name: "/31 at the lowest address", cfg: Config{0, 8}, addr: "0.0.0.0/31", want: "0.0.0.0/8 via 0.0.0.1"},
		{name: "/31 at the highest address", cfg: Config{0, 8}, addr: "255.255.255.255/31", want: "255.0.0.0/8 via 255.255.255.254"},
		{name: "/31, destination just shorter", cfg: Config{0, 30}, addr: "10.1.2.5/31", want: "10.1.2.4/30 via 10.1.2.4"},
		{name: "/31, destination not shorter", cfg: Config{0, 31}, addr: "10.1.2.5/31", skip: "31 is not shorter than the interface's 31"},

		{name: "/32", cfg: Config{1, 16}, addr: "10.1.2.5/32", skip: "the network of a /32 has no other host"},
		{name: "/32, offset 0", cfg: Config{0, 16}, addr: "10.1.2.5/32", skip: "the network of a /32 has no other host"},
		{name: "/32 with a peer", cfg: Config{1, 16}, addr: "10.1.2.5 peer 10.1.2.4/32", skip: "the network of a /32 has no other host"},
		{name: "/32 with a peer, offset 0", cfg: Config{0, 16}, addr: "10.1.2.5 peer 10.1.2.4/32", skip: "the network of a /32 has no other host"},
		{name: "peer outside the address's network", cfg: Config{1, 16}, addr: "10.1.2.5 peer 10.9.3.77/24", want: "10.1.0.0/16 via 10.1.2.1"},
		{name: "peer outside the address's network, /30", cfg: Config{1, 16}, addr: "10.1.2.6 peer 10.9.3.77/30", want: "10.1.0.0/16 via 10.1.2.5"},
		{name: "peer outside the address's network, offset out of range", cfg: Config{3, 16}, addr: "10.1.2.6 peer 10.9.3.77/30",
			skip: "offset 3 is not within 1 to 2, the hosts of 10.1.2.4/30"},
		{name: "peer in the address's network", cfg: Config{3, 19}, addr: "10.1.2.130 peer 10.1.2.129/25", want: "10.1.0.0/19 via 10.1.2.131"},

		{name: "destination of the interface's length", cfg: Config{1, 25}, addr: "10.1.2.130/25", skip: "25 is not shorter"},
		{name: "longer destination", cfg: Config{1, 26}, addr: "10.1.2.130/25", skip: "26 is not shorter"},
		{name: "host route", cfg: Config{1, 32}, addr: "10.1.2.130/25", skip: "32 is not shorter"},
		{name: "just shorter", cfg: Config{1, 24}, addr: "10.1.2.130/25", want: "10.1.2.0/24 via 10.1.2.129"},
		{name: "destination length too large", cfg: Config{1, 33}, addr: "10.1.2.130/25", skip: "33 is not within 0 to 32"},
		{name: "negative destination length", cfg: Config{1, -1}, addr: "10.1.2.130/25", skip: "-1 is not within 0 to 32"},

		{name: "offset 0 is the network", cfg: Config{0, 19}, addr: "10.1.2.130/25", skip: "offset 0 is not within 1 to 126"},
		{name: "last host", cfg: Config{126, 19}, addr: "10.1.2.130/25", want: "10.1.0.0/19 via 10.1.2.254"},
		{name: "broadcast", cfg: Config{127, 19}, addr: "10.1.2.130/25", skip: "offset 127 is not within 1 to 126"},
		{name: "next network", cfg: Config{129, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "offset 2^32", cfg: Config{1 << 32, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "offset 2^32+1 does not wrap", cfg: Config{1<<32 + 1, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "offset -1 is not the network before", cfg: Config{-1, 19}, addr: "10.1.2.130/25", skip: "offset -1 is not within 1 to 126"},
		{name: "offset 1-2^32 does not wrap", cfg: Config{1 - 1<<32, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "largest offset", cfg: Config{math.MaxInt64, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "smallest offset", cfg: Config{math.MinInt64, 19}, addr: "10.1.2.130/25", skip: "not within"},
		{name: "own address", cfg: Config{2, 19}, addr: "10.1.2.130/25", skip: "10.1.2.130 is the interface's own address"},
		{name: "first of a /30", cfg: Config{1, 29}, addr: "10.1.2.6/30", want: "10.1.2.0/29 via 10.1.2.5"},
		{name: "last of a /30", cfg: Config{2, 29}, addr: "10.1.2.5/30", want: "10.1.2.0/29 via 10.1.2.6"},
		{name: "past a /30", cfg: Config{3, 29}, addr: "10.1.2.5/30", skip: "offset 3 is not within 1 to 2"},
		{name: "/24", cfg: Config{254, 16}, addr: "192.0.2.9/24", want: "192.0.0.0/16 via 192.0.2.254"},
		{name: "/16", cfg: Config{256, 12}, addr: "172.20.9.9/16", want: "172.16.0.0/12 via 172.20.1.0"},
		{name: "/1, highest half", cfg: Config{1<<31 - 2, 0}, addr: "203.0.113.1/1", want: "0.0.0.0/0 via 255.255.255.254"},
		{name: "/0 has no wider network", cfg: Config{1, 0}, addr: "10.1.2.3/0", skip: "0 is not shorter than the interface's 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			routes, skips := Derive(tt.cfg, []Address{addr(t, tt.addr)})
			if tt.skip != "" {
				require.Empty(t, routes)
				require.Len(t, skips, 1)
				require.Contains(t, skips[0].Reason, tt.skip)
				require.Equal(t, tt.addr, skips[0].Address.String())
				return
			}
			require.Empty(t, skips)
			require.Len(t, routes, 1)
			require.Equal(t, tt.want, routes[0].String())
			require.Equal(t, addr(t, tt.addr).Local, routes[0].From)
		})
	}
}

// Addresses stand for themselves: those without a route do not keep others from theirs, and IPv6 is not looked at.
func TestDeriveSeveral(t *testing.T) {
	var addrs []Address
	for _, s := range []string{
		"10.1.2.130/25", "2001:db8::5/64", "10.1.3.1/32", "10.1.2.5/31", "fe80::1/64", "10.1.4.2/29", "10.1.4.3/29",
	} {
		addrs = append(addrs, addr(t, s))
	}
	routes, skips := Derive(Config{NexthopOffset: 1, DstPrefixLen: 19}, addrs)
	var got []string
	for _, r := range routes {
		got = append(got, fmt.Sprintf("from %s: %s", r.From, r))
	}
	require.Equal(t, []string{
		"from 10.1.2.130: 10.1.0.0/19 via 10.1.2.129",
		"from 10.1.2.5: 10.1.0.0/19 via 10.1.2.4",
		"from 10.1.4.2: 10.1.0.0/19 via 10.1.4.1",
		"from 10.1.4.3: 10.1.0.0/19 via 10.1.4.1",
	}, got)
	require.Len(t, skips, 1)
	require.Equal(t, "10.1.3.1/32", skips[0].Address.String())
}

func TestDeriveRefusesNonsense(t *testing.T) {
	four, six := netip.MustParseAddr("10.1.2.5"), netip.MustParseAddr("2001:db8::1")
	for _, a := range []Address{
		{Local: four, PrefixLen: -1},
		{Local: four, PrefixLen: 33},
		{Local: four, Peer: six, PrefixLen: 31},
	} {
		routes, skips := Derive(Config{NexthopOffset: 1}, []Address{a})
		require.Empty(t, routes, "%+v", a)
		require.Len(t, skips, 1, "%+v", a)
	}
	routes, skips := Derive(Config{NexthopOffset: 1}, []Address{{}, {Local: six, PrefixLen: 64}})
	require.Empty(t, routes)
	require.Empty(t, skips)
}

// requireSound checks what holds for every input.
func requireSound(t *testing.T, cfg Config, a Address) {
	t.Helper()
	routes, skips := Derive(cfg, []Address{a})
	if !a.Local.Is4() {
		require.Empty(t, routes)
		require.Empty(t, skips)
		return
	}
	require.Equal(t, 1, len(routes)+len(skips), "%+v of %s", cfg, a)
	for _, s := range skips {
		require.NotEmpty(t, s.Reason)
	}
	for _, r := range routes {
		require.Equal(t, a.Local, r.From)
		require.NotEqual(t, a.Local, r.NextHop, "%+v of %s: %s", cfg, a, r)
		require.Equal(t, cfg.DstPrefixLen, r.Dst.Bits())
		require.Equal(t, r.Dst.Masked(), r.Dst)
		require.True(t, r.Dst.Contains(a.Local), "%+v of %s: %s", cfg, a, r)
		require.Less(t, r.Dst.Bits(), a.PrefixLen)
		require.LessOrEqual(t, a.PrefixLen, 31)
		if a.PrefixLen == 31 && a.Peer.IsValid() {
			require.Equal(t, a.Peer, r.NextHop)
			continue
		}
		network := netip.PrefixFrom(a.Local, a.PrefixLen).Masked()
		require.True(t, network.Contains(r.NextHop), "%+v of %s: %s leaves %s", cfg, a, r, network)
		if a.PrefixLen <= 30 {
			require.NotEqual(t, network.Addr(), r.NextHop)
			host := toUint32(r.NextHop) - toUint32(network.Addr())
			require.Equal(t, cfg.NexthopOffset, int64(host))
			require.NotEqual(t, int64(1)<<(32-a.PrefixLen)-1, int64(host), "%s is the broadcast address", r.NextHop)
		}
	}
}

func TestDeriveProperties(t *testing.T) {
	for prefixLen := 0; prefixLen <= 32; prefixLen++ {
		for dst := 0; dst <= 32; dst++ {
			size := int64(1) << (32 - prefixLen)
			for _, offset := range []int64{math.MinInt64, -size, -1, 0, 1, 2, size - 2, size - 1, size, size + 1, 1 << 32, math.MaxInt64, rand.Int64N(size)} {
				a := Address{Local: fromUint32(rand.Uint32()), PrefixLen: prefixLen}
				requireSound(t, Config{offset, dst}, a)
				a.Peer = fromUint32(rand.Uint32())
				requireSound(t, Config{offset, dst}, a)
			}
		}
	}
}

// Both ends of a /31 are each other's next hop.
func TestDeriveBothEndsOf31(t *testing.T) {
	for range 1000 {
		a := fromUint32(rand.Uint32())
		routes, _ := Derive(Config{DstPrefixLen: 8}, []Address{{Local: a, PrefixLen: 31}})
		require.Len(t, routes, 1)
		back, _ := Derive(Config{DstPrefixLen: 8}, []Address{{Local: routes[0].NextHop, PrefixLen: 31}})
		require.Len(t, back, 1)
		require.Equal(t, a, back[0].NextHop)
		require.Equal(t, netip.PrefixFrom(a, 31).Masked(), netip.PrefixFrom(routes[0].NextHop, 31).Masked())
	}
}

func FuzzDerive(f *testing.F) {
	f.Add(int64(1), 19, []byte{10, 1, 2, 130}, []byte{}, 25)
	f.Add(int64(0), 16, []byte{10, 1, 2, 5}, []byte{10, 1, 2, 4}, 31)
	f.Add(int64(1<<32), 0, []byte{255, 255, 255, 255}, []byte{}, 1)
	f.Add(int64(-1), 0, netip.MustParseAddr("2001:db8::1").AsSlice(), []byte{}, 64)
	f.Fuzz(func(t *testing.T, offset int64, dst int, local, peer []byte, prefixLen int) {
		a := Address{PrefixLen: prefixLen}
		a.Local, _ = netip.AddrFromSlice(local)
		a.Peer, _ = netip.AddrFromSlice(peer)
		if a.Peer == a.Local {
			a.Peer = netip.Addr{}
		}
		requireSound(t, Config{offset, dst}, a)
	})
}

func BenchmarkDerive(b *testing.B) {
	addrs := []Address{addr(b, "10.1.2.130/25"), addr(b, "10.1.2.5/31"), addr(b, "2001:db8::5/64")}
	b.ReportAllocs()
	for b.Loop() {
		Derive(Config{NexthopOffset: 1, DstPrefixLen: 19}, addrs)
	}
}
