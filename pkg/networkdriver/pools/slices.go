// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// The attributes that the driver itself gives every device.
const (
	// AttributePool is the configured pool's name.
	AttributePool resourceapi.QualifiedName = "pool"
	// AttributeDeviceManager is the device manager's name.
	AttributeDeviceManager resourceapi.QualifiedName = "deviceManager"
	// AttributeMultusResourceName is the pool's name once more, for devices that Multus can hand on: it compares it with the
	// annotation k8s.v1.cni.cncf.io/resourceName of a NetworkAttachmentDefinition.
	AttributeMultusResourceName resourceapi.QualifiedName = "k8s.cni.cncf.io/resourceName"
)

// maxSliceDevices is how many devices a slice may have where one of them has a taint.
const maxSliceDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// Attributes are what the administrator gives the devices of a pool.
type Attributes = map[string]v2alpha1.PoolAttribute

// AttributesOf returns the attributes of each pool that has any.
func AttributesOf(configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) map[string]Attributes {
	attributes := map[string]Attributes{}
	for _, c := range configs {
		if len(c.Attributes) > 0 {
			attributes[c.PoolName] = c.Attributes
		}
	}
	return attributes
}

// FaultEffectsOf returns the effect of each pool's taints.
func FaultEffectsOf(configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) map[string]string {
	effects := make(map[string]string, len(configs))
	for _, c := range configs {
		effects[c.PoolName] = c.FaultEffect
	}
	return effects
}

// Name is the name of a node's pool in ResourceSlices. The scheduler tells devices apart by driver, pool and device,
// and identical servers have devices of identical names: the node makes the three unique in the cluster.
func Name(node, pool string) string { return node + "/" + pool }

// Configured is the reverse of [Name]: the configured pool's name. ok is false for a pool that is not the node's.
func Configured(node, published string) (pool string, ok bool) {
	pool, ok = strings.CutPrefix(published, node+"/")
	return pool, ok && pool != "" && !strings.Contains(pool, "/")
}

// Omission is something that ResourceSlices cannot express and that is therefore left out.
type Omission struct {
	// Pool is the configured pool's name.
	Pool string
	// Device and Attribute are their names; both are empty when it is the whole pool.
	Device    string
	Attribute resourceapi.QualifiedName
	// Reason says what about it breaks the rules.
	Reason string
}

// Describer describes pools for the ResourceSlice API. It remembers the description of each inventory row, since rows
// are immutable and most of thousands are the same in the next publication. It is not for concurrent use.
type Describer struct {
	node string
	// known has the descriptions that the last call made or used.
	known map[*tables.DRADevice]description
}

type description struct {
	pool      string
	own       Attributes
	taints    []resourceapi.DeviceTaint
	device    resourceapi.Device
	omissions []Omission
}

// NewDescriber returns a describer for the driver's pools on the node.
func NewDescriber(node string) *Describer { return &Describer{node: node} }

// Slices describes the assigned devices, with the attributes that their pools give them and the taints that they have in their pools, none for
// a nil function. Each pool is split into slices of at most 64 devices, in the order of their names, so that a change of one device changes
// one slice. A pool without devices is not in the assignment and so has no slice. The result shares memory with later ones and must not
// be changed.
//
// The API server refuses a slice as a whole for a single bad attribute. What would be refused is left out and reported.
func (d *Describer) Slices(assignment Assignment, own map[string]Attributes, taints func(pool, device string) []resourceapi.DeviceTaint) (resourceslice.DriverResources, []Omission) {
	resources := resourceslice.DriverResources{Pools: make(map[string]resourceslice.Pool, len(assignment))}
	known := make(map[*tables.DRADevice]description, len(d.known))
	var omissions []Omission
	for pool, rows := range assignment {
		if reason := checkPool(d.node, pool); reason != "" {
			omissions = append(omissions, Omission{Pool: pool, Reason: reason})
			continue
		}
		devices := make([]resourceapi.Device, 0, len(rows))
		for _, row := range rows {
			var tainted []resourceapi.DeviceTaint
			if taints != nil {
				tainted = taints(pool, row.Name)
			}
			described, ok := d.known[row]
			if !ok || described.pool != pool || !maps.Equal(described.own, own[pool]) || !slices.Equal(described.taints, tainted) {
				attrs, omitted := attributes(pool, own[pool], row)
				described = description{pool, own[pool], tainted, resourceapi.Device{Name: row.Name, Attributes: attrs, Taints: slices.Clone(tainted)}, omitted}
			}
			known[row] = described
			devices = append(devices, described.device)
			omissions = append(omissions, described.omissions...)
		}
		var split []resourceslice.Slice
		for chunk := range slices.Chunk(devices, maxSliceDevices) {
			split = append(split, resourceslice.Slice{Devices: chunk})
		}
		resources.Pools[Name(d.node, pool)] = resourceslice.Pool{Slices: split}
	}
	d.known = known
	slices.SortFunc(omissions, func(a, b Omission) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Attribute, b.Attribute))
	})
	return resources, omissions
}

// checkPool returns why a pool cannot be published. The name of a prepared device's pool comes from a claim and did
// not go through the schema of the node config.
func checkPool(node, pool string) string {
	switch {
	case len(validation.IsDNS1123Subdomain(pool)) > 0:
		return "the pool's name is not a DNS subdomain"
	case len(pool) > resourceapi.DeviceAttributeMaxValueLength:
		return fmt.Sprintf("the pool's name is longer than %d characters", resourceapi.DeviceAttributeMaxValueLength)
	case len(Name(node, pool)) > resourceapi.PoolNameMaxLength:
		return fmt.Sprintf("%q is longer than %d characters", Name(node, pool), resourceapi.PoolNameMaxLength)
	}
	return ""
}
