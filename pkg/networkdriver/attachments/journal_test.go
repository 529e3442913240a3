// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

func (w *fakeWorld) Remember(_ context.Context, dev types.Device, _ types.DeviceConfig) (types.Device, error) {
	return dev, nil
}

// Note and Forget keep the settled entries by device.
func (w *fakeWorld) Note(row *tables.DRAAllocation, settled bool) error {
	if err := w.fail["note "+row.DeviceName]; err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noted[row.DeviceName] = settled
	w.notedIndex = row.PreparedDevice.Link().Index
	return nil
}

func (w *fakeWorld) OweClaim(claim tables.ClaimRef) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.owed = append(w.owed, claim.UID)
	return nil
}

func (w *fakeWorld) SettleClaim(claim kubetypes.UID) error { return errors.New("not by the room") }
func (w *fakeWorld) OwedClaims() (owed []tables.ClaimRef) {
	for _, uid := range w.owed {
		owed = append(owed, tables.ClaimRef{UID: uid})
	}
	return owed
}

func (w *fakeWorld) Forget(row *tables.DRAAllocation) error {
	if err := w.fail["forget "+row.DeviceName]; err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.noted, row.DeviceName)
	return nil
}

// A device is not set up when the journal cannot be written, and a full disk does not keep it from being given back.
func TestJournalCannotBeWritten(t *testing.T) {
	f := newFixture(t)
	row, _ := f.newRow("pod", "a", 1)
	f.world.fail["note a"] = errors.New("no space left on device")
	claim := f.lock()
	require.ErrorContains(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}), "no space left")
	require.Empty(t, f.world.takeCalls())
	require.Empty(t, f.rows())

	delete(f.world.fail, "note a")
	require.NoError(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}))
	require.Equal(t, map[string]bool{"a": true}, f.world.noted)
	f.world.fail["note a"] = errors.New("no space left on device")
	f.world.takeCalls()
	require.NoError(t, claim.Release(t.Context()))
	require.Equal(t, []string{"detach a", "free a", "apply claim"}, f.world.takeCalls())
	require.Empty(t, f.world.noted)
}

// A device that is another one after it was set up again is so in the journal before it is in the row.
func TestDeviceAnewWithoutJournal(t *testing.T) {
	f := newFixture(t)
	a := f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	f.world.end(a.ID)
	f.world.fail["note a"] = errors.New("no space left on device")
	require.ErrorContains(t, f.Attach(t.Context(), pod), "no space left")
	require.Equal(t, a, f.row("a").PreparedDevice)

	delete(f.world.fail, "note a")
	require.NoError(t, f.Attach(t.Context(), pod))
	require.NotEqual(t, a, f.row("a").PreparedDevice)
	require.Equal(t, f.row("a").PreparedDevice.Link().Index, f.world.notedIndex)
}

// A device that could not be given back, and is prepared again where it is, is to stay.
func TestKeptDeviceIsSettled(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s1")))
	f.world.fail["detach a"] = errors.New("busy")
	require.Error(t, f.release(t.Context(), "pod"))
	require.Equal(t, map[string]bool{"a": false}, f.world.noted)
	claim := f.lock()
	require.NoError(t, claim.Prepare(t.Context(), Plan{Claim: ref, Keep: claim.Rows()}))
	require.False(t, f.row("a").Releasing)
	require.Equal(t, map[string]bool{"a": true}, f.world.noted)
}

// A device that was freed and that the journal still has keeps its row, so that it is not given to another claim whose
// entry would be the former one's.
func TestEntryThatStays(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	f.world.fail["forget a"] = errors.New("read-only file system")
	require.ErrorContains(t, f.release(t.Context(), "pod"), "read-only")
	require.True(t, f.row("a").Releasing)
	delete(f.world.fail, "forget a")
	require.Zero(t, f.giveBackReleasing(t.Context(), none))
	require.Empty(t, f.rows())
}

