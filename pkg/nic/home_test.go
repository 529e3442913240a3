// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

func open(t *testing.T, path string) *Place {
	t.Helper()
	p, err := Open(slog.New(slog.DiscardHandler), path, "")
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p
}

// makeNIC makes a link of the host that is known by its alias, and returns what it is and has.
func makeNIC(t *testing.T, host *Place, name string) (Identity, State) {
	t.Helper()
	alias := "mark of " + name
	require.NoError(t, host.Add("veth", name, 0))
	link, err := host.ByName(name)
	require.NoError(t, err)
	require.NoError(t, host.Change(link.Attrs().Index, rtlink.Change{Alias: &alias}))
	link, err = host.ByName(name)
	require.NoError(t, err)
	return Identity{Kind: "veth", Alias: alias}, Read(link)
}

func send(t *testing.T, from, to *Place, id Identity, name string) {
	t.Helper()
	link, err := from.Find(id, nil)
	require.NoError(t, err)
	require.NoError(t, from.Change(link.Attrs().Index, rtlink.Change{To: to.NS, Name: name}))
}

func TestFetch(t *testing.T) {
	host, pod, nested := open(t, testenv.NetNS(t)), open(t, testenv.NetNS(t)), open(t, testenv.NetNS(t))
	require.NoError(t, unix.Unmount(nested.NS.Path, unix.MNT_DETACH), "nothing but this process's descriptor leads to it")
	id, want := makeNIC(t, host, "d0")
	fetch := func(named ...string) {
		t.Helper()
		link, err := host.Fetch(t.Context(), Search{ID: id, Want: want, Named: named})
		require.NoError(t, err)
		require.True(t, id.Matches(link))
		require.Equal(t, "d0", link.Attrs().Name, "the move gives the name")
		taken, err := host.Restore(link, want)
		require.NoError(t, err)
		require.Empty(t, taken)
		link, err = host.ByName("d0")
		require.NoError(t, err)
		require.Equal(t, want, Read(link))
	}
	fetch() // it is home

	send(t, host, pod, id, "net1")
	fetch("", host.NS.Path, pod.NS.Path+"-gone", pod.NS.Path)

	// A pod may move it into a namespace of its own.
	send(t, host, pod, id, "net1")
	send(t, pod, nested, id, "net2")
	fetch(pod.NS.Path)

	// What is not accepted is left where it is, and is not taken for gone or lost.
	send(t, host, nested, id, "net1")
	link, err := host.Fetch(t.Context(), Search{ID: id, Want: want, Accept: func(ns netnamespace.ID, _ netlink.Link) bool {
		return ns != nested.NS.ID
	}})
	require.NoError(t, err)
	require.Nil(t, link)
	fetch()
}

// Who has no time left has not looked everywhere: that is not to be taken for a link that is gone.
func TestFetchWithoutTime(t *testing.T) {
	host, pod := open(t, testenv.NetNS(t)), open(t, testenv.NetNS(t))
	id, want := makeNIC(t, host, "d0")
	send(t, host, pod, id, "net1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := host.Fetch(ctx, Search{ID: id, Want: want})
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorIs(t, err, context.Canceled)
}

func TestFetchOfALinkThatDied(t *testing.T) {
	host := open(t, testenv.NetNS(t))
	id, want := makeNIC(t, host, "d0")
	link, err := host.Find(id, nil)
	require.NoError(t, err)
	require.NoError(t, host.Delete(link.Attrs().Index))
	link, err = host.Fetch(t.Context(), Search{ID: id, Want: want})
	require.NoError(t, err)
	require.Nil(t, link)
}

func TestRestoreNames(t *testing.T) {
	host := open(t, testenv.NetNS(t))
	id, want := makeNIC(t, host, "d0")
	want.AltNames = []string{"alt0", "alt1"}
	link, err := host.Find(id, nil)
	require.NoError(t, err)
	require.NoError(t, host.Change(link.Attrs().Index, rtlink.Change{Name: "net1"}))
	require.NoError(t, host.AddAltName(link.Attrs().Index, "d0"), "its own name as an alternative one")
	_, _ = makeNIC(t, host, "other")
	other, err := host.ByName("other")
	require.NoError(t, err)
	require.NoError(t, host.AddAltName(other.Attrs().Index, "alt1"))

	restore := func(name string, taken ...string) {
		t.Helper()
		link, err := host.Find(id, nil)
		require.NoError(t, err)
		got, err := host.Restore(link, want)
		require.NoError(t, err)
		require.ElementsMatch(t, taken, got)
		link, err = host.Find(id, nil)
		require.NoError(t, err)
		require.Equal(t, name, link.Attrs().Name)
	}
	restore("d0", "alt1")
	require.NoError(t, host.Change(link.Attrs().Index, rtlink.Change{Name: "net1"}))
	require.NoError(t, host.Change(other.Attrs().Index, rtlink.Change{Name: "d0"}))
	restore("netdrv0", "d0", "alt1")
	restore("netdrv0", "d0", "alt1")
	require.NoError(t, host.Delete(other.Attrs().Index))
	restore("d0")
	for _, name := range []string{"eth%d", "a/b", "..", "lo"} {
		forged := want
		forged.Name = name
		link, err := host.Find(id, nil)
		require.NoError(t, err)
		taken, err := host.Restore(link, forged)
		require.NoError(t, err)
		require.Equal(t, []string{name}, taken)
		restore("d0")
	}
}

// What was not known when the state was recorded stays as it is.
func TestRestoreLeavesWhatIsNotKnown(t *testing.T) {
	host := open(t, testenv.NetNS(t))
	id, _ := makeNIC(t, host, "d0")
	link, err := host.Find(id, nil)
	require.NoError(t, err)
	group, length := uint32(5), uint32(77)
	require.NoError(t, host.Change(link.Attrs().Index, rtlink.Change{
		Group: &group, TxQLen: &length, MTU: 1300, Flags: unix.IFF_PROMISC, Mask: unix.IFF_PROMISC,
	}))
	link, err = host.Find(id, nil)
	require.NoError(t, err)
	before := Read(link)
	_, err = host.Restore(link, State{Promisc: true})
	require.NoError(t, err)
	link, err = host.Find(id, nil)
	require.NoError(t, err)
	require.Equal(t, before, Read(link))
}

// sysfs says whether a device has a link in any namespace, whichever driver it is bound to.
func TestLinkless(t *testing.T) {
	root := t.TempDir()
	p := &Place{sysfs: root}
	id := PCI("0000:03:00.1")
	require.Empty(t, p.linkless(id), "sysfs cannot be read")
	dir := filepath.Join(root, "bus/pci/devices", id.Device)
	require.NoError(t, os.MkdirAll(filepath.Dir(dir), 0o755))
	require.Equal(t, "the device is not on the pci bus any more", p.linkless(id))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "net"), 0o755))
	require.NoError(t, os.Symlink("../../../bus/pci/drivers/mlx5_vfio_pci", filepath.Join(dir, "driver")))
	require.Empty(t, p.linkless(id), "a link in another namespace")
	require.NoError(t, os.Remove(filepath.Join(dir, "net")))
	require.Equal(t, "the device is bound to mlx5_vfio_pci and has no interface", p.linkless(id))
	require.NoError(t, os.Remove(filepath.Join(dir, "driver")))
	require.Equal(t, "the device has no driver", p.linkless(id))
	for _, forged := range []Identity{PCI("../../class"), {Bus: "..", Device: "x"}, {Bus: "pci", Device: ".."}, {Bus: "pci", Device: "a/b"}} {
		require.Empty(t, p.deviceDir(forged))
	}
}
