// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

func isUp(l netlink.Link) bool { return l.Attrs().RawFlags&unix.IFF_UP != 0 }

func TestAttachAndDetachAreOneChangeEach(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")

	att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.Equal(t, []string{"RTM_NEWLINK"}, f.requests.changes())
	link := f.pod.link("net1")
	require.True(t, dev.id.Matches(link))
	require.True(t, isUp(link))
	require.Empty(t, f.host.names())
	require.Equal(t, &types.Attachment{
		NetNS: f.pod.path, IfName: "net1", IfIndex: link.Attrs().Index, MAC: dev.host.MAC,
	}, att)

	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.Equal(t, []string{"RTM_NEWLINK"}, f.requests.changes())
	f.host.requireHome(dev)
	require.Empty(t, f.pod.names())
}

func TestRepeatedAttachAndDetachChangeNothing(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")

	first, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	f.requests.changes()
	again, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.Equal(t, first, again)
	require.Empty(t, f.requests.changes())

	require.NoError(t, f.pod.LinkSetDown(f.pod.link("net1")))
	require.NoError(t, f.pod.LinkSetName(f.pod.link("net1"), "other"))
	again, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.Equal(t, first, again)
	require.True(t, isUp(f.pod.link("net1")))

	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.requests.changes()
	for _, path := range []string{f.pod.path, "", f.host.path, filepath.Join(t.TempDir(), "gone")} {
		require.NoError(t, f.Detach(f.ctx, path, dev), "path %q", path)
		require.Empty(t, f.requests.changes(), "path %q", path)
		f.host.requireHome(dev)
	}
}

func TestAttachWithoutNameKeepsTheHosts(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: ""})
	require.NoError(t, err)
	require.Equal(t, "v0", att.IfName)
	require.True(t, isUp(f.pod.link("v0")))

	other := f.host.addLink("v0")
	_, err = f.Attach(f.ctx, f.pod.path, other, types.DeviceConfig{PodIfName: ""})
	require.ErrorContains(t, err, `interface name "v0" is taken`)
	f.host.requireHome(other)
}

// Of hardware the very link is moved that was asked for. lo is the one link without a kind that every namespace has.
func TestAttachRefusesAnotherLink(t *testing.T) {
	f := setup(t)
	dev := device{name: "nic", id: nic.Identity{Index: 1}, host: nic.Read(f.host.link("lo"))}
	index, err := f.HostIndex(f.ctx, dev)
	require.NoError(t, err)
	require.Equal(t, 1, index)
	for _, former := range []int{0, 7} {
		_, err = f.Mover.Attach(f.ctx, f.pod.path, dev, former, types.DeviceConfig{PodIfName: "net1"})
		require.ErrorIs(t, err, ErrAnotherLink)
	}
	require.Empty(t, f.requests.changes())
	index, err = f.HostIndex(f.ctx, device{name: "gone", id: nic.Identity{Index: 9}})
	require.NoError(t, err)
	require.Zero(t, index)
}

func TestAttachRefusesTheHostsNamespace(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	// The same namespace by another path is no other namespace.
	fd, err := unix.Open(f.host.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	for _, path := range []string{f.host.path, numbered("/proc/self/fd/", fd)} {
		_, err := f.Attach(f.ctx, path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.ErrorIs(t, err, ErrHostNamespace)
		require.ErrorContains(t, err, "attach device v0")
		_, err = f.Where(f.ctx, path, dev)
		require.ErrorIs(t, err, ErrHostNamespace)
	}
	f.host.requireHome(dev)
	require.Empty(t, f.requests.changes())
}

func TestAttachRefusesWhatIsNoNamespace(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{"", "/nonexistent", file, fifo, "/proc/self/ns/mnt"} {
		_, err := f.Attach(f.ctx, path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.ErrorContains(t, err, "is not a network namespace", "path %q", path)
		seen, err := f.Where(f.ctx, path, dev)
		require.NoError(t, err)
		require.Equal(t, OnHost, seen.Place)
	}
	f.host.requireHome(dev)
}

func TestAttachRefusesBadNames(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	for _, name := range []string{"lo", "..", "a/b", "net%d", "sixteen-bytes-ab"} {
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: name})
		require.Error(t, err, name)
	}
	_, err := f.Attach(f.ctx, f.pod.path, device{name: "vfio"}, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorContains(t, err, "it has no link")
	require.NoError(t, f.Detach(f.ctx, f.pod.path, device{name: "vfio"}))
	f.host.requireHome(dev)
	require.Empty(t, f.requests.changes())
}

func TestAttachSaysWhenTheLinkIsGone(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkDel(f.host.link("v0")))
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, ErrLinkGone)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
}

