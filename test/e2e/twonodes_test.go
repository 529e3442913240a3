// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab"
)

// TestTwoNodes: identical nodes publish the same pool and device names, and a device of each name can be used on both at
// once. Pods reach each other over their VFs inside a VLAN, across nodes, and not across VLANs; on the wire their frames
// carry the tag.
func TestTwoNodes(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	for _, n := range e.Nodes() {
		e.configure(n.Name(), sriovPools(vfPool("blue", 0), vfPool("red", 1)))
	}
	for _, pool := range []string{"blue", "red"} {
		// One device for each node, so that the scheduler has to use both although they have the same name.
		one, two := devices(e.waitDevices("node1", pool, 1)), devices(e.waitDevices("node2", pool, 1))
		for name := range one {
			require.Contains(e, two, name)
		}
		e.class(pool, pool)
	}
	e.vlanTemplate("blue", "blue", 1001)
	e.vlanTemplate("red", "red", 1002)
	capture, err := e.CaptureUplinks()
	require.NoError(e, err)
	defer capture.Close()

	vlans := map[string]int{"blue1": 1001, "blue2": 1001, "red1": 1002, "red2": 1002}
	ips := map[string]string{"blue1": "10.78.0.1", "blue2": "10.78.0.2", "red1": "10.78.0.3", "red2": "10.78.0.4"}
	for pod := range vlans {
		e.pod(pod, "", pod[:len(pod)-1])
	}
	e.running("blue1", "blue2", "red1", "red2")
	macs := map[string]string{}
	for pod, ip := range ips {
		macs[e.mustInPod(pod, "cat /sys/class/net/sriov0/address")] = pod
		e.address(pod, ip)
	}
	require.Len(e, macs, 4)
	require.NotEqual(e, e.podNode("blue1").Name(), e.podNode("blue2").Name())
	require.NotEqual(e, e.podNode("red1").Name(), e.podNode("red2").Name())
	require.Equal(e, e.allocationsOf("blue1")[0].DeviceName, e.allocationsOf("blue2")[0].DeviceName)

	e.reaches("blue1", ips["blue2"])
	e.reaches("blue2", ips["blue1"])
	e.reaches("red1", ips["red2"])
	e.doesNotReach("blue1", ips["red1"])
	e.doesNotReach("blue1", ips["red2"])
	e.doesNotReach("red2", ips["blue1"])

	// What the wire saw: pings of every pod, and of no pod a frame without its tag.
	const ipv4 = 0x0800
	for mac, pod := range macs {
		ctx, cancel := context.WithTimeout(e.ctx, patience)
		defer cancel()
		_, err := capture.WaitFor(ctx, func(f lab.Frame) bool {
			return f.Src.String() == mac && f.EtherType == ipv4 && f.FromNode && f.Node == e.podNode(pod).Name()
		})
		require.NoError(e, err, "a ping of pod %s on the wire", pod)
	}
	for _, f := range capture.Frames() {
		if pod, ok := macs[f.Src.String()]; ok {
			require.True(e, f.Tagged && f.VLAN == vlans[pod], "frame of pod %s: %s", pod,
				fmt.Sprintf("tagged %t, VLAN %d, type %#x", f.Tagged, f.VLAN, f.EtherType))
		}
	}
}
