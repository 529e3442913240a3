// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package tables defines StateDB tables that several rooms read. The inventory answers what the device managers see now; the
// allocations answer what was prepared, for which claim and pod, and what is needed to give it back.
package tables

import (
	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// DeviceTableName is the name of the inventory table.
const DeviceTableName = "networkdriver-dra-devices"

// DRADevice is a row of the inventory.
type DRADevice struct {
	// Name is the device's name in ResourceSlices ([types.Device.IfName]).
	Name string
	// Manager is the device manager that reports it.
	Manager types.DeviceManagerType
	// Dev is the manager's present view of the device.
	Dev types.Device
}

// TableHeader implements [statedb.TableWritable].
func (d *DRADevice) TableHeader() []string {
	return []string{"Name", "Manager", "KernelIfName"}
}

// TableRow implements [statedb.TableWritable].
func (d *DRADevice) TableRow() []string {
	return []string{d.Name, d.Manager.String(), d.Dev.KernelIfName()}
}

var (
	deviceNameIndex = statedb.Index[*DRADevice, string]{
		Name:       "name",
		FromObject: func(d *DRADevice) index.KeySet { return index.NewKeySet(index.String(d.Name)) },
		FromKey:    index.String,
		FromString: index.FromString,
		Unique:     true,
	}
	deviceManagerIndex = statedb.Index[*DRADevice, types.DeviceManagerType]{
		Name:       "manager",
		FromObject: func(d *DRADevice) index.KeySet { return index.NewKeySet(index.Stringer(d.Manager)) },
		FromKey:    index.Stringer[types.DeviceManagerType],
		FromString: index.FromString,
	}

	// DeviceByName queries the inventory by a device's name.
	DeviceByName = deviceNameIndex.Query
	// DevicesByManager queries the inventory by the device manager.
	DevicesByManager = deviceManagerIndex.Query
)

// NewDeviceTable registers the inventory table.
func NewDeviceTable(db *statedb.DB) (statedb.RWTable[*DRADevice], error) {
	return statedb.NewTable(db, DeviceTableName, deviceNameIndex, deviceManagerIndex)
}
