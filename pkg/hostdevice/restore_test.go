// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/nic"
)

// longName is an alternative name that is too long for an interface name.
const longName = "fabric-port-of-rack-7"

// adorn gives the NIC everything that it has to get back.
func (b *bed) adorn() {
	b.t.Helper()
	link := b.host.mustLink(nicName)
	require.NoError(b.t, b.host.LinkSetMTU(link, 1400))
	require.NoError(b.t, b.host.LinkSetAlias(link, "fabric port 7"))
	require.NoError(b.t, b.host.LinkSetGroup(link, 7))
	require.NoError(b.t, b.host.LinkSetTxQLen(link, 500))
	require.NoError(b.t, b.host.SetPromiscOn(link))
	for _, alt := range []string{"enp3s0f0", longName} {
		require.NoError(b.t, b.host.LinkAddAltName(link, alt))
	}
	b.host.address(nicName, "10.1.2.130/25", "10.1.2.131/25", "10.9.0.2 peer 10.9.0.1/30", "2001:db8::5/64")
	for _, addr := range []netlink.Addr{
		{IPNet: &net.IPNet{IP: net.IPv4(10, 5, 0, 1), Mask: net.CIDRMask(24, 32)}, Label: nicName + ":spare", Broadcast: net.IPv4(10, 5, 0, 77), Scope: unix.RT_SCOPE_LINK},
		{IPNet: &net.IPNet{IP: net.IPv4(10, 6, 0, 1), Mask: net.CIDRMask(24, 32)}, Broadcast: net.IPv4zero, Flags: unix.IFA_F_NOPREFIXROUTE},
		{IPNet: &net.IPNet{IP: net.ParseIP("2001:db8:1::5"), Mask: net.CIDRMask(64, 128)}, ValidLft: 100000, PreferedLft: 50000, Flags: unix.IFA_F_NODAD},
	} {
		require.NoError(b.t, b.host.AddrAdd(link, &addr))
	}
}

// withoutLifetimes makes snapshots of different seconds comparable.
func withoutLifetimes(snapshot []string) []string {
	out := make([]string, len(snapshot))
	for i, s := range snapshot {
		var st hostState
		if err := json.Unmarshal([]byte(s), &st); err != nil {
			panic(err) // it was made by this test
		}
		for j, a := range st.Addresses {
			if a.Valid != forever {
				st.Addresses[j].Valid, st.Addresses[j].Preferred = 1, 1
			}
		}
		text, _ := json.Marshal(st)
		out[i] = string(text)
	}
	return out
}

// vandalise does to the interface what a pod with the right to can do.
func (b *bed) vandalise() {
	b.t.Helper()
	link := b.pod.mustLink(b.ifName)
	require.NoError(b.t, b.pod.LinkSetDown(link))
	require.NoError(b.t, b.pod.LinkSetName(link, "stolen"))
	require.NoError(b.t, b.pod.LinkSetMTU(link, 1280))
	require.NoError(b.t, b.pod.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 1}))
	require.NoError(b.t, b.pod.LinkSetGroup(link, 8))
	require.NoError(b.t, b.pod.LinkSetTxQLen(link, 3))
	require.NoError(b.t, b.pod.SetPromiscOff(link))
	require.NoError(b.t, b.pod.LinkSetAllmulticastOn(link))
	require.NoError(b.t, b.pod.LinkSetARPOff(link))
	require.NoError(b.t, b.pod.LinkDelAltName(link, "enp3s0f0"))
	// A name of the host's must not keep the NIC in the pod.
	for _, alt := range []string{"uplink0", "uplink-of-the-whole-node", nicName, "pods-own"} {
		require.NoError(b.t, b.pod.LinkAddAltName(link, alt))
	}
	addrs, err := b.pod.AddrList(link, netlink.FAMILY_ALL)
	require.NoError(b.t, err)
	for _, a := range addrs {
		// A primary address takes its secondary ones with it.
		if err := b.pod.AddrDel(link, &a); !errors.Is(err, unix.EADDRNOTAVAIL) {
			require.NoError(b.t, err)
		}
	}
	b.pod.address("stolen", "203.0.113.1/24")
	require.NoError(b.t, b.pod.LinkSetUp(link))
}

// retune does what a pod can do to an interface and earlier versions did not record.
func (b *bed) retune(name string) {
	b.t.Helper()
	link := b.pod.mustLink(name)
	require.NoError(b.t, b.pod.LinkSetGSOMaxSize(link, 10000))
	require.NoError(b.t, b.pod.LinkSetGSOMaxSegs(link, 2))
	require.NoError(b.t, b.pod.LinkSetGROMaxSize(link, 10000))
	settings := maps.Clone(b.pod.settings(name))
	settings["features"] = slices.Clone(settings["features"])
	for i := 1; i < len(settings["features"]); i += 2 {
		settings["features"][i] = 0
	}
	require.NoError(b.t, b.pod.inPlace(func(p *nic.Place) error { return p.PutBack(b.pod.mustLink(name), settings) }))
}

