// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// disguise changes all of the NIC in the pod that tells it from other links of its kind, and puts one beside it.
func (b *bed) disguise() {
	b.t.Helper()
	link := b.pod.mustLink("net1")
	require.NoError(b.t, b.pod.LinkSetDown(link))
	require.NoError(b.t, b.pod.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 7}))
	require.NoError(b.t, b.pod.LinkSetAlias(link, "the pod's"))
	require.NoError(b.t, b.pod.LinkSetName(link, "lan"))
	b.pod.veth("net1", b.leaf, "port9")
}

// A NIC without hardware comes home although the pod has changed its MAC, its alias and its name: it would end with the
// namespace.
func TestDisguisedNIC(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	b.disguise()
	b.must("DEL", b.single())
	b.requireHome(before)
	require.NotNil(t, b.pod.link("net1"), "the pod's own link stays")
}

// Where the index is another link's by now, of another kind, that link is not taken.
func TestIndexOfAnotherLink(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.must("ADD", b.single())
	index := b.pod.mustLink("net1").Attrs().Index
	require.NoError(t, b.pod.LinkDel(b.pod.mustLink("net1")))
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "net1", index
	require.NoError(t, b.pod.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	b.must("DEL", b.single())
	require.NotNil(t, b.pod.link("net1"))
	require.Nil(t, b.host.link(nicName))
	require.Empty(t, b.recorded())
}
