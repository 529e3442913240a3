// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dummy

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	wait = 10 * time.Second
	poll = 10 * time.Millisecond
)

// eachKind runs the test with dummy links where the kernel has them, and with ifb links, which are as simple, where it
// has those: few kernels of build machines have the former.
func eachKind(t *testing.T, test func(t *testing.T, k kernelLinks, h *netlink.Handle)) {
	for _, kind := range []string{linkKind, "ifb"} {
		t.Run(kind, func(t *testing.T) {
			k := kernelLinks{log: slog.New(slog.DiscardHandler), netns: testenv.NetNS(t), kind: kind}
			ns, err := netns.GetFromPath(k.netns)
			require.NoError(t, err)
			defer ns.Close()
			h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
			require.NoError(t, err)
			t.Cleanup(h.Close)
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "probe"
			if err := h.LinkAdd(&netlink.GenericLink{LinkAttrs: attrs, LinkType: kind}); err != nil {
				t.Skipf("the kernel has no %s links: %v", kind, err)
			}
			for _, name := range []string{"probe", moduleStray} {
				if l, err := h.LinkByName(name); err == nil {
					require.NoError(t, h.LinkDel(l))
				}
			}
			test(t, k, h)
		})
	}
}

func names(t *testing.T, h *netlink.Handle) []string {
	t.Helper()
	all, err := h.LinkList()
	require.NoError(t, err)
	names := []string{}
	for _, l := range all {
		if l.Attrs().Name != "lo" {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

func add(t *testing.T, h *netlink.Handle, kind, name string) netlink.Link {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	require.NoError(t, h.LinkAdd(&netlink.GenericLink{LinkAttrs: attrs, LinkType: kind}))
	l, err := h.LinkByName(name)
	require.NoError(t, err)
	return l
}

func TestSetupAndFree(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		dev := types.Device(&device{links: k, name: "dummy2"})
		prepared, err := dev.Setup(t.Context(), types.DeviceConfig{PodIfName: "net1"})
		require.NoError(t, err)
		l, err := h.LinkByName("dummy2")
		require.NoError(t, err)
		attrs := l.Attrs()
		require.Equal(t, nic.Identity{Kind: linkKind, Index: attrs.Index, Alias: attrs.Alias}, prepared.Link())
		require.Equal(t, "networkdriver:dummy2", attrs.Alias)
		require.Zero(t, attrs.Group)
		require.Equal(t, nic.State{Name: "dummy2", MTU: 1500, MAC: attrs.HardwareAddr.String(), NoARP: true}, prepared.HostState())
		require.Zero(t, attrs.RawFlags&unix.IFF_UP)
		require.True(t, nic.Difference(l, prepared.HostState()).IsZero(), "it is what it was made as")

		again, err := prepared.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.Equal(t, prepared, again)

		// It may be back from a pod under another name.
		require.NoError(t, h.LinkSetName(l, "netdrv0"))
		again, err = prepared.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.Equal(t, prepared, again)
		require.NoError(t, prepared.Free(t.Context(), types.DeviceConfig{}))
		require.Empty(t, names(t, h))
		require.NoError(t, prepared.Free(t.Context(), types.DeviceConfig{}), "what is gone is freed")
	})
}

// A Setup that was interrupted is undone with what the device was before.
func TestFreeOfUnfinished(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		m := &Manager{log: slog.New(slog.DiscardHandler), links: k}
		dev := types.Device(&device{links: k, name: "dummy2"})
		data, err := dev.MarshalJSON()
		require.NoError(t, err)
		_, err = dev.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		_, err = m.RestoreDevice(data)
		require.Error(t, err, "it is no prepared device")
		unfinished, err := m.RestoreUnfinished(data)
		require.NoError(t, err)
		require.NoError(t, unfinished.Free(t.Context(), types.DeviceConfig{}))
		require.Empty(t, names(t, h))
		_, err = m.RestoreUnfinished([]byte(`{"name":"eth0"}`))
		require.ErrorContains(t, err, "is none of dummy0")
	})
}

