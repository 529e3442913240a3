// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// fakeDevice is a device that only knows its identity.
type fakeDevice struct {
	Name string
	ID   nic.Identity
}

func (d fakeDevice) MarshalJSON() ([]byte, error) { return json.Marshal(d.Name) }
func (d fakeDevice) IfName() string               { return d.Name }
func (d fakeDevice) KernelIfName() string         { return d.Name }
func (d fakeDevice) Link() nic.Identity           { return d.ID }
func (d fakeDevice) HostState() nic.State         { return nic.State{Name: d.Name} }
func (d fakeDevice) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	return nil
}
func (d fakeDevice) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool { return true }
func (d fakeDevice) Validate(types.DeviceConfig) error                    { return nil }
func (d fakeDevice) Merge(types.Device) types.Device                      { return d }

func (d fakeDevice) Setup(context.Context, types.DeviceConfig) (types.Device, error) {
	return nil, errors.New("not by the room")
}
func (d fakeDevice) Free(context.Context, types.DeviceConfig) error {
	return errors.New("not by the room")
}

// fakeWorld is a kernel with one link per device, each in one namespace; the host's is the empty path. It also is the
// claims' status.
type fakeWorld struct {
	write func() statedb.WriteTxn
	// claims are those with rows.
	claims func() []kubetypes.UID

	mu        sync.Mutex // guards all
	place     map[nic.Identity]string
	made      int             // how often VFs were made anew
	gone      map[string]bool // namespaces that are no longer there
	calls     []string
	fail      map[string]error // by call
	block     map[string]chan struct{}
	statuses  map[kubetypes.UID][]string // devices by claim
	withdrawn []tables.ClaimRef
	events    []string
	gates     map[kubetypes.UID]string // sandbox and requests by claim
	opened    cdi.Gate                 // the last one
	described map[kubetypes.UID]string // sandboxes by claim, as containers read of its devices
	noted     map[string]bool          // settled, by device of the journal
	owed      []kubetypes.UID          // claims
	returned  []string                 // whose addresses
	// notedIndex is the link's index in the last entry.
	notedIndex int
	now        time.Time
	// unheld are claims that are nobody's, reads counts how often claims were read, and duringRead is what happens then.
	unheld     map[kubetypes.UID]bool
	reads      int
	duringRead func()
	// afterCheck happens when devices have been looked at.
	afterCheck func()
}

var (
	_       World = (*fakeWorld)(nil)
	errNone       = errors.New("the pod runs on the host network")
)

// enter notes the call and what it is to fail with. A call that is to wait ignores its context, as a netlink call does.
// It hangs if the caller has the table open for writing.
func (w *fakeWorld) enter(call string) error {
	w.write().Abort()
	w.mu.Lock()
	w.calls = append(w.calls, call)
	err, block := w.fail[call], w.block[call]
	w.mu.Unlock()
	if block != nil {
		<-block
	}
	return err
}

func (w *fakeWorld) where(id nic.Identity) (string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ns, ok := w.place[id]
	return ns, ok
}

func (w *fakeWorld) put(id nic.Identity, netns string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.place[id] = netns
}

func (w *fakeWorld) end(id nic.Identity) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.place, id)
}

func (w *fakeWorld) seen(call string) func() bool {
	return func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.Contains(w.calls, call)
	}
}

func (w *fakeWorld) takeCalls() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	calls := w.calls
	w.calls = nil
	return calls
}

// hold makes the call wait until the returned function is called.
func (w *fakeWorld) hold(call string) (release func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := make(chan struct{})
	w.block[call] = c
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.block, call)
		close(c)
	}
}

func (w *fakeWorld) HostIndex(_ context.Context, dev types.Device) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if at, ok := w.place[dev.Link()]; !ok || at != "" {
		return 0, nil
	}
	return 10 + w.made, nil
}

