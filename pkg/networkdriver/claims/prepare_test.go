// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const waitFor, tick = 10 * time.Second, time.Millisecond

func TestPrepare(t *testing.T) {
	f := newFixture(t, "a", "b")
	result, err := f.Prepare(t.Context(), newClaim("c", with("net", "a"), with("alt/fast", "b"), fromClaim(`{"podIfName":"net1","vlan":5}`, "net")))
	require.NoError(t, err)
	require.Equal(t, Result{Devices: []PreparedDevice{
		{Request: "net", Pool: "node-1/pool", Device: "a"},
		{Request: "alt/fast", Pool: "node-1/pool", Device: "b"},
	}}, result)
	require.Equal(t, []string{"setup a", "setup b"}, f.host.takeCalls())
	require.Equal(t, []string{"a", "b"}, f.status.applied["uid-c"])
	require.Empty(t, f.status.takeWithdrawn())
	require.Equal(t, &tables.DRAAllocation{
		DeviceName: "a", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{host: f.host, Name: "a", Found: true},
		Pool: "pool", PodUID: "uid-pod-c", ClaimUID: "uid-c", Config: types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)},
		ClaimNamespace: "default", ClaimName: "c", PodName: "pod-c", Request: "net",
	}, f.row("a"))
	require.Len(t, f.rows(), 2)
	require.InDelta(t, 1, testutil.ToFloat64(f.Metrics.calls.WithLabelValues("prepare", "success")), 0)
}

// The rows must not be seen before the record is durable.
func TestPrepareWritesStatusBeforeRows(t *testing.T) {
	f := newFixture(t, "a")
	during := -1
	f.status.during = func() { during = len(f.rows()) }
	_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a")))
	require.NoError(t, err)
	require.Equal(t, 0, during)
}

