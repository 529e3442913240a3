// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"log/slog"
	"reflect"
	"time"

	"k8s.io/client-go/util/flowcontrol"

	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Backoff of a device manager that stopped with an error.
const (
	managerBackoffMin = time.Second
	managerBackoffMax = time.Minute
)

// managerRunner keeps one device manager running with the configuration it has now. It is used by one goroutine.
type managerRunner struct {
	kind      types.DeviceManagerType
	inventory *inventory.Inventory
	log       *slog.Logger

	applied bool
	config  any
	cancel  context.CancelFunc
	done    chan struct{}
}

// apply runs the manager with config, and a new one when the configuration is another than before. A nil config
// switches it off and withdraws its devices; those that are prepared keep their allocation rows.
func (r *managerRunner) apply(ctx context.Context, config any, manager func() types.DeviceManager) {
	if r.applied && reflect.DeepEqual(config, r.config) {
		return
	}
	r.stop()
	r.applied, r.config = true, config
	if config == nil {
		r.log.Info("Device manager is off", "deviceManager", r.kind)
		r.inventory.Withdraw(r.kind)
		return
	}
	r.log.Info("Device manager is on", "deviceManager", r.kind)
	ctx, r.cancel = context.WithCancel(ctx)
	r.done = make(chan struct{})
	go r.run(ctx, manager(), r.done)
}

func (r *managerRunner) run(ctx context.Context, manager types.DeviceManager, done chan<- struct{}) {
	defer close(done)
	backoff := flowcontrol.NewBackOff(managerBackoffMin, managerBackoffMax)
	for {
		started := time.Now()
		err := manager.Run(ctx, func(s types.Snapshot) { r.inventory.Publish(r.kind, s) })
		if ctx.Err() != nil {
			return
		}
		backoff.Next(r.kind.String(), started)
		delay := backoff.Get(r.kind.String())
		r.log.Error("Device manager stopped, it is started again", "deviceManager", r.kind, "delay", delay, "error", err)
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return
		}
	}
}

// stop ends the manager and waits for it. Its inventory stays until the next manager publishes.
func (r *managerRunner) stop() {
	if r.cancel == nil {
		return
	}
	r.cancel()
	<-r.done
	r.cancel = nil
}