// The entry of a device that could not be set up, and that the journal keeps, is dealt with like one that could not be freed: else it
// stayed, and its addresses with it, until the agent was started again.
func TestEntryOfWhatWasNotSetUpStays(t *testing.T) {
	f := newFixture(t)
	row, _ := f.newRow("pod", "a", 1)
	f.world.fail["setup a"], f.world.fail["forget a"] = errors.New("busy"), errors.New("read-only file system")
	claim := f.lock()
	require.ErrorContains(t, claim.Prepare(t.Context(), Plan{Claim: ref, SetUp: []*tables.DRAAllocation{row}}), "read-only")
	claim.Unlock()
	require.True(t, f.row("a").Releasing)
	delete(f.world.fail, "forget a")
	require.Zero(t, f.giveBackReleasing(t.Context(), none))
	require.Empty(t, f.rows())
	require.Empty(t, f.world.noted)
}

// What is left of an earlier life is given back without anybody asking, and tried again when that fails.
func TestGiveBackWhatIsLeft(t *testing.T) {
	f := newFixture(t)
	row, a := f.newRow("pod", "a", 1)
	f.world.put(a.ID, "/run/netns/s1")
	kept, _ := f.newRow("other", "b", 2)
	require.NoError(t, f.Restore([]*tables.DRAAllocation{row.With(func(r *tables.DRAAllocation) { r.Releasing = true }), kept}))
	var running []Sandbox
	unknown := errors.New("not connected")
	of := func(pod kubetypes.UID) ([]Sandbox, error) { return sandboxesOf(running...)(pod), unknown }
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), of), "a container may be about to start where it is")
	unknown, running = nil, []Sandbox{{ID: "s1", PodUID: row.PodUID, NetNS: "/run/netns/s1"}}
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), of))
	f.world.fail["where a"] = errors.New("cannot be looked at")
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), of), "where it is has to be known")
	delete(f.world.fail, "where a")
	require.Equal(t, "/run/netns/s1", f.world.place[a.ID])
	running = nil
	f.world.fail["free a"] = errors.New("busy")
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), of))
	require.Equal(t, "Failed", f.row("a").State())
	delete(f.world.fail, "free a")
	unknown = errors.New("not connected") // it is on the host, and so in no sandbox

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx, of) }()
	require.Eventually(t, func() bool { return len(f.rows()) == 1 }, waitFor, tick)
	require.Equal(t, "Prepared", f.row("b").State())
	cancel()
	require.NoError(t, <-done)
	require.Equal(t, []tables.ClaimRef{ref}, f.world.withdrawn)
	require.Equal(t, []kubetypes.UID{ref.UID, ref.UID}, f.world.owed, "kubelet may not ask again")
}

// A device that a program has opened itself is in no namespace: it stays for as long as its pod has a sandbox that runs, and while that is
// not known.
func TestLinklessStaysInItsSandbox(t *testing.T) {
	f := newFixture(t)
	row, _ := f.newRow("pod", "a", 1)
	require.NoError(t, f.Restore([]*tables.DRAAllocation{row.With(func(r *tables.DRAAllocation) {
		r.PreparedDevice, r.Releasing = fakeDevice{Name: "a"}, true
	})}))
	unknown := func(kubetypes.UID) ([]Sandbox, error) { return nil, errors.New("not connected") }
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), unknown))
	running := []Sandbox{{ID: "s1", PodUID: row.PodUID, NetNS: "/run/netns/s1"}}
	known := func(kubetypes.UID) ([]Sandbox, error) { return running, nil }
	require.Equal(t, 1, f.giveBackReleasing(t.Context(), known))
	require.NotContains(t, f.world.takeCalls(), "free a")
	running = nil
	require.Zero(t, f.giveBackReleasing(t.Context(), known))
	require.Empty(t, f.rows())
}

