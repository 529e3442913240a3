// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package inventory keeps the table of the devices that the device managers report now. It knows nothing of what is
// prepared except that discovery cannot see all of a device whose link is in a pod, and completes such a device from
// its allocation row.
package inventory

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"slices"

	"github.com/cilium/statedb"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Inventory writes the device table and the table of reports.
//
// The device table counts as initialized once [Inventory.Expect] has said which managers there are, and each of them
// has published a snapshot or was withdrawn. Who needs the complete inventory waits for that.
type Inventory struct {
	log         *slog.Logger
	db          *statedb.DB
	devices     statedb.RWTable[*tables.DRADevice]
	reports     statedb.RWTable[*Report]
	allocations statedb.Table[*tables.DRAAllocation]

	// What follows is guarded by holding a write transaction on the device table.

	// managers has the last snapshot of every manager, rejected the devices of each that were logged as left out.
	managers map[types.DeviceManagerType]*snapshot
	rejected map[types.DeviceManagerType]*logonce.Problems[types.Skipped]
	// waiting has, for each expected manager that has said nothing yet, what completes its table initializer.
	waiting map[types.DeviceManagerType]func(statedb.WriteTxn)
	// expected completes the initializer that stands for the managers that are not known yet.
	expected func(statedb.WriteTxn)
}

// snapshot is a manager's last snapshot, before prepared state was merged in.
type snapshot struct {
	types.Snapshot
	byName map[string]types.Device
	// clashes is true when a device had to give way to another manager's device of the same name.
	clashes bool
	// rejected are the devices that the inventory itself left out.
	rejected []types.Skipped
}

// New returns an inventory without managers. The device table is not initialized before [Inventory.Expect].
func New(log *slog.Logger, db *statedb.DB, devices statedb.RWTable[*tables.DRADevice], reports statedb.RWTable[*Report],
	allocations statedb.Table[*tables.DRAAllocation]) *Inventory {
	i := &Inventory{
		log:         log,
		db:          db,
		devices:     devices,
		reports:     reports,
		allocations: allocations,
		managers:    map[types.DeviceManagerType]*snapshot{},
		rejected:    map[types.DeviceManagerType]*logonce.Problems[types.Skipped]{},
		waiting:     map[types.DeviceManagerType]func(statedb.WriteTxn){},
	}
	txn := db.WriteTxn(devices)
	i.expected = devices.RegisterInitializer(txn, "device-managers")
	txn.Commit()
	return i
}

// Expect says which managers will publish. It is called once, also when there are none.
func (i *Inventory) Expect(managers ...types.DeviceManagerType) {
	txn := i.db.WriteTxn(i.devices)
	defer txn.Abort()
	for _, m := range managers {
		_, published := i.managers[m]
		_, waiting := i.waiting[m]
		if !published && !waiting {
			i.waiting[m] = i.devices.RegisterInitializer(txn, m.String())
		}
	}
	i.expected(txn)
	txn.Commit()
}

// Publish makes the snapshot the complete inventory of the manager: its rows are written where they changed, and
// removed where the snapshot no longer has the device, unless that is left out for a fault. Rows of other managers and the allocations
// are left alone.
func (i *Inventory) Publish(manager types.DeviceManagerType, s types.Snapshot) {
	txn := i.db.WriteTxn(i.devices, i.reports)
	defer txn.Abort()

	i.managers[manager] = &snapshot{Snapshot: s}
	i.apply(txn, manager)
	i.applyClashing(txn, manager)
	i.heard(txn, manager)
	txn.Commit()
}

// Withdraw removes everything of a manager that is switched off or gave up.
func (i *Inventory) Withdraw(manager types.DeviceManagerType) {
	txn := i.db.WriteTxn(i.devices, i.reports)
	defer txn.Abort()

	i.managers[manager] = &snapshot{}
	i.apply(txn, manager)
	delete(i.managers, manager)
	i.reports.Delete(txn, &Report{Manager: manager})
	i.applyClashing(txn, manager)
	i.heard(txn, manager)
	txn.Commit()
}

// heard completes the manager's table initializer.
func (i *Inventory) heard(txn statedb.WriteTxn, manager types.DeviceManagerType) {
	if done, ok := i.waiting[manager]; ok {
		done(txn)
		delete(i.waiting, manager)
	}
}

// applyClashing gives other managers' devices that had to give way the names that the manager no longer uses.
func (i *Inventory) applyClashing(txn statedb.WriteTxn, manager types.DeviceManagerType) {
	for other, s := range i.managers {
		if other != manager && s.clashes {
			i.apply(txn, other)
		}
	}
}

