// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
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
			require.NoError(t, f.host.SetPromiscOn(f.host.link("v0")))
			require.NoError(t, f.host.LinkSetAllmulticastOn(f.host.link("v0")))
			require.NoError(t, f.host.LinkSetTxQLen(f.host.link("v0"), 500))
			require.NoError(t, f.host.LinkSetGroup(f.host.link("v0"), 7))
			dev = f.host.prepared(dev, "v0")
		}
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)

		link := f.pod.link("net1")
		require.NoError(t, f.pod.LinkSetHardwareAddr(link, mac(t, "02:00:00:00:00:99")))
		require.NoError(t, f.pod.LinkSetMTU(link, 1300))
		if up {
			require.NoError(t, f.pod.SetPromiscOff(link))
			require.NoError(t, f.pod.LinkSetAllmulticastOff(link))
		} else {
			require.NoError(t, f.pod.SetPromiscOn(link))
			require.NoError(t, f.pod.LinkSetAllmulticastOn(link))
		}
		require.NoError(t, f.pod.LinkSetARPOff(link))
		require.NoError(t, f.pod.LinkSetTxQLen(link, 10))
		require.NoError(t, f.pod.LinkSetGroup(link, 9))
		require.NoError(t, f.pod.LinkDelAltName(link, "alt1"))
		require.NoError(t, f.pod.LinkAddAltName(link, "v0"))
		require.NoError(t, f.pod.LinkAddAltName(link, "pods-own"))
		require.NoError(t, f.pod.LinkSetName(link, "foo"))
		// Whoever has the name now must not be taken for the device.
		decoy := f.pod.addLink("net1")

		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
		f.host.requireHome(dev)
		require.Equal(t, up, f.host.link("v0").Attrs().RawFlags&unix.IFF_PROMISC != 0)
		require.Equal(t, up, f.host.link("v0").Attrs().RawFlags&unix.IFF_ALLMULTI != 0)
		require.Equal(t, []string{"net1"}, f.pod.names())
		require.True(t, decoy.id.Matches(f.pod.link("net1")))
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
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
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
	_, err = f.Attach(f.ctx, other.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, ErrLinkGone)
}

func TestNamesTakenOnTheHost(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt1"))
	dev = f.host.prepared(dev, "v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	other := f.host.addLink("v0")
	third := f.host.addLink("net1") // the pod's name for it is no refuge
	require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))

	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.Empty(t, f.pod.names())
	standIn := f.host.standIn()
	require.True(t, dev.id.Matches(f.host.link(standIn)))
	require.Equal(t, []string{"alt1"}, f.host.link(standIn).Attrs().AltNames)
	require.True(t, other.id.Matches(f.host.link("v0")))
	require.True(t, third.id.Matches(f.host.link("net1")))
	require.Len(t, f.owed(), 1)
	require.Equal(t, "v0", f.owed()[0].device)

	// As long as the names are taken nothing changes.
	f.requests.changes()
	require.NoError(t, f.Repair(f.ctx))
	require.NoError(t, f.Detach(f.ctx, "", dev))
	require.True(t, dev.id.Matches(f.host.link(standIn)))
	require.Len(t, f.owed(), 1)
	require.Equal(t, "v0", f.owed()[0].device)
	require.NotContains(t, f.requests.changes(), "RTM_NEWLINK")

	// The device is claimed again under the stand-in, is in a pod when the name gets free, and still gets its own.
	second := f.host.prepared(dev, standIn)
	_, err = f.Attach(f.ctx, f.pod.path, second, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.NoError(t, f.host.LinkDel(f.host.link("v0")))
	require.NoError(t, f.Repair(f.ctx))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, second))
	f.host.requireHome(dev)
	require.Empty(t, f.owed())

	require.NoError(t, f.Detach(f.ctx, "", second), "the stand-in is not restored")
	f.host.requireHome(dev)
}

// kept are the debts that outlive the agent, by device.
type kept map[string]Debt

