// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// writerFixture is a fixture whose status writer is a real one before a fake API server.
type writerFixture struct {
	*fixture
	api    *fakeAPI
	writer *Writer
	log    *testenv.LogBuffer
}

func newWriterFixture(t *testing.T, api *fakeAPI, names ...string) *writerFixture {
	f := &writerFixture{fixture: newFixture(t, names...), api: api, log: &testenv.LogBuffer{}}
	f.newWriter()
	return f
}

func (f *writerFixture) newWriter() {
	f.writer = NewWriter(WriterParams{
		Logger: slog.New(slog.NewTextHandler(f.log, nil)), DB: f.db, Allocations: f.allocations, Client: f.api,
		DriverName: testDriver, NodeName: testNode, BootID: testBoot,
	})
	f.world.StatusWriter = f.writer
}

// run runs the writer until the test, or the returned function, ends it.
func (f *writerFixture) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- f.writer.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(f.t, <-done)
	})
	f.t.Cleanup(stop)
	return stop
}

// settled waits until the writer has looked at everything that changed until now.
func (f *writerFixture) settled() {
	f.t.Helper()
	// A row of a claim that does not exist makes a write that fails as such, after all that came before it.
	f.insert(&tables.DRAAllocation{DeviceName: "marker", Pool: "marker", ClaimNamespace: "default", ClaimName: "marker",
		ClaimUID: kubetypes.UID(fmt.Sprint("marker", time.Now().UnixNano())), PreparedDevice: &fakeDevice{host: f.host}})
	_, before := f.api.counts()
	require.Eventually(f.t, func() bool { _, after := f.api.counts(); return after > before }, waitFor, tick)
}

func condition(t *testing.T, entry resourceapi.AllocatedDeviceStatus) metav1.Condition {
	t.Helper()
	require.Len(t, entry.Conditions, 1)
	c := entry.Conditions[0]
	require.Equal(t, "Ready", c.Type)
	require.False(t, c.LastTransitionTime.IsZero())
	return c
}

