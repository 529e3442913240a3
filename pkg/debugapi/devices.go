// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package debugapi

import (
	"cmp"
	"slices"

	"github.com/cilium/statedb"

	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Device is a device and what it is used for, in a form for people.
type Device struct {
	Device  string `json:"device"`
	Manager string `json:"manager"`
	// Pool is the one that the device was allotted from or is offered in; empty for none.
	Pool string `json:"pool,omitempty"`
	// Claim and Pod are empty for a device that is not prepared.
	Claim string `json:"claim,omitempty"`
	Pod   string `json:"pod,omitempty"`
	// Interface is the name in the pod while the device is attached, else the name on the host.
	Interface string `json:"interface,omitempty"`
	VLAN      int    `json:"vlan,omitempty"`
	// Network is the network that the claim joined, and Addresses are what that gave the device, with prefix length.
	Network   string   `json:"network,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	// State is Free, Prepared, Attached, Moved, Releasing, Failed, Missing (prepared, but its manager does not see it) or NotOffered.
	State string `json:"state"`
	// Reason says why, for Failed and NotOffered.
	Reason string `json:"reason,omitempty"`
	// Faults are the causes of its faults, the heaviest first; none for a healthy device. Fault says what is wrong.
	Faults []string `json:"faults,omitempty"`
	Fault  string   `json:"fault,omitempty"`
}

// Devices joins inventory, allocations and reports. Tables that the program does not have count as empty.
func Devices(db *statedb.DB) []Device {
	txn := db.ReadTxn()
	devices := []Device{}
	seen := map[string]bool{}
	inventoried := map[string]*tables.DRADevice{}
	for row := range rows[*tables.DRADevice](db, txn, tables.DeviceTableName) {
		inventoried[row.Name] = row
	}
	pools := map[string]string{}
	for row := range rows[*tables.Pool](db, txn, tables.PoolTableName) {
		for _, device := range row.Devices {
			pools[device] = row.Name
		}
	}
	for row := range rows[*tables.DRAAllocation](db, txn, tables.AllocationTableName) {
		seen[row.DeviceName] = true
		d := Device{
			Device: row.DeviceName, Manager: row.Manager.String(), Pool: row.Pool, Claim: row.Claim(),
			Pod: row.ClaimNamespace + "/" + row.PodName, VLAN: row.Config.VLAN(), State: row.State(), Reason: row.Error,
		}
		if n := row.Config.InPod(); n != nil {
			d.Network = row.Config.Network
			for _, a := range n.Addresses {
				d.Addresses = append(d.Addresses, a.String())
			}
		}
		known, ok := inventoried[row.DeviceName]
		switch {
		case row.Attachment != nil:
			d.Interface = row.Attachment.IfName
		case ok:
			d.Interface = known.Dev.KernelIfName()
		case d.State == "Prepared":
			d.State = "Missing"
		}
		devices = append(devices, d)
	}
	for name, row := range inventoried {
		if !seen[name] {
			devices = append(devices, Device{
				Device: name, Manager: row.Manager.String(), Pool: pools[name], Interface: row.Dev.KernelIfName(), State: "Free",
			})
		}
	}
	for report := range rows[*inventory.Report](db, txn, inventory.ReportTableName) {
		for _, s := range report.Skipped {
			if inventoried[s.Device] != nil {
				continue // it has a fault
			}
			devices = append(devices, Device{
				Device: s.Device, Manager: report.Manager.String(), State: "NotOffered", Reason: s.Reason,
			})
		}
	}
	faults := map[string]*tables.DeviceHealth{}
	for row := range rows[*tables.DeviceHealth](db, txn, tables.HealthTableName) {
		faults[row.Device] = row
	}
	for i := range devices {
		if h := faults[devices[i].Device]; h != nil {
			devices[i].Faults, devices[i].Fault = h.Causes(), h.Message()
		}
	}
	slices.SortFunc(devices, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Manager, b.Manager), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Pool, b.Pool))
	})
	return devices
}

// rows returns the rows of a table by its name, so that this package works in an agent without the driver too.
func rows[T any](db *statedb.DB, txn statedb.ReadTxn, table string) func(yield func(T) bool) {
	return func(yield func(T) bool) {
		meta := db.GetTable(txn, table)
		if meta == nil {
			return
		}
		for obj := range (statedb.AnyTable{Meta: meta}).All(txn) {
			if row, ok := obj.(T); ok && !yield(row) {
				return
			}
		}
	}
}