func (k kept) SaveDebt(d Debt) error {
	k[d.Device] = d
	return nil
}

// A link is owed its names by the next life of the agent too, which knows the device by its stand-in.
func TestNamesAreOwedAfterARestart(t *testing.T) {
	for _, freed := range []string{"while the agent is away", "before"} {
		t.Run(freed, func(t *testing.T) {
			f := setup(t)
			debts := kept{}
			f.cfg.Debts = debts
			dev := f.host.addLink("v0")
			require.NoError(t, f.host.LinkAddAltName(f.host.link("v0"), "alt0"))
			dev = f.host.prepared(dev, "v0")
			_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
			require.NoError(t, err)
			f.host.addLink("v0")
			require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
			require.Equal(t, Debt{Device: dev.IfName(), Link: dev.Link(), Name: "v0", AltNames: []string{"alt0"}}, debts[dev.IfName()])

			second := f.host.prepared(dev, f.host.standIn())
			_, err = f.Attach(f.ctx, f.pod.path, second, types.DeviceConfig{PodIfName: "net1"})
			require.NoError(t, err)
			require.NoError(t, f.host.LinkDel(f.host.link("v0")))
			if freed == "before" {
				require.NoError(t, f.Repair(f.ctx))
				require.True(t, debts[dev.IfName()].Settled, "it is in a pod")
			}
			f.misnamed = map[nic.Identity]debt{}
			f.Owe([]Debt{debts[dev.IfName()]})
			require.NoError(t, f.Detach(f.ctx, f.pod.path, second))
			f.host.requireHome(dev)
			require.True(t, debts[dev.IfName()].Settled)
		})
	}
}

func TestRepairGivesNamesBack(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
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
	defer host.Close()
	pod, err := f.openPod(f.pod.path, host.NS.ID)
	require.NoError(t, err)
	defer pod.Close()
	link, err = host.Find(dev.id, nil)
	require.NoError(t, err)
	require.NoError(t, f.moveIn(host, pod, link, "net1", types.DeviceConfig{}))
	require.NoError(t, f.undo(host, pod, home{device: "v0", id: dev.id, want: nic.Read(link)}, nil))
	f.host.requireHome(dev)

	// Or if it never left.
	require.NoError(t, f.host.LinkDelAltName(f.host.link("v0"), "net1"))
	require.NoError(t, f.undo(host, pod, home{device: "v0", id: dev.id, want: nic.Read(link)}, nil))
	f.host.requireHome(dev)
}

func TestForgedHostNames(t *testing.T) {
	f := setup(t)
	for _, name := range []string{"lo", "eth%d", "a/b", ".."} {
		dev := f.host.addLink("v0")
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)
		dev.host.Name = name
		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev), name)
		require.True(t, dev.id.Matches(f.host.link(f.host.standIn())), name)
		require.NoError(t, f.host.LinkDel(f.host.link(f.host.standIn())))
	}
}

