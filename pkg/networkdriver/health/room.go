// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"

	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// examineInterval bounds how long a fault goes unnoticed that makes no link event.
	examineInterval = 10 * time.Second
	// gather is how long link events are gathered before the PFs are asked: as long as that, a state of a link may go unseen.
	gather = 100 * time.Millisecond
)

// Events tells a pod about its device.
type Events interface {
	// Unhealthy and Healthy say how the device of the row is now.
	Unhealthy(row *tables.DRAAllocation, message string)
	Healthy(row *tables.DRAAllocation, message string)
}

// Params are what a [Room] works with.
type Params struct {
	Logger      *slog.Logger
	DB          *statedb.DB
	Table       statedb.RWTable[*tables.DeviceHealth]
	Devices     statedb.Table[*tables.DRADevice]
	Allocations statedb.Table[*tables.DRAAllocation]
	Reports     statedb.Table[*inventory.Report]
	// Examiners are the device managers that can say more.
	Examiners map[types.DeviceManagerType]types.Examiner
	// Quarantine says why devices are quarantined, by their names, and returns a channel that is closed when that may be otherwise.
	Quarantine func() (map[string]string, <-chan struct{})
	Events     Events
	// Metrics may be nil.
	Metrics *Metrics
}

// Room keeps the table of devices that are not healthy. The table counts as initialized once all devices were looked at.
type Room struct {
	Params
	// initialized completes the table's initializer.
	initialized func(statedb.WriteTxn)
	// asked has those who wait for a fresh look.
	asked chan chan<- error

	// What follows is used by Run only.

	// began is when the devices were looked at first.
	began   time.Time
	devices map[string]device
	unseen  logonce.Problems[string]
}

// New returns a room that does nothing before [Room.Run].
func New(p Params) *Room {
	r := &Room{Params: p, asked: make(chan chan<- error), devices: map[string]device{}}
	txn := p.DB.WriteTxn(p.Table)
	r.initialized = p.Table.RegisterInitializer(txn, "health")
	txn.Commit()
	return r
}

