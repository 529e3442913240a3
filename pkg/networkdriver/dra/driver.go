// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package dra connects the driver to kubelet and to the scheduler: it registers as a kubelet plugin for Dynamic
// Resource Allocation, hands kubelet's calls on, and publishes the devices as ResourceSlices.
package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cilium/statedb"
	"k8s.io/client-go/kubernetes"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// stableAfter is how long a registration has to last for the next loss to be mended at once.
	stableAfter = time.Minute
	// maxLossBackoff is the longest wait before a lost registration is mended.
	maxLossBackoff = time.Minute
)

// Config are the driver's names and how patiently it registers.
type Config struct {
	// DriverName is the DRA driver name.
	DriverName string
	// NodeName is the Kubernetes node.
	NodeName string
	// KubeletRootDir is kubelet's data directory, at the same path as kubelet sees it.
	KubeletRootDir string

	// RetryInterval is the time between two attempts to register.
	RetryInterval time.Duration
	// Timeout is how long one attempt may take.
	Timeout time.Duration
	// MaxAttempts is the number of attempts after which [Driver.Run] gives up.
	MaxAttempts int
}

// Params are what a driver is made of.
type Params struct {
	Logger *slog.Logger
	Config Config
	// Client publishes, Prompt reads claims while kubelet waits.
	Client, Prompt kubernetes.Interface
	Claims         Claims
	Metadata       Metadata
	Runtime        Runtime
	DB             *statedb.DB
	Devices        statedb.Table[*tables.DRADevice]
	Allocations    statedb.Table[*tables.DRAAllocation]
	// Faults are devices that are not healthy, and Health looks for them. Both may be nil.
	Faults statedb.Table[*tables.DeviceHealth]
	Health Health
	// Pools is filled with what is offered; it may be nil.
	Pools statedb.RWTable[*tables.Pool]
	// Metrics may be nil.
	Metrics *Metrics
}

// Driver registers and publishes.
type Driver struct {
	log       *slog.Logger
	config    Config
	prompt    kubernetes.Interface
	claims    Claims
	reporter  *reporter
	metadata  Metadata
	runtime   Runtime
	state     *tracker
	metrics   *Metrics
	publisher *publisher
	writer    *sliceWriter
}

// New returns a driver that does nothing before [Driver.Run].
func New(p Params) *Driver {
	state := newTracker()
	taintless := make(chan struct{})
	writer := &sliceWriter{
		log: p.Logger, client: p.Client, driver: p.Config.DriverName, node: p.Config.NodeName,
		state: state, metrics: p.Metrics,
		taintless: sync.OnceFunc(func() {
			p.Logger.Warn("The API server keeps no taints of devices (feature gate " + featureTaints +
				"): devices that cannot serve are withdrawn, others with a fault stay as they are")
			close(taintless)
		}),
		failing: map[string]error{}, dropped: map[string]error{},
	}
	return &Driver{
		log: p.Logger, config: p.Config, prompt: p.Prompt, claims: p.Claims, metadata: p.Metadata, runtime: p.Runtime, state: state,
		metrics: p.Metrics, reporter: newReporter(p), writer: writer,
		publisher: &publisher{
			log: p.Logger, db: p.DB, devices: p.Devices, allocations: p.Allocations, faults: p.Faults, taintless: taintless, table: p.Pools,
			node: p.Config.NodeName, describer: pools.NewDescriber(p.Config.NodeName),
			state: state, metrics: p.Metrics, begin: writer.begin, write: writer.write,
			changed: make(chan struct{}),
		},
	}
}

// SetPools sets the configured pools. It may be called again at any time; nothing is published before the first.
func (d *Driver) SetPools(configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) {
	d.publisher.setPools(configs)
}

// State returns the present state, and a channel that is closed when there is another.
func (d *Driver) State() (State, <-chan struct{}) { return d.state.get() }

// Run registers with kubelet, keeps registered, and publishes once it is: before that, the scheduler would send pods
// that nobody can serve. It must be called after both tables were restored, as kubelet's calls come at once.
//
// It returns nil when the context ends, and an error when kubelet does not register the driver in the configured number
// of attempts, or when the publication has ended. Either way the sockets are gone, while the slices stay for an agent
// that comes back; kubelet removes them when none does. It may be called again when it has returned.
func (d *Driver) Run(ctx context.Context) error {
	if err := d.config.validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var publishing sync.WaitGroup
	defer func() {
		cancel(nil)
		publishing.Wait()
		d.writer.stop()
	}()
	var once sync.Once
	publish := func() {
		if err := d.publisher.run(ctx); ctx.Err() == nil {
			d.state.problem(problemOf(err))
			cancel(fmt.Errorf("publish ResourceSlices: %w", err))
		}
	}

	backoff := d.config.RetryInterval
	for {
		server, err := d.register(ctx)
		if ctx.Err() != nil {
			return causeOf(ctx)
		}
		if err != nil {
			return err
		}
		once.Do(func() { publishing.Go(publish) })

		since := time.Now()
		lost := server.watch(ctx)
		server.stop()
		d.metrics.isRegistered(false)
		d.state.update(func(s *State) { s.Registered, s.RegistrationError = false, lost })
		if ctx.Err() != nil {
			return causeOf(ctx)
		}
		if time.Since(since) > stableAfter {
			backoff = d.config.RetryInterval
		}
		d.log.Error("Registration with kubelet was lost, registering again",
			slog.String("error", lost.Error()), slog.Duration("wait", backoff))
		if !pause.For(ctx, backoff) {
			return causeOf(ctx)
		}
		backoff = min(2*backoff, maxLossBackoff)
	}
}

// register makes sockets until kubelet registers the driver by one of them.
func (d *Driver) register(ctx context.Context) (*server, error) {
	d.state.update(func(s *State) { s.Attempts = 0 })
	for attempt := 1; ; attempt++ {
		d.state.update(func(s *State) { s.Attempts = attempt })
		server, err := d.attempt(ctx)
		if ctx.Err() != nil {
			if server != nil {
				server.stop()
			}
			return nil, ctx.Err()
		}
		d.metrics.attempted(err)
		log := d.log.With(slog.Int("attempt", attempt), slog.Int("maxAttempts", d.config.MaxAttempts))
		if err == nil {
			log.Info("Registered with kubelet")
			d.metrics.isRegistered(true)
			d.state.update(func(s *State) { s.Registered, s.Attempts, s.RegistrationError, s.GaveUp = true, 0, nil, false })
			return server, nil
		}
		log.Warn("Registration with kubelet failed", slog.String("error", err.Error()))
		gaveUp := attempt >= d.config.MaxAttempts
		d.state.update(func(s *State) { s.RegistrationError, s.GaveUp = err, s.GaveUp || gaveUp })
		if gaveUp {
			return nil, fmt.Errorf("not registered with kubelet after %d attempts: %w", attempt, err)
		}
		if !pause.For(ctx, d.config.RetryInterval) {
			return nil, ctx.Err()
		}
	}
}

// attempt makes new sockets and waits for kubelet. The sockets of a failed attempt are removed.
func (d *Driver) attempt(ctx context.Context) (*server, error) {
	server, err := d.startServer(ctx)
	if err != nil {
		return nil, err
	}
	if err := server.waitRegistered(ctx, d.config.Timeout); err != nil {
		server.stop()
		return nil, err
	}
	return server, nil
}

// causeOf returns the error that the context was cancelled for, nil if it was cancelled by the caller of [Driver.Run].
func causeOf(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return cause
	}
	return nil
}