func TestPrepareRefuses(t *testing.T) {
	const ofGroup = `all of whose pods share it, and a network device can only be given to one pod: ` +
		`take it out of spec.resourceClaims of the PodGroup, and name a ResourceClaimTemplate in that of the pods alone`
	tests := []struct {
		name      string
		claim     *resourceapi.ResourceClaim
		err       string
		permanent bool
	}{
		{name: "not allocated", claim: newClaim("c", func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }),
			err: `the claim is not allocated`},
		{name: "not reserved", claim: newClaim("c", with("net", "a"), func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }),
			err: `the claim is not reserved for a pod`},
		{name: "no pod", claim: newClaim("c", with("net", "a"), func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil },
			alsoFor(resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g"})),
			err: `the claim is reserved for PodGroup "g", ` + ofGroup, permanent: true},
		{name: "a pod, and a group beside it", claim: newClaim("c", with("net", "a"),
			alsoFor(resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g"})),
			err: `the claim is reserved for PodGroup "g", ` + ofGroup, permanent: true},
		{name: "resource pods of another group", claim: newClaim("c", with("net", "a"), func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].APIGroup = "x.io" }),
			err: `the claim is reserved for pods.x.io "pod-c", a network device can only be given to a pod`, permanent: true},
		{name: "nothing of ours", claim: newClaim("c", withResult(resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com", Pool: testNode + "/pool", Device: "a"})),
			err: `the claim has no device of driver networkdriver.cilium.io`, permanent: true},
		{name: "another node", claim: newClaim("c", with("x", "b"), withResult(resourceapi.DeviceRequestAllocationResult{Request: "net", Driver: testDriver, Pool: "node-10/pool", Device: "a"})),
			err: `request "net": device a is in pool node-10/pool, which is not a pool of this node, node-1`, permanent: true},
		{name: "pool without node", claim: newClaim("c", withResult(resourceapi.DeviceRequestAllocationResult{Request: "net", Driver: testDriver, Pool: "node-1", Device: "a"})),
			err: `request "net": device a is in pool node-1, which is not a pool of this node, node-1`, permanent: true},
		{name: "adminAccess", claim: newClaim("c", with("x", "b"), withResult(resourceapi.DeviceRequestAllocationResult{Request: "admin", Driver: testDriver, Pool: testNode + "/pool", Device: "a", AdminAccess: ptr.To(true)})),
			err: `request "admin": adminAccess to device a is not supported: a network device is given to one pod or not at all`, permanent: true},
		{name: "share", claim: newClaim("c", withResult(resourceapi.DeviceRequestAllocationResult{Request: "net", Driver: testDriver, Pool: testNode + "/pool", Device: "a", ShareID: ptr.To(kubetypes.UID("s"))})),
			err: `request "net": device a was allocated as a share, but cannot be shared`, permanent: true},
		{name: "device gone", claim: newClaim("c", with("x", "b"), with("net", "zz")),
			err: `request "net": device zz is gone: the node has no such device that can serve now`},
		{name: "parameters of the second request", claim: newClaim("c", with("x", "b"), with("net", "a"), fromClaim(`{"vlan":4095}`, "net")),
			err: `request "net": parameters: vlan: 4095 is not in 0..4094`, permanent: true},
		{name: "vlan on a dummy", claim: newClaim("c", with("x", "b"), with("net", "dummy0"), fromClaim(`{"vlan":7}`, "net")),
			err: `request "net": device dummy0: parameters: vlan: a dummy device has no VLAN filter`, permanent: true},
		{name: "one name for two requests", claim: newClaim("c", with("x", "b"), with("net", "a"), fromClaim(`{"podIfName":"net1"}`)),
			err: `request "net": podIfName: "net1" is also the interface name of request "x"`, permanent: true},
		{name: "one name for two devices of a request", claim: newClaim("c", with("net", "a"), with("net", "b"), fromClaim(`{"podIfName":"net1"}`)),
			err: `request "net": podIfName: "net1" would name two devices of this one request; use a request of its own for each device, each with its podIfName`, permanent: true},
		{name: "podIfName that another device keeps", claim: newClaim("c", with("x", "kernel"), with("net", "a"), fromClaim(`{"podIfName":"ens1v0"}`, "net")),
			err: `request "net": podIfName: "ens1v0" is also the interface name of request "x"`, permanent: true},
		{name: "own name that every pod has", claim: newClaim("c", with("x", "b"), with("net", "first")),
			err: `request "net": device first: parameters: podIfName is needed, since the interface's own name cannot be kept: "eth0" is taken in every pod`, permanent: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "dummy0")
			f.addDevice(&fakeDevice{Name: "first", Kernel: "eth0"})
			f.addDevice(&fakeDevice{Name: "kernel", Kernel: "ens1v0"})
			_, err := f.Prepare(t.Context(), tt.claim)
			want := "prepare claim default/c: " + tt.err
			result := "error"
			if tt.permanent {
				want += " (permanent: trying again does not help)"
				result = "invalid"
			}
			require.EqualError(t, err, want)
			require.Equal(t, tt.permanent, IsPermanent(err))
			require.Empty(t, f.host.takeCalls(), "nothing may be touched")
			require.Empty(t, f.rows())
			require.Empty(t, f.status.applied)
			require.InDelta(t, 1, testutil.ToFloat64(f.Metrics.calls.WithLabelValues("prepare", result)), 0)

			_, err = f.Prepare(t.Context(), newClaim("d", with("net", "a"), with("x", "b"), fromClaim(`{"podIfName":"net1"}`, "x")))
			require.NoError(t, err, "the refusal must not hold anything")
		})
	}
}

// adminAccess: false is what an allocation without it may say.
func TestPrepareWithoutAdminAccess(t *testing.T) {
	f := newFixture(t, "a")
	claim := newClaim("c", with("net", "a"))
	claim.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(false)
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
}

