// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
)

// TestManyDevices offers more devices in one pool than one slice or two can hold: the last one can be allotted too.
func TestManyDevices(t *testing.T) {
	const count, last = 300, "dummy299"
	e := start(t)
	n := e.node
	e.configure(e.node.Name(), dummySpec(count))
	slices := e.waitDevices(e.node.Name(), "fast-net", count)
	require.Len(e, slices, 5)
	for _, s := range slices {
		require.LessOrEqual(e, len(s.Spec.Devices), resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures)
		require.EqualValues(e, 5, s.Spec.Pool.ResourceSliceCount)
		require.Equal(e, slices[0].Spec.Pool.Generation, s.Spec.Pool.Generation)
	}
	e.class("dummy", "fast-net")
	e.template("last", []resourceapi.DeviceRequest{named(e.request("net", "dummy"), last)}, config(`{"podIfName": "last0"}`))
	e.pod("last", e.node.Name(), "last")
	e.running("last")
	rows := e.allocations(n)
	require.Len(e, rows, 1)
	require.Equal(e, last, rows[0].DeviceName)
	require.Empty(e, e.hasInterface("last", "last0"))
	e.waitDevices(e.node.Name(), "fast-net", count)
	e.deletePods("last")
	e.noAllocations(n)
}