func (w *fakeWorld) Attach(_ context.Context, netns string, dev types.Device, link int, config types.DeviceConfig) (*types.Attachment, error) {
	if err := w.enter("attach " + dev.IfName()); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	at, ok := w.place[dev.Link()]
	switch {
	case !ok:
		return nil, podnet.ErrLinkGone
	case at != "" && at != netns:
		return nil, podnet.ErrLinkGone
	case at == "" && dev.Link().Physical() && link != 10+w.made:
		return nil, podnet.ErrAnotherLink
	}
	w.place[dev.Link()] = netns
	return &types.Attachment{IfName: config.PodIfName, IfIndex: 2, MAC: "02:00:00:00:00:01"}, nil
}

func (w *fakeWorld) Detach(_ context.Context, _ string, dev types.Device) error {
	if err := w.enter("detach " + dev.IfName()); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.place[dev.Link()]; !ok {
		return podnet.ErrLinkGone
	}
	w.place[dev.Link()] = ""
	return nil
}

func (w *fakeWorld) Where(_ context.Context, netns string, dev types.Device) (podnet.Sighting, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at, ok := w.place[dev.Link()]
	switch {
	case w.fail["where "+dev.IfName()] != nil:
		return podnet.Sighting{}, w.fail["where "+dev.IfName()]
	case !ok:
		return podnet.Sighting{Why: "the device has no driver"}, nil
	case at == "":
		return podnet.Sighting{Place: podnet.OnHost}, nil
	case at == netns:
		return podnet.Sighting{Place: podnet.InPod, Attachment: &types.Attachment{IfName: "found0", IfIndex: 2}}, nil
	}
	return podnet.Sighting{Place: podnet.Elsewhere}, nil
}

func (w *fakeWorld) CheckNetNS(netns string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case netns == "":
		return errNone
	case w.gone[netns]:
		return errors.New("gone")
	}
	return nil
}

func (w *fakeWorld) Validate(types.Device, types.DeviceConfig) error { return nil }

// Setup gives the device a new link if it has none, as it is with a virtual one.
func (w *fakeWorld) Setup(_ context.Context, dev types.Device, _ types.DeviceConfig) (types.Device, error) {
	if err := w.enter("setup " + dev.IfName()); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.fail, "check "+dev.IfName())
	if d, ok := dev.(driven); ok {
		d.node += "-again"
		return d, nil
	}
	d := dev.(fakeDevice)
	if _, ok := w.place[d.ID]; !ok {
		d.ID.Index += 100
		w.place[d.ID] = ""
	}
	return d, nil
}

// Free takes the link away, so that it is seen what was freed where.
func (w *fakeWorld) Free(ctx context.Context, dev types.Device, _ types.DeviceConfig) error {
	if err := w.enter("free " + dev.IfName()); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if at := w.place[dev.Link()]; at != "" {
		return errors.New("freed while it is in " + at)
	}
	delete(w.place, dev.Link())
	return nil
}

func (w *fakeWorld) Apply(_ context.Context, claim tables.ClaimRef, rows []*tables.DRAAllocation) error {
	if err := w.enter("apply " + claim.Name); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.statuses[claim.UID] = nil
	for _, row := range rows {
		w.statuses[claim.UID] = append(w.statuses[claim.UID], row.DeviceName)
	}
	return nil
}

func (w *fakeWorld) Withdraw(claim tables.ClaimRef) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.withdrawn = append(w.withdrawn, claim)
}

func (w *fakeWorld) Now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *fakeWorld) WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, limit)
}

type fixture struct {
	tb    testing.TB
	db    *statedb.DB
	table statedb.RWTable[*tables.DRAAllocation]
	world *fakeWorld
	*Room
}

func newFixture(tb testing.TB) *fixture {
	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(tb, err)
	world := &fakeWorld{
		write:  func() statedb.WriteTxn { return db.WriteTxn(table) },
		claims: func() []kubetypes.UID { return claimsOf(statedb.Collect(table.All(db.ReadTxn()))) },
		place:  map[nic.Identity]string{}, gone: map[string]bool{}, fail: map[string]error{}, block: map[string]chan struct{}{},
		statuses: map[kubetypes.UID][]string{}, gates: map[kubetypes.UID]string{}, described: map[kubetypes.UID]string{}, noted: map[string]bool{}, now: time.Unix(1, 0),
	}
	metrics, err := NewMetrics(prometheus.NewRegistry())
	require.NoError(tb, err)
	return &fixture{tb, db, table, world, New(slog.New(slog.DiscardHandler), db, table, world, metrics)}
}