func TestPrepareRefusesNameOfAnotherClaimOfThePod(t *testing.T) {
	f := newFixture(t, "a", "b", "c")
	_, err := f.Prepare(t.Context(), newClaim("one", forPod("p"), with("net", "a"), fromClaim(`{"podIfName":"net1"}`)))
	require.NoError(t, err)
	f.host.takeCalls()
	_, err = f.Prepare(t.Context(), newClaim("two", forPod("p"), with("req", "b"), fromClaim(`{"podIfName":"net1"}`)))
	require.ErrorContains(t, err, `prepare claim default/two: request "req": podIfName: "net1" is also what request "net" of claim default/one has in the same pod`)
	require.Empty(t, f.host.takeCalls())
	_, err = f.Prepare(t.Context(), newClaim("two", forPod("p"), with("req", "b"), fromClaim(`{"podIfName":"net2"}`)))
	require.NoError(t, err)
	_, err = f.Prepare(t.Context(), newClaim("three", forPod("q"), with("req", "c"), fromClaim(`{"podIfName":"net1"}`)))
	require.NoError(t, err, "another pod may use the name")
}

// The device of a pod that was deleted by force is refused to the next claim until it is home (PREP-10), and the old
// claim's late or repeated Unprepare does not touch the new holder (DET-03).
func TestPrepareDeviceStillHeld(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("old", with("net", "a")))
	require.NoError(t, err)
	f.attach("a")
	next := newClaim("new", with("net", "a"), func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results[0].Pool = testNode + "/otherpool" // the device counts, not its pool
	})
	f.host.takeCalls()
	_, err = f.Prepare(t.Context(), next)
	require.EqualError(t, err, `prepare claim default/new: request "net": device a is still held by claim default/old (uid uid-old) of pod default/pod-old (uid uid-pod-old)`)
	require.Empty(t, f.host.takeCalls())
	require.Len(t, f.rows(), 1)

	require.NoError(t, f.Unprepare(t.Context(), "uid-old"))
	f.networks.pools["a"] = "otherpool"
	_, err = f.Prepare(t.Context(), next)
	require.NoError(t, err)
	f.host.takeCalls()
	require.NoError(t, f.Unprepare(t.Context(), "uid-old"))
	require.Empty(t, f.host.takeCalls())
	require.Equal(t, kubetypes.UID("uid-new"), f.row("a").ClaimUID)
}

// The scheduler chose a device from a pool whose filter has been changed since: the device may be another pool's, for others, by now.
func TestPrepareDeviceThatLeftItsPool(t *testing.T) {
	for _, tt := range []struct{ pool, now string }{{"", "it is in none now"}, {"other", "it is in pool other now"}} {
		t.Run(tt.now, func(t *testing.T) {
			f := newFixture(t, "a", "b")
			claim := newClaim("c", with("x", "b"), with("net", "a"))
			f.networks.pools["a"] = tt.pool
			_, err := f.Prepare(t.Context(), claim)
			require.EqualError(t, err, `prepare claim default/c: request "net": device a is not in pool pool any more, which it was allotted from, `+tt.now+
				`: have the pool's filter take it again, or delete the pod to get another device`)
			require.Empty(t, f.host.takeCalls(), "nothing may be touched")
			require.Empty(t, f.rows())

			delete(f.networks.pools, "a")
			_, err = f.Prepare(t.Context(), claim)
			require.NoError(t, err, "the refusal is not for ever")

			// What is prepared stays in its pool: for its pod, once more when something went wrong, and for the next pod of the claim.
			f.networks.pools["a"] = tt.pool
			f.host.takeCalls()
			_, err = f.Prepare(t.Context(), claim)
			require.NoError(t, err)
			require.Empty(t, f.host.takeCalls())
			f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Error = "test" }))
			_, err = f.Prepare(t.Context(), claim)
			require.NoError(t, err)
			require.Equal(t, []string{"setup a"}, f.host.takeCalls())
			_, err = f.Prepare(t.Context(), newClaim("c", with("x", "b"), with("net", "a"), forPod("next")))
			require.NoError(t, err)
			require.Equal(t, kubetypes.UID("uid-next"), f.row("a").PodUID)
		})
	}
}

