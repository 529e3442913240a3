// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/test/lab"
)

// twoVFs starts a pod with the VFs 0 and 1 as sriov0 and sriov1 in VLAN 1001.
func twoVFs(e *T) {
	e.Helper()
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0), vfPool("second", 1)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.waitDevices(e.node.Name(), "second", 1)
	e.class("first", "first")
	e.class("second", "second")
	e.template("two", []resourceapi.DeviceRequest{e.request("a", "first"), e.request("b", "second")},
		config(`{"vlan": 1001, "podIfName": "sriov0"}`, "a"), config(`{"vlan": 1001, "podIfName": "sriov1"}`, "b"))
	e.pod("two", e.node.Name(), "two")
}

// links returns the names of the node's links.
func (e *T) links(node string) []string {
	e.Helper()
	var names []string
	for name := range e.hostState(e.Node(node)).Links {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// settings is what ethtool says of an interface of the host, and the sizes of large packets.
func (e *T) settings(n *lab.Node, link string) string {
	e.Helper()
	return e.onNode(n, fmt.Sprintf("for what in -g -c -k; do ethtool $what %s; done; ip -d link show %[1]s | grep -o 'g[sr]o_[a-z0-9_]* [0-9]*'", link))
}

// TestPodChangesInterface: a pod may do with its interface what it likes, and put another in its place. The VF comes
// home as it went, and the pod's own link does not come at all.
func TestPodChangesInterface(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	// What comes back is the host's, and not what the driver begins with.
	drivers := e.settings(n, vfName(0))
	e.onNode(n, fmt.Sprintf("ethtool -G %s rx 2048 && ethtool -K %[1]s gro off", vfName(0)))
	settings := e.settings(n, vfName(0))
	require.NotEqual(e, drivers, settings)
	before := e.hostState(n)
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.class("first", "first")
	e.vlanTemplate("first", "first", 1001)
	e.pod("a", e.node.Name(), "first")
	e.running("a")
	require.NotContains(e, e.links(e.node.Name()), vfName(0))
	e.mustInPod("a", `set -e
		ip link set sriov0 down
		ip link set sriov0 name foo
		ip link property add dev foo altname a-name-of-the-pod
		ip link add sriov0 type dummy
		ip link set foo address 02:aa:bb:cc:dd:ee mtu 1400
		ip link set foo promisc on allmulticast on
		ip link set foo gso_max_size 20000 gso_max_segs 7 gro_max_size 20000
		ethtool -G foo rx 512 tx 512
		ethtool -C foo rx-usecs 100
		ethtool -K foo tso off rx off gro on
		ip link set foo up`)
	require.Contains(e, e.mustInPod("a", "ip link show foo"), "02:aa:bb:cc:dd:ee")
	e.deletePods("a")
	e.requireRestored(n, before)
	require.NotContains(e, e.onNode(n, "ip -d link show "+vfName(0)), "promiscuity 1")
	// They come back when the device is freed, which is later than the interface.
	e.noAllocations(n)
	require.Equal(e, settings, e.settings(n, vfName(0)))

	// The next pod has what is the VF's own.
	e.pod("b", e.node.Name(), "first")
	e.running("b")
	require.Contains(e, e.mustInPod("b", "ip link show sriov0"), before.Links[vfName(0)].MAC)
	e.deletePods("b")
	e.noAllocations(n)
	require.Equal(e, settings, e.settings(n, vfName(0)))
	e.onNode(n, fmt.Sprintf("ethtool -G %s rx 1024 && ethtool -K %[1]s gro on", vfName(0)))
	require.Equal(e, drivers, e.settings(n, vfName(0)))
}

// TestNamespaceGone: while the agent is away, the processes and the namespace of a pod are destroyed, so that the kernel
// puts the VFs on the host under the names they had in the pod. The agent finds and repairs them.
func TestNamespaceGone(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	twoVFs(e)
	e.running("two")
	rows := e.allocations(n)
	require.Len(e, rows, 2)
	netns := rows[0].Attachment.NetNS

	e.stopAgent(n)
	e.onNode(n, fmt.Sprintf(`set -e
		inode=$(stat -Lc %%i %[1]s)
		killed=0
		for p in /proc/[0-9]*; do
			if [ "$(stat -Lc %%i $p/ns/net)" = $inode ]; then kill -9 ${p#/proc/}; killed=$((killed+1)); fi
		done
		[ $killed -ge 2 ]
		umount %[1]s
		rm -f %[1]s`, netns))
	e.eventually("VFs on the host under the pod's names", func() string {
		links := e.links(e.node.Name())
		if !slices.Contains(links, "sriov0") || !slices.Contains(links, "sriov1") {
			return fmt.Sprint(links)
		}
		return ""
	})
	require.Equal(e, 1001, e.vlanOf(n, 0))

	e.startAgent(n)
	e.deletePods("two")
	e.noAllocations(n)
	e.requireRestored(n, before)
}

// TestNameTaken: the VF's name was given to another link of the host while the VF was in a pod. It comes home under
// another name, and gets its own when that is free.
func TestNameTaken(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	e.configure(e.node.Name(), sriovPools(vfPool("first", 0)))
	e.waitDevices(e.node.Name(), "first", 1)
	e.class("first", "first")
	e.vlanTemplate("first", "first", 1001)
	e.pod("a", e.node.Name(), "first")
	e.running("a")
	e.onNode(n, fmt.Sprintf("ip link add %s type dummy", vfName(0)))
	e.deletePods("a")
	e.noAllocations(n)
	now := e.hostState(n)
	home, ok := now.Links["netdrv0"]
	require.True(e, ok, "%+v", now.Links)
	require.Equal(e, before.Links[vfName(0)], home)
	require.Equal(e, before.VFs, now.VFs)
	require.Equal(e, "dummy", now.Links[vfName(0)].Kind)

	e.onNode(n, "ip link del "+vfName(0))
	e.requireRestored(n, before)
}
