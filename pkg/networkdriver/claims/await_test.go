// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"iter"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// The claim that comes next on a device waits until the pod before it, which was deleted by force, has been ended; not
// forever, not for its own rows, and not for those of other devices.
func TestAwaitDevices(t *testing.T) {
	f := newFixture(t, "a", "b")
	f.HolderPatience = time.Hour
	log := &testenv.LogBuffer{}
	f.Logger = slog.New(slog.NewTextHandler(log, nil))
	old, next := newClaim("old", with("net", "a")), newClaim("next", with("net", "a"))
	for _, claim := range []*resourceapi.ResourceClaim{old, newClaim("other", with("net", "b"))} {
		_, err := f.Prepare(t.Context(), claim)
		require.NoError(t, err)
	}
	f.AwaitDevices(t.Context(), old)
	f.AwaitDevices(t.Context(), newClaim("foreign", withResult(resourceapi.DeviceRequestAllocationResult{
		Request: "net", Driver: testDriver, Pool: "node-2/pool", Device: "c",
	})))

	done := make(chan struct{})
	go func() {
		defer close(done)
		f.AwaitDevices(t.Context(), next)
	}()
	require.Eventually(t, func() bool {
		return log.Count("Waiting for a device that another claim still holds", "device=a", "claim=default/next", "holder=default/old") == 1
	}, waitFor, tick)
	f.attach("a") // a change that does not free it
	select {
	case <-done:
		t.Fatal("the device is still held")
	case <-time.After(10 * tick):
	}
	require.NoError(t, f.Unprepare(t.Context(), "uid-old"))
	<-done
	_, err := f.Prepare(t.Context(), next)
	require.NoError(t, err)

	f.HolderPatience = time.Millisecond
	f.AwaitDevices(t.Context(), newClaim("late", with("net", "b")))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.HolderPatience = time.Hour
	f.AwaitDevices(ended, newClaim("late", with("net", "b")))
	f.AwaitDevices(t.Context(), newClaim("admin", with("net", "b"), func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	}))
}

// namedPool is a pool that takes one interface.
type namedPool struct{ Pools }

func (namedPool) Of(device *tables.DRADevice, _ iter.Seq[*tables.DRAAllocation]) string {
	if device.Dev.KernelIfName() == "ens1f0v0" {
		return "pool"
	}
	return ""
}

// After a boot a VF has another name for a moment, which the pool's filter does not take.
func TestAwaitDevicesThatComeIntoTheirPool(t *testing.T) {
	f := newFixture(t, "a")
	f.HolderPatience = time.Hour
	log := &testenv.LogBuffer{}
	f.Logger = slog.New(slog.NewTextHandler(log, nil))
	f.Pools = namedPool{f.Pools}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.AwaitDevices(t.Context(), newClaim("c", with("net", "a")))
	}()
	require.Eventually(t, func() bool {
		return log.Count("Waiting for a device that is not in its pool yet", "device=a", "claim=default/c") == 1
	}, waitFor, tick)
	f.addDevice(&fakeDevice{Name: "a", Kernel: "ens1f0v0"})
	<-done
}

// After a boot kubelet asks for devices that are being made. One that is prepared may be out of sight.
func TestAwaitDevicesThatAreMade(t *testing.T) {
	f := newFixture(t, "a")
	f.HolderPatience = time.Hour
	log := &testenv.LogBuffer{}
	f.Logger = slog.New(slog.NewTextHandler(log, nil))
	claim := newClaim("c", with("net", "a"), with("more", "b"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.AwaitDevices(t.Context(), claim)
	}()
	require.Eventually(t, func() bool {
		return log.Count("Waiting for a device that is not in its pool yet", "device=b", "claim=default/c") == 1
	}, waitFor, tick)
	f.addDevice(&fakeDevice{Name: "b"})
	<-done
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)

	txn := f.db.WriteTxn(f.devices)
	require.NoError(t, f.devices.DeleteAll(txn))
	txn.Commit()
	f.AwaitDevices(t.Context(), claim)
}
