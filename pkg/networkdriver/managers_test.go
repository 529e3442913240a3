// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// scripted is a device manager whose runs are told to it.
type scripted struct {
	runs chan func(ctx context.Context, publish func(types.Snapshot)) error
}

func (s *scripted) Type() types.DeviceManagerType { return types.DeviceManagerTypeDummy }

func (s *scripted) RestoreDevice([]byte) (types.Device, error) {
	return nil, errors.New("restores nothing")
}

func (s *scripted) Run(ctx context.Context, publish func(types.Snapshot)) error {
	select {
	case run := <-s.runs:
		return run(ctx, publish)
	case <-ctx.Done():
		return nil
	}
}

func TestManagerRunner(t *testing.T) {
	defer goleak.VerifyNone(t)
	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	reports, err := inventory.NewReportTable(db)
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	configs := newCurrent[*v2alpha1.CiliumNetworkDriverDeviceManagerConfig]()
	m := &scripted{runs: make(chan func(context.Context, func(types.Snapshot)) error)}
	made := make(chan any, 10)
	r := &managerRunner{
		kind: types.DeviceManagerTypeDummy, log: log, parts: newParts(log), configs: configs,
		inventory: inventory.New(log, db, devices, reports, allocations),
		configOf: func(c *v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any {
			if c == nil || c.Dummy == nil {
				return nil
			}
			return c.Dummy
		},
		quarantine: func() (map[string]string, <-chan struct{}) { return nil, nil },
		make:       func(config any) types.DeviceManager { made <- config; return m },
	}
	r.inventory.Expect(types.DeviceManagerTypeDummy)
	_, initialized := devices.Initialized(db.ReadTxn())
	count := func(n int32) *v2alpha1.CiliumNetworkDriverDeviceManagerConfig {
		return &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{Dummy: &v2alpha1.DummyDeviceManagerConfig{Count: n}}
	}

	ctx, cancel := context.WithCancel(t.Context())
	_, health := cell.NewSimpleHealth()
	var running sync.WaitGroup
	running.Go(func() { r.run(ctx, health) })
	defer running.Wait()
	defer cancel()

	// One that is off does not keep the table waiting.
	receive(t, initialized)
	require.Empty(t, made)

	// One that fails is started again, and the failure is visible.
	configs.set(count(1))
	require.Equal(t, count(1).Dummy, receive(t, made))
	m.runs <- func(context.Context, func(types.Snapshot)) error { return errors.New("sysfs is away") }
	published := make(chan struct{})
	m.runs <- func(ctx context.Context, publish func(types.Snapshot)) error {
		publish(types.Snapshot{})
		close(published)
		<-ctx.Done()
		return nil
	}
	receive(t, published)
	require.ErrorContains(t, r.parts.failure("device-manager-dummy").err, "sysfs is away")
	require.Equal(t, cell.StatusDegraded, health.Level)
	require.Empty(t, made, "by the same manager")

	// The same configuration changes nothing, another one makes another manager with a clean slate.
	configs.set(count(1))
	configs.set(count(2))
	require.Equal(t, count(2).Dummy, receive(t, made))
	require.Nil(t, r.parts.failure("device-manager-dummy"))
	require.Equal(t, cell.StatusOK, health.Level)

	// Off, its devices are withdrawn.
	configs.set(nil)
	require.Eventually(t, func() bool { return reports.NumObjects(db.ReadTxn()) == 0 }, 10*time.Second, time.Millisecond)
}

// A quarantined device is withdrawn whatever claims tolerate, also one that has lost its driver, which else stays with a taint.
func TestQuarantinedIsWithdrawn(t *testing.T) {
	snapshot := types.Snapshot{
		Devices: inventorytest.Devices(types.DeviceManagerTypeSRIOV, "d", 2),
		Skipped: []types.Skipped{
			{Device: "a", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF},
			{Device: "b", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF},
		},
	}
	rest := withoutQuarantined(snapshot, map[string]string{"d1": "why", "b": "why"})
	require.Equal(t, snapshot.Devices[:1], rest.Devices)
	require.Equal(t, []types.Skipped{snapshot.Skipped[0], {Device: "b", Reason: "no driver"}, {Device: "d1", Reason: "quarantined: why"}}, rest.Skipped)
	require.Equal(t, types.CauseDriverGone, snapshot.Skipped[1].Cause, "the manager's snapshot is its own")
}

const receiveTimeout = 20 * time.Second

// receive returns what the channel has, which has to come.
func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(receiveTimeout):
		t.Fatal("nothing has come")
		panic("unreachable")
	}
}

// Failures of the managers are known under the names of their rooms.
func TestManagersAreRooms(t *testing.T) {
	for _, kind := range []types.DeviceManagerType{types.DeviceManagerTypeSRIOV, types.DeviceManagerTypeDummy} {
		part := (&managerRunner{kind: kind}).part()
		require.True(t, slices.ContainsFunc(rooms, func(r room) bool { return r.name == part }), part)
	}
}
