// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
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
	r := &managerRunner{
		kind: types.DeviceManagerTypeDummy, log: log,
		inventory: inventory.New(log, db, devices, reports, allocations),
	}
	r.inventory.Expect(types.DeviceManagerTypeDummy)
	initialized := func() bool {
		done, _ := devices.Initialized(db.ReadTxn())
		return done
	}

	m := &scripted{runs: make(chan func(context.Context, func(types.Snapshot)) error)}
	made := 0
	newManager := func() types.DeviceManager { made++; return m }

	t.Run("one that is off does not keep the table waiting", func(t *testing.T) {
		require.False(t, initialized())
		r.apply(t.Context(), nil, newManager)
		require.True(t, initialized())
		require.Zero(t, made)
	})

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	t.Run("one that fails is started again", func(t *testing.T) {
		r.apply(ctx, "config", newManager)
		m.runs <- func(context.Context, func(types.Snapshot)) error { return errors.New("fails") }
		published := make(chan struct{})
		m.runs <- func(ctx context.Context, publish func(types.Snapshot)) error {
			publish(types.Snapshot{})
			close(published)
			<-ctx.Done()
			return nil
		}
		select {
		case <-published:
		case <-time.After(10 * time.Second):
			t.Fatal("the manager was not started again")
		}
		require.Equal(t, 1, made)
	})
	t.Run("the same configuration changes nothing", func(t *testing.T) {
		r.apply(ctx, "config", newManager)
		require.Equal(t, 1, made)
	})
	t.Run("another configuration makes another manager", func(t *testing.T) {
		r.apply(ctx, "other", newManager)
		require.Equal(t, 2, made)
	})
	r.stop()
}
