// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// throwHome does what the kernel does to a hardware NIC whose namespace dies: it is on the host under the pod's name,
// down, without addresses.
func (b *bed) throwHome() {
	b.t.Helper()
	ns, err := netns.GetFromPath(b.host.path)
	require.NoError(b.t, err)
	defer ns.Close()
	require.NoError(b.t, b.pod.LinkSetNsFd(b.pod.mustLink(b.ifName), int(ns)))
}

// The runtime has no namespace to name any more.
func TestDelWithoutNamespace(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "plain")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for name, tt := range map[string]struct {
		netns func(b *bed) string
		gone  bool // the namespace is, and the kernel has thrown the NIC out
	}{
		"empty":                  {netns: func(*bed) string { return "" }, gone: true},
		"missing":                {netns: func(*bed) string { return "/run/netns/none" }, gone: true},
		"not a namespace":        {netns: func(*bed) string { return file }, gone: true},
		"unmounted":              {netns: func(b *bed) string { return b.pod.path }, gone: true},
		"the host's":             {netns: func(b *bed) string { return b.host.path }, gone: true},
		"the host's, NIC in pod": {netns: func(b *bed) string { return b.host.path }},
		"empty, NIC in pod":      {netns: func(*bed) string { return "" }},
		"missing, NIC in pod":    {netns: func(*bed) string { return "/run/netns/none" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host.address(nicName, "10.1.2.130/25", "2001:db8::5/64")
			before := b.host.snapshot()
			b.must("ADD", b.single())
			if tt.gone {
				b.throwHome()
				b.pod.die()
				require.NotEqual(t, before, b.host.snapshot())
			}
			call := b.call("DEL", b.single())
			call.netns = tt.netns(b)
			for range 2 {
				_, stderr, failure := b.run(call)
				require.Nil(t, failure, "%v\n%s", failure, stderr)
				b.requireHome(before)
			}
		})
	}
}

// A process still holds the pod's namespace, whose path is gone.
func TestDelFindsHeldNamespace(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	held, err := os.Open(b.pod.path)
	require.NoError(t, err)
	defer held.Close()
	require.NoError(t, unix.Unmount(b.pod.path, unix.MNT_DETACH))
	log := b.must("DEL", b.single())
	t.Log(log)
	b.requireHome(before)
}

// The NIC is in neither place that it was sent to. It is fetched if host-device has moved it there, as it is on its way
// through, and left if somebody else has.
func TestDelOfNICElsewhere(t *testing.T) {
	t.Parallel()
	for _, marked := range []bool{true, false} {
		b := newBed(t)
		b.host.address(nicName, "10.1.2.130/25")
		before := b.host.snapshot()
		b.must("ADD", b.single())
		elsewhere := newSpace(t)
		ns, err := netns.GetFromPath(elsewhere.path)
		require.NoError(t, err)
		defer ns.Close() // a descriptor is what the search finds it by, when the path is gone
		require.NoError(t, unix.Unmount(elsewhere.path, unix.MNT_DETACH))
		if !marked {
			require.NoError(t, b.pod.LinkSetAlias(b.pod.mustLink("net1"), ""))
		}
		require.NoError(t, b.pod.LinkSetNsFd(b.pod.mustLink("net1"), int(ns)))
		b.must("DEL", b.single())
		if marked {
			b.requireHome(before)
		} else {
			require.NotNil(t, elsewhere.link("net1"))
		}
	}
}

// A link without hardware dies with its namespace: nothing is left to do.
func TestDelOfDeadVirtualLink(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.must("ADD", b.single())
	b.pod.die()
	require.Eventually(t, func() bool { return b.leaf.link(port) == nil }, patience, pollInterval)
	b.must("DEL", b.single())
	require.Empty(t, b.recorded())
}

// Somebody has taken the NIC out of the pod before the chain's DEL, which sbr and this plugin must bear in any order.
func TestDelAfterLinkWasTaken(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin(routeFields(1, 19)), sbr)
	b.add(list)
	b.throwHome()
	b.del(list)
	b.requireHome(before)

	b.add(list)
	b.must("DEL", b.single()) // before sbr
	b.del(list)
	b.requireHome(before)
}

// The namespace that the runtime names is another pod's by now, which has an interface of the same name.
func TestDelWithAnotherPodsNamespace(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	other := newSpace(t)
	other.veth("net1", b.leaf, "port2")
	// It even looks as if host-device had moved it.
	require.NoError(t, other.LinkSetAlias(other.mustLink("net1"), "eth7"))
	otherBefore := other.snapshot()

	call := b.call("DEL", b.single())
	call.netns = other.path
	for range 2 { // with the record, and without
		_, _, failure := b.run(call)
		require.Nil(t, failure)
		b.requireHome(before)
		require.Equal(t, otherBefore, other.snapshot())
	}
}

// A device of another pod's, which resembles the NIC, is not taken for it when the NIC is nowhere.
func TestDelLeavesWhatResemblesTheNIC(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	index := b.host.mustLink(nicName).Attrs().Index
	b.must("ADD", b.single())
	other := newSpace(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "net1", index
	leaf, err := netns.GetFromPath(b.leaf.path)
	require.NoError(t, err)
	defer leaf.Close()
	require.NoError(t, other.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "peer", PeerNamespace: netlink.NsFd(leaf)}))
	require.NoError(t, other.LinkSetAlias(other.mustLink("net1"), nicName))
	require.Equal(t, index, other.mustLink("net1").Attrs().Index)
	held, err := os.Open(other.path) // so that the search finds it
	require.NoError(t, err)
	defer held.Close()
	otherBefore := other.snapshot()
	b.pod.die()
	require.Eventually(t, func() bool { return b.leaf.link(port) == nil }, patience, pollInterval)
	log := b.must("DEL", b.single())
	require.Contains(t, log, "gone with the network namespace")
	require.Equal(t, otherBefore, other.snapshot())
}
