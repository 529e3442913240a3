// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package pools decides which pool a device is advertised in, and describes the pools as ResourceSlices. It is made of
// pure functions of the inventory, the allocations and the configuration.
package pools

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Assignment has the devices of each pool that has any, sorted by name.
type Assignment map[string][]*tables.DRADevice

// PFs returns the interface names of the physical functions that each pool's devices come from, sorted. A pool whose devices have none
// is not there.
func (a Assignment) PFs() map[string][]string {
	pfs := map[string][]string{}
	for pool, devices := range a {
		for _, d := range devices {
			virtual, ok := d.Dev.(interface{ PF() (name string, vf int) })
			if !ok {
				continue
			}
			if name, _ := virtual.PF(); name != "" && !slices.Contains(pfs[pool], name) {
				pfs[pool] = append(pfs[pool], name)
			}
		}
		slices.Sort(pfs[pool])
	}
	return pfs
}

// Conflict is a device that more than one pool lays claim to.
type Conflict struct {
	// Device is the device's name.
	Device string
	// Pools are the names of the pools in alphabetical order.
	Pools []string
	// Pool is the one that the device is advertised in. It is empty when Prepared.
	Pool string
	// Prepared is true when the allocations disagree: the device was prepared in all of Pools, and is not advertised.
	// Otherwise the pools' filters overlap.
	Prepared bool
}

// Key identifies the situation, so that it can be told from a new one.
func (c Conflict) Key() string {
	return fmt.Sprintf("%s %t %s %s", c.Device, c.Prepared, c.Pool, strings.Join(c.Pools, ","))
}

// Of is the pool that [Assign] assigns the device to, given the allocations of this device; empty for none.
func Of(device *tables.DRADevice, allocations iter.Seq[*tables.DRAAllocation],
	configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) string {
	assignment, _ := Assign(slices.Values([]*tables.DRADevice{device}), allocations, configs)
	for pool := range assignment {
		return pool
	}
	return ""
}

// Assign assigns each device to at most one pool. A prepared device stays in the pool it was allotted from, whatever
// the configuration says meanwhile; it is in none if its allocations name more than one. Any other device goes to the
// alphabetically first pool whose filter it passes. A pool without a filter takes nothing, an empty filter everything.
//
// Conflicts come in the order of the devices.
func Assign(devices iter.Seq[*tables.DRADevice], allocations iter.Seq[*tables.DRAAllocation],
	configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) (Assignment, []Conflict) {
	configs = slices.SortedStableFunc(slices.Values(configs), func(a, b v2alpha1.CiliumNetworkDriverDevicePoolConfig) int {
		return cmp.Compare(a.PoolName, b.PoolName)
	})
	recorded := map[string][]string{}
	for a := range allocations {
		if names := recorded[a.DeviceName]; !slices.Contains(names, a.Pool) {
			recorded[a.DeviceName] = append(names, a.Pool)
		}
	}

	assignment := Assignment{}
	var conflicts []Conflict
	var matching []string
	for d := range devices {
		pools := recorded[d.Name]
		if len(pools) > 1 {
			conflicts = append(conflicts, Conflict{Device: d.Name, Pools: slices.Sorted(slices.Values(pools)), Prepared: true})
			continue
		}
		matching = matching[:0]
		for _, c := range configs {
			if c.Filter != nil && d.Dev.Match(c.Filter) && !slices.Contains(matching, c.PoolName) {
				matching = append(matching, c.PoolName)
			}
		}
		if len(pools) == 0 {
			pools = matching
		}
		if len(pools) == 0 {
			continue
		}
		if len(matching) > 1 {
			conflicts = append(conflicts, Conflict{Device: d.Name, Pools: slices.Clone(matching), Pool: pools[0]})
		}
		assignment[pools[0]] = append(assignment[pools[0]], d)
	}
	byName := func(a, b *tables.DRADevice) int { return cmp.Compare(a.Name, b.Name) }
	for _, devs := range assignment {
		if !slices.IsSortedFunc(devs, byName) {
			slices.SortFunc(devs, byName)
		}
	}
	slices.SortFunc(conflicts, func(a, b Conflict) int { return cmp.Compare(a.Device, b.Device) })
	return assignment, conflicts
}
