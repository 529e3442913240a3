// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// world is what a room looks at and tells.
type world struct {
	t           *testing.T
	db          *statedb.DB
	faults      statedb.RWTable[*tables.DeviceHealth]
	allocations statedb.RWTable[*tables.DRAAllocation]
	inventory   *inventory.Inventory
	room        *Room
	log         bytes.Buffer
	events      chan struct{} // link events

	mu sync.Mutex // guards the fields below
	// seen is what the manager sees of every device, err that it sees nothing.
	seen map[string][]types.Fault
	err  error
	// looks counts the manager's looks by whether they had to be fresh.
	looks map[bool]int
	// quarantined are the quarantined devices.
	quarantined map[string]string
	told        []string
}

func (w *world) Examine(_ context.Context, devices []types.Prepared, fresh bool) ([][]types.Fault, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks[fresh]++
	faults := make([][]types.Fault, len(devices))
	for i, d := range devices {
		faults[i] = w.seen[d.Device.IfName()]
	}
	return faults, w.err
}

func (w *world) WatchLinks(ctx context.Context, notify func()) error {
	notify()
	for {
		select {
		case <-w.events:
			notify()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (w *world) Unhealthy(row *tables.DRAAllocation, message string) {
	w.with(func() { w.told = append(w.told, row.Pod()+": "+message) })
}

func (w *world) Healthy(row *tables.DRAAllocation, message string) { w.Unhealthy(row, message) }

// with changes the world, or looks at it, while a room runs on it.
func (w *world) with(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// see has the manager see something else, of which an event tells.
func (w *world) see(device string, faults ...types.Fault) {
	w.with(func() { w.seen[device] = faults })
	w.events <- struct{}{}
}

// causes returns what the table has, after all that comes at once.
func (w *world) causes() map[string][]string {
	synctest.Wait()
	causes := map[string][]string{}
	for row := range w.faults.All(w.db.ReadTxn()) {
		causes[row.Device] = row.Causes()
	}
	return causes
}

func newWorld(t *testing.T, names ...string) *world {
	w := &world{t: t, db: statedb.New(), seen: map[string][]types.Fault{}, events: make(chan struct{}), looks: map[bool]int{}}
	devices, err := tables.NewDeviceTable(w.db)
	require.NoError(t, err)
	w.allocations, err = tables.NewAllocationTable(w.db)
	require.NoError(t, err)
	w.faults, err = tables.NewHealthTable(w.db)
	require.NoError(t, err)
	reports, err := inventory.NewReportTable(w.db)
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(&w.log, nil))
	w.inventory = inventory.New(log, w.db, devices, reports, w.allocations)
	w.room = New(Params{
		Logger: log, DB: w.db, Table: w.faults, Devices: devices, Allocations: w.allocations, Reports: reports,
		Examiners: map[types.DeviceManagerType]types.Examiner{types.DeviceManagerTypeSRIOV: w},
		Quarantine: func() (quarantined map[string]string, changed <-chan struct{}) {
			w.with(func() { quarantined = w.quarantined })
			return quarantined, nil
		},
		Events: w, Metrics: NewMetrics(),
	})
	w.publish(names)
	w.inventory.Expect(types.DeviceManagerTypeSRIOV)
	return w
}

func (w *world) publish(names []string, skipped ...types.Skipped) {
	s := types.Snapshot{Skipped: skipped}
	for _, name := range names {
		s.Devices = append(s.Devices, &inventorytest.Device{Name: name, Manager: types.DeviceManagerTypeSRIOV})
	}
	w.inventory.Publish(types.DeviceManagerTypeSRIOV, s)
}

// allocate gives a pod the device.
func (w *world) allocate(name, rowError string) {
	txn := w.db.WriteTxn(w.allocations)
	_, _, err := w.allocations.Insert(txn, &tables.DRAAllocation{
		DeviceName: name, Manager: types.DeviceManagerTypeSRIOV, Pool: "pool", ClaimNamespace: "ns", PodName: "pod", Error: rowError,
		PreparedDevice: &inventorytest.Device{Name: name, Manager: types.DeviceManagerTypeSRIOV},
	})
	require.NoError(w.t, err)
	txn.Commit()
}

// run runs the room for the rest of the test, which is run in virtual time.
func (w *world) run() {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error)
	go func() { done <- w.room.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		require.NoError(w.t, <-done)
	})
	synctest.Wait()
}

// A carrier that is lost for good counts within two seconds of the event, and is over ten seconds after it is back. The pod hears of both,
// and a flap is nothing.
func TestCarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a", "b")
		w.allocate("a", "")
		_, initialized := w.faults.Initialized(w.db.ReadTxn())
		w.run()
		<-initialized
		require.Empty(t, w.causes())

		told := func() (told []string) {
			w.with(func() { told = slices.Clone(w.told) })
			return told
		}
		lost := fault(types.CauseNoCarrier)
		w.see("a", lost)
		time.Sleep(time.Second)
		w.see("a")
		time.Sleep(time.Minute)
		require.Empty(t, w.causes())

		w.see("a", lost)
		time.Sleep(2 * time.Second)
		require.Equal(t, map[string][]string{"a": {"NoCarrier"}}, w.causes())
		require.Equal(t, []string{"ns/pod: device a of pool pool: message of NoCarrier"}, told())
		require.NoError(t, testutil.CollectAndCompare(only{w.room.Metrics.unhealthy, "NoCarrier"}, bytes.NewBufferString(
			"# HELP cilium_networkdriver_unhealthy_devices Devices that have a fault, by its cause. A device may have several.\n"+
				"# TYPE cilium_networkdriver_unhealthy_devices gauge\n"+
				"cilium_networkdriver_unhealthy_devices{cause=\"NoCarrier\"} 1\n")))
		w.see("a")
		time.Sleep(9 * time.Second)
		require.Equal(t, map[string][]string{"a": {"NoCarrier"}}, w.causes())
		time.Sleep(2 * time.Second)
		require.Empty(t, w.causes())
		require.Len(t, told(), 2)
		require.Equal(t, "ns/pod: device a of pool pool is healthy again", told()[1])
	})
}

