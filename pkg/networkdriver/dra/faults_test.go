// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// faulty gives a device faults, or none.
func faulty(tb testing.TB, db *statedb.DB, table statedb.RWTable[*tables.DeviceHealth], device string, causes ...types.Cause) {
	tb.Helper()
	txn := db.WriteTxn(table)
	defer txn.Commit()
	row := &tables.DeviceHealth{Device: device}
	for _, cause := range causes {
		row.Faults = append(row.Faults, tables.DeviceFault{Fault: types.Fault{Cause: cause, Of: types.OfPF, Message: "message"}})
	}
	if len(causes) == 0 {
		_, _, err := table.Delete(txn, row)
		require.NoError(tb, err)
		return
	}
	_, _, err := table.Insert(txn, row)
	require.NoError(tb, err)
}

// offered returns the devices of all slices with their taints.
func (f *fixture) offered() map[string]string {
	list, err := f.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
	require.NoError(f.t, err)
	offered := map[string]string{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			offered[d.Name] = ""
			for _, t := range d.Taints {
				offered[d.Name] += fmt.Sprintf("%s=%s:%s ", t.Key, t.Value, t.Effect)
			}
		}
	}
	return offered
}

func (f *fixture) waitOffered(want map[string]string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return fmt.Sprint(f.offered()) == fmt.Sprint(want) }, patience, 10*time.Millisecond,
		"want %v; log:\n%s", want, f.log)
}

// A device with a fault has a taint, until it has none.
func TestFaultsAreTaints(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	f.publishing()
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": ""})
	faulty(t, f.db, f.faults, "dummy1", types.CauseNoCarrier, types.CauseQuarantined)
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": "networkdriver.cilium.io/no-carrier=pf:NoSchedule "})
	evicting := []v2alpha1.CiliumNetworkDriverDevicePoolConfig{everything[0]}
	evicting[0].FaultEffect = v2alpha1.FaultEffectNoExecute
	f.SetPools(evicting)
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": "networkdriver.cilium.io/no-carrier=pf:NoExecute "})
	faulty(t, f.db, f.faults, "dummy1")
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": ""})
}

// Where the API server keeps no taints, a device that cannot serve is withdrawn, and one that may serve stays. That is no problem of the
// publication.
func TestNoTaintsKept(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	f.client.PrependReactor("update", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice).DeepCopy()
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
		return true, slice, f.client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceslices"), slice, "")
	})
	f.publishing()
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": ""})
	faulty(t, f.db, f.faults, "dummy0", types.CauseNoCarrier)
	require.Eventually(t, func() bool { return f.log.Count("keeps no taints") == 1 }, patience, 10*time.Millisecond)
	faulty(t, f.db, f.faults, "dummy1", types.CauseDriverGone)
	f.waitOffered(map[string]string{"dummy0": ""})
	state, _ := f.State()
	require.Nil(t, state.PublicationProblem)
	faulty(t, f.db, f.faults, "dummy1")
	f.waitOffered(map[string]string{"dummy0": "", "dummy1": ""})
}

// Faults that come and go cost one publication in two seconds at most.
func TestFaultsCostLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := statedb.New()
		table, err := tables.NewHealthTable(db)
		require.NoError(t, err)
		p := &publisher{db: db, faults: table, describer: pools.NewDescriber(testNode)}
		shown, changes := p.faultsToShow(db.ReadTxn(), statedb.NewWatchSet()), 0
		for i := range 600 {
			time.Sleep(100 * time.Millisecond)
			faulty(t, db, table, fmt.Sprint("d", i), types.CauseNoCarrier)
			if now := p.faultsToShow(db.ReadTxn(), statedb.NewWatchSet()); len(now) != len(shown) {
				shown, changes = now, changes+1
			}
		}
		require.Equal(t, 30, changes, "in a minute")

		// What had to wait is due at last, and the watch set says so.
		faulty(t, db, table, "e", types.CauseNoCarrier)
		for {
			watch := statedb.NewWatchSet()
			if p.faultsToShow(db.ReadTxn(), watch)["e"] != nil {
				break
			}
			_, err := watch.Wait(t.Context(), 0)
			require.NoError(t, err)
		}
	})
}

