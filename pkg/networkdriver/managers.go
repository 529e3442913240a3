// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"log/slog"
	"maps"
	"reflect"
	"sync"

	"github.com/cilium/hive/cell"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/dummy"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// managerConfigs is what the device managers are told to do, nil when all of them are off.
type managerConfigs = current[*v2alpha1.CiliumNetworkDriverDeviceManagerConfig]

// managerRunner runs the device manager of one kind as it is configured.
type managerRunner struct {
	kind      types.DeviceManagerType
	log       *slog.Logger
	inventory *inventory.Inventory
	parts     *parts
	configs   *managerConfigs
	// quarantine says why devices must not be offered, and when that is otherwise.
	quarantine func() (map[string]string, <-chan struct{})
	// configOf returns the manager's part of the configuration, nil (without a type) when it is off.
	configOf func(*v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any
	// make makes a manager for a configuration from configOf, or one that only restores for nil.
	make func(config any) types.DeviceManager
}

// part is what the manager is called in messages.
func (r *managerRunner) part() string { return "device-manager-" + r.kind.String() }

// run keeps the manager running until the context ends, and makes a new one when its configuration is another than
// before. Without a configuration the manager's devices are withdrawn; those that are prepared keep their allocation
// rows. Between two managers, and after the last one, the inventory stays.
func (r *managerRunner) run(ctx context.Context, health cell.Health) {
	for ctx.Err() == nil {
		wanted, changed := r.configs.get()
		config := r.configOf(wanted)
		stop := r.start(ctx, health, config)
		for same := true; same; {
			select {
			case <-changed:
				wanted, changed = r.configs.get()
				same = reflect.DeepEqual(config, r.configOf(wanted))
			case <-ctx.Done():
				same = false
			}
		}
		stop()
	}
}

// start starts a manager, and returns what ends it and waits for it.
func (r *managerRunner) start(ctx context.Context, health cell.Health, config any) (stop func()) {
	if config == nil {
		r.log.Info("Device manager is off", "deviceManager", r.kind)
		health.OK("Off")
		r.inventory.Withdraw(r.kind)
		return func() {}
	}
	r.log.Info("Device manager is on", "deviceManager", r.kind)
	health.OK("Running")
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	manager := r.make(config)
	snapshots := make(chan types.Snapshot)
	running.Go(func() { r.publish(ctx, snapshots) })
	running.Go(func() {
		r.parts.keep(ctx, health, r.part(), func(ctx context.Context) error {
			return manager.Run(ctx, func(s types.Snapshot) {
				select {
				case snapshots <- s:
				case <-ctx.Done():
				}
			})
		})
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// publish publishes the newest snapshot without what is quarantined, until the context ends.
func (r *managerRunner) publish(ctx context.Context, snapshots <-chan types.Snapshot) {
	var last *types.Snapshot
	reasons, changed := r.quarantine()
	for {
		select {
		case s := <-snapshots:
			last = &s
		case <-changed:
			before := reasons
			if reasons, changed = r.quarantine(); last == nil || maps.Equal(before, reasons) {
				continue
			}
		case <-ctx.Done():
			return
		}
		r.inventory.Publish(r.kind, withoutQuarantined(*last, reasons))
	}
}

// sriovRunner is the runner of SR-IOV's manager.
func sriovRunner(r managerRunner, p sriov.Params) *managerRunner {
	r.kind = types.DeviceManagerTypeSRIOV
	r.configOf = func(c *v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any {
		if c == nil || c.SRIOV == nil || !c.SRIOV.Enabled {
			return nil
		}
		return c.SRIOV
	}
	r.make = func(config any) types.DeviceManager {
		params := p
		params.Config, _ = config.(*v2alpha1.SRIOVDeviceManagerConfig)
		return sriov.New(params)
	}
	return &r
}

// dummyRunner is the runner of the manager of dummy links.
func dummyRunner(r managerRunner) *managerRunner {
	r.kind = types.DeviceManagerTypeDummy
	r.configOf = func(c *v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any {
		if c == nil || c.Dummy == nil || !c.Dummy.Enabled {
			return nil
		}
		return c.Dummy
	}
	r.make = func(config any) types.DeviceManager {
		c, _ := config.(*v2alpha1.DummyDeviceManagerConfig)
		return dummy.New(r.log, c)
	}
	return &r
}