func TestPrepareIsIdempotent(t *testing.T) {
	f := newFixture(t, "a", "b")
	claim := newClaim("c", with("net", "a"), with("x", "b"), fromClaim(`{"podIfName":"net1"}`, "net"))
	first, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.attach("a")
	before := f.rows()
	f.host.takeCalls()
	f.status.applied = nil
	txn := f.db.WriteTxn(f.devices)
	require.NoError(t, f.devices.DeleteAll(txn)) // its devices are in the pod: nobody may look for them
	txn.Commit()
	for range 3 {
		again, err := f.Prepare(t.Context(), claim)
		require.NoError(t, err)
		require.Equal(t, first, again)
	}
	require.Empty(t, f.host.takeCalls())
	require.Empty(t, f.status.applied)
	require.Equal(t, before, f.rows())
}

// Half of the claim is prepared, as after a restart that could restore only one of the records.
func TestPrepareTheRest(t *testing.T) {
	f := newFixture(t, "a", "b")
	claim := newClaim("c", with("net", "a"), with("x", "b"))
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	a := f.row("a")
	txn := f.db.WriteTxn(f.allocations)
	_, _, err = f.allocations.Delete(txn, f.row("b"))
	require.NoError(t, err)
	txn.Commit()
	f.host.takeCalls()

	f.host.fail["setup b"] = errors.New("no")
	_, err = f.Prepare(t.Context(), claim)
	require.Error(t, err)
	require.Equal(t, []string{"setup b"}, f.host.takeCalls(), "what an earlier call prepared is not rolled back")
	require.Equal(t, []*tables.DRAAllocation{a}, f.rows())

	delete(f.host.fail, "setup b")
	result, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Len(t, result.Devices, 2)
	require.Equal(t, []string{"setup b"}, f.host.takeCalls())
	require.Equal(t, []string{"a", "b"}, f.status.applied["uid-c"], "the status is written for all devices of the claim")
	require.Same(t, a, f.row("a"))
	require.Len(t, f.rows(), 2)
}

func TestPrepareRollsBack(t *testing.T) {
	boom := errors.New("boom")
	tests := []struct {
		name      string
		fail      []string // calls
		status    error
		err       string
		calls     []string
		kept      []string // devices whose rows stay
		withdrawn bool
	}{
		{name: "first setup", fail: []string{"setup a"}, calls: []string{"setup a"},
			err: `request "ra": set up device a: boom`},
		{name: "third setup", fail: []string{"setup c"}, calls: []string{"setup a", "setup b", "setup c", "free b", "free a"},
			err: `request "rc": set up device c: boom`},
		{name: "status", status: boom, calls: []string{"setup a", "setup b", "setup c", "free c", "free b", "free a"}, withdrawn: true,
			err: `record the devices in the claim's status: boom`},
		{name: "setup and then a rollback", fail: []string{"setup c", "free b"}, kept: []string{"b"},
			calls: []string{"setup a", "setup b", "setup c", "free b", "free a"},
			err:   `request "rc": set up device c: boom; and device b could not be freed again: boom`},
		{name: "status and then all rollbacks", fail: []string{"free a", "free b", "free c"}, status: boom, kept: []string{"a", "b", "c"}, withdrawn: true,
			calls: []string{"setup a", "setup b", "setup c", "free c", "free b", "free a"},
			err: `record the devices in the claim's status: boom; and device c could not be freed again: boom; ` +
				`and device b could not be freed again: boom; and device a could not be freed again: boom`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "c")
			claim := newClaim("x", with("ra", "a"), with("rb", "b"), with("rc", "c"), fromClaim(`{"vlan":9}`))
			for _, call := range tt.fail {
				f.host.fail[call] = boom
			}
			f.status.fail = tt.status
			_, err := f.Prepare(t.Context(), claim)
			require.EqualError(t, err, "prepare claim default/x: "+tt.err)
			require.ErrorIs(t, err, boom)
			require.False(t, IsPermanent(err))
			require.Equal(t, tt.calls, f.host.takeCalls())
			var kept []string
			for _, row := range f.rows() {
				kept = append(kept, row.DeviceName)
				require.Equal(t, "Failed", row.State())
				require.Equal(t, "roll back a failed prepare: boom", row.Error)
				require.True(t, row.PreparedDevice.(*fakeDevice).Found, "the row must know how to free the device")
			}
			require.Equal(t, tt.kept, kept)
			require.Equal(t, tt.withdrawn, len(f.status.takeWithdrawn()) > 0)
			for _, device := range []string{"a", "b", "c"} {
				_, set := f.host.vlan(device)
				require.Equal(t, len(kept) > 0 && (device == "b" || len(kept) == 3), set, "device %s", device)
			}
			if len(kept) > 0 {
				_, err := f.Prepare(t.Context(), newClaim("y", with("r", "b")))
				require.ErrorContains(t, err, "still held by claim default/x")
				f.host.takeCalls()
			}

			// The next try begins clean and works.
			clear(f.host.fail)
			f.status.fail = nil
			result, err := f.Prepare(t.Context(), claim)
			require.NoError(t, err)
			require.Len(t, result.Devices, 3)
			require.Equal(t, []string{"setup a", "setup b", "setup c"}, f.host.takeCalls())
			for _, row := range f.rows() {
				require.Equal(t, "Prepared", row.State())
			}
		})
	}
}

