// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// neighbour returns the hardware address that a namespace has for an address on a link.
func (ns *testNS) neighbour(index int, addr string) string {
	ns.tb.Helper()
	list, err := ns.NeighList(index, netlink.FAMILY_ALL)
	require.NoError(ns.tb, err)
	for _, n := range list {
		if n.IP.Equal(net.ParseIP(addr)) {
			return n.HardwareAddr.String()
		}
	}
	return ""
}

// TestAnnounce corrects what a neighbour knows of addresses that another link had before, by frames that the kernel there
// understands.
func TestAnnounce(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	peer := f.host.link(dev.peer)
	require.NoError(t, f.host.LinkSetUp(peer))
	index := peer.Attrs().Index
	for _, a := range []string{"192.0.2.99/24", "2001:db8::99/64"} {
		require.NoError(t, f.host.AddrAdd(peer, &netlink.Addr{IPNet: netipx.PrefixIPNet(netip.MustParsePrefix(a))}))
	}
	config, err := types.ParseDeviceConfig([]byte(`{"podIfName": "net1", "addresses": ["192.0.2.10/24", "2001:db8::10/64"]}`))
	require.NoError(t, err)
	att, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	stale := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	makeStale := func() {
		for _, a := range config.InPod().Addresses {
			require.NoError(t, f.host.NeighSet(&netlink.Neigh{LinkIndex: index, IP: a.Addr().AsSlice(), HardwareAddr: stale, State: netlink.NUD_STALE}))
		}
	}

	makeStale()
	a := NewAnnouncer(slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	a.Announce(att, types.DeviceConfig{})
	a.Announce(att, config)
	for range 1 + len(announceAgain) {
		for _, addr := range config.InPod().Addresses {
			require.Eventually(t, func() bool { return f.host.neighbour(index, addr.Addr().String()) == att.MAC }, 10*time.Second, 10*time.Millisecond, "%s", addr)
		}
		makeStale()
	}
	// A link that is gone is not announced again.
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	a.Announce(att, config)
	gone := *att
	gone.NetNS = "/no/such/path"
	a.Announce(&gone, config)
	cancel()
	require.NoError(t, <-done)
	require.Empty(t, a.send([]*announcement{{netns: "/no/such/path"}, {netns: f.pod.path, index: att.IfIndex, mac: stale, addrs: config.InPod().Addresses}}))
}

// TestSendAnnouncement is what takes a capability that nothing else does.
func TestSendAnnouncement(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkSetUp(f.host.link(dev.peer)))
	config := withAddresses(false)
	att, err := f.Attach(f.ctx, f.pod.path, dev, config)
	require.NoError(t, err)
	mac, err := net.ParseMAC(att.MAC)
	require.NoError(t, err)
	require.NoError(t, (&announcement{netns: f.pod.path, index: att.IfIndex, mac: mac, addrs: config.InPod().Addresses}).send(slog.New(slog.DiscardHandler)))
}

// TestAnnounceWaitsForCarrier: nothing would leave a link that has no carrier yet. One that gets none is given up.
func TestAnnounceWaitsForCarrier(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	att, err := f.Attach(f.ctx, f.pod.path, dev, withAddresses(false))
	require.NoError(t, err)
	mac, err := net.ParseMAC(att.MAC)
	require.NoError(t, err)
	a := NewAnnouncer(slog.New(slog.DiscardHandler))
	now := time.Now()
	waits := &announcement{netns: f.pod.path, index: att.IfIndex, mac: mac, addrs: withAddresses(false).InPod().Addresses, due: now, end: now.Add(time.Hour)}
	givenUp := *waits
	givenUp.end = now
	require.Equal(t, []*announcement{waits}, a.send([]*announcement{waits, &givenUp}))
	require.Zero(t, waits.sent)
	require.True(t, waits.due.After(now))
	require.NoError(t, f.host.LinkSetUp(f.host.link(dev.peer)))
	require.Eventually(t, func() bool {
		waits.due = now
		return len(a.send([]*announcement{waits})) == 1 && waits.sent == 1
	}, 10*time.Second, 10*time.Millisecond)
}
