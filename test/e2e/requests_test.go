// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
)

// TestRequests has pods that ask for devices in every way a claim can: several requests, several claims, parameters
// from class and claim, for all requests and for one, and alternatives.
func TestRequests(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(e.node.Name(), mixedSpec(3))
	offered := devices(e.waitDevices(e.node.Name(), "sriov-pool", vfCount))
	e.waitDevices(e.node.Name(), "fast-net", 3)
	e.class("vf", "sriov-pool")
	e.class("vf-in-100", "sriov-pool", `{"vlan": 100, "podIfName": "class0"}`)
	e.class("dummy", "fast-net")
	e.class("nothing", "no-such-pool")

	// Two requests: one set of parameters for both, since it names none, and one for each.
	e.template("two", []resourceapi.DeviceRequest{e.request("left", "vf"), e.request("right", "vf")},
		config(`{"podIfName": "right0"}`, "right"), config(`{"vlan": 200, "podIfName": "left0"}`))
	// The claim's parameters override those of the class that they set, and no others.
	e.template("classy", []resourceapi.DeviceRequest{e.request("net", "vf-in-100")}, config(`{"podIfName": "claim0"}`, "net"))
	// Of two alternatives the second can be met; parameters are for the request and, more exactly, for the alternative.
	e.template("either", []resourceapi.DeviceRequest{{Name: "net", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "best", DeviceClassName: e.className("nothing")}, {Name: "vf", DeviceClassName: e.className("vf")},
	}}}, config(`{"podIfName": "sub0"}`, "net/vf"), config(`{"vlan": 300, "podIfName": "net0"}`, "net"), config(`{"vlan": 301}`, "net/best"))
	// Two claims of one pod.
	e.template("one", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "one0"}`))
	e.template("other", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "other0"}`))

	pods := map[string]struct {
		templates []string
		wants     []map[string]any
	}{
		"two": {[]string{"two"}, []map[string]any{
			{"vlan": 200., "podIfName": "left0"}, {"vlan": 200., "podIfName": "right0"},
		}},
		"classy": {[]string{"classy"}, []map[string]any{{"vlan": 100., "podIfName": "claim0"}}},
		"either": {[]string{"either"}, []map[string]any{{"vlan": 300., "podIfName": "sub0"}}},
		"claims": {[]string{"one", "other"}, []map[string]any{{"podIfName": "one0"}, {"podIfName": "other0"}}},
	}
	for name, p := range pods {
		e.pod(name, e.node.Name(), p.templates...)
	}
	for name, p := range pods {
		e.running(name)
		rows := e.allocationsOf(name)
		var got []map[string]any
		for _, row := range rows {
			got = append(got, row.Config)
			require.Empty(e, e.hasInterface(name, row.Config["podIfName"].(string)))
			if vlan, ok := row.Config["vlan"]; ok {
				vf := offered[row.DeviceName].Attributes["vfID"].IntValue
				require.NotNil(e, vf, "device %s", row.DeviceName)
				require.EqualValues(e, vlan, e.vlanOf(n, int(*vf)), "VLAN of %s", row.DeviceName)
			}
		}
		require.ElementsMatch(e, p.wants, got, "pod %s", name)
	}
	for name := range pods {
		e.deletePods(name)
	}
	e.noAllocations(n)
}
