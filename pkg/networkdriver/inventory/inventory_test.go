// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package inventory

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	sriov = types.DeviceManagerTypeSRIOV
	dummy = types.DeviceManagerTypeDummy
)

type fixture struct {
	*Inventory
	allocations statedb.RWTable[*tables.DRAAllocation]
	log         *bytes.Buffer
}

func newFixture(t testing.TB) fixture {
	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	reports, err := NewReportTable(db)
	require.NoError(t, err)
	log := &bytes.Buffer{}
	return fixture{New(slog.New(slog.NewTextHandler(log, nil)), db, devices, reports, allocations), allocations, log}
}

func (f fixture) rows() map[string]string {
	rows := map[string]string{}
	for d := range f.devices.All(f.db.ReadTxn()) {
		rows[d.Name] = d.Manager.String() + " " + d.Dev.KernelIfName()
	}
	return rows
}

func (f fixture) allocate(pool string, dev types.Device, manager types.DeviceManagerType) {
	txn := f.db.WriteTxn(f.allocations)
	f.allocations.Insert(txn, &tables.DRAAllocation{Pool: pool, DeviceName: dev.IfName(), Manager: manager, PreparedDevice: dev})
	txn.Commit()
}

func (f fixture) free(pool, device string) {
	txn := f.db.WriteTxn(f.allocations)
	f.allocations.Delete(txn, &tables.DRAAllocation{Pool: pool, DeviceName: device})
	txn.Commit()
}

func snap(devs ...types.Device) types.Snapshot { return types.Snapshot{Devices: devs} }

func dev(name, kernel string) *inventorytest.Device {
	return &inventorytest.Device{Name: name, Kernel: kernel}
}

func TestPublishReplacesOwnRowsOnly(t *testing.T) {
	f := newFixture(t)
	f.allocate("p", dev("a", "eth0"), sriov)
	f.Publish(sriov, snap(dev("a", "eth0"), dev("b", "eth1")))
	f.Publish(dummy, snap(dev("dummy0", "dummy0")))
	assert.Equal(t, map[string]string{"a": "sr-iov eth0", "b": "sr-iov eth1", "dummy0": "dummy dummy0"}, f.rows())

	f.Publish(sriov, snap(dev("b", "eth9")))
	assert.Equal(t, map[string]string{"b": "sr-iov eth9", "dummy0": "dummy dummy0"}, f.rows())
	assert.Equal(t, 1, f.allocations.NumObjects(f.db.ReadTxn()), "the allocation is not the inventory's")

	f.Withdraw(sriov)
	assert.Equal(t, map[string]string{"dummy0": "dummy dummy0"}, f.rows())
	_, _, found := f.reports.Get(f.db.ReadTxn(), ReportByManager(sriov))
	assert.False(t, found)
}

func TestPublishWritesOnlyChanges(t *testing.T) {
	f := newFixture(t)
	f.Publish(dummy, snap(dev("dummy0", "dummy0"), dev("dummy1", "dummy1")))
	_, before := f.devices.AllWatch(f.db.ReadTxn())
	_, reports := f.reports.AllWatch(f.db.ReadTxn())
	_, first, _ := f.devices.Get(f.db.ReadTxn(), tables.DeviceByName("dummy0"))

	f.Publish(dummy, snap(dev("dummy0", "dummy0"), dev("dummy1", "dummy1")))
	select {
	case <-before:
		t.Fatal("an unchanged device woke a reader of the inventory")
	case <-reports:
		t.Fatal("an unchanged snapshot woke a reader of the reports")
	default:
	}

	f.Publish(dummy, snap(dev("dummy0", "dummy0"), dev("dummy1", "renamed")))
	<-before
	_, rev, _ := f.devices.Get(f.db.ReadTxn(), tables.DeviceByName("dummy0"))
	assert.Equal(t, first, rev)
	assert.Equal(t, "dummy renamed", f.rows()["dummy1"])
}

