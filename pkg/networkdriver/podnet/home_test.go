// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	wait = 10 * time.Second
	poll = 10 * time.Millisecond
)

func TestEverythingAPodChangesIsRestored(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	link := f.host.link("v0")
	require.NoError(t, f.host.LinkSetMTU(link, 1420))
	require.NoError(t, f.host.LinkAddAltName(link, "alt0"))
	require.NoError(t, f.host.LinkAddAltName(link, "alt1"))
	dev = f.host.prepared(dev, "v0")

	for _, up := range []bool{false, true} {
		if up {
			require.NoError(t, f.host.LinkSetUp(f.host.link("v0")))
			dev = f.host.prepared(dev, "v0")
		}
		_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
		require.NoError(t, err)

		link := f.pod.link("net1")
		require.NoError(t, f.pod.LinkSetHardwareAddr(link, mac(t, "02:00:00:00:00:99")))
		require.NoError(t, f.pod.LinkSetMTU(link, 1300))
		require.NoError(t, f.pod.SetPromiscOn(link))
		require.NoError(t, f.pod.LinkSetAllmulticastOn(link))
		require.NoError(t, f.pod.LinkDelAltName(link, "alt1"))
		require.NoError(t, f.pod.LinkAddAltName(link, "v0"))
		require.NoError(t, f.pod.LinkAddAltName(link, "pods-own"))
		require.NoError(t, f.pod.LinkSetName(link, "foo"))
		// Whoever has the name now must not be taken for the device.
		decoy := f.pod.addLink("net1")

		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
		f.host.requireHome(dev)
		require.Zero(t, f.host.link("v0").Attrs().RawFlags&(unix.IFF_PROMISC|unix.IFF_ALLMULTI))
		require.Equal(t, []string{"net1"}, f.pod.names())
		require.True(t, is(f.pod.link("net1"), decoy.id))
		require.NoError(t, f.pod.LinkDel(f.pod.link("net1")))
	}
}

func TestLinkOnTheHostIsRepaired(t *testing.T) {
	// So it looks after the death of a namespace: home under the pod's name, with what the pod did to it.
	f := setup(t)
	dev := f.host.addLink("v0")
	link := f.host.link("v0")
	require.NoError(t, f.host.LinkAddAltName(link, "alt0"))
	dev = f.host.prepared(dev, "v0")
	require.NoError(t, f.host.LinkSetName(link, "net1"))
	require.NoError(t, f.host.LinkSetHardwareAddr(link, mac(t, "02:00:00:00:00:99")))
	require.NoError(t, f.host.LinkSetMTU(link, 1300))
	require.NoError(t, f.host.LinkDelAltName(link, "alt0"))
	require.NoError(t, f.host.LinkAddAltName(link, "v0"))
	require.NoError(t, f.host.LinkSetUp(link))

	require.NoError(t, f.Detach(f.ctx, "", dev))
	f.host.requireHome(dev)
}

func TestLinkThatDiedWithItsNamespace(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
	require.NoError(t, err)
	f.pod.die()
	require.Eventually(t, func() bool {
		_, err := f.host.LinkByName(dev.peer)
		return err != nil
	}, wait, poll)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev), "the file that was the namespace is still there")
	require.NoError(t, f.Detach(f.ctx, "", dev))
	require.Empty(t, f.host.names())

	// A namespace may be made anew at the path.
	other := newNS(t)
	_, err = f.Attach(f.ctx, other.path, dev, "net1")
	require.ErrorIs(t, err, ErrLinkGone)
}

