// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/cilium/statedb"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// reportInterval is the longest time between two reports to kubelet, which takes what it has not heard of for 30 seconds as unknown.
	reportInterval = 20 * time.Second
	// reportPause is the shortest: for each report the PFs are asked.
	reportPause = time.Second
)

// Health looks for faults of devices.
type Health interface {
	// Look asks the kernel now, and returns when the table of faults has what there is to say. An error is why it may lack something.
	Look(ctx context.Context) error
}

// reporter reports to kubelet how the devices are that pods have: kubelet has it in the pods' status.
type reporter struct {
	db          *statedb.DB
	allocations statedb.Table[*tables.DRAAllocation]
	faults      statedb.Table[*tables.DeviceHealth]
	health      Health
	node        string
}

// newReporter returns nil where nobody looks for faults.
func newReporter(p Params) *reporter {
	if p.Health == nil {
		return nil
	}
	return &reporter{p.DB, p.Allocations, p.Faults, p.Health, p.Config.NodeName}
}

// run reports at once, at each change, and every [reportInterval], until the context ends. Before each report the kernel is asked. What
// it does not say is not reported, so that kubelet comes to call it unknown; where no pod has a device a report says just that.
func (r *reporter) run(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) {
	for ctx.Err() == nil {
		again, cancel := context.WithTimeout(ctx, reportInterval)
		err := r.health.Look(again)
		report, watch := r.report()
		if err == nil {
			select {
			case reports <- report:
			case <-ctx.Done():
			}
		}
		// An error is logged where it comes from.
		pause.For(again, reportPause)
		_, _ = watch.Wait(again, settleTime)
		cancel()
	}
}

// report returns how the prepared devices are, and what tells of a change.
func (r *reporter) report() (kubeletplugin.DeviceHealthReport, *statedb.WatchSet) {
	txn := r.db.ReadTxn()
	watch := statedb.NewWatchSet()
	allocations, allocationsChanged := r.allocations.AllWatch(txn)
	_, faultsChanged := r.faults.AllWatch(txn)
	watch.Add(allocationsChanged, faultsChanged)
	now := time.Now()
	var report kubeletplugin.DeviceHealthReport
	for row := range allocations {
		device := kubeletplugin.DeviceHealth{
			PoolName: pools.Name(r.node, row.Pool), DeviceName: row.DeviceName,
			Health: kubeletplugin.HealthStatusHealthy, LastUpdated: now,
		}
		if h, _, found := r.faults.Get(txn, tables.HealthByDevice(row.DeviceName)); found {
			device.Health, device.Message = kubeletplugin.HealthStatusUnhealthy, h.Message()
		}
		report.Devices = append(report.Devices, device)
	}
	slices.SortFunc(report.Devices, func(a, b kubeletplugin.DeviceHealth) int {
		return cmp.Or(cmp.Compare(a.PoolName, b.PoolName), cmp.Compare(a.DeviceName, b.DeviceName))
	})
	return report, watch
}