// newRow is a row with a device on the host. Device numbers below zero have no link.
func (f *fixture) newRow(pod kubetypes.UID, name string, index int) (*tables.DRAAllocation, fakeDevice) {
	dev := fakeDevice{Name: name}
	if index >= 0 {
		dev.ID = nic.Identity{Kind: "dummy", Index: index}
		f.world.put(dev.ID, "")
	}
	return &tables.DRAAllocation{
		DeviceName: name, Manager: types.DeviceManagerTypeDummy, PreparedDevice: dev, Pool: "pool",
		PodUID: pod, ClaimUID: "claim-of-" + pod, ClaimNamespace: "default", ClaimName: "claim",
		PodName: string(pod), Request: "net", Config: types.DeviceConfig{PodIfName: "net-" + name},
	}, dev
}

// prepare adds such a row.
func (f *fixture) prepare(pod kubetypes.UID, name string, index int) fakeDevice {
	row, dev := f.newRow(pod, name, index)
	f.insert(row)
	return dev
}

func (f *fixture) insert(row *tables.DRAAllocation) { require.NoError(f.tb, f.update(put(row))) }

func (f *fixture) rows() []*tables.DRAAllocation { return statedb.Collect(f.table.All(f.db.ReadTxn())) }

// release gives the pod's claim back.
func (f *fixture) release(ctx context.Context, pod kubetypes.UID) error {
	claim, err := f.Lock(ctx, "claim-of-"+pod)
	require.NoError(f.tb, err)
	defer claim.Unlock()
	return claim.Release(ctx)
}

func (f *fixture) row(name string) *tables.DRAAllocation {
	row, _, ok := f.table.Get(f.db.ReadTxn(), tables.AllocationByKey(tables.AllocationKey("pool", name)))
	require.True(f.tb, ok, "row of %s", name)
	return row
}

func (f *fixture) delete(name string) { require.NoError(f.tb, f.update(remove(f.row(name)))) }

// at asserts where a device's link is and what the row says about it.
func (f *fixture) at(dev types.Device, netns, sandbox string) {
	f.tb.Helper()
	ns, ok := f.world.where(dev.Link())
	require.True(f.tb, ok, "link of %s exists", dev.IfName())
	require.Equal(f.tb, netns, ns, "namespace of %s", dev.IfName())
	row := f.row(dev.IfName())
	if sandbox == "" {
		require.Nil(f.tb, row.Attachment)
		return
	}
	require.NotNil(f.tb, row.Attachment)
	require.Equal(f.tb, sandbox, row.Attachment.SandboxID)
	require.Equal(f.tb, netns, row.Attachment.NetNS)
}

// newSandbox is a sandbox with a network namespace.
func newSandbox(pod kubetypes.UID, id string) Sandbox {
	return Sandbox{ID: id, PodUID: pod, PodNamespace: "default", PodName: string(pod), NetNS: "/run/netns/" + id}
}

// waited is closed after so many ticks, for what must not happen.
func waited(ticks int) <-chan time.Time { return time.After(time.Duration(ticks) * tick) }

func (w *fakeWorld) Tidy(string, types.DeviceConfig) error { return nil }
func (w *fakeWorld) Take(_ context.Context, row *tables.DRAAllocation, _ func(*tables.DRAAllocation) error) (*tables.DRAAllocation, error) {
	return row, nil
}
func (w *fakeWorld) Return(_ context.Context, row *tables.DRAAllocation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.returned = append(w.returned, row.DeviceName+" of "+string(row.ClaimUID))
}
func (w *fakeWorld) ReturnLeft(claim kubetypes.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.returned = append(w.returned, "left of "+string(claim))
}
func (w *fakeWorld) Announce(*types.Attachment, types.DeviceConfig) {}