// A call that kubelet gave up rolls back all the same.
func TestPrepareRollsBackAfterCancellation(t *testing.T) {
	f := newFixture(t, "a", "b")
	f.host.block["setup b"] = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := f.Prepare(ctx, newClaim("c", with("ra", "a"), with("rb", "b")))
		done <- err
	}()
	require.Eventually(t, f.host.seen("setup b"), waitFor, tick)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.Equal(t, []string{"setup a", "setup b", "free a"}, f.host.takeCalls())
	require.False(t, f.host.cancelled, "Free must get a context that has not ended")
	require.Empty(t, f.rows())
}

// A rollback that hangs is given up, and its device stays with the claim.
func TestPrepareRollbackIsBounded(t *testing.T) {
	f := newFixture(t, "a")
	f.host.patience = time.Millisecond
	f.host.block["free a"] = make(chan struct{})
	f.status.fail = errors.New("boom")
	_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a")))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, "Failed", f.row("a").State())
}

// A row that failed to attach is set up again and, if that works but the status does not, rolled back altogether.
func TestPrepareRepairsFailedRow(t *testing.T) {
	f := newFixture(t, "a")
	claim := newClaim("c", with("net", "a"), fromClaim(`{"vlan":3}`))
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	failed := f.row("a").With(func(r *tables.DRAAllocation) { r.Error = "attach: no" })
	f.insert(failed)
	f.host.takeCalls()

	f.host.fail["setup a"] = errors.New("no")
	_, err = f.Prepare(t.Context(), claim)
	require.Error(t, err)
	require.Equal(t, []*tables.DRAAllocation{failed}, f.rows())

	clear(f.host.fail)
	f.status.fail = errors.New("no")
	f.host.takeCalls()
	_, err = f.Prepare(t.Context(), claim)
	require.Error(t, err)
	require.Equal(t, []string{"setup a", "free a"}, f.host.takeCalls())
	require.Empty(t, f.rows())
	require.NotEmpty(t, f.status.takeWithdrawn(), "its record must go too")

	f.status.fail = nil
	f.insert(failed)
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "Prepared", f.row("a").State())
	require.Equal(t, []string{"setup a"}, f.host.takeCalls())

	// The same after an Unprepare that failed before it got to the device.
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Releasing = true }))
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.False(t, f.row("a").Releasing)
	require.Equal(t, []string{"setup a"}, f.host.takeCalls())

	// A device that is in the pod is not touched, and is not given back any more.
	f.attach("a")
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Releasing = true }))
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "Attached", f.row("a").State())
	require.Empty(t, f.host.takeCalls())

	// An error about a link that is in the pod is the hooks' business.
	f.attach("a")
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Error = "detach: no" }))
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Empty(t, f.host.takeCalls())
}