// A device that the manager leaves out for a fault stays as it was, once it was there; one that is left out on purpose does not.
func TestFaultyStays(t *testing.T) {
	f := newFixture(t)
	f.Publish(sriov, snap(dev("a", "eth0"), dev("b", "eth1")))
	lost := types.Skipped{Device: "a", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF}
	never := types.Skipped{Device: "c", Reason: "no driver", Cause: types.CauseDriverGone, Of: types.OfVF}
	f.Publish(sriov, types.Snapshot{Skipped: []types.Skipped{lost, never, {Device: "b", Reason: "the node's own"}}})
	require.Equal(t, map[string]string{"a": "sr-iov eth0"}, f.rows())
	f.merge(map[string]struct{}{"a": {}})
	require.Equal(t, map[string]string{"a": "sr-iov eth0"}, f.rows(), "also when its allocation changes")
	f.Publish(sriov, snap(dev("a", "eth2")))
	require.Equal(t, map[string]string{"a": "sr-iov eth2"}, f.rows())
	f.Publish(sriov, types.Snapshot{Skipped: []types.Skipped{lost}})
	f.Withdraw(sriov)
	require.Empty(t, f.rows())
}

func TestNames(t *testing.T) {
	f := newFixture(t)
	long := strings.Repeat("x", 64)
	f.Publish(sriov, types.Snapshot{
		Devices: []types.Device{dev("eth_0.UP", ""), dev(long, ""), dev("", ""), dev("ok", ""), dev("ok", "second")},
		Skipped: []types.Skipped{{Device: "uplink", Reason: "carries the default route"}},
	})
	f.Publish(dummy, snap(dev("ok", "dummy0"), dev("own", "dummy1")))
	assert.Equal(t, map[string]string{"ok": "sr-iov ", "own": "dummy dummy1"}, f.rows())

	report, _, found := f.reports.Get(f.db.ReadTxn(), ReportByManager(sriov))
	require.True(t, found)
	assert.Equal(t, 1, report.Devices)
	require.Len(t, report.Skipped, 5)
	assert.Equal(t, "uplink", report.Skipped[0].Device)
	assert.Contains(t, report.Skipped[1].Reason, "not a DNS label")
	assert.LessOrEqual(t, len(report.Skipped[2].Device), 65)
	assert.Contains(t, report.Skipped[4].Reason, "two devices")
	assert.Equal(t, 1, strings.Count(f.log.String(), "eth_0.UP"))
	assert.Contains(t, f.log.String(), "device manager sr-iov already has a device of this name")
	assert.Len(t, report.TableRow(), len(report.TableHeader()))

	logged := f.log.Len()
	f.Publish(dummy, snap(dev("ok", "dummy0"), dev("own", "dummy1")))
	assert.Equal(t, logged, f.log.Len(), "a known situation is not logged again")

	f.Publish(sriov, snap())
	assert.Equal(t, map[string]string{"ok": "dummy dummy0", "own": "dummy dummy1"}, f.rows(), "the name is free for the other manager")
	report, _, _ = f.reports.Get(f.db.ReadTxn(), ReportByManager(dummy))
	assert.Empty(t, report.Skipped)
}

func TestProblemsAreReported(t *testing.T) {
	f := newFixture(t)
	problem := types.Problem{Field: "sriov.ifaces[0].vfCount", Message: "ens1f0: 200 is more than sriov_totalvfs (7)"}
	f.Publish(sriov, types.Snapshot{Problems: []types.Problem{problem}})
	report, _, _ := f.reports.Get(f.db.ReadTxn(), ReportByManager(sriov))
	assert.Equal(t, []types.Problem{problem}, report.Problems)
	_, watch := f.reports.AllWatch(f.db.ReadTxn())
	f.Publish(sriov, types.Snapshot{})
	<-watch
}

func TestInitialized(t *testing.T) {
	f := newFixture(t)
	initialized := func() bool {
		ok, _ := f.devices.Initialized(f.db.ReadTxn())
		return ok
	}
	f.Publish(dummy, snap())
	assert.False(t, initialized(), "nobody said yet which managers there are")
	f.Expect(sriov, dummy)
	assert.False(t, initialized())
	f.Publish(dummy, snap())
	assert.False(t, initialized())
	_, watch := f.devices.Initialized(f.db.ReadTxn())
	f.Publish(sriov, snap())
	<-watch
	assert.True(t, initialized())

	f = newFixture(t)
	f.Expect(sriov)
	f.Withdraw(sriov)
	assert.True(t, initialized(), "a withdrawn manager is not waited for")

	f = newFixture(t)
	f.Expect()
	assert.True(t, initialized(), "no manager")
}