// inPlace runs a function with the namespace as a place.
func (s *space) inPlace(f func(*nic.Place) error) error {
	s.t.Helper()
	place, err := nic.Open(slog.New(slog.DiscardHandler), s.path, "")
	require.NoError(s.t, err)
	defer place.Close()
	return f(place)
}

// settings are what ethtool sets of a link.
func (s *space) settings(name string) (settings nic.Settings) {
	s.t.Helper()
	require.NoError(s.t, s.inPlace(func(p *nic.Place) (err error) {
		settings, err = p.Settings(s.mustLink(name))
		return err
	}))
	return settings
}

// Everything that the NIC had comes back, whatever the pod did to it, also if the runtime calls twice.
func TestEverythingIsRestored(t *testing.T) {
	t.Parallel()
	for _, sabotage := range []bool{false, true} {
		b := newBed(t)
		b.adorn()
		b.host.veth("uplink0", b.leaf, "port2")
		require.NoError(t, b.host.LinkAddAltName(b.host.mustLink("uplink0"), "uplink-of-the-whole-node"))
		before, settings := withoutLifetimes(b.host.snapshot()), b.host.settings(nicName)
		log := b.must("ADD", b.single(routeFields(1, 19)))
		require.Contains(t, log, "level=INFO")
		if sabotage {
			b.vandalise()
			b.retune("stolen")
		}
		b.must("DEL", b.single())
		require.Equal(t, before, withoutLifetimes(b.host.snapshot()))
		require.Equal(t, settings, b.host.settings(nicName))
		require.Empty(t, b.recorded())
		for _, a := range mustState(t, b.host, nicName).Addresses {
			if a.Local.String() == "2001:db8:1::5" {
				require.InDelta(t, 100000, float64(a.Valid), 600)
				require.InDelta(t, 50000, float64(a.Preferred), 600)
			}
		}
		b.must("DEL", b.single())
		require.Equal(t, before, withoutLifetimes(b.host.snapshot()))
	}
}

// What an earlier version has recorded has no settings, and a setting that the driver refuses is told of.
func TestRecordsWithoutSettings(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	file := filepath.Join(b.stateDir, "attachments", attachment{"c1", "net1"}.file())
	change := func(edit func(nic.Settings) nic.Settings) {
		t.Helper()
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		rec, err := decodeRecord(data)
		require.NoError(t, err)
		rec.Settings = edit(rec.Settings)
		data, err = rec.encode()
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, data, 0o600))
	}
	b.must("ADD", b.single())
	change(func(s nic.Settings) nic.Settings {
		require.NotEmpty(t, s)
		return nil
	})
	b.must("DEL", b.single())
	b.requireHome(before)

	b.must("ADD", b.single())
	change(func(s nic.Settings) nic.Settings {
		s["flow rules"] = []uint32{7}
		return s
	})
	for range maxRefusals - 1 {
		_, _, failure := b.run(b.call("DEL", b.single()))
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrTryAgainLater), int(failure.Code))
		require.Contains(t, failure.Msg, "put back the flow rules")
	}
	require.Contains(t, b.must("DEL", b.single()), "put back the flow rules")
	b.requireHome(before)
}

// The modes that take frames which are not the NIC's own are the host's to choose, and come back as they were.
func TestModesAreTheHosts(t *testing.T) {
	t.Parallel()
	set := map[bool]func(*space, netlink.Link) error{
		true: func(s *space, link netlink.Link) error {
			return errors.Join(s.SetPromiscOn(link), s.LinkSetAllmulticastOn(link))
		},
		false: func(s *space, link netlink.Link) error {
			return errors.Join(s.SetPromiscOff(link), s.LinkSetAllmulticastOff(link))
		},
	}
	for _, on := range []bool{true, false} {
		b := newBed(t)
		require.NoError(t, set[on](b.host, b.host.mustLink(nicName)))
		before := b.host.snapshot()
		b.must("ADD", b.single())
		require.NoError(t, set[!on](b.pod, b.pod.mustLink("net1")))
		require.NoError(t, b.pod.LinkSetAlias(b.pod.mustLink("net1"), "the pod's"))
		b.must("DEL", b.single())
		b.requireHome(before)
		state := mustState(t, b.host, nicName)
		require.Equal(t, on, state.Promisc)
		require.Equal(t, on, state.AllMulti)
	}
}

// The kernel has put the NIC on the host under the pod's name, and another link has its own. It does not keep the pod's.
func TestThrownHomeWithoutItsName(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.must("ADD", b.single())
	b.throwHome()
	b.host.veth(nicName, b.leaf, "port2")
	_, _, failure := b.run(b.call("DEL", b.single()))
	require.NotNil(t, failure)
	require.Contains(t, failure.Msg, "is on the host as netdrv0")
	require.Nil(t, b.host.link("net1"))
	require.NotEmpty(t, mustState(t, b.host, "netdrv0").Addresses)
}

func mustState(t *testing.T, s *space, name string) hostState {
	t.Helper()
	place, err := nic.Open(slog.New(slog.DiscardHandler), s.path, "")
	require.NoError(t, err)
	defer place.Close()
	link, err := place.ByName(name)
	require.NoError(t, err)
	st, err := readState(place, link)
	require.NoError(t, err)
	return st
}