// looker looks for faults, in vain if there is an error.
type looker struct {
	mu    sync.Mutex // guards the fields below
	looks int
	err   error
}

func (l *looker) Look(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looks++
	return l.err
}

func (l *looker) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

func (l *looker) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.looks
}

// Kubelet hears of the prepared devices at once, at each change, and before what it knows is too old; and nothing that was not looked at.
func TestHealthReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := statedb.New()
		allocations, err := tables.NewAllocationTable(db)
		require.NoError(t, err)
		faults, err := tables.NewHealthTable(db)
		require.NoError(t, err)
		txn := db.WriteTxn(allocations)
		for _, name := range []string{"b", "a"} {
			row := &tables.DRAAllocation{DeviceName: name, Pool: "fast", PreparedDevice: &inventorytest.Device{Name: name}}
			_, _, err := allocations.Insert(txn, row)
			require.NoError(t, err)
		}
		txn.Commit()
		health := &looker{}
		plugin := &kubeletPlugin{reporter: newReporter(Params{DB: db, Allocations: allocations, Faults: faults, Health: health, Config: Config{NodeName: testNode}})}
		reports, done := make(chan kubeletplugin.DeviceHealthReport), make(chan error)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { done <- plugin.WatchHealthStatus(ctx, reports) }()
		next := func() (report kubeletplugin.DeviceHealthReport, after time.Duration) {
			start := time.Now()
			report = <-reports
			for i := range report.Devices {
				require.WithinDuration(t, time.Now(), report.Devices[i].LastUpdated, time.Second)
				report.Devices[i].LastUpdated = time.Time{}
			}
			return report, time.Since(start)
		}
		a := kubeletplugin.DeviceHealth{PoolName: testNode + "/fast", DeviceName: "a", Health: kubeletplugin.HealthStatusHealthy}
		b := kubeletplugin.DeviceHealth{PoolName: testNode + "/fast", DeviceName: "b", Health: kubeletplugin.HealthStatusHealthy}
		report, _ := next()
		require.Equal(t, []kubeletplugin.DeviceHealth{a, b}, report.Devices)
		report, after := next()
		require.Equal(t, []kubeletplugin.DeviceHealth{a, b}, report.Devices)
		require.Equal(t, reportInterval, after)

		time.Sleep(2 * reportPause)
		faulty(t, db, faults, "a", types.CauseNoCarrier)
		a.Health, a.Message = kubeletplugin.HealthStatusUnhealthy, "message"
		report, after = next()
		require.Equal(t, []kubeletplugin.DeviceHealth{a, b}, report.Devices)
		require.LessOrEqual(t, after, settleTime)

		health.fail(errors.New("boom"))
		select {
		case <-reports:
			t.Error("reported what was not looked at")
		case <-time.After(time.Minute):
		}
		require.GreaterOrEqual(t, health.count(), 4)
		cancel()
		require.NoError(t, <-done)
	})
	require.ErrorIs(t, (&kubeletPlugin{}).WatchHealthStatus(t.Context(), nil), kubeletplugin.ErrHealthNotSupported)
}

// Reports that do not come are no failure of the server.
func TestStaleReports(t *testing.T) {
	f := newFixture(t, fakeClaims{}, nil)
	p := newKubeletPlugin(f.Driver.log, testDriver, fakeClaims{}, nil, noMetadata{}, fakeRuntime{})
	p.HandleError(t.Context(), fmt.Errorf("none: %w", kubeletplugin.ErrRecoverable), "stale")
	require.Empty(t, p.failed)
	require.Equal(t, 1, f.log.Count("Kubelet does not hear how devices are"))
}
