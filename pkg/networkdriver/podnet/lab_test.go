// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// These tests move VFs of a real PF. The kernel returns physical links of a dead namespace to the initial one, so the
// host's side is the namespace that the test runs in.

// labVFs returns the VFs of the PF that have a link on the host. It makes some if the PF has none.
func labVFs(t *testing.T) (*fixture, []device) {
	t.Helper()
	pf := testenv.LabPF(t)
	dir := filepath.Join("/sys/class/net", pf, "device")
	raw, err := os.ReadFile(filepath.Join(dir, "sriov_numvfs"))
	require.NoError(t, err)
	if strings.TrimSpace(string(raw)) == "0" {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "sriov_numvfs"), []byte("4"), 0o644))
	}
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(host.Close)
	link, err := host.LinkByName(pf)
	require.NoError(t, err)
	require.NoError(t, host.LinkSetUp(link), "VFs need their PF to be up")

	f := &fixture{ctx: t.Context(), pod: newNS(t)}
	f.host = &testNS{Handle: host, tb: t, path: "/proc/thread-self/ns/net"}
	f.Mover = New(slog.New(slog.DiscardHandler), Config{})

	var devs []device
	require.Eventually(t, func() bool {
		devs = devs[:0]
		links, err := host.LinkList()
		require.NoError(t, err)
		functions, err := filepath.Glob(filepath.Join(dir, "virtfn*"))
		require.NoError(t, err)
		for _, fn := range functions {
			path, err := filepath.EvalSymlinks(fn)
			require.NoError(t, err)
			id := nic.PCI(filepath.Base(path))
			for _, l := range links {
				if id.Matches(l) {
					devs = append(devs, device{name: id.Device, id: id, host: nic.Read(l)})
				}
			}
		}
		// The node gives each the name of its PF and a number, some time after the kernel has made it.
		named := !slices.ContainsFunc(devs, func(d device) bool { return !strings.HasPrefix(d.host.Name, pf+"v") })
		return named && len(devs) >= 3
	}, wait, poll, "the VFs of %s get no links", pf)
	return f, devs
}

func TestLabVFInAndOut(t *testing.T) {
	f, devs := labVFs(t)
	for i, dev := range devs {
		require.NoError(t, f.host.LinkAddAltName(f.host.link(dev.host.Name), fmt.Sprint("vf-alt", i)))
		dev = f.host.prepared(dev, dev.host.Name)
		for range 2 {
			att, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
			require.NoError(t, err)
			require.Equal(t, dev.host.MAC, att.MAC)
			link := f.pod.link("net1")
			require.True(t, dev.id.Matches(link))
			require.NoError(t, f.pod.LinkSetMTU(link, 1400))
			require.NoError(t, f.pod.LinkSetName(link, "foo"))
			require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
			f.host.requireHome(dev)
		}
		require.NoError(t, f.host.LinkDelAltName(f.host.link(dev.host.Name), fmt.Sprint("vf-alt", i)))
	}
}

// A VF that was made anew is not moved in the place of the former one.
func TestLabVFMadeAnew(t *testing.T) {
	f, devs := labVFs(t)
	dev := devs[0]
	former, err := f.HostIndex(f.ctx, dev)
	require.NoError(t, err)
	numVFs := filepath.Join("/sys/class/net", testenv.LabPF(t), "device/sriov_numvfs")
	count, err := os.ReadFile(numVFs)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(numVFs, []byte("0"), 0o644))
	_, err = f.Mover.Attach(f.ctx, f.pod.path, dev, former, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, ErrLinkGone)
	require.NoError(t, os.WriteFile(numVFs, count, 0o644))
	require.Eventually(t, func() bool {
		link, err := f.host.LinkByName(dev.host.Name)
		return err == nil && dev.id.Matches(link)
	}, wait, poll, "the VF gets no link")
	dev = f.host.prepared(dev, dev.host.Name)
	_, err = f.Mover.Attach(f.ctx, f.pod.path, dev, former, types.DeviceConfig{PodIfName: "net1"})
	require.ErrorIs(t, err, ErrAnotherLink)
	require.Empty(t, f.pod.names())
	_, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
	require.NoError(t, err)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	f.host.requireHome(dev)
}

func TestLabVFOfADeadNamespace(t *testing.T) {
	f, devs := labVFs(t)
	// One comes back under the name it had in the pod, one whose name is taken on the host as devN.
	renamed, fallback, held := devs[0], devs[1], devs[2]
	for i, dev := range devs[:3] {
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: numbered("podnet-t", i)})
		require.NoError(t, err)
		require.NoError(t, f.pod.LinkSetMTU(f.pod.link(numbered("podnet-t", i)), 1400))
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "podnet-t1"
	require.NoError(t, f.host.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	defer func() { require.NoError(t, f.host.LinkDel(&netlink.Bridge{LinkAttrs: attrs})) }()

	// As long as a process holds the namespace, the VF is taken from there.
	fd, err := unix.Open(f.pod.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f.pod.die()
	require.NoError(t, f.Detach(f.ctx, f.pod.path, held))
	f.host.requireHome(held)
	require.NoError(t, unix.Close(fd))

	for _, dev := range []device{renamed, fallback} {
		require.NoError(t, f.Detach(f.ctx, "", dev))
		f.host.requireHome(dev)
	}
	require.NoError(t, f.Detach(f.ctx, f.pod.path, renamed))
	f.host.requireHome(renamed)
}

func TestLabRenamesDuringAttach(t *testing.T) {
	f, devs := labVFs(t)
	dev, other := devs[0], devs[1]
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		rename := func(d device, name string) {
			links, _ := f.host.LinkList()
			for _, l := range links {
				if d.id.Matches(l) {
					_ = f.host.LinkSetName(l, name) // refused while the link is away
				}
			}
		}
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
				rename(dev, "podnet-tmp")
				rename(other, dev.host.Name)
				rename(other, other.host.Name)
				rename(dev, dev.host.Name)
			}
		}
	}()
	for range 20 {
		_, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)
		require.True(t, dev.id.Matches(f.pod.link("net1")))
		require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	}
	close(stop)
	require.NoError(t, <-stopped)
	for _, d := range []device{dev, other} {
		require.NoError(t, f.Detach(f.ctx, "", d))
	}
	for _, d := range []device{dev, other} {
		require.NoError(t, f.Repair(f.ctx))
		f.host.requireHome(d)
	}
}