// apply brings the manager's rows and its report in line with its last snapshot.
func (i *Inventory) apply(txn statedb.WriteTxn, manager types.DeviceManagerType) {
	s := i.managers[manager]
	s.byName, s.clashes, s.rejected = make(map[string]types.Device, len(s.Devices)), false, nil
	prepared := i.prepared(txn, manager)

	for _, dev := range s.Devices {
		name := dev.IfName()
		row, _, found := i.devices.Get(txn, tables.DeviceByName(name))
		switch {
		case len(validation.IsDNS1123Label(name)) > 0:
			s.reject(fmt.Sprintf("%.63q", name), "the name is not a DNS label: at most 63 lower case letters, digits and '-', with a letter or digit at both ends")
			continue
		case s.byName[name] != nil:
			s.reject(name, fmt.Sprintf("device manager %s reports two devices of this name", manager))
			continue
		case found && row.Manager != manager:
			s.reject(name, fmt.Sprintf("device manager %s already has a device of this name", row.Manager))
			s.clashes = true
			continue
		}
		s.byName[name] = dev
		if p := prepared[name]; p != nil {
			dev = dev.Merge(p)
		}
		i.write(txn, row, &tables.DRADevice{Name: name, Manager: manager, Dev: dev})
	}

	// A device with a fault stays as it was seen last: it is for the publication to say that it cannot be used.
	faulty := map[string]bool{}
	for _, skipped := range s.Skipped {
		faulty[skipped.Device] = skipped.Cause != ""
	}
	var gone []*tables.DRADevice
	for row := range i.devices.List(txn, tables.DevicesByManager(manager)) {
		if s.byName[row.Name] == nil && !faulty[row.Name] {
			gone = append(gone, row)
		}
	}
	for _, row := range gone {
		i.devices.Delete(txn, row)
	}

	report := &Report{
		Manager:  manager,
		Devices:  len(s.byName),
		Skipped:  slices.Concat(s.Skipped, s.rejected),
		Problems: s.Problems,
	}
	if old, _, found := i.reports.Get(txn, ReportByManager(manager)); !found || !reflect.DeepEqual(old, report) {
		i.reports.Insert(txn, report)
	}
	if i.rejected[manager] == nil {
		i.rejected[manager] = &logonce.Problems[types.Skipped]{}
	}
	for _, r := range i.rejected[manager].Replace(s.rejected...) {
		i.log.Error("Device left out of the inventory",
			slog.String("device", r.Device), slog.String("deviceManager", manager.String()), slog.String("reason", r.Reason))
	}
}

func (s *snapshot) reject(device, reason string) {
	s.rejected = append(s.rejected, types.Skipped{Device: device, Reason: reason})
}

// write inserts the row unless it is what the table has already: an unchanged device wakes nobody.
func (i *Inventory) write(txn statedb.WriteTxn, old, row *tables.DRADevice) {
	if old == nil || !reflect.DeepEqual(old.Dev, row.Dev) {
		i.devices.Insert(txn, row)
	}
}

// prepared returns the prepared devices of the manager by name.
func (i *Inventory) prepared(txn statedb.ReadTxn, manager types.DeviceManagerType) map[string]types.Device {
	prepared := map[string]types.Device{}
	for row := range i.allocations.All(txn) {
		if row.Manager == manager && prepared[row.DeviceName] == nil {
			prepared[row.DeviceName] = row.PreparedDevice
		}
	}
	return prepared
}

// Run follows the allocations until the context ends and merges anew what changed there: after a restart a manager may
// publish before its prepared devices are restored, and a freed device falls back to what discovery sees.
func (i *Inventory) Run(ctx context.Context) error {
	txn := i.db.WriteTxn(i.allocations)
	changes, err := i.allocations.Changes(txn)
	txn.Commit()
	if err != nil {
		return fmt.Errorf("follow table %s: %w", tables.AllocationTableName, err)
	}
	defer changes.Close()
	for {
		names := map[string]struct{}{}
		seq, watch := changes.Next(i.db.ReadTxn())
		for change := range seq {
			names[change.Object.DeviceName] = struct{}{}
		}
		if len(names) > 0 {
			i.merge(names)
		}
		select {
		case <-watch:
		case <-ctx.Done():
			return nil
		}
	}
}

// merge merges prepared state into the named devices.
func (i *Inventory) merge(names map[string]struct{}) {
	txn := i.db.WriteTxn(i.devices)
	defer txn.Abort()
	for name := range names {
		row, _, found := i.devices.Get(txn, tables.DeviceByName(name))
		if !found {
			continue
		}
		dev := i.managers[row.Manager].byName[name]
		if dev == nil {
			continue // it has a fault, and stays as it was seen last
		}
		prepared := false
		for allocation := range i.allocations.List(txn, tables.AllocationsByDevice(name)) {
			if allocation.Manager == row.Manager {
				dev, prepared = dev.Merge(allocation.PreparedDevice), true
				break
			}
		}
		if !prepared && !dev.Link().IsZero() && dev.KernelIfName() == "" && row.Dev.KernelIfName() != "" {
			// The snapshot is from when the link was in the pod, and the next one is due. Until then the row is right,
			// and without this each pod that ends would have the device's slice written twice.
			continue
		}
		i.write(txn, row, &tables.DRADevice{Name: name, Manager: row.Manager, Dev: dev})
	}
	txn.Commit()
}