func TestNamesTakenOnTheHost(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt1"))
	dev = f.host.prepared(dev, "v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
	require.NoError(t, err)
	other := f.host.addLink("v0")
	third := f.host.addLink("net1") // the pod's name for it is no refuge
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))

	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.Empty(t, f.pod.names())
	standIn := f.host.standIn()
	require.True(t, is(f.host.link(standIn), dev.id))
	require.Equal(t, []string{"alt1"}, f.host.link(standIn).Attrs().AltNames)
	require.True(t, is(f.host.link("v0"), other.id))
	require.True(t, is(f.host.link("net1"), third.id))
	require.Len(t, f.owed(), 1)
	require.Equal(t, "v0", f.owed()[0].device)

	// As long as the names are taken nothing changes.
	f.requests.changes()
	require.NoError(t, f.Repair(f.ctx))
	require.NoError(t, f.Detach(f.ctx, "", dev))
	require.True(t, is(f.host.link(standIn), dev.id))
	require.Len(t, f.owed(), 1)
	require.Equal(t, "v0", f.owed()[0].device)
	require.NotContains(t, f.requests.changes(), "RTM_NEWLINK")

	// The device is claimed again under the stand-in, is in a pod when the name gets free, and still gets its own.
	second := f.host.prepared(dev, standIn)
	_, err = f.Attach(f.ctx, f.pod.path, second, "net1")
	require.NoError(t, err)
	require.NoError(t, f.host.LinkDel(f.host.link("v0")))
	require.NoError(t, f.Repair(f.ctx))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, second))
	f.host.requireHome(dev)
	require.Empty(t, f.owed())

	require.NoError(t, f.Detach(f.ctx, "", second), "the stand-in is not restored")
	f.host.requireHome(dev)
}

func TestRepairGivesNamesBack(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
	require.NoError(t, err)
	f.host.addLink("v0")
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.NoError(t, f.host.LinkSetMTU(f.host.link(f.host.standIn()), 1300)) // such as for the next claim
	require.NoError(t, f.host.LinkDel(f.host.link("v0")))

	require.NoError(t, f.Repair(f.ctx))
	require.Equal(t, 1300, f.host.link("v0").Attrs().MTU)
	require.Empty(t, f.owed())
	require.NoError(t, f.Detach(f.ctx, "", dev))
	f.host.requireHome(dev)
}

func TestFailedAttachRestoresEverything(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	link := f.host.link("v0")
	require.NoError(t, f.host.LinkAddAltName(link, "net1"))
	require.NoError(t, f.host.LinkSetUp(link))
	dev = f.host.prepared(dev, "v0")

	host, err := f.openHost()
	require.NoError(t, err)
	defer host.close()
	pod, err := f.openPod(f.pod.path, host.ns)
	require.NoError(t, err)
	defer pod.close()
	link, err = f.findOnHost(host, dev.id)
	require.NoError(t, err)
	require.NoError(t, f.moveIn(host, pod, link, "net1"))
	require.NoError(t, f.undo(host, pod, home{device: "v0", id: dev.id, want: stateOf(link)}))
	f.host.requireHome(dev)

	// Or if it never left.
	require.NoError(t, f.host.LinkDelAltName(f.host.link("v0"), "net1"))
	require.NoError(t, f.undo(host, pod, home{device: "v0", id: dev.id, want: stateOf(link)}))
	f.host.requireHome(dev)
}

func TestForgedHostNames(t *testing.T) {
	f := setup(t)
	for _, name := range []string{"lo", "eth%d", "a/b", ".."} {
		dev := f.host.addLink("v0")
		_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
		require.NoError(t, err)
		dev.host.Name = name
		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev), name)
		require.True(t, is(f.host.link(f.host.standIn()), dev.id), name)
		require.NoError(t, f.host.LinkDel(f.host.link(f.host.standIn())))
	}
}

func TestXDPDoesNotCrossTheBoundary(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	prog := testenv.XDP(t)
	require.NoError(t, attachXDP(f.host, "v0", prog, nl.XDP_FLAGS_DRV_MODE))
	require.True(t, f.host.link("v0").Attrs().Xdp.Attached)
	_, err := f.Attach(f.ctx, f.pod.path, dev, "net1")
	require.NoError(t, err)
	require.False(t, f.pod.link("net1").Attrs().Xdp.Attached)

	require.NoError(t, attachXDP(f.pod, "net1", prog, nl.XDP_FLAGS_SKB_MODE))
	require.True(t, f.pod.link("net1").Attrs().Xdp.Attached)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.False(t, f.host.link("v0").Attrs().Xdp.Attached)

	require.NoError(t, attachXDP(f.host, "v0", prog, nl.XDP_FLAGS_DRV_MODE))
	require.NoError(t, f.Detach(f.ctx, "", dev))
	require.False(t, f.host.link("v0").Attrs().Xdp.Attached, "left from a namespace that died")
}