// What waits for its sandbox to end is free as soon as that has, however long it has been waited for.
func TestFreeAsSoonAsItIsHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		row, a := f.newRow("pod", "a", 1)
		f.world.put(a.ID, "/run/netns/s1")
		s := Sandbox{ID: "s1", PodUID: row.PodUID, NetNS: "/run/netns/s1"}
		require.NoError(t, f.Restore([]*tables.DRAAllocation{row.With(func(r *tables.DRAAllocation) { r.Releasing = true })}))
		var ended atomic.Bool
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- f.Run(ctx, func(kubetypes.UID) ([]Sandbox, error) {
				if ended.Load() {
					return nil, nil
				}
				return []Sandbox{s}, nil
			})
		}()
		time.Sleep(time.Hour)
		require.Len(t, f.rows(), 1)
		ended.Store(true)
		start := time.Now()
		require.NoError(t, f.Detach(ctx, s))
		synctest.Wait()
		require.Empty(t, f.rows())
		require.Zero(t, time.Since(start))
		cancel()
		require.NoError(t, <-done)
	})
}

// The node of the crash tests: what outlives the agent. Each VF has a VLAN and is in a namespace.
type node struct {
	vlan  map[string]int
	place map[string]string
	dir   string
	// calls counts down to the end of the agent, which comes before or after the last call has had its effect.
	calls int
	after bool
	// lost is true when the API server stores what is written, and its answers are lost.
	lost bool
}

// died is what the agent ends with.
type died struct{}

// step runs what a call does, unless the agent ends before.
func (n *node) step(effect func() error) error {
	n.calls--
	if n.calls == 0 && !n.after {
		panic(died{})
	}
	err := effect()
	if n.calls == 0 {
		panic(died{})
	}
	return err
}

// vf is a device that remembers the VLAN it was found in.
type vf struct {
	fakeDevice
	Original *int
}

func (d vf) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"name": d.Name, "original": d.Original})
}

func restoreVF(data []byte) (types.Device, error) {
	var d struct {
		Name     string
		Original *int
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return nil, err
	}
	if d.Original == nil {
		return nil, errors.New("was not set up")
	}
	return newVF(d.Name, d.Original), nil
}

func newVF(name string, original *int) vf {
	return vf{fakeDevice{Name: name, ID: nic.PCI(name)}, original}
}

// life is the World of one life of the agent on the node.
type life struct {
	*node
	*journal.Journal
}

func (l life) HostIndex(context.Context, types.Device) (int, error) { return 1, nil }

func (l life) Attach(_ context.Context, netns string, dev types.Device, _ int, config types.DeviceConfig) (*types.Attachment, error) {
	return &types.Attachment{IfName: config.PodIfName}, l.step(func() error { l.place[dev.IfName()] = netns; return nil })
}

func (l life) Detach(_ context.Context, _ string, dev types.Device) error {
	return l.step(func() error { l.place[dev.IfName()] = ""; return nil })
}

func (l life) Where(_ context.Context, netns string, dev types.Device) (podnet.Sighting, error) {
	if l.place[dev.IfName()] == netns {
		return podnet.Sighting{Place: podnet.InPod, Attachment: &types.Attachment{}}, nil
	}
	return podnet.Sighting{Place: podnet.OnHost}, nil
}

func (l life) Check(_ context.Context, rows []*tables.DRAAllocation) []error {
	return make([]error, len(rows))
}

func (l life) OpenGate(cdi.Gate) error                         { return nil }
func (l life) CloseGate(kubetypes.UID)                         {}
func (l life) WasOpened(kubetypes.UID, string) bool            { return false }
func (l life) Describe([]*tables.DRAAllocation) error          { return nil }
func (l life) Undescribe(tables.ClaimRef)                      {}
func (l life) UndescribeOthers([]tables.ClaimRef)              {}
func (l life) CloseOtherGates([]kubetypes.UID)                 {}
func (l life) ReadMarkers(_, _ []string) []cdi.Marker          { return nil }
func (l life) Warn(Sandbox, string, string)                    {}
func (l life) CheckNetNS(string) error                         { return nil }
func (l life) Validate(types.Device, types.DeviceConfig) error { return nil }