// A pod's XDP program does not come home with the NIC, and the host's own is not taken off by an ADD that failed.
func TestXDP(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	prog := testenv.XDP(t)
	attach := func(s *space, name string, prog int) {
		t.Helper()
		link := s.mustLink(name)
		s.do(func() error { return netlink.LinkSetXdpFdWithFlags(link, prog, nl.XDP_FLAGS_SKB_MODE) })
	}
	before := b.host.snapshot()
	b.must("ADD", b.single())
	attach(b.pod, "net1", prog)
	require.True(t, b.pod.mustLink("net1").Attrs().Xdp.Attached)
	b.must("DEL", b.single())
	b.requireHome(before)
	require.False(t, b.host.mustLink(nicName).Attrs().Xdp.Attached)

	attach(b.host, nicName, prog)
	call := b.call("ADD", b.single())
	call.path = t.TempDir() // no sub-plugin
	_, _, failure := b.run(call)
	require.NotNil(t, failure)
	require.Equal(t, int(types.ErrPluginNotAvailable), int(failure.Code))
	require.True(t, b.host.mustLink(nicName).Attrs().Xdp.Attached)
	require.Empty(t, b.recorded())
}

// A program that a process of the pod's holds cannot be taken off. That is said and keeps nothing.
func TestXDPThatIsHeld(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	prog := testenv.XDP(t)
	before := b.host.snapshot()
	b.must("ADD", b.single())
	attr := struct{ progFD, ifindex, attachType, flags uint32 }{uint32(prog), uint32(b.pod.mustLink("net1").Attrs().Index), unix.BPF_XDP, nl.XDP_FLAGS_SKB_MODE}
	var held uintptr
	b.pod.do(func() error {
		var errno unix.Errno
		held, _, errno = unix.Syscall(unix.SYS_BPF, unix.BPF_LINK_CREATE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
		if errno != 0 {
			return errno
		}
		return nil
	})
	log := b.must("DEL", b.single())
	require.Contains(t, log, "An XDP program stays on the link")
	require.Empty(t, b.recorded())
	require.True(t, b.host.mustLink(nicName).Attrs().Xdp.Attached)
	require.NoError(t, unix.Close(int(held)))
	require.Eventually(t, func() bool { return !b.host.mustLink(nicName).Attrs().Xdp.Attached }, patience, pollInterval)
	b.requireHome(before)
}

// A NIC that was down is down again.
func TestDownStaysDown(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	require.NoError(t, b.host.LinkSetDown(b.host.mustLink(nicName)))
	before := b.host.snapshot()
	b.must("ADD", b.single())
	require.True(t, isUp(b.pod.mustLink("net1")))
	b.must("DEL", b.single())
	b.requireHome(before)
	require.False(t, isUp(b.host.mustLink(nicName)))
}

// Another link has the NIC's name. The end fails, says so, goes on from there, and does not fail again and again.
func TestDelWhenNameIsTaken(t *testing.T) {
	t.Parallel()
	for _, removed := range []bool{true, false} {
		b := newBed(t)
		b.host.address(nicName, "10.1.2.130/25")
		before := b.host.snapshot()
		b.must("ADD", b.single())
		b.host.veth(nicName, b.leaf, "port2")

		_, _, failure := b.run(b.call("DEL", b.single()))
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrTryAgainLater), int(failure.Code))
		require.Contains(t, failure.Msg, "is on the host as netdrv0, but not as it was: another link is called eth1")
		require.NotEmpty(t, mustState(t, b.host, "netdrv0").Addresses, "home in everything else")
		require.Len(t, b.recorded(), 1)

		if removed {
			require.NoError(t, b.host.LinkDel(b.host.mustLink(nicName)))
			b.must("DEL", b.single())
			b.must("DEL", b.single())
			b.requireHome(before)
			continue
		}
		_, _, failure = b.run(b.call("DEL", b.single()))
		require.NotNil(t, failure)
		log := b.must("DEL", b.single())
		require.Contains(t, log, "The NIC is home and stays as it is")
		require.Empty(t, b.recorded())
		require.NotEmpty(t, mustState(t, b.host, "netdrv0").Addresses)
	}
}

// The kernel does not take back what was recorded. That too is said, and not again and again.
func TestDelWhenStateIsRefused(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	file := filepath.Join(b.stateDir, "attachments", attachment{"c1", "net1"}.file())
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	changed := strings.Replace(string(data), `"mtu":1500`, `"mtu":1000000`, 1)
	require.NotEqual(t, string(data), changed)
	require.NoError(t, os.WriteFile(file, []byte(changed), 0o600))
	for range maxRefusals - 1 {
		_, _, failure := b.run(b.call("DEL", b.single()))
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrTryAgainLater), int(failure.Code))
		require.Contains(t, failure.Msg, "set MTU 1000000")
		require.Equal(t, before, b.host.snapshot(), "all else is as it was")
	}
	require.Contains(t, b.must("DEL", b.single()), "set MTU 1000000")
	b.requireHome(before)
}
