// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"
	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

const (
	// settleTime is how long changes are collected after the first.
	settleTime = 50 * time.Millisecond
	// publishInterval is the least time between publications in the long run; a device that flaps costs no more.
	publishInterval = time.Second
	// publishBurst is how many publications may come at once.
	publishBurst = 5
	// faultInterval is the least time between two publications of what faults devices have.
	faultInterval = 2 * time.Second
)

// publisher turns inventory, allocations and pool configuration into ResourceSlices, again whenever one of them
// changes. What does not change a slice is not written: that is so for attaching and detaching.
type publisher struct {
	log         *slog.Logger
	db          *statedb.DB
	devices     statedb.Table[*tables.DRADevice]
	allocations statedb.Table[*tables.DRAAllocation]
	table       statedb.RWTable[*tables.Pool] // may be nil
	node        string
	// faults is nil where nobody looks for any.
	faults    statedb.Table[*tables.DeviceHealth]
	describer *pools.Describer
	state     *tracker
	metrics   *Metrics
	// begin waits until something can be published, and returns the taints that are.
	begin func(context.Context) (taintTimes, error)
	// write publishes resources, which the publisher does not change afterwards.
	write func(context.Context, *resourceslice.DriverResources) error

	// conflicts and omissions are those that were logged.
	conflicts logonce.Problems[string]
	omissions logonce.Problems[pools.Omission]
	// shown are the faults that were published last, and shownAt is when they were others before.
	shown   map[string]*tables.DeviceHealth
	shownAt time.Time
	// added has since when taints are there, as the API server has it.
	added taintTimes
	// taintless is closed when the API server has been found to keep no taints.
	taintless chan struct{}
	// pfs are the last publication's, with the configuration of pfsOf.
	pfs   map[string][]string
	pfsOf <-chan struct{}

	mu         sync.Mutex // guards the fields below
	configured bool
	configs    []v2alpha1.CiliumNetworkDriverDevicePoolConfig
	changed    chan struct{}
}

// setPools sets the configuration. Nothing is published before.
func (p *publisher) setPools(configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.configs, p.configured = configs, true
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *publisher) pools() (configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig, configured bool, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.configs, p.configured, p.changed
}

// run publishes until the context ends. It begins when both tables are complete: a half-filled inventory would
// withdraw devices that pods have.
func (p *publisher) run(ctx context.Context) error {
	if err := p.waitForInput(ctx); err != nil {
		return err
	}
	var err error
	if p.added, err = p.begin(ctx); err != nil {
		return err
	}
	limiter := rate.NewLimiter(rate.Every(publishInterval), publishBurst)
	watch := statedb.NewWatchSet()
	var last *resourceslice.DriverResources
	for {
		watch.Clear()
		resources, publication, offered := p.build(watch)
		p.note(publication)
		if err := p.offer(offered); err != nil {
			return err
		}
		if last == nil || !reflect.DeepEqual(*last, resources) {
			crashpoint.Here(crashpoint.PublishBefore)
			if err := p.write(ctx, &resources); err != nil {
				return err
			}
			crashpoint.Here(crashpoint.PublishAfter)
			last = &resources
			if err := limiter.Wait(ctx); err != nil {
				return err
			}
		}
		if _, err := watch.Wait(ctx, settleTime); err != nil {
			return err
		}
	}
}