func TestSetupAfterTheLinkDied(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		dev := types.Device(&device{links: k, name: "dummy0"})
		prepared, err := dev.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		l, err := h.LinkByName("dummy0")
		require.NoError(t, err)
		require.NoError(t, h.LinkDel(l))

		again, err := prepared.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.NotEqual(t, prepared.Link().Index, again.Link().Index)
		l, err = h.LinkByName("dummy0")
		require.NoError(t, err)
		require.Equal(t, l.Attrs().Index, again.Link().Index)
	})
}

func TestSetupReplacesWhatWasLeft(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		dev := types.Device(&device{links: k, name: "dummy0"})
		left, err := dev.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		l, err := h.LinkByName("dummy0")
		require.NoError(t, err)
		require.NoError(t, h.LinkSetMTU(l, 1300))
		prepared, err := dev.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.NotEqual(t, left.Link(), prepared.Link())
		require.Equal(t, 1500, prepared.HostState().MTU)
		require.Equal(t, []string{"dummy0"}, names(t, h))
		require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))

		// An agent that was killed between making a link and marking it.
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Group = "dummy0", unfinishedGroup
		require.NoError(t, h.LinkAdd(&netlink.GenericLink{LinkAttrs: attrs, LinkType: k.kind}))
		_, err = dev.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
		require.Empty(t, names(t, h))
	})
}

func TestForeignLinksAreLeftAlone(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		add(t, h, k.kind, "dummy0")
		add(t, h, "bridge", "dummy1")
		bridge := add(t, h, "bridge", "dummy3")
		require.NoError(t, h.LinkSetAlias(bridge, aliasOf("dummy3")))
		for _, name := range []string{"dummy0", "dummy1", "dummy3"} {
			dev := types.Device(&device{links: k, name: name})
			_, err := dev.Setup(t.Context(), types.DeviceConfig{})
			require.ErrorContains(t, err, "create link "+name+": "+foreignReason)
			require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
		}
		require.ElementsMatch(t, []string{"dummy0", "dummy1", "dummy3"}, names(t, h))
	})
}

func TestKernelWithoutSupport(t *testing.T) {
	k := kernelLinks{log: slog.New(slog.DiscardHandler), netns: testenv.NetNS(t), kind: "no-such-kind"}
	_, err := (&device{links: k, name: "dummy0"}).Setup(t.Context(), types.DeviceConfig{})
	require.ErrorContains(t, err, "kernel has no no-such-kind link support")
}

func TestRunFollowsTheHost(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	eachKind(t, func(t *testing.T, k kernelLinks, h *netlink.Handle) {
		m := &Manager{log: slog.New(slog.DiscardHandler), count: 3, links: k}
		snapshots := make(chan types.Snapshot, 10)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- m.Run(ctx, func(s types.Snapshot) { snapshots <- s }) }()
		next := func() types.Snapshot {
			select {
			case s := <-snapshots:
				return s
			case <-time.After(wait):
				require.Fail(t, "nothing is published")
				return types.Snapshot{}
			}
		}
		require.Len(t, next().Devices, 3)

		foreign := add(t, h, "bridge", "dummy1")
		s := next()
		require.Len(t, s.Devices, 2)
		require.Equal(t, []types.Skipped{{Device: "dummy1", Reason: foreignReason}}, s.Skipped)

		// Ours is nothing new.
		_, err := s.Devices[0].Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.NoError(t, h.LinkDel(foreign))
		s = next()
		require.Len(t, s.Devices, 3)
		require.Empty(t, s.Skipped)

		cancel()
		require.NoError(t, <-ended)
		require.Empty(t, snapshots)
	})
	require.Eventually(t, func() bool { return goleak.Find(ignore) == nil }, wait, poll, "goroutines are left")
}

func TestNoDescriptorIsLeftOpen(t *testing.T) {
	eachKind(t, func(t *testing.T, k kernelLinks, _ *netlink.Handle) {
		open := func() int {
			entries, err := os.ReadDir("/proc/self/fd")
			require.NoError(t, err)
			return len(entries)
		}
		dev := types.Device(&device{links: k, name: "dummy0"})
		before := open()
		for range 3 {
			_, err := dev.Setup(t.Context(), types.DeviceConfig{})
			require.NoError(t, err)
			_, err = k.list()
			require.NoError(t, err)
			require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
		}
		require.Equal(t, before, open())
	})
}
