// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package tables

import (
	"strings"
	"time"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// HealthTableName is the name of the table of devices that are not healthy.
const HealthTableName = "networkdriver-health"

// DeviceHealth is a row of the table of devices that are not healthy: a device without a row is. Rows are immutable.
type DeviceHealth struct {
	// Device is the device's name in ResourceSlices.
	Device string
	// Faults are those that have lasted, in the order of [types.Causes]; there is at least one.
	Faults []DeviceFault
}

// DeviceFault is a fault of a device that has lasted.
type DeviceFault struct {
	types.Fault
	// Since is when it was first seen.
	Since time.Time
}

// Causes names the causes, the heaviest first.
func (h *DeviceHealth) Causes() []string {
	causes := make([]string, len(h.Faults))
	for i, f := range h.Faults {
		causes[i] = string(f.Cause)
	}
	return causes
}

// Message says what is wrong, for people.
func (h *DeviceHealth) Message() string {
	messages := make([]string, len(h.Faults))
	for i, f := range h.Faults {
		messages[i] = f.Message
	}
	return strings.Join(messages, "; ")
}

// TableHeader implements [statedb.TableWritable].
func (h *DeviceHealth) TableHeader() []string {
	return []string{"Device", "Causes", "Since", "Message"}
}

// TableRow implements [statedb.TableWritable].
func (h *DeviceHealth) TableRow() []string {
	return []string{h.Device, strings.Join(h.Causes(), ","), h.Faults[0].Since.Format(time.RFC3339), h.Message()}
}

var healthDeviceIndex = statedb.Index[*DeviceHealth, string]{
	Name:       "device",
	FromObject: func(h *DeviceHealth) index.KeySet { return index.NewKeySet(index.String(h.Device)) },
	FromKey:    index.String,
	FromString: index.FromString,
	Unique:     true,
}

// HealthByDevice queries by a device's name.
var HealthByDevice = healthDeviceIndex.Query

// NewHealthTable registers the table of devices that are not healthy.
func NewHealthTable(db *statedb.DB) (statedb.RWTable[*DeviceHealth], error) {
	return statedb.NewTable(db, HealthTableName, healthDeviceIndex)
}