func (l life) Remember(_ context.Context, dev types.Device, _ types.DeviceConfig) (types.Device, error) {
	d := dev.(vf)
	if d.Original == nil {
		d.Original = new(l.vlan[d.Name])
	}
	return d, nil
}

func (l life) Setup(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error) {
	dev, _ = l.Remember(ctx, dev, config)
	return dev, l.step(func() error { l.vlan[dev.IfName()] = config.VLAN(); return nil })
}

func (l life) Free(_ context.Context, dev types.Device, _ types.DeviceConfig) error {
	return l.step(func() error {
		if at := l.place[dev.IfName()]; at != "" {
			return fmt.Errorf("freed while it is in %s", at)
		}
		l.vlan[dev.IfName()] = *dev.(vf).Original
		return nil
	})
}

func (l life) Note(row *tables.DRAAllocation, settled bool) error {
	return l.step(func() error { return l.Journal.Note(row, settled) })
}

func (l life) Forget(row *tables.DRAAllocation) error {
	return l.step(func() error { return l.Journal.Forget(row) })
}

func (l life) Apply(context.Context, tables.ClaimRef, []*tables.DRAAllocation) error {
	return l.step(func() error {
		if l.lost {
			return errors.New("lost")
		}
		return nil
	})
}
func (l life) Withdraw(tables.ClaimRef) {}
func (l life) Now() time.Time           { return time.Unix(1, 0) }
func (l life) WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, limit)
}

// start is the agent's start: a room over the node, with what its journal has. The claims of the UIDs still are their
// pods'.
func (n *node) start(t *testing.T, reserved ...kubetypes.UID) *Room {
	db := statedb.New()
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	entries, err := journal.NewTable(db)
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	j := journal.New(journal.Params{Logger: log, DB: db, Table: entries, Dir: n.dir, BootID: "boot", DriverName: "d", NodeName: "n"})
	require.NoError(t, j.Open())
	metrics, err := NewMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	room := New(log, db, allocations, life{n, j}, metrics)
	var rows []*tables.DRAAllocation
	for _, e := range j.Entries() {
		require.Empty(t, e.Quarantine)
		dev, err := restoreVF(e.Device)
		require.NoError(t, err, "an entry can be undone")
		row := e.Row(dev)
		row.Releasing = !e.Settled || !slices.Contains(reserved, e.ClaimUID)
		rows = append(rows, row)
	}
	require.NoError(t, room.Restore(rows))
	require.Zero(t, room.giveBackReleasing(t.Context(), none))
	return room
}

// The agent is killed at each call, before and after its effect, while it prepares, attaches and releases two devices, or
// rolls back. What is left comes home, with the VLAN that it had, when the claim is gone; a claim that is still its
// pod's has its devices set up or not, and never believes the one when it is the other.
func TestKilledAtEachCall(t *testing.T) {
	for _, lost := range []bool{false, true} {
		for _, gone := range []bool{true, false} {
			for _, after := range []bool{false, true} {
				kills := 0
				for killOneAtATime(t, kills+1, after, lost, gone) {
					kills++
				}
				require.Greater(t, kills, 10)
			}
		}
	}
}