// A device without a link is in no namespace: it is the former pod's for as long as that has a sandbox, whatever the row says.
func TestPrepareLinklessOfAnEarlierPod(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", forPod("first"), with("net", "a")))
	require.NoError(t, err)
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) {
		dev := *r.PreparedDevice.(*fakeDevice)
		dev.NoLink, r.PreparedDevice = true, &dev
	}))
	f.host.run("first", "s1")
	f.host.takeCalls()
	second := newClaim("c", forPod("second"), with("net", "a"))
	_, err = f.Prepare(t.Context(), second)
	require.ErrorContains(t, err, "device a is still in pod default/first (uid uid-first)")
	require.Empty(t, f.host.takeCalls())
	f.host.stop("s1")
	_, err = f.Prepare(t.Context(), second)
	require.NoError(t, err)
	require.Equal(t, kubetypes.UID("uid-second"), f.row("a").PodUID)
}

// What a container is given by the number of an IOMMU group has to be looked at when it starts.
func TestPrepareNeedsTheHook(t *testing.T) {
	f := newFixture(t, "a")
	claim := newClaim("c", with("net", "a"), fromClaim(`{"driver": "vfio-pci"}`))
	f.Unhooked = true
	_, err := f.Prepare(t.Context(), claim)
	require.ErrorContains(t, err, `request "net": device a: parameters: driver: vfio-pci needs the gate hook, which is off on this node`)
	require.Empty(t, f.host.takeCalls())
	f.Unhooked = false
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
}

// A claim that outlives its pod goes to the next one: not before the device is out of the first, and then anew.
func TestPrepareClaimOfAnEarlierPod(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", forPod("first"), with("net", "a"), fromClaim(`{"vlan":4}`)))
	require.NoError(t, err)
	f.attach("a")
	f.host.takeCalls()
	second := newClaim("c", forPod("second"), with("net", "a"), fromClaim(`{"vlan":4}`))
	_, err = f.Prepare(t.Context(), second)
	require.EqualError(t, err, `prepare claim default/c: device a is still in pod default/first (uid uid-first), which had this claim before pod second (uid uid-second)`)
	require.Empty(t, f.host.takeCalls())

	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Attachment = nil }))
	f.host.fail["return a"] = errors.New("no")
	_, err = f.Prepare(t.Context(), second)
	require.ErrorContains(t, err, "give back what pod default/first (uid uid-first) had of this claim: bring device a back from pod default/first: no")
	require.Equal(t, []string{"return a"}, f.host.takeCalls())
	require.Equal(t, "Failed", f.row("a").State())
	require.NotEmpty(t, f.status.takeWithdrawn())

	clear(f.host.fail)
	_, err = f.Prepare(t.Context(), second)
	require.NoError(t, err)
	require.Equal(t, []string{"return a", "free a", "setup a"}, f.host.takeCalls())
	require.Equal(t, kubetypes.UID("uid-second"), f.row("a").PodUID)
	require.Equal(t, "Prepared", f.row("a").State())
	require.Len(t, f.rows(), 1)
}

// PREP-05: results and parameters of another driver in the same claim are none of our business.
func TestPrepareWithAnotherDriver(t *testing.T) {
	f := newFixture(t, "a")
	claim := newClaim("c", withResult(resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com", Pool: "other", Device: "gpu-0"}),
		with("net", "a"), config(resourceapi.AllocationConfigSourceClaim, "gpu.example.com", `garbage`, nil))
	result, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, []PreparedDevice{{Request: "net", Pool: "node-1/pool", Device: "a"}}, result.Devices)
}
