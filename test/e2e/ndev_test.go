// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/ndev"
)

// TestNdev: by the API server alone kubectl ndev says of two nodes which devices they have and who has them, and of pods that do not
// run why. What is packed for a report has the node's devices, and no token.
func TestNdev(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	for _, n := range e.Nodes() {
		e.configure(n.Name(), sriovPools(vfPool("blue", 0), vfPool("red", 1, 2)))
		e.waitDevices(n.Name(), "blue", 1)
		e.waitDevices(n.Name(), "red", 2)
	}
	e.class("blue", "blue")
	e.class("green", "green")
	e.vlanTemplate("blue", "blue", 1001)
	e.template("green", []resourceapi.DeviceRequest{e.request("net", "green")})
	e.template("ghost", []resourceapi.DeviceRequest{e.request("net", "blue")}, config(`{"network": "ghost"}`))
	e.pod("one", "node1", "blue")
	e.running("one")

	byDevice := map[string]ndev.Device{}
	var list ndev.DeviceList
	e.eventually("kubectl ndev", func() string { // the status is written a moment after the attach
		require.NoError(e, json.Unmarshal([]byte(e.user("kubectl ndev -o json")), &list))
		for _, d := range list.Items {
			byDevice[d.Node+"/"+d.Pool+"/"+d.Device] = d
		}
		used := byDevice["node1/blue/"+e.allocationsOf("one")[0].DeviceName]
		if used.State != "Attached" {
			return "the device is " + used.State
		}
		return ""
	})
	require.Empty(e, list.Unread)
	blue := e.allocationsOf("one")[0].DeviceName
	used := byDevice["node1/blue/"+blue]
	require.Equal(e, e.ns, used.Use.Namespace)
	require.Equal(e, "one", used.Use.Pod)
	require.Equal(e, "sriov0", used.Use.Interface)
	require.Equal(e, 1001, used.Use.VLAN)
	require.Empty(e, used.Problems)
	require.Equal(e, "Free", byDevice["node2/blue/"+blue].State, "the device of the same name of the other node")
	for _, node := range []string{"node1", "node2"} {
		lines := strings.Fields(e.user("kubectl ndev --no-headers --pool red --node " + node + " | awk '{print $1, $2, $4, $NF}'"))
		require.Equal(e, strings.Fields(node+" red Free ok "+node+" red Free ok"), lines)
	}
	require.Contains(e, e.user("kubectl ndev pod "+e.ns+"/one"), "Nothing is missing.")

	// One pod too many on the node, one whose class matches nothing, and one whose network does not exist.
	e.pod("two", "node1", "blue")
	e.pod("green", "", "green")
	e.pod("ghost", "node2", "ghost")
	e.eventSays("two", "cannot allocate all claims")
	e.eventSays("green", "cannot allocate all claims")
	e.eventSays("ghost", "there is no CiliumNetworkDriverNetwork of this name")
	require.Contains(e, e.user("kubectl ndev pod "+e.ns+"/two"), "of 6 devices 2 match: ")
	require.Contains(e, e.user("kubectl ndev pod green -n "+e.ns), "matches none of the network driver's 6 devices")
	require.Contains(e, e.user("kubectl ndev pod ghost -n "+e.ns), "network ghost: there is no CiliumNetworkDriverNetwork of this name")

	const report = "/run/bugreport.tar.gz"
	said, err := e.Dbg(e.ctx, e.node, "bugreport", "-o", report)
	require.NoError(e, err)
	require.Empty(e, said)
	run := func(script string) string {
		out, err := e.node.Run(e.ctx, script)
		require.NoError(e, err)
		return out
	}
	names := run("tar -tzf " + report)
	for _, name := range []string{
		"version.txt", "config.json", "status.json", "devices.json", "tables.json", "log.txt", "links.json", "journal/" + blue + ".json",
		"journal/config",
		"cdi/" + driverName + "-claim_",
	} {
		require.Contains(e, names, "bugreport/"+name)
	}
	require.NotContains(e, names, "missing.txt")
	require.Contains(e, run("tar -xzOf "+report+" bugreport/links.json"), `"Vlan": 1001`)
	require.Equal(e, "0", strings.TrimSpace(run("tar -xzOf "+report+" | grep -c -e eyJ -e PRIVATE || true")), "no token, no key")
	run("rm " + report)
}