func killOneAtATime(t *testing.T, call int, after, lost, gone bool) (killed bool) {
	const claimVLAN = 1001
	name := fmt.Sprintf("call %d, after its effect: %v, answer lost: %v, claim gone: %v", call, after, lost, gone)
	found := map[string]int{"a": 7, "b": 0}
	node := &node{
		vlan: maps.Clone(found), place: map[string]string{"a": "", "b": ""}, dir: t.TempDir(),
		calls: call, after: after, lost: lost,
	}
	if !node.live(t, node.start(t, ref.UID), claimVLAN) {
		return false
	}
	node.calls, node.lost = 0, false
	if gone {
		room := node.start(t)
		require.Empty(t, room.world.(life).Entries(), name)
		require.Equal(t, found, node.vlan, name)
		require.Equal(t, map[string]string{"a": "", "b": ""}, node.place, name)
		return true
	}
	room := node.start(t, ref.UID)
	claim, err := room.Lock(t.Context(), ref.UID)
	require.NoError(t, err)
	defer claim.Unlock()
	set := map[string]bool{}
	for _, row := range claim.Rows() {
		require.Equal(t, claimVLAN, node.vlan[row.DeviceName], "%s: device %s has a row", name, row.DeviceName)
		set[row.DeviceName] = true
	}
	for device, vlan := range found {
		if !set[device] {
			require.Equal(t, vlan, node.vlan[device], "%s: device %s has no row", name, device)
		}
	}
	require.NoError(t, claim.Release(t.Context()), name)
	require.Equal(t, found, node.vlan, name)
	require.Empty(t, room.world.(life).Entries(), name)
	return true
}

// A device that two claims have is left to the other one, and so is its entry.
func TestEntryGoesToTheOtherClaim(t *testing.T) {
	node := &node{vlan: map[string]int{"a": 1001}, place: map[string]string{}, dir: t.TempDir()}
	room := node.start(t)
	mine := &tables.DRAAllocation{
		DeviceName: "a", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: newVF("a", new(0)), Pool: "pool", PodUID: "pod",
		ClaimUID: ref.UID, ClaimNamespace: ref.Namespace, ClaimName: ref.Name, PodName: "pod", Request: "net",
	}
	other := mine.With(func(r *tables.DRAAllocation) { r.Pool, r.ClaimUID = "pool2", "other" })
	require.NoError(t, room.update(put(mine), put(other)))
	require.NoError(t, room.world.Note(mine, true))
	claim, err := room.Lock(t.Context(), ref.UID)
	require.NoError(t, err)
	defer claim.Unlock()
	require.NoError(t, claim.Release(t.Context()))
	entries := room.world.(life).Entries()
	require.Len(t, entries, 1)
	require.Equal(t, other.ClaimUID, entries[0].ClaimUID)
	require.Equal(t, 1001, node.vlan["a"])
}

// live prepares, attaches and releases, and returns whether the agent was killed meanwhile.
func (n *node) live(t *testing.T, room *Room, vlan int) (killed bool) {
	defer func() {
		if r := recover(); r != nil {
			require.Equal(t, died{}, r)
			killed = true
		}
	}()
	var plan Plan
	plan.Claim = ref
	for _, name := range []string{"a", "b"} {
		plan.SetUp = append(plan.SetUp, &tables.DRAAllocation{
			DeviceName: name, Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: newVF(name, nil), Pool: "pool",
			PodUID: "pod", ClaimUID: ref.UID, ClaimNamespace: ref.Namespace, ClaimName: ref.Name, PodName: "pod", Request: "net",
			Config: types.DeviceConfig{PodIfName: "net-" + name, Vlan: new(vlan)},
		})
	}
	claim, err := room.Lock(t.Context(), ref.UID)
	require.NoError(t, err)
	err = claim.Prepare(t.Context(), plan)
	claim.Unlock()
	if n.lost {
		require.ErrorContains(t, err, "lost")
		return false
	}
	require.NoError(t, err)
	require.NoError(t, room.Attach(t.Context(), newSandbox("pod", "s1")))
	claim, err = room.Lock(t.Context(), ref.UID)
	require.NoError(t, err)
	require.NoError(t, claim.Release(t.Context()))
	claim.Unlock()
	return false
}

func (l life) ReturnLeft(kubetypes.UID)              {}
func (l life) Tidy(string, types.DeviceConfig) error { return nil }
func (l life) Take(_ context.Context, row *tables.DRAAllocation, _ func(*tables.DRAAllocation) error) (*tables.DRAAllocation, error) {
	return row, nil
}
func (l life) Return(context.Context, *tables.DRAAllocation)  {}
func (l life) Announce(*types.Attachment, types.DeviceConfig) {}