func TestAttachEndsWithItsContext(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	_, err := f.Attach(ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, f.Detach(ctx, f.pod.path, dev), context.Canceled)
	f.host.requireHome(dev)
}

func TestNameTakenInPod(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkSetMTU(f.host.link("v0"), 1400))
	require.NoError(t, f.host.LinkSetUp(f.host.link("v0")))
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))
	dev = f.host.prepared(dev, "v0")
	f.pod.addLink("net1")

	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	var taken *NameTakenError
	require.ErrorAs(t, err, &taken)
	require.ErrorContains(t, err, `attach device v0: interface name "net1" is taken`)
	f.host.requireHome(dev)
	require.Equal(t, []string{"net1"}, f.pod.names())

	// The same when the name is taken after it was looked up: the kernel moves the link before it refuses the name.
	host, err := f.openHost()
	require.NoError(t, err)
	defer host.Close()
	pod, err := f.openPod(f.pod.path, host.NS.ID)
	require.NoError(t, err)
	defer pod.Close()
	link, err := host.Find(dev.id, nil)
	require.NoError(t, err)
	require.ErrorAs(t, f.moveIn(host, pod, link, "net1", types.DeviceConfig{}), &taken)
	require.ElementsMatch(t, []string{"net1", "v0"}, f.pod.names(), "the kernel does not behave as expected")
	require.NoError(t, f.undo(host, pod, home{device: "v0", id: dev.id, want: nic.Read(link)}, nil))
	f.host.requireHome(dev)
	require.Equal(t, []string{"net1"}, f.pod.names())

	require.NoError(t, f.pod.LinkDel(f.pod.link("net1")))
	_, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
}

func TestAltNamesThatClashInThePod(t *testing.T) {
	for _, hostNameClashes := range []bool{false, true} {
		f := setup(t)
		dev := f.host.addLink("v0")
		long := "an-alternative-name-that-is-too-long-for-an-interface-name"
		for _, alt := range []string{"net1", "other", long, "mine"} {
			require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), alt))
		}
		dev = f.host.prepared(dev, "v0")
		f.pod.addLink("other")
		require.NoError(t, f.pod.LinkAddAltName(f.pod.link("other"), long))
		if hostNameClashes {
			f.pod.addLink("v0")
		}

		att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)
		require.Equal(t, "net1", att.IfName)
		require.Equal(t, []string{"mine"}, f.pod.link("net1").Attrs().AltNames)
		require.Equal(t, []string{long}, f.pod.link("other").Attrs().AltNames)

		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
		f.host.requireHome(dev)
	}
}

func TestIndexTakenInThePod(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	for n := 0; ; n++ {
		f.pod.addLink(numbered("p", n))
		if link, err := f.pod.LinkByIndex(dev.id.Index); err == nil {
			require.False(t, dev.id.Matches(link))
			break
		}
	}
	att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.NotEqual(t, dev.id.Index, att.IfIndex)
	seen, err := f.Where(f.ctx, f.pod.path, dev)
	require.NoError(t, err)
	require.Equal(t, Sighting{Place: InPod, Attachment: att}, seen)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
}

