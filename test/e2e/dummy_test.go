// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// dummySpec offers count dummies in the pool fast-net.
func dummySpec(count int32) v2alpha1.CiliumNetworkDriverNodeConfigSpec {
	return v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
			Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: count},
		},
		Pools: []v2alpha1.CiliumNetworkDriverDevicePoolConfig{{
			PoolName: "fast-net", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{DeviceManagers: []string{"dummy"}},
		}},
	}
}

// TestDummy is the minimal example of the documentation: three dummy devices in one slice, a pod gets its link under
// the name it asked for, and afterwards there is neither a link nor an allocation.
func TestDummy(t *testing.T) {
	e := start(t)
	e.configure(e.node.Name(), dummySpec(3))
	require.Len(e, e.waitDevices(e.node.Name(), "fast-net", 3), 1)
	e.class("dummy", "fast-net")
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "fast0"}`, "net"))
	e.pod("a", e.node.Name(), "dummy")
	e.running("a")
	require.Contains(e, e.mustInPod("a", "ip -d link show fast0"), "dummy")

	rows := e.allocations(e.node)
	require.Len(e, rows, 1)
	out, err := e.Dbg(e.ctx, e.node, "statedb", "networkdriver-dra-allocations")
	require.NoError(e, err)
	require.JSONEq(e, string(e.table(e.node, "networkdriver-dra-allocations")), out, "what cilium-dbg prints")
	require.Equal(e, "dummy", rows[0].Manager)
	require.Equal(e, "fast-net", rows[0].Pool)
	require.Equal(e, map[string]any{"podIfName": "fast0"}, rows[0].Config)

	e.deletePods("a")
	e.noAllocations(e.node)
}
