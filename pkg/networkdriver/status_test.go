// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/dra"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func condition(t *testing.T, s v2alpha1.CiliumNetworkDriverNodeConfigStatus, name string) metav1.Condition {
	t.Helper()
	c := meta.FindStatusCondition(s.Conditions, name)
	require.NotNil(t, c)
	return *c
}

func TestStatusServing(t *testing.T) {
	v := view{
		generation: 7, driverName: "d", rdmaMode: "exclusive", pools: []string{"a", "empty"}, advertised: map[string]int{"a": 3, "former": 1}, free: map[string]int{"a": 2},
		pfs: map[string][]string{"a": {"eth0"}, "away": {"eth1"}},
		reports: []*inventory.Report{{Manager: "dummy", Devices: 4, Skipped: []types.Skipped{
			{Device: "dummy4", Reason: "first"}, {Device: "dummy4", Reason: "again"}, {Device: strings.Repeat("x", 80), Reason: "long"},
		}}},
		allocations: []*tables.DRAAllocation{{DeviceName: "dummy0", Pool: "former"}},
	}
	s := v.status()
	require.Equal(t, int64(7), s.ObservedGeneration)
	require.Equal(t, "exclusive", s.RDMAMode)
	require.Equal(t, int32(4), s.Devices)
	require.Equal(t, int32(1), s.AllocatedDevices)
	require.Equal(t, []v2alpha1.DevicePoolStatus{
		{Name: "a", Devices: 3, Free: 2, PFs: []string{"eth0"}}, {Name: "away", PFs: []string{"eth1"}}, {Name: "empty"}, {Name: "former", Devices: 1, Allocated: 1},
	}, s.Pools)
	require.Equal(t, "a 2/3, away 0/0, empty 0/0, former 0/1", s.PoolUse)
	require.Equal(t, []v2alpha1.DeviceManagerStatus{{Manager: "dummy", Devices: 4, Skipped: 3}}, s.Managers)
	require.Equal(t, []v2alpha1.SkippedDevice{
		{Manager: "dummy", Device: "dummy4", Reason: "first"},
		{Manager: "dummy", Device: strings.Repeat("x", 63), Reason: "long"},
	}, s.SkippedDevices)
	require.Equal(t, metav1.ConditionTrue, condition(t, s, v2alpha1.ConditionReady).Status)
	require.Equal(t, metav1.ConditionFalse, condition(t, s, v2alpha1.ConditionDegraded).Status)
	require.Equal(t, metav1.ConditionUnknown, condition(t, s, v2alpha1.ConditionContainerGate).Status)
	v.gate.Resolved = true
	require.Equal(t, metav1.ConditionTrue, condition(t, v.status(), v2alpha1.ConditionContainerGate).Status)
}

// What pools share is not forgotten while an agent starts.
func TestStatusKeepsPFs(t *testing.T) {
	before := []v2alpha1.DevicePoolStatus{{Name: "a", Devices: 3, PFs: []string{"eth0"}}, {Name: "former"}}
	starting := view{pools: []string{"a"}}
	starting.keepPFs(before)
	require.Equal(t, []v2alpha1.DevicePoolStatus{{Name: "a", PFs: []string{"eth0"}}}, starting.status().Pools)

	v := view{pools: []string{"a"}}
	v.addKubelet(dra.State{Publication: &dra.Publication{PFs: map[string][]string{"a": {"eth1"}}}})
	v.keepPFs(before)
	require.Equal(t, []v2alpha1.DevicePoolStatus{{Name: "a", PFs: []string{"eth1"}}}, v.status().Pools)
}

func TestStatusProblems(t *testing.T) {
	v := view{
		reports: []*inventory.Report{{Manager: "sr-iov", Problems: []types.Problem{
			{Field: "sriov.ifaces[0].vfCount", Message: "PF ens1f0 has at most 7 VFs, 200 are asked for"},
		}}},
		allocations: []*tables.DRAAllocation{{DeviceName: "0000-03-00-1", ClaimNamespace: "ns", ClaimName: "c", Error: "VF is stuck"}},
	}
	v.addKubelet(dra.State{
		GaveUp: true, Attempts: 10, RegistrationError: errors.New("no answer"),
		PublicationProblem: &dra.PublicationProblem{Reason: dra.ReasonForbidden, Message: "cannot create resourceslices"},
		Publication: &dra.Publication{
			Conflicts: []pools.Conflict{
				{Device: "d1", Pools: []string{"a", "b"}, Prepared: true}, {Device: "d2", Pools: []string{"a", "b"}, Pool: "a"},
			},
			Omissions: []pools.Omission{{Pool: "a", Device: "d3", Attribute: "x", Reason: "too long"}},
		},
	})
	v.gate.Problem = errors.New("no space left on device")
	s := v.status()
	ready := condition(t, s, v2alpha1.ConditionReady)
	require.Equal(t, metav1.ConditionFalse, ready.Status)
	require.Equal(t, reasonRegistrationFailed, ready.Reason, "the first cause counts")
	require.Contains(t, ready.Message, "no answer")

	degraded := condition(t, s, v2alpha1.ConditionDegraded)
	require.Equal(t, metav1.ConditionTrue, degraded.Status)
	for _, part := range []string{
		"sriov.ifaces[0].vfCount: PF ens1f0", "device 0000-03-00-1 of claim ns/c: VF is stuck", "no space left on device",
		"d1 is prepared in the pools [a b] and is not advertised", "d2 matches the pools [a b] and is in a", "too long",
	} {
		require.Contains(t, degraded.Message, part)
	}
	gate := condition(t, s, v2alpha1.ConditionContainerGate)
	require.Equal(t, metav1.ConditionFalse, gate.Status)
	require.Equal(t, "no space left on device", gate.Message)
}