func TestXDPDoesNotCrossTheBoundary(t *testing.T) {
	f := setup(t)
	dev := f.host.addLink("v0")
	prog := testenv.XDP(t)
	require.NoError(t, attachXDP(f.host, "v0", prog, nl.XDP_FLAGS_DRV_MODE))
	require.True(t, f.host.link("v0").Attrs().Xdp.Attached)
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
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

// A program that a process holds by a BPF link stays, which is said once.
func TestXDPThatIsHeld(t *testing.T) {
	f := setup(t)
	var log bytes.Buffer
	f.Mover = New(slog.New(slog.NewTextHandler(&log, nil)), Config{HostNetNS: f.host.path, Sysfs: t.TempDir()})
	dev := f.host.addLink("v0")
	_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	linkXDP(f.pod, "net1", testenv.XDP(t))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.True(t, f.host.link("v0").Attrs().Xdp.Attached)
	require.Equal(t, 1, strings.Count(log.String(), "An XDP program stays on the link"), log.String())
}

// linkXDP attaches the program by a BPF link, which is held until the test ends.
func linkXDP(ns *testNS, name string, prog int) {
	ns.tb.Helper()
	attr := struct {
		prog, target, attachType, flags uint32
		_                               [112]byte
	}{prog: uint32(prog), target: uint32(ns.link(name).Attrs().Index), attachType: unix.BPF_XDP}
	require.NoError(ns.tb, osthread.Run(func() error {
		handle, err := netns.GetFromPath(ns.path)
		if err != nil {
			return err
		}
		defer func() { _ = handle.Close() }()
		if err := netns.Set(handle); err != nil {
			return err
		}
		fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_LINK_CREATE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
		if errno != 0 {
			return fmt.Errorf("attach an XDP program by a BPF link: %w", errno)
		}
		ns.tb.Cleanup(func() { _ = unix.Close(int(fd)) })
		return nil
	}))
}

func attachXDP(ns *testNS, name string, prog, mode int) error {
	handle, err := netns.GetFromPath(ns.path)
	if err != nil {
		return err
	}
	defer func() { _ = handle.Close() }()
	socket, err := nl.GetNetlinkSocketAt(handle, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer socket.Close()
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(ns.link(name).Attrs().Index)
	req.AddData(info)
	attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(uint32(prog)))
	attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(uint32(mode)))
	req.AddData(attr)
	_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

func TestWhatSysfsSaysIsVerified(t *testing.T) {
	// A name read in sysfs may belong to another link a moment later. PCI devices are not to be had here: none matches.
	f := setup(t)
	f.host.addLink("v0")
	addr := "0000:03:00.1"
	pci := filepath.Join(f.cfg.Sysfs, "bus/pci/devices", addr)
	dir := filepath.Join(pci, "net", "v0")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	index := f.host.link("v0").Attrs().Index
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ifindex"), []byte(numbered("", index)+"\n"), 0o600))
	vf := device{name: "0000-03-00-1", id: nic.PCI(addr), host: nic.State{Name: "vf0"}}

	_, err := f.Attach(f.ctx, f.pod.path, vf, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, ErrLinkGone)
	require.Empty(t, f.requests.changes())

	// It has a link that is not found, whatever driver made it.
	for _, driver := range []string{"", "igbvf", "mlx5_vfio_pci"} {
		_ = os.Remove(filepath.Join(pci, "driver"))
		if driver != "" {
			require.NoError(t, os.Symlink("../../../bus/pci/drivers/"+driver, filepath.Join(pci, "driver")))
		}
		ctx, cancel := context.WithTimeout(f.ctx, 100*time.Millisecond)
		err = f.Detach(ctx, f.pod.path, vf)
		cancel()
		require.ErrorIs(t, err, ErrUnreachable)
		require.ErrorContains(t, err, "0000-03-00-1")
	}
	require.Equal(t, []string{"v0"}, f.host.names())

	// Without a link there is none to wait for.
	require.NoError(t, os.RemoveAll(filepath.Join(pci, "net")))
	for _, driver := range []string{"mlx5_vfio_pci", "vfio-pci", "pci-stub", ""} {
		_ = os.Remove(filepath.Join(pci, "driver"))
		if driver != "" {
			require.NoError(t, os.Symlink("../../../bus/pci/drivers/"+driver, filepath.Join(pci, "driver")))
		}
		require.NoError(t, f.Detach(f.ctx, f.pod.path, vf), driver)
	}
	require.NoError(t, os.RemoveAll(pci))
	require.NoError(t, f.Detach(f.ctx, f.pod.path, vf), "nor off the bus")

	// Whatever a record says, it does not lead elsewhere in sysfs.
	require.NoError(t, os.MkdirAll(filepath.Join(f.cfg.Sysfs, "class/net/v0"), 0o755))
	vf.id.Device = "../../../class"
	ctx, cancel := context.WithTimeout(f.ctx, 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.Detach(ctx, "", vf), ErrUnreachable)
}