func (p *publisher) waitForInput(ctx context.Context) error {
	txn := p.db.ReadTxn()
	_, devices := p.devices.Initialized(txn)
	_, allocations := p.allocations.Initialized(txn)
	inputs := []<-chan struct{}{devices, allocations}
	if p.faults != nil {
		_, faults := p.faults.Initialized(txn)
		inputs = append(inputs, faults)
	}
	for _, initialized := range inputs {
		select {
		case <-initialized:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for {
		_, configured, changed := p.pools()
		if configured {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// build describes the present situation, and adds to the watch set what tells of another.
func (p *publisher) build(watch *statedb.WatchSet) (resourceslice.DriverResources, *Publication, []*tables.Pool) {
	txn := p.db.ReadTxn()
	devices, devicesChanged := p.devices.AllWatch(txn)
	allocations, allocationsChanged := p.allocations.AllWatch(txn)
	configs, _, configsChanged := p.pools()
	watch.Add(devicesChanged, allocationsChanged, configsChanged)

	assignment, conflicts := pools.Assign(statedb.ToSeq(devices), statedb.ToSeq(allocations), configs)
	pfs := assignment.PFs()
	if p.pfsOf == configsChanged {
		keepAway(pfs, p.pfs)
	}
	p.pfs, p.pfsOf = pfs, configsChanged
	faults := p.faultsToShow(txn, watch)
	var taints func(pool, device string) []resourceapi.DeviceTaint
	select {
	case <-p.taintless:
		withdraw(assignment, faults)
	default:
		watch.Add(p.taintless)
		effects := pools.FaultEffectsOf(configs)
		now, added := metav1.NewTime(time.Now().Truncate(time.Second)), taintTimes{}
		taints = func(pool, device string) []resourceapi.DeviceTaint {
			taints := health.Taints(faults[device], effects[pool])
			for i := range taints {
				taints[i].TimeAdded = added.carry(p.added, pools.Name(p.node, pool), device, taints[i], &now)
			}
			return taints
		}
		defer func() { p.added = added }()
	}
	resources, omissions := p.describer.Slices(assignment, pools.AttributesOf(configs), taints)
	publication := &Publication{Pools: map[string]int{}, Free: map[string]int{}, PFs: pfs, Conflicts: conflicts, Omissions: omissions}
	var offered []*tables.Pool
	for name, devs := range assignment {
		if _, ok := resources.Pools[pools.Name(p.node, name)]; !ok {
			continue
		}
		pool := &tables.Pool{Name: name}
		for _, dev := range devs {
			pool.Devices = append(pool.Devices, dev.Name)
			if _, _, prepared := p.allocations.Get(txn, tables.AllocationsByDevice(dev.Name)); !prepared {
				pool.Free = append(pool.Free, dev.Name)
			}
		}
		slices.Sort(pool.Devices)
		slices.Sort(pool.Free)
		offered = append(offered, pool)
		publication.Pools[name], publication.Free[name] = len(pool.Devices), len(pool.Free)
	}
	return resources, publication, offered
}

// keepAway adds to the PFs of pools those they had before of which no device is there now.
func keepAway(pfs, before map[string][]string) {
	var present []string
	for _, names := range pfs {
		present = append(present, names...)
	}
	for pool, names := range before {
		for _, name := range names {
			if !slices.Contains(present, name) {
				pfs[pool] = append(pfs[pool], name)
			}
		}
		slices.Sort(pfs[pool])
	}
}

// offer makes the table of pools say what is offered.
func (p *publisher) offer(offered []*tables.Pool) error {
	if p.table == nil {
		return nil
	}
	txn := p.db.WriteTxn(p.table)
	defer txn.Abort()
	for row := range p.table.All(txn) {
		if !slices.ContainsFunc(offered, func(pool *tables.Pool) bool { return pool.Name == row.Name }) {
			if _, _, err := p.table.Delete(txn, row); err != nil {
				return fmt.Errorf("row of pool %s: %w", row.Name, err)
			}
		}
	}
	for _, pool := range offered {
		if row, _, found := p.table.Get(txn, tables.PoolByName(pool.Name)); found && row.Equal(pool) {
			continue
		}
		if _, _, err := p.table.Insert(txn, pool); err != nil {
			return fmt.Errorf("row of pool %s: %w", pool.Name, err)
		}
	}
	txn.Commit()
	return nil
}

// taintTimes say since when taints are there. The library that writes slices would keep the times that the API server gives, but of all
// taints of a device only the last one's.
type taintTimes map[taintKey]*metav1.Time

type taintKey struct {
	pool, device, key, value string
	effect                   resourceapi.DeviceTaintEffect
}

// carry returns since when the taint is there: as it was before, or since now.
func (t taintTimes) carry(before taintTimes, pool, device string, taint resourceapi.DeviceTaint, now *metav1.Time) *metav1.Time {
	key := taintKey{pool, device, taint.Key, taint.Value, taint.Effect}
	t[key] = cmp.Or(before[key], now)
	return t[key]
}

// timesIn returns the times of the taints in slices.
func timesIn(found []resourceapi.ResourceSlice) taintTimes {
	times := taintTimes{}
	for _, s := range found {
		for _, d := range s.Spec.Devices {
			for _, taint := range d.Taints {
				if taint.TimeAdded != nil {
					times.carry(nil, s.Spec.Pool.Name, d.Name, taint, taint.TimeAdded)
				}
			}
		}
	}
	return times
}

// faultsToShow returns the faults by the names of their devices. What has changed less than a [faultInterval] after the last change has to
// wait.
func (p *publisher) faultsToShow(txn statedb.ReadTxn, watch *statedb.WatchSet) map[string]*tables.DeviceHealth {
	if p.faults == nil {
		return nil
	}
	rows, changed := p.faults.AllWatch(txn)
	now := map[string]*tables.DeviceHealth{}
	for row := range rows {
		now[row.Device] = row
	}
	if maps.Equal(now, p.shown) {
		watch.Add(changed)
		return p.shown
	}
	if wait := faultInterval - time.Since(p.shownAt); wait > 0 {
		due := make(chan struct{})
		time.AfterFunc(wait, func() { close(due) })
		watch.Add(due)
		return p.shown
	}
	watch.Add(changed)
	p.shown, p.shownAt = now, time.Now()
	return now
}

// withdraw takes devices that cannot serve out of the assignment.
func withdraw(assignment pools.Assignment, faults map[string]*tables.DeviceHealth) {
	for pool, devices := range assignment {
		devices = slices.DeleteFunc(devices, func(d *tables.DRADevice) bool { return health.CannotServe(faults[d.Name]) })
		if assignment[pool] = devices; len(devices) == 0 {
			delete(assignment, pool)
		}
	}
}

// note makes the publication visible, in the state, the metrics and the log, where it is another than before.
func (p *publisher) note(publication *Publication) {
	state, _ := p.state.get()
	if state.Publication != nil && reflect.DeepEqual(*state.Publication, *publication) {
		return
	}
	p.metrics.published(state.Publication, publication)
	p.logNew(publication)
	p.state.update(func(s *State) { s.Publication = publication })
}

// logNew logs conflicts and omissions once, and not with every publication while they last.
func (p *publisher) logNew(publication *Publication) {
	byKey := map[string]pools.Conflict{}
	var keys []string
	for _, c := range publication.Conflicts {
		byKey[c.Key()] = c
		keys = append(keys, c.Key())
	}
	for _, key := range p.conflicts.Replace(keys...) {
		c := byKey[key]
		log := p.log.With(slog.String("device", c.Device), slog.Any("pools", c.Pools))
		if c.Prepared {
			log.Error("Device is prepared in more than one pool and is not advertised")
		} else {
			log.Error("Device matches more than one pool", slog.String("pool", c.Pool))
		}
	}
	for _, o := range p.omissions.Replace(publication.Omissions...) {
		log := p.log.With(slog.String("pool", o.Pool), slog.String("reason", o.Reason))
		if o.Device == "" {
			log.Error("Pool cannot be published and is left out")
		} else {
			log.Error("Attribute cannot be published and is left out",
				slog.String("device", o.Device), slog.String("attribute", string(o.Attribute)))
		}
	}
}
