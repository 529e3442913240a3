// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/test/lab"
)

// TestAPITaints: the API server takes a taint of each cause, only the slice is written whose device has another, and a taint keeps the
// time from when it was added, when its slice is written for something else and when the agent is started again.
func TestAPITaints(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(t, err)
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	_, err = client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, metav1.CreateOptions{})
	require.NoError(t, err)

	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	faults, err := tables.NewHealthTable(db)
	require.NoError(t, err)
	reports, err := inventory.NewReportTable(db)
	require.NoError(t, err)
	inventory := inventory.New(slog.New(slog.DiscardHandler), db, devices, reports, allocations)
	inventory.Publish(types.DeviceManagerTypeSRIOV, types.Snapshot{Devices: inventorytest.Devices(types.DeviceManagerTypeSRIOV, "d", 65)})
	inventory.Expect()
	start := func() (stop func()) {
		d := New(Params{
			Logger: slog.New(slog.DiscardHandler), Config: Config{DriverName: testDriver, NodeName: testNode}, Client: client,
			Claims: fakeClaims{}, DB: db, Devices: devices, Allocations: allocations, Faults: faults,
		})
		d.SetPools(everything)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- d.publisher.run(ctx) }()
		return func() {
			cancel()
			require.ErrorIs(t, <-done, context.Canceled)
			d.writer.stop()
			state, _ := d.State()
			require.Nil(t, state.PublicationProblem)
		}
	}
	// added returns since when each device's taints are there, once the devices have that many.
	added := func(want map[string]int) map[string][]time.Time {
		t.Helper()
		var times map[string][]time.Time
		require.Eventually(t, func() bool {
			list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			require.NoError(t, err)
			times = map[string][]time.Time{}
			counts := map[string]int{}
			for _, s := range list.Items {
				for _, d := range s.Spec.Devices {
					for _, taint := range d.Taints {
						require.NotNil(t, taint.TimeAdded)
						times[d.Name] = append(times[d.Name], taint.TimeAdded.Time)
						counts[d.Name]++
					}
				}
			}
			return fmt.Sprint(counts) == fmt.Sprint(want)
		}, time.Minute, 20*time.Millisecond, "want taints %v", want)
		return times
	}

	// other returns the version of the slice with the last device alone.
	other := func() (version string) {
		t.Helper()
		require.Eventually(t, func() bool {
			list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			require.NoError(t, err)
			for _, s := range list.Items {
				if len(s.Spec.Devices) == 1 {
					version = s.ResourceVersion
				}
			}
			return version != "" && len(list.Items) == 2
		}, time.Minute, 20*time.Millisecond)
		return version
	}

	stop := start()
	untouched := other()
	faulty(t, db, faults, "d0", types.Causes()...)
	first := added(map[string]int{"d0": len(types.Causes()) - 1})
	nextSecond(t, first["d0"][0])
	faulty(t, db, faults, "d63", types.CauseNoCarrier)
	both := added(map[string]int{"d0": len(types.Causes()) - 1, "d63": 1})
	require.Equal(t, first["d0"], both["d0"])
	require.Equal(t, untouched, other())
	require.True(t, both["d63"][0].After(first["d0"][0]), "the test could not see another time")
	stop()

	stop = start()
	defer stop()
	nextSecond(t, both["d63"][0])
	faulty(t, db, faults, "d1", types.CauseNoCarrier)
	all := added(map[string]int{"d0": len(types.Causes()) - 1, "d1": 1, "d63": 1})
	require.Equal(t, both["d0"], all["d0"])
	require.Equal(t, both["d63"], all["d63"])
	require.False(t, slices.Equal(all["d1"], all["d63"]))
}

// nextSecond waits until the second of the time is over: the API has no finer times.
func nextSecond(t *testing.T, since time.Time) {
	t.Helper()
	ctx, cancel := context.WithDeadline(t.Context(), since.Add(2*time.Second))
	defer cancel()
	<-ctx.Done()
	require.True(t, errors.Is(ctx.Err(), context.DeadlineExceeded))
}