func attachXDP(ns *testNS, name string, prog, mode int) error {
	c := ns.dial()
	defer c.Close()
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(ns.link(name).Attrs().Index)
	req.AddData(info)
	attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(uint32(prog)))
	attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(uint32(mode)))
	req.AddData(attr)
	_, err := c.Execute(req, 0)
	return err
}

func TestWhatSysfsSaysIsVerified(t *testing.T) {
	// A name read in sysfs may belong to another link a moment later. PCI devices are not to be had here: none matches.
	f := setup(t)
	f.host.addLink("v0")
	addr := "0000:03:00.1"
	dir := f.pciPath(addr, "net", "v0")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	index := f.host.link("v0").Attrs().Index
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ifindex"), []byte(numbered("", index)+"\n"), 0o600))
	vf := device{name: "0000-03-00-1", id: types.LinkID{PCIAddr: addr}, host: types.LinkState{Name: "vf0"}}

	_, err := f.Attach(f.ctx, f.pod.path, vf, "net1")
	require.ErrorIs(t, err, ErrLinkGone)
	require.Empty(t, f.requests.changes())

	require.NoError(t, f.Detach(f.ctx, f.pod.path, vf), "without a driver there is no link")
	require.NoError(t, os.Symlink("../../../bus/pci/drivers/vfio-pci", f.pciPath(addr, "driver")))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, vf), "nor with one for userspace")
	require.NoError(t, os.RemoveAll(f.pciPath(addr)))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, vf), "nor off the bus")
	require.NoError(t, os.MkdirAll(f.pciPath(addr), 0o755))
	require.NoError(t, os.Symlink("../../../bus/pci/drivers/igbvf", f.pciPath(addr, "driver")))
	err = f.Detach(f.ctx, f.pod.path, vf)
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorContains(t, err, "0000-03-00-1")
	require.Equal(t, []string{"v0"}, f.host.names())

	vf.id.PCIAddr = "../../../class"
	require.ErrorContains(t, f.Detach(f.ctx, "", vf), "is not a PCI address")
}

func TestIdentity(t *testing.T) {
	pci := func(bus, addr string) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 7, ParentDev: addr, ParentDevBus: bus}}
	}
	dummy := func(index int, alias string) netlink.Link {
		return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index, Alias: alias}}
	}
	byAlias := types.LinkID{Kind: "dummy", IfIndex: 7, Alias: "ours"}
	byIndex := types.LinkID{Kind: "dummy", IfIndex: 7}
	vf := types.LinkID{PCIAddr: "0000:03:00.1"}
	for _, c := range []struct {
		link netlink.Link
		id   types.LinkID
		want bool
	}{
		{pci("pci", "0000:03:00.1"), vf, true},
		{pci("pci", "0000:03:00.2"), vf, false},
		{pci("usb", "0000:03:00.1"), vf, false},
		{dummy(7, "ours"), vf, false},
		{dummy(7, "ours"), byAlias, true},
		{dummy(8, "ours"), byAlias, true},
		{dummy(7, "theirs"), byAlias, false},
		{dummy(7, ""), byIndex, true},
		{dummy(8, ""), byIndex, false},
		{&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Index: 7, Alias: "ours"}}, byAlias, false},
		{dummy(0, ""), types.LinkID{}, false},
	} {
		require.Equal(t, c.want, is(c.link, c.id), "%s %+v as %+v", c.link.Type(), c.link.Attrs(), c.id)
	}
}