// Look asks about all devices now, and returns when the table has what there is to say. An error is why it may lack something.
func (r *Room) Look(ctx context.Context) error {
	answer := make(chan error, 1)
	select {
	case r.asked <- answer:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run keeps the table until the context ends, from when it is known which devices there are.
func (r *Room) Run(ctx context.Context) error {
	txn := r.DB.ReadTxn()
	_, devices := r.Devices.Initialized(txn)
	_, allocations := r.Allocations.Initialized(txn)
	for _, initialized := range []<-chan struct{}{devices, allocations} {
		select {
		case <-initialized:
		case <-ctx.Done():
			return nil
		}
	}

	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	links := make(chan struct{}, 1)
	for _, e := range r.Examiners {
		watching.Go(func() { rescan.Follow(ctx, r.Logger, e.WatchLinks, links) })
	}

	full := time.NewTicker(examineInterval)
	defer full.Stop()
	var answers []chan<- error
	for fresh := true; ctx.Err() == nil; {
		seen := r.see(ctx, fresh)
		if ctx.Err() != nil {
			break
		}
		until := r.judge(seen)
		for _, answer := range answers {
			answer <- seen.err
		}
		answers, fresh = nil, false
		select {
		case <-seen.changes[0]:
		case <-seen.changes[1]:
		case <-seen.changes[2]:
		case <-seen.changes[3]:
		case <-links:
			pause.For(ctx, gather)
		case <-timerTo(until):
		case <-full.C:
			fresh = true
		case answer := <-r.asked:
			answers, fresh = append(answers, answer), true
		case <-ctx.Done():
		}
	}
	return nil
}

// timerTo returns a channel that gets something at the time, nil for none.
func timerTo(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(time.Until(t))
}

// judge writes what has come of what is seen, and returns when something may change by the time alone. Of devices about which nothing is
// known, what was known stays.
func (r *Room) judge(seen *sight) (until time.Time) {
	if seen.err == nil {
		r.unseen.Solved()
	} else {
		r.Logger.Log(context.Background(), r.unseen.Level(seen.err.Error(), slog.LevelWarn), "Health of devices cannot be told, trying again", "error", seen.err)
	}
	now := time.Now()
	txn := r.DB.WriteTxn(r.Table)
	defer txn.Abort()
	var tell []func()
	for name, faults := range seen.faults {
		d, known := r.devices[name]
		if !known {
			d = device{}
			r.devices[name] = d
		}
		changed, next := d.step(now, faults)
		if !next.IsZero() && (until.IsZero() || next.Before(until)) {
			until = next
		}
		if changed {
			tell = append(tell, r.write(txn, name, d.row(name)))
		}
	}
	for name := range r.devices {
		if _, there := seen.faults[name]; !there && !seen.unknown[name] {
			delete(r.devices, name)
			tell = append(tell, r.write(txn, name, nil))
		}
	}
	if r.initialized != nil {
		until = r.initialize(txn, now, until)
	}
	txn.Commit()
	for _, f := range tell {
		f()
	}
	return until
}

// initialize completes the table's initializer once what was there when the agent was started has lasted or is gone: an agent that is
// restarted neither offers for a moment what it did not offer before, nor has pods ended for a flap. It returns when there is to be another
// look.
func (r *Room) initialize(txn statedb.WriteTxn, now, until time.Time) time.Time {
	if r.began.IsZero() {
		r.began = now
	}
	if due := r.began.Add(flap); !until.IsZero() && now.Before(due) {
		if due.Before(until) {
			return due
		}
		return until
	}
	r.initialized(txn)
	r.initialized = nil
	return until
}

// write makes the row the device's, none for nil, and returns what tells of that.
func (r *Room) write(txn statedb.WriteTxn, name string, row *tables.DeviceHealth) func() {
	before, _, _ := r.Table.Get(txn, tables.HealthByDevice(name))
	switch {
	case row != nil:
		r.Table.Insert(txn, row)
	case before != nil:
		r.Table.Delete(txn, before)
	default:
		return func() {}
	}
	return func() { r.tell(name, before, row) }
}

// tell tells of a device that is in another state than before: in the log, the metrics and the events of pods that have it.
func (r *Room) tell(name string, before, after *tables.DeviceHealth) {
	r.Metrics.changed(before, after)
	if after == nil {
		r.Logger.Info("Device is healthy again", "device", name, "causes", before.Causes())
	} else if before == nil || !slices.Equal(before.Causes(), after.Causes()) {
		r.Logger.Warn("Device is unhealthy", "device", name, "causes", after.Causes(), "reason", after.Message())
	}
	for row := range r.Allocations.List(r.DB.ReadTxn(), tables.AllocationsByDevice(name)) {
		if after == nil {
			r.Events.Healthy(row, fmt.Sprintf("device %s of pool %s is healthy again", name, row.Pool))
		} else {
			r.Events.Unhealthy(row, fmt.Sprintf("device %s of pool %s: %s", name, row.Pool, after.Message()))
		}
	}
}

// sight is what is seen of all devices at one moment.
type sight struct {
	// faults are those of each device, none for one that is well, by the devices' names. Of a cause it has one.
	faults map[string][]types.Fault
	// unknown are the devices of which it cannot be told, and err is why.
	unknown map[string]bool
	err     error
	// changes are closed when something else is to be seen.
	changes [4]<-chan struct{}
}

func (s *sight) add(device string, faults ...types.Fault) {
	for _, fault := range faults {
		if !slices.ContainsFunc(s.faults[device], func(f types.Fault) bool { return f.Cause == fault.Cause }) {
			s.faults[device] = append(s.faults[device], fault)
		}
	}
	if s.faults[device] == nil {
		s.faults[device] = []types.Fault{}
	}
}

// examined are a manager's devices that it is to examine, with their names.
type examined struct {
	names   []string
	devices []types.Prepared
}

// see looks at all devices.
func (r *Room) see(ctx context.Context, fresh bool) *sight {
	s := &sight{faults: map[string][]types.Fault{}, unknown: map[string]bool{}}
	txn := r.DB.ReadTxn()
	devices, devicesChanged := r.Devices.AllWatch(txn)
	allocations, allocationsChanged := r.Allocations.AllWatch(txn)
	reports, reportsChanged := r.Reports.AllWatch(txn)
	quarantined, quarantineChanged := r.Quarantine()
	s.changes = [4]<-chan struct{}{devicesChanged, allocationsChanged, reportsChanged, quarantineChanged}

	skipped, reported := map[string]types.Skipped{}, map[types.DeviceManagerType]bool{}
	for report := range reports {
		reported[report.Manager] = true
		for _, left := range report.Skipped {
			skipped[left.Device] = left
		}
	}
	prepared := map[string]*tables.DRAAllocation{}
	for row := range allocations {
		prepared[row.DeviceName] = row
	}
	byManager := map[types.DeviceManagerType]*examined{}
	inventoried := map[string]bool{}
	for row := range devices {
		inventoried[row.Name] = true
		s.add(row.Name)
		if left := skipped[row.Name]; left.Cause != "" {
			s.add(row.Name, types.Fault{Cause: left.Cause, Of: left.Of, Message: left.Reason})
			continue
		}
		e := byManager[row.Manager]
		if e == nil {
			e = &examined{}
			byManager[row.Manager] = e
		}
		device := types.Prepared{Device: row.Dev}
		if p := prepared[row.Name]; p != nil && p.Manager == row.Manager && !p.Releasing {
			device = types.Prepared{Device: p.PreparedDevice, Config: p.Config}
		}
		e.names, e.devices = append(e.names, row.Name), append(e.devices, device)
	}
	for name, row := range prepared {
		s.add(name)
		left, isSkipped := skipped[name]
		switch {
		case inventoried[name]:
		case left.Cause != "":
			s.add(name, types.Fault{Cause: left.Cause, Of: left.Of, Message: left.Reason})
		case !isSkipped && r.Examiners[row.Manager] != nil && reported[row.Manager]:
			s.add(name, types.Fault{Cause: types.CauseLinkMissing, Of: types.OfVF, Message: "the node does not have it any more"})
		}
		if row.Error != "" {
			s.add(name, failing(row))
		}
	}
	for name, why := range quarantined {
		s.add(name, types.Fault{Cause: types.CauseQuarantined, Of: types.OfVF, Message: "it is quarantined: " + why})
	}

	for manager, examiner := range r.Examiners {
		if e := byManager[manager]; e != nil {
			s.examine(ctx, manager, examiner, e, fresh)
		}
	}
	return s
}

// failing is the fault of a device whose row has an error. What the error says may change with each attempt, and stands elsewhere.
func failing(row *tables.DRAAllocation) types.Fault {
	if row.Releasing {
		return types.Fault{Cause: types.CauseFailing, Of: types.OfFree, Message: "it cannot be given back: the condition Ready of its claim says why"}
	}
	return types.Fault{Cause: types.CauseFailing, Of: types.OfAttach, Message: "it cannot be attached: the condition Ready of its claim says why"}
}

// examine adds what the manager says of its devices.
func (s *sight) examine(ctx context.Context, manager types.DeviceManagerType, examiner types.Examiner, e *examined, fresh bool) {
	faults, err := examiner.Examine(ctx, e.devices, fresh)
	if err != nil {
		s.err = errors.Join(s.err, fmt.Errorf("examine the devices of manager %s: %w", manager, err))
	}
	for i, name := range e.names {
		if err != nil {
			s.unknown[name] = true
			delete(s.faults, name)
		} else {
			s.add(name, faults[i]...)
		}
	}
}