// only is one cause's gauge.
type only struct {
	*prometheus.GaugeVec
	cause string
}

func (o only) Collect(ch chan<- prometheus.Metric) { o.WithLabelValues(o.cause).Collect(ch) }

// Nothing is asked between events but every ten seconds, and who asks gets a fresh answer.
func TestLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.run()
		time.Sleep(time.Second)
		w.causes()
		looks := func() (looks map[bool]int) {
			w.with(func() { looks = maps.Clone(w.looks) })
			return looks
		}
		w.with(func() { clear(w.looks) })
		time.Sleep(time.Minute)
		w.causes()
		require.Equal(t, map[bool]int{true: 6}, looks())
		require.NoError(t, w.room.Look(t.Context()))
		require.Equal(t, map[bool]int{true: 7}, looks())

		// What cannot be told leaves what was known, and is said once.
		w.see("a", fault(types.CausePFDown))
		time.Sleep(2 * time.Second)
		require.Equal(t, map[string][]string{"a": {"PFDown"}}, w.causes())
		w.with(func() { w.err = errors.New("boom") })
		w.see("a")
		require.ErrorContains(t, w.room.Look(t.Context()), "boom")
		time.Sleep(time.Minute)
		require.Equal(t, map[string][]string{"a": {"PFDown"}}, w.causes())
		require.Equal(t, 1, bytes.Count(w.log.Bytes(), []byte("Health of devices cannot be told")))
	})
}

// What the manager leaves out for a fault, what the pod's device is not on the node any more, what goes on failing and what is quarantined.
func TestOtherCauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "driverless", "gone", "failing", "fine", "quarantined")
		for _, name := range []string{"driverless", "gone", "fine"} {
			w.allocate(name, "")
		}
		w.run()
		require.Empty(t, w.causes())
		w.with(func() { w.quarantined = map[string]string{"quarantined": "why"} })
		w.allocate("failing", "boom")
		w.publish([]string{"failing", "fine"},
			types.Skipped{Device: "driverless", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF},
			types.Skipped{Device: "never offered", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF},
			types.Skipped{Device: "quarantined", Reason: "quarantined: why"})
		time.Sleep(5 * time.Second)
		want := map[string][]string{"driverless": {"DriverGone"}, "gone": {"LinkMissing"}, "quarantined": {"Quarantined"}}
		require.Equal(t, want, w.causes())
		time.Sleep(30 * time.Second)
		want["failing"] = []string{"Failing"}
		require.Equal(t, want, w.causes())

		// A manager that is off says nothing of devices.
		w.with(func() { w.quarantined = nil })
		w.inventory.Withdraw(types.DeviceManagerTypeSRIOV)
		w.allocate("failing", "")
		time.Sleep(peace + time.Second)
		require.Empty(t, w.causes())
	})
}

// An agent that is started while a device has a fault does not say how devices are before that has lasted or is over, and without a fault at
// once. What takes longer to count is not waited for.
func TestStartWithFault(t *testing.T) {
	for name, tt := range map[string]struct {
		faults []types.Fault
		over   bool
		want   map[string][]string
		wait   time.Duration
	}{
		"none":    {nil, false, map[string][]string{}, 0},
		"lasts":   {[]types.Fault{fault(types.CauseNoCarrier)}, false, map[string][]string{"a": {"NoCarrier"}}, flap},
		"flap":    {[]types.Fault{fault(types.CauseNoCarrier)}, true, map[string][]string{}, time.Second + gather},
		"failing": {[]types.Fault{fault(types.CauseFailing)}, false, map[string][]string{}, flap},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "a", "b")
				w.seen["a"] = tt.faults
				_, initialized := w.faults.Initialized(w.db.ReadTxn())
				start := time.Now()
				w.run()
				if tt.over {
					time.Sleep(time.Second)
					w.see("a")
				}
				<-initialized
				require.Equal(t, tt.wait, time.Since(start))
				require.Equal(t, tt.want, w.causes())
			})
		})
	}
}