func TestStatusOfPreparedDevices(t *testing.T) {
	claim := newClaim("c", with("net", "a"), with("x", "b"), fromClaim(`{"podIfName":"net1","vlan":5}`, "net"))
	f := newWriterFixture(t, newFakeAPI(claim), "a", "b")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)

	entries := f.api.devices("c")
	require.Len(t, entries, 2)
	require.Equal(t, testDriver, entries[0].Driver)
	require.Equal(t, "node-1/pool", entries[0].Pool)
	require.Equal(t, "a", entries[0].Device)
	require.Equal(t, "b", entries[1].Device)
	require.Nil(t, entries[0].NetworkData)
	c := condition(t, entries[0])
	require.Equal(t, metav1.ConditionFalse, c.Status)
	require.Equal(t, "Prepared", c.Reason)
	record, err := types.DecodeRecord(entries[0].Data.Raw)
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"a","found":true}`, string(record.Device))
	record.Device = nil
	require.Equal(t, types.Record{Version: types.RecordVersion, Manager: types.DeviceManagerTypeSRIOV, PodUID: "uid-pod-c",
		BootID: testBoot, Config: types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)}}, record)
}

func TestStatusOf(t *testing.T) {
	row := &tables.DRAAllocation{DeviceName: "a", Pool: "p", PreparedDevice: &fakeDevice{Name: "a"}}
	status := func(change func(*tables.DRAAllocation)) deviceStatus {
		s, err := statusOf(row.With(change), testNode, testBoot, "")
		require.NoError(t, err)
		return s
	}
	for reason, attachment := range map[string]*types.Attachment{"Prepared": nil, "Attached": {SandboxID: "sandbox", NetNS: "/run/netns/x"}} {
		s := status(func(r *tables.DRAAllocation) {
			r.PreparedDevice, r.Attachment = &fakeDevice{Name: "a", NoLink: true}, attachment
		})
		require.Equal(t, metav1.ConditionTrue, s.Ready, "a device without a link is ready when it is set up")
		require.Equal(t, reason, s.Reason)
		require.Equal(t, "set up; the device has no network interface that could be moved into the pod", s.Message)
		entries, err := configured(applyConfigOf(Ref{}, testDriver, []deviceStatus{s}, nil))
		require.NoError(t, err)
		require.Nil(t, entries[0].NetworkData)
	}

	s := status(func(r *tables.DRAAllocation) { r.Attachment = &types.Attachment{SandboxID: "sandbox", Moved: true} })
	require.Equal(t, metav1.ConditionTrue, s.Ready)
	require.Equal(t, "Moved", s.Reason)
	require.Equal(t, "the pod has moved the interface into a network namespace of its own", s.Message)

	s = status(func(r *tables.DRAAllocation) { r.Attachment = &types.Attachment{IfName: "net0", Again: true} })
	require.Equal(t, metav1.ConditionTrue, s.Ready)
	require.Equal(t, "interface net0 is in the pod again, after it was gone from there: addresses and routes that it had are lost", s.Message)
	s = status(func(r *tables.DRAAllocation) {
		r.Attachment = &types.Attachment{IfName: "net0"}
		r.Config = types.DeviceConfig{Network: "racks", Joined: &types.Network{Lacks: types.IPv4}}
	})
	require.Equal(t, metav1.ConditionTrue, s.Ready)
	require.Equal(t, "interface net0 is in the pod, without an IPv4 address: network racks has no subnet of that family for this node", s.Message)

	s = status(func(r *tables.DRAAllocation) { r.Error = "attach: name \xff taken" })
	require.Equal(t, metav1.ConditionFalse, s.Ready)
	require.Equal(t, "Failed", s.Reason)
	require.Equal(t, "attach: name ? taken", s.Message)

	var ips []string
	for i := range 20 {
		ips = append(ips, fmt.Sprintf("192.0.2.%d/24", i), fmt.Sprintf("192.0.2.%d/24", i))
	}
	s = status(func(r *tables.DRAAllocation) {
		r.Error = strings.Repeat("ä", 5000)
		r.Attachment = &types.Attachment{IfName: strings.Repeat("x", 300), MAC: strings.Repeat("0", 300),
			IPs: append([]string{"", "192.0.2.1", "fe80::1%eth0/64", "2001:DB8::1/64"}, ips...)}
	})
	require.Len(t, s.Message, maxMessageLen)
	require.Len(t, s.IfName, resourceapi.NetworkDeviceDataInterfaceNameMaxLength)
	require.Len(t, s.MAC, resourceapi.NetworkDeviceDataHardwareAddressMaxLength)
	require.Len(t, s.IPs, resourceapi.NetworkDeviceDataMaxIPs)
	require.Equal(t, []string{"2001:db8::1/64", "192.0.2.0/24"}, s.IPs[:2])
	require.Equal(t, metav1.ConditionFalse, s.Ready, "an error counts also while attached")

	_, err := statusOf(row.With(func(r *tables.DRAAllocation) {
		r.PreparedDevice = &fakeDevice{Name: "a", Pad: strings.Repeat("x", resourceapi.AllocatedDeviceStatusDataMaxLength)}
	}), testNode, testBoot, "")
	require.ErrorContains(t, err, "a claim's status holds at most 10240 for a device")
}

// A record that does not fit the status fails Prepare, which rolls back.
func TestPrepareRecordTooLarge(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim))
	f.addDevice(&fakeDevice{Name: "a", Pad: strings.Repeat("x", 20000)})
	_, err := f.Prepare(t.Context(), claim)
	require.ErrorContains(t, err, "record the devices in the claim's status: device a: the record has")
	require.Equal(t, []string{"setup a", "free a"}, f.host.takeCalls())
	require.Empty(t, f.rows())
}

func TestWriterFollowsRows(t *testing.T) {
	claim := newClaim("c", with("net", "a"), with("x", "b"))
	f := newWriterFixture(t, newFakeAPI(claim), "a", "b")
	f.run()
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.settled()
	_, writes := f.api.counts()
	require.Equal(t, 2, writes, "Prepare and the marker: what Prepare wrote is not written again")
	since := condition(t, f.api.devices("c")[1]).LastTransitionTime

	f.attach("a")
	require.Eventually(t, func() bool { return f.api.devices("c")[0].NetworkData != nil }, waitFor, tick)
	entries := f.api.devices("c")
	require.Equal(t, &resourceapi.NetworkDeviceData{InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"192.0.2.4/24"}}, entries[0].NetworkData)
	c := condition(t, entries[0])
	require.Equal(t, metav1.ConditionTrue, c.Status)
	require.Equal(t, "Attached", c.Reason)
	require.NotEmpty(t, entries[0].Data.Raw, "the record must stay")
	require.Equal(t, since, condition(t, entries[1]).LastTransitionTime)
	_, err = types.DecodeRecord(entries[0].Data.Raw)
	require.NoError(t, err)

	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Attachment = nil; r.Error = "taken" }))
	require.Eventually(t, func() bool { return f.api.devices("c")[0].NetworkData == nil }, waitFor, tick)
	c = condition(t, f.api.devices("c")[0])
	require.Equal(t, "Failed", c.Reason)
	require.Equal(t, "taken", c.Message)
	require.Equal(t, metav1.ConditionFalse, c.Status)

	_, before := f.api.counts()
	f.insert(f.row("a").With(func(*tables.DRAAllocation) {}))
	f.settled()
	_, after := f.api.counts()
	require.Equal(t, before+1, after, "only the marker: nothing had changed")

	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	require.Eventually(t, func() bool { return len(f.api.devices("c")) == 0 }, waitFor, tick)
	require.Eventually(t, func() bool { return !f.writer.knows(claim.UID) }, waitFor, tick, "knowledge of claims that are gone must not pile up")
}

// Who waits does not go through the background's client, and what nobody waits for goes through no other.
func TestWriterUsesTwoClients(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	background := newFakeAPI(claim.DeepCopy())
	f.writer.Background = background
	f.run()
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	_, writes := background.counts()
	require.Zero(t, writes)
	require.Len(t, f.api.devices("c"), 1)

	f.attach("a")
	require.Eventually(t, func() bool { return len(background.devices("c")) == 1 }, waitFor, tick)
	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	require.Empty(t, f.api.devices("c"))
	_, writes = f.api.counts()
	require.Equal(t, 2, writes, "Prepare and Unprepare")
}

// Of 50 changes in a row few are written.
func TestWriterCoalesces(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.run()
	f.attach("a")
	for i := range 50 {
		f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Error = fmt.Sprint("failure ", i) }))
	}
	require.Eventually(t, func() bool { return condition(t, f.api.devices("c")[0]).Message == "failure 49" }, waitFor, tick)
	_, writes := f.api.counts()
	require.Less(t, writes, 10)
}

func TestTransitionTimeIsStable(t *testing.T) {
	t0 := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	s := []deviceStatus{{Pool: "p", Device: "a", Ready: metav1.ConditionFalse}}
	first := transitionsOf(s, nil, t0)
	require.Equal(t, first, transitionsOf(s, first, t0.Add(time.Hour)))
	s[0].Message, s[0].Reason = "other words", "Other"
	require.Equal(t, first, transitionsOf(s, first, t0.Add(time.Hour)), "only the status counts")
	s[0].Ready = metav1.ConditionTrue
	require.Equal(t, metav1.NewTime(t0.Add(time.Hour).Truncate(time.Second)), transitionsOf(s, first, t0.Add(time.Hour))["p/a/Ready"].at)
}

// After a restart nothing is written as long as the rows do not change, and nothing that the server has.
func TestWriterAfterRestart(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	stop := f.run()
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.attach("a")
	require.Eventually(t, func() bool { return f.api.devices("c")[0].NetworkData != nil }, waitFor, tick)
	stop()
	before := f.api.devices("c")
	restored := f.row("a").With(func(r *tables.DRAAllocation) { r.Attachment = nil })
	f.insert(restored)

	f.newWriter()
	f.writer.Observe(f.api.claims["default/c"].DeepCopy(), []*tables.DRAAllocation{restored})
	_, writes := f.api.counts()
	f.run()
	f.settled()
	f.attach("a") // the runtime says that it is still there
	// The markers are other claims: a worker may be done with one while another has this claim yet before it.
	require.Eventually(t, func() bool {
		unlock, err := f.writer.claims.lock(t.Context(), string(claim.UID))
		require.NoError(t, err)
		defer unlock()
		return f.writer.knowledge(RefOf(claim)).wanted[0].IfName != ""
	}, waitFor, tick)
	f.settled()
	_, now := f.api.counts()
	require.Equal(t, writes+2, now, "the two markers")
	require.Equal(t, before, f.api.devices("c"))

	f.insert(restored)
	require.Eventually(t, func() bool { return f.api.devices("c")[0].NetworkData == nil }, waitFor, tick)
	require.Equal(t, "Prepared", condition(t, f.api.devices("c")[0]).Reason)
}

// How a device is stands beside whether it is in its pod, and is written when that changes; after a restart too, where nothing else is
// known yet.
func TestWriterHealth(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	faults, err := tables.NewHealthTable(f.db)
	require.NoError(t, err)
	f.writer.Faults = faults
	set := func(row *tables.DeviceHealth) {
		txn := f.db.WriteTxn(faults)
		defer txn.Commit()
		if len(row.Faults) > 0 {
			_, _, err := faults.Insert(txn, row)
			require.NoError(t, err)
		} else {
			_, _, err := faults.Delete(txn, row)
			require.NoError(t, err)
		}
	}
	says := func() (said string) {
		for _, c := range f.api.devices("c")[0].Conditions {
			said += fmt.Sprintf("%s %s %s %s; ", c.Type, c.Status, c.Reason, c.Message)
		}
		return said
	}
	eventually := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool { return says() == want }, waitFor, tick, "%s", want)
	}
	stop := f.run()
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.attach("a")
	eventually("Ready True Attached interface net1 is in the pod; Healthy True Healthy ; ")
	set(&tables.DeviceHealth{Device: "other", Faults: []tables.DeviceFault{{Fault: types.Fault{Cause: types.CauseNoCarrier}}}})
	set(&tables.DeviceHealth{Device: "a", Faults: []tables.DeviceFault{
		{Fault: types.Fault{Cause: types.CausePFDown, Message: "down"}}, {Fault: types.Fault{Cause: types.CauseSlowLink, Message: "slow"}},
	}})
	eventually("Ready True Attached interface net1 is in the pod; Healthy False PFDown down; slow; ")
	stop()

	// The rows that are restored do not know yet what is in the pod; and the fault is over.
	set(&tables.DeviceHealth{Device: "a"})
	restored := f.row("a").With(func(r *tables.DRAAllocation) { r.Attachment = nil })
	f.insert(restored)
	f.newWriter()
	f.writer.Faults = faults
	f.writer.Observe(f.api.claims["default/c"].DeepCopy(), []*tables.DRAAllocation{restored})
	f.run()
	eventually("Ready True Attached interface net1 is in the pod; Healthy True Healthy ; ")
}

// A claim that is gone, or that was made anew under its name, is not written.
func TestWriterClaimGone(t *testing.T) {
	for name, next := range map[string]func(*fakeAPI){
		"gone": func(a *fakeAPI) { delete(a.claims, "default/c") },
		"made anew": func(a *fakeAPI) {
			c := newClaim("c")
			c.UID = "uid-next"
			a.claims["default/c"] = c
		},
	} {
		t.Run(name, func(t *testing.T) {
			claim := newClaim("c", with("net", "a"))
			f := newWriterFixture(t, newFakeAPI(claim), "a")
			f.run()
			_, err := f.Prepare(t.Context(), claim)
			require.NoError(t, err)
			f.api.mu.Lock()
			next(f.api)
			f.api.mu.Unlock()
			f.attach("a")
			f.settled()
			require.NoError(t, f.Unprepare(t.Context(), claim.UID))
			require.Eventually(t, func() bool {
				return !f.writer.knows(claim.UID) && len(f.writer.withdrawnClaims()) == 0
			}, waitFor, tick)
			require.Empty(t, f.log.String())
			if c := f.api.claims["default/c"]; c != nil {
				require.Empty(t, c.Status.Devices)
			}
		})
	}
}

func TestWriterRetries(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	f.run()
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	failures := 3
	f.api.setFail(func(call, name string) error {
		if name != "c" || failures == 0 {
			return nil
		}
		failures--
		return apierrors.NewConflict(claimsResource, name, errors.New("the object has been modified")) // not a UID
	})
	f.attach("a")
	require.Eventually(t, func() bool { return f.api.devices("c")[0].NetworkData != nil }, waitFor, tick)
	require.Equal(t, 1, f.log.Count("Claim status could not be written"), "once per cause")
}

// A missing right is named, once, and in the error of Prepare.
func TestWriterForbidden(t *testing.T) {
	one, two := newClaim("one", with("net", "a")), newClaim("two", with("net", "b"))
	f := newWriterFixture(t, newFakeAPI(one, two), "a", "b", "c")
	for _, claim := range []*resourceapi.ResourceClaim{one, two} {
		_, err := f.Prepare(t.Context(), claim)
		require.NoError(t, err)
	}
	f.api.setFail(func(_, name string) error {
		if name == "marker" {
			return nil
		}
		return apierrors.NewForbidden(claimsResource, name, errors.New("no such right"))
	})
	_, before := f.api.counts()
	f.run()
	f.attach("a")
	f.attach("b")
	require.Eventually(t, func() bool { _, now := f.api.counts(); return now == before+2 }, waitFor, tick)
	require.Eventually(t, func() bool { return f.log.Count("Claim status is refused") > 0 }, waitFor, tick)
	f.settled()
	require.Equal(t, 1, f.log.Count("Claim status is refused"))
	require.Contains(t, f.log.String(), "verbs patch and update on resourceclaims/status in resource.k8s.io")
	require.Contains(t, f.log.String(), "associated-node:patch and associated-node:update on resourceclaims/driver named networkdriver.cilium.io")
	_, now := f.api.counts()
	require.Equal(t, before+3, now, "a refusal is not tried again soon")

	_, err := f.Prepare(t.Context(), newClaim("three", with("net", "c")))
	require.ErrorContains(t, err, "needs the verbs patch and update on resourceclaims/status")
	require.True(t, apierrors.IsForbidden(err))
}

// A withdrawal that is due, or being written, does not undo a Prepare that comes after it.
func TestWithdrawAndApplyInOrder(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	f.writer.Withdraw(RefOf(claim)) // not running yet, so the withdrawal is due
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.run()
	f.settled()
	require.Len(t, f.api.devices("c"), 1)

	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	release := make(chan struct{})
	f.api.mu.Lock()
	f.api.block = release
	f.api.mu.Unlock()
	f.writer.Withdraw(RefOf(claim))
	require.Eventually(t, func() bool { return len(f.writer.withdrawnClaims()) == 0 }, waitFor, tick) // it is being written
	done := make(chan error)
	go func() {
		_, err := f.Prepare(context.Background(), claim)
		done <- err
	}()
	require.Eventually(t, func() bool { vlan, set := f.host.vlan("a"); return set && vlan == 0 }, waitFor, tick)
	close(release)
	require.NoError(t, <-done)
	f.settled()
	require.Len(t, f.api.devices("c"), 1)
	require.Equal(t, "Prepared", f.row("a").State())
}

func (w *Writer) knows(claim kubetypes.UID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.written[claim] != nil
}

func (w *Writer) withdrawnClaims() map[kubetypes.UID]Ref {
	w.mu.Lock()
	defer w.mu.Unlock()
	copied := map[kubetypes.UID]Ref{}
	for uid, claim := range w.withdrawn {
		copied[uid] = claim
	}
	return copied
}

// A Prepare whose status write fails leaves no record behind, though the server may have taken it.
func TestWithdrawAfterFailedApply(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	f.run()
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.settled()
	// As if this had been a call that was told that the write failed.
	txn := f.db.WriteTxn(f.allocations)
	_, _, err = f.allocations.Delete(txn, f.row("a"))
	require.NoError(t, err)
	txn.Commit()
	failed := false
	f.api.setFail(func(call, name string) error {
		if name == "c" && !failed {
			failed = true
			return apierrors.NewInternalError(errors.New("etcd"))
		}
		return nil
	})
	_, err = f.Prepare(t.Context(), claim)
	require.ErrorContains(t, err, "etcd")
	require.Eventually(t, func() bool { return len(f.api.devices("c")) == 0 }, waitFor, tick)
	require.Empty(t, f.host.vlans)
}

// When kubelet has been told that a claim is unprepared, no restart can find a record of it, also when the writer's
// queue does not come to it any more. Nothing is kept in memory of a claim that is through, or gone.
func TestUnprepareLeavesNoRecord(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Len(t, f.api.devices("c"), 1)
	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	require.Empty(t, f.api.devices("c"))
	require.Empty(t, f.writer.written)

	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.api.mu.Lock()
	clear(f.api.claims)
	f.api.mu.Unlock()
	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	require.Empty(t, f.writer.written)
	require.Empty(t, f.writer.withdrawn)
}

// Claims that wait for a stuck API server do not keep the writer from stopping.
func TestWriterStops(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.api.mu.Lock()
	f.api.block = make(chan struct{})
	f.api.mu.Unlock()
	stop := f.run()
	f.attach("a")
	stop()
	f.writer.Withdraw(RefOf(claim)) // late calls are harmless
}

// Between a Prepare's write of the status and its rows the writer may look at the claim, also because of a withdrawal
// from before; it must not take the status for an orphan.
func TestWriterLeavesWhatPrepareIsAboutToInsert(t *testing.T) {
	claim := newClaim("c", with("net", "a"))
	f := newWriterFixture(t, newFakeAPI(claim), "a")
	row := &tables.DRAAllocation{DeviceName: "a", Pool: "pool", ClaimNamespace: "default", ClaimName: "c", ClaimUID: claim.UID,
		PreparedDevice: &fakeDevice{host: f.host, Name: "a", Found: true}}
	f.writer.Withdraw(RefOf(claim))
	require.NoError(t, f.writer.Apply(t.Context(), RefOf(claim), []*tables.DRAAllocation{row}))
	require.NoError(t, f.writer.reconcile(t.Context(), RefOf(claim)))
	require.Len(t, f.api.devices("c"), 1)
	f.writer.Withdraw(RefOf(claim))
	require.NoError(t, f.writer.reconcile(t.Context(), RefOf(claim)))
	require.Empty(t, f.api.devices("c"))
}
