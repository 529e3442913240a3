// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
)

// What a pod stacks on its NIC does not use it any more when the NIC has left. Without that, the kernel leaves it at work
// for as long as the pod's namespace lives.
func TestStackedLinksDoNotOutliveTheStay(t *testing.T) {
	host, pod := open(t, testenv.NetNS(t)), open(t, testenv.NetNS(t))
	id, want := makeNIC(t, host, "d0")
	send(t, host, pod, id, "net1")
	ns, err := netns.GetFromPath(pod.NS.Path)
	require.NoError(t, err)
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	defer handle.Close()
	nic, err := pod.Find(id, nil)
	require.NoError(t, err)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = "stacked", nic.Attrs().Index
	require.NoError(t, handle.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}))
	beside := netlink.NewLinkAttrs()
	beside.Name = "beside"
	require.NoError(t, handle.LinkAdd(&netlink.Bridge{LinkAttrs: beside}))

	link, err := host.Fetch(t.Context(), Search{ID: id, Want: want, Named: []string{pod.NS.Path}})
	require.NoError(t, err)
	require.True(t, id.Matches(link))
	stacked, err := pod.ByName("stacked")
	require.NoError(t, err)
	require.Nil(t, stacked)
	other, err := pod.ByName("beside")
	require.NoError(t, err)
	require.NotNil(t, other, "what is not on the NIC stays")
}
