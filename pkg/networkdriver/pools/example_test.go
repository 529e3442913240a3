// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools_test

import (
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Two VFs are to leave sriov-pool for a pool of their own. One of them is prepared for a claim: it stays where it was
// allotted from until it is free.
func Example() {
	var inventory []*tables.DRADevice
	for n := range 4 {
		vf := inventorytest.VF(n)
		inventory = append(inventory, &tables.DRADevice{Name: vf.Name, Manager: vf.Manager, Dev: vf})
	}
	allocations := []*tables.DRAAllocation{{DeviceName: "0000-00-00-3", Pool: "sriov-pool"}}
	configs := []v2alpha1.CiliumNetworkDriverDevicePoolConfig{
		{PoolName: "sriov-pool", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{"ens1f0v0", "ens1f0v1"}}},
		{PoolName: "reserved", Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{"ens1f0v2", "ens1f0v3"}}},
	}

	assignment, conflicts := pools.Assign(slices.Values(inventory), slices.Values(allocations), configs)
	resources, omissions := pools.NewDescriber("node1").Slices(assignment, nil, nil)
	for _, pool := range slices.Sorted(maps.Keys(resources.Pools)) {
		fmt.Println(pool)
		for _, slice := range resources.Pools[pool].Slices {
			for _, device := range slice.Devices {
				fmt.Println("  ", device.Name, *device.Attributes["kernelIfName"].StringValue)
			}
		}
	}
	fmt.Println("conflicts:", conflicts, "left out:", omissions)
	// Output:
	// node1/reserved
	//    0000-00-00-2 ens1f0v2
	// node1/sriov-pool
	//    0000-00-00-0 ens1f0v0
	//    0000-00-00-1 ens1f0v1
	//    0000-00-00-3 ens1f0v3
	// conflicts: [] left out: []
}
