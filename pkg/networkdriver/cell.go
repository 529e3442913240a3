// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package networkdriver is the network driver's Hive cell: it gives pods the network devices that the scheduler
// allots to their claims.
//
// The data go one way. The node config says which device managers run; they fill the inventory. Pools turn the
// inventory into ResourceSlices. Kubelet's calls turn claims into allocations, and the runtime's events move the
// links of a pod's allocations into its network namespace. After a restart the allocations come back from the
// node's journal and the claims' status. This package wires these rooms and sees to the order in which they open.
package networkdriver

import (
	"fmt"
	"log/slog"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/ciliumnode"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Cell is the network driver. What it needs from the application around it is listed in [Params].
var Cell = cell.Module(
	"network-driver",
	"Gives pods real network devices through DRA and NRI",

	cell.Config(defaultConfig),
	cell.ProvidePrivate(
		tables.NewDeviceTable,
		tables.NewAllocationTable, statedb.RWTable[*tables.DRAAllocation].ToTable,
		inventory.NewReportTable,
		tables.NewPoolTable,
		journal.NewTable,
		tables.NewHealthTable,
	),
	cell.Invoke(register),
)

// Params are what the driver takes from the application. Another Hive application provides these and adds [Cell].
type Params struct {
	cell.In

	Config     Config
	Logger     *slog.Logger
	Jobs       job.Group
	DB         *statedb.DB
	Clientset  kubernetes.Interface
	RESTConfig *rest.Config
	// Prompt is for what kubelet and the runtime wait for; without one it is Clientset.
	Prompt  client.Prompt `optional:"true"`
	Metrics prometheus.Registerer
	Health  *health.Checks

	Devices     statedb.RWTable[*tables.DRADevice]
	Allocations statedb.Table[*tables.DRAAllocation]
	Reports     statedb.RWTable[*inventory.Report]
	Pools       statedb.RWTable[*tables.Pool]
	Journal     statedb.RWTable[*journal.Entry]
	Faults      statedb.RWTable[*tables.DeviceHealth]
}

func register(p Params, allocations statedb.RWTable[*tables.DRAAllocation]) error {
	if !p.Config.enabled() {
		return nil
	}
	var err error
	if p.Config, err = p.Config.complete(); err != nil {
		return fmt.Errorf("network driver: %w", err)
	}
	if p.Prompt.Interface == nil {
		p.Prompt.Interface = p.Clientset
	}
	d, err := newDriver(p, allocations)
	if err != nil {
		return fmt.Errorf("network driver: %w", err)
	}
	p.Jobs.Add(d.jobs()...)
	if p.Config.AutoCreateCiliumNodeResource {
		publisher, err := ciliumnode.NewPublisher(p.Logger, p.RESTConfig, p.Config.NodeName)
		if err != nil {
			return fmt.Errorf("network driver: %w", err)
		}
		p.Jobs.Add(d.job("cilium-node", publisher.Run))
	}
	return nil
}