func TestWhere(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	seen, err := f.Where(f.ctx, f.pod.path, dev)
	require.NoError(t, err)
	require.Equal(t, OnHost, seen.Place)

	want, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	for _, s := range []string{"192.0.2.4/24", "2001:db8::4/64"} {
		addr, err := netlink.ParseAddr(s)
		require.NoError(t, err)
		addr.Flags = unix.IFA_F_NODAD
		require.NoError(t, f.pod.AddrAdd(f.pod.link("net1"), addr))
		want.IPs = append(want.IPs, s)
	}
	seen, err = f.Where(f.ctx, f.pod.path, dev)
	require.NoError(t, err)
	require.Equal(t, Sighting{Place: InPod, Attachment: want}, seen)

	// Addresses do not come home, and are not there for the next pod.
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.Empty(t, att.IPs)
	f.requests.changes()

	// A pod makes a namespace of its own, as one that routes does.
	nested := newNS(t)
	into, err := netns.GetFromPath(nested.path)
	require.NoError(t, err)
	defer into.Close()
	require.NoError(t, unix.Unmount(nested.path, unix.MNT_DETACH), "held by a descriptor, as one that has lost its name")
	require.NoError(t, f.pod.LinkSetNsFd(f.pod.link("net1"), int(into)))
	for _, path := range []string{f.pod.path, ""} {
		seen, err = f.Where(f.ctx, path, dev)
		require.NoError(t, err)
		require.Equal(t, Sighting{Place: Elsewhere}, seen)
	}
	require.Equal(t, []string{"net1"}, nested.names())
	require.Empty(t, f.requests.changes())

	require.NoError(t, nested.LinkDel(nested.link("net1")))
	seen, err = f.Where(f.ctx, f.pod.path, dev)
	require.NoError(t, err)
	require.Equal(t, Gone, seen.Place)
	require.Contains(t, seen.Why, "was deleted")
}

// Of a PCI device sysfs tells whether it has a link at all: the directory net is there, and empty, while that is in a
// namespace which this sysfs does not show.
func TestWherePCIDeviceIs(t *testing.T) {
	f := setup(t)
	const addr = "0000:03:00.1"
	dev := device{name: "vf", id: nic.PCI(addr)}
	dir := filepath.Join(f.cfg.Sysfs, "bus/pci/devices", addr)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "net"), 0o755))
	where := func() Sighting {
		t.Helper()
		seen, err := f.Where(f.ctx, f.pod.path, dev)
		require.NoError(t, err)
		return seen
	}
	require.Equal(t, Sighting{Place: Elsewhere}, where())
	require.NoError(t, os.Remove(filepath.Join(dir, "net")))
	require.Equal(t, Sighting{Why: "the device has no driver"}, where())
	require.NoError(t, os.Symlink("../../drivers/vfio-pci", filepath.Join(dir, "driver")))
	require.Contains(t, where().Why, "bound to vfio-pci")
	require.NoError(t, os.RemoveAll(dir))
	require.Contains(t, where().Why, "not on the pci bus any more")
}

func TestNoDescriptorIsLeftOpen(t *testing.T) {
	f := setup(t)
	dev, blocked := f.host.addLink("v0"), f.host.addLink("v1")
	before := openFDs(t)
	for range 3 {
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)
		_, err = f.Attach(f.ctx, f.pod.path, blocked, types.DeviceConfig{PodIfName: "net1"})
		require.Error(t, err)
		_, err = f.Attach(f.ctx, f.host.path, blocked, types.DeviceConfig{PodIfName: "net1"})
		require.Error(t, err)
		_, err = f.Attach(f.ctx, "/proc/self/ns/mnt", blocked, types.DeviceConfig{PodIfName: "net1"})
		require.Error(t, err)
		_, err = f.Where(f.ctx, f.pod.path, dev)
		require.NoError(t, err)
		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
		require.NoError(t, f.Repair(f.ctx))
	}
	require.Equal(t, before, openFDs(t))

	// And so the namespace can die, and a link in it with it.
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	f.pod.die()
	require.Eventually(t, func() bool {
		_, err := f.host.LinkByName(dev.peer)
		return err != nil
	}, wait, poll, "something keeps the pod's namespace alive")
}

func TestManyAtOnce(t *testing.T) {
	f := setup(t)
	const n = 50
	devs := make([]device, n)
	for i := range devs {
		devs[i] = f.host.addLink(numbered("v", i))
	}
	var attach, detach errgroup.Group
	for i, dev := range devs {
		attach.Go(func() error {
			_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: numbered("net", i)})
			return err
		})
	}
	require.NoError(t, attach.Wait())
	require.Empty(t, f.host.names())
	for i, dev := range devs {
		require.True(t, dev.id.Matches(f.pod.link(numbered("net", i))))
	}
	for _, dev := range devs {
		detach.Go(func() error { return f.Detach(f.ctx, f.pod.path, dev) })
	}
	require.NoError(t, detach.Wait())
	for _, dev := range devs {
		f.host.requireHome(dev)
	}
}