func TestMerge(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()

	// A rescan while the link is in the pod.
	f.Publish(sriov, snap(dev("a", "ens1f0v0")))
	f.allocate("p", dev("a", "ens1f0v0"), sriov)
	f.Publish(sriov, snap(dev("a", "")))
	assert.Equal(t, "sr-iov ens1f0v0", f.rows()["a"])

	// After a restart: discovery is first and restore second.
	f.Publish(sriov, snap(dev("a", ""), dev("b", "")))
	assert.Equal(t, "sr-iov ", f.rows()["b"])
	f.allocate("p", dev("b", "ens1f0v1"), sriov)
	f.eventually(t, "b", "sr-iov ens1f0v1")

	// Freed: what discovery sees, without a new snapshot.
	f.free("p", "a")
	f.eventually(t, "a", "sr-iov ")

	// An allocation of another manager's device of that name is not merged, and one without a device does no harm.
	f.allocate("q", dev("a", "wrong"), dummy)
	f.allocate("p", dev("absent", "x"), sriov)
	f.allocate("p", dev("a", "ens1f0v0"), sriov)
	f.eventually(t, "a", "sr-iov ens1f0v0")

	cancel()
	assert.NoError(t, <-done)
}

// linked is a device with a link.
type linked struct{ *inventorytest.Device }

func (l linked) Link() nic.Identity { return nic.PCI("0000:03:00.1") }

func (l linked) Merge(prepared types.Device) types.Device {
	return linked{l.Device.Merge(prepared).(*inventorytest.Device)}
}

// A device whose link is just home from a pod does not lose its name until the next snapshot, but what the snapshot
// after that sees counts.
func TestFreedBeforeTheNextSnapshot(t *testing.T) {
	f := newFixture(t)
	f.Publish(sriov, snap(linked{dev("a", "ens1f0v0")}))
	f.allocate("p", linked{dev("a", "ens1f0v0")}, sriov)
	f.Publish(sriov, snap(linked{dev("a", "")}))
	_, changed := f.devices.AllWatch(f.db.ReadTxn())

	f.free("p", "a")
	f.merge(map[string]struct{}{"a": {}})
	assert.Equal(t, "sr-iov ens1f0v0", f.rows()["a"])
	f.Publish(sriov, snap(linked{dev("a", "ens1f0v0")}))
	select {
	case <-changed:
		t.Fatal("the end of a pod woke who publishes the inventory")
	default:
	}
	f.Publish(sriov, snap(linked{dev("a", "other0")}))
	assert.Equal(t, "sr-iov other0", f.rows()["a"])
}

func (f fixture) eventually(t *testing.T, device, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		_, watch := f.devices.AllWatch(f.db.ReadTxn())
		if f.rows()[device] == want {
			return
		}
		select {
		case <-watch:
		case <-ctx.Done():
			t.Fatalf("device %s is %q, want %q", device, f.rows()[device], want)
		}
	}
}

func BenchmarkPublish(b *testing.B) {
	snapshot := func(kernel string) types.Snapshot {
		var s types.Snapshot
		for i := range 4096 {
			d := inventorytest.VF(i)
			d.Kernel = kernel
			s.Devices = append(s.Devices, d)
		}
		return s
	}
	// The two snapshots share no memory: what is compared has to be looked at.
	a, same, other := snapshot("eth0"), snapshot("eth0"), snapshot("eth1")
	for _, bench := range []struct {
		name string
		next types.Snapshot
	}{{"unchanged", same}, {"all-changed", other}} {
		b.Run(bench.name, func(b *testing.B) {
			f := newFixture(b)
			b.ReportAllocs()
			f.Publish(sriov, a)
			for i := 0; b.Loop(); i++ {
				if i%2 == 0 {
					f.Publish(sriov, bench.next)
				} else {
					f.Publish(sriov, a)
				}
			}
		})
	}
}
