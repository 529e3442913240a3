// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostnet

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

type fakeSource struct {
	links    []Link
	routes   []int
	addrs    []Address
	linkErr  error
	routeErr error
	addrErr  error
}

func (f fakeSource) Links() ([]Link, error)            { return f.links, f.linkErr }
func (f fakeSource) DefaultRouteLinks() ([]int, error) { return f.routes, f.routeErr }
func (f fakeSource) Addresses() ([]Address, error)     { return f.addrs, f.addrErr }

func TestReason(t *testing.T) {
	nodeIPs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	src := fakeSource{
		links: []Link{
			{Index: 1, Name: "lo"},
			{Index: 2, Name: "uplink"},
			{Index: 3, Name: "ens1f0v0", Master: 10},
			{Index: 4, Name: "ens1f0v1"},
			{Index: 5, Name: "ens1f0v2"},
			{Index: 6, Name: "ens1f0v3", Master: 99},
			{Index: 7, Name: "ens1f0v4"},
			{Index: 8, Name: "ens1f0v5"},
			{Index: 10, Name: "br0"},
			{Index: 11, Name: "vlan5", Lower: 4},
		},
		routes: []int{2, 10},
		addrs: []Address{
			{Index: 2, Addr: netip.MustParseAddr("192.0.2.1")},
			{Index: 5, Addr: netip.MustParseAddr("2001:db8::1")},
			{Index: 8, Addr: netip.MustParseAddr("::ffff:192.0.2.1")},
			{Index: 7, Addr: netip.MustParseAddr("192.0.2.2")},
		},
	}
	view, err := Scan(src, nodeIPs)
	require.NoError(t, err)
	for index, want := range map[int]string{
		1:  "",
		2:  "carries a default route",
		3:  "has the upper device br0",
		4:  "has the upper device vlan5",
		5:  "has the node's address 2001:db8::1",
		6:  "has the upper device with index 99",
		7:  "",
		8:  "has the node's address 192.0.2.1",
		10: "carries a default route",
		11: "",
		12: "",
	} {
		require.Equal(t, want, view.Reason(index), "index %d", index)
	}
}

// A guard that cannot see must say so: an empty view would offer the node's uplink.
func TestScanErrors(t *testing.T) {
	boom := errors.New("boom")
	for name, src := range map[string]fakeSource{
		"list links":          {linkErr: boom},
		"list default routes": {routeErr: boom},
		"list addresses":      {addrErr: boom},
	} {
		view, err := Scan(src, nil)
		require.Nil(t, view)
		require.ErrorIs(t, err, boom)
		require.ErrorContains(t, err, name)
	}
}
