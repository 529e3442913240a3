// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// fakeDevice is a device that only knows its identity. Setup gives it a new link, as it does for a virtual one.
type fakeDevice struct {
	Name   string
	ID     nic.Identity
	kernel *fakeLinker
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
	d.kernel.mu.Lock()
	defer d.kernel.mu.Unlock()
	d.ID.Index += 100
	d.kernel.place[d.ID] = ""
	return d, nil
}

func (d fakeDevice) Free(context.Context, types.DeviceConfig) error {
	d.kernel.mu.Lock()
	defer d.kernel.mu.Unlock()
	delete(d.kernel.place, d.ID)
	return nil
}

// fakeLinker is a kernel with one link per device, each in one namespace; the host's is the empty path.
type fakeLinker struct {
	mu        sync.Mutex // guards all
	place     map[nic.Identity]string
	calls     []string
	attachErr map[string]error
	detachErr map[string]error
	block     chan struct{} // Attach waits for it and ignores its context, as a netlink call does
	entered   chan struct{}
}

func (l *fakeLinker) where(id nic.Identity) (string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ns, ok := l.place[id]
	return ns, ok
}

func (l *fakeLinker) Attach(_ context.Context, netns string, dev types.Device, podIfName string) (*types.Attachment, error) {
	l.mu.Lock()
	block, entered := l.block, l.entered
	l.mu.Unlock()
	if block != nil {
		close(entered)
		<-block
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, "attach "+dev.IfName())
	if err := l.attachErr[dev.IfName()]; err != nil {
		return nil, err
	}
	at, ok := l.place[dev.Link()]
	switch {
	case !ok:
		return nil, podnet.ErrLinkGone
	case at != "" && at != netns:
		return nil, podnet.ErrLinkGone
	}
	l.place[dev.Link()] = netns
	return &types.Attachment{IfName: podIfName, IfIndex: 2, MAC: "02:00:00:00:00:01"}, nil
}

func (l *fakeLinker) Detach(_ context.Context, _ string, dev types.Device) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, "detach "+dev.IfName())
	if err := l.detachErr[dev.IfName()]; err != nil {
		return err
	}
	if _, ok := l.place[dev.Link()]; !ok {
		return podnet.ErrLinkGone
	}
	l.place[dev.Link()] = ""
	return nil
}

func (l *fakeLinker) Find(_ context.Context, netns string, dev types.Device) (*types.Attachment, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, ok := l.place[dev.Link()]; !ok || at != netns {
		return nil, false, nil
	}
	return &types.Attachment{IfName: "found0", IfIndex: 2}, true, nil
}

type fixture struct {
	tb     testing.TB
	db     *statedb.DB
	table  statedb.RWTable[*tables.DRAAllocation]
	linker *fakeLinker
	hooks  *Hooks
}

func newFixture(tb testing.TB) *fixture {
	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(tb, err)
	linker := &fakeLinker{place: map[nic.Identity]string{}, attachErr: map[string]error{}, detachErr: map[string]error{}}
	metrics, err := NewMetrics(prometheus.NewRegistry())
	require.NoError(tb, err)
	hooks, err := NewHooks(db, table, linker, metrics, slog.New(slog.DiscardHandler))
	require.NoError(tb, err)
	tb.Cleanup(hooks.Wait)
	return &fixture{tb, db, table, linker, hooks}
}

// prepare adds a row with a device on the host. Device numbers below zero have no link.
func (f *fixture) prepare(pod kubetypes.UID, name string, index int) fakeDevice {
	dev := fakeDevice{Name: name, kernel: f.linker}
	if index >= 0 {
		dev.ID = nic.Identity{Kind: "dummy", Index: index}
		f.linker.mu.Lock()
		f.linker.place[dev.ID] = ""
		f.linker.mu.Unlock()
	}
	f.write(func(txn statedb.WriteTxn) {
		_, _, err := f.table.Insert(txn, &tables.DRAAllocation{
			DeviceName: name, Manager: types.DeviceManagerTypeDummy, PreparedDevice: dev, Pool: "pool",
			PodUID: pod, ClaimUID: "claim-of-" + pod, ClaimNamespace: "default", ClaimName: "claim",
			PodName: string(pod), Request: "net", Config: types.DeviceConfig{PodIfName: "net-" + name},
		})
		require.NoError(f.tb, err)
	})
	return dev
}

func (f *fixture) write(change func(statedb.WriteTxn)) {
	txn := f.db.WriteTxn(f.table)
	change(txn)
	txn.Commit()
}

func (f *fixture) row(name string) *tables.DRAAllocation {
	row, _, ok := f.table.Get(f.db.ReadTxn(), tables.AllocationByKey(tables.AllocationKey("pool", name)))
	require.True(f.tb, ok, "row of %s", name)
	return row
}

func (f *fixture) delete(name string) {
	row := f.row(name)
	f.write(func(txn statedb.WriteTxn) {
		_, _, err := f.table.Delete(txn, row)
		require.NoError(f.tb, err)
	})
}

// at asserts where a device's link is and what the row says about it.
func (f *fixture) at(dev types.Device, netns, sandbox string) {
	f.tb.Helper()
	ns, ok := f.linker.where(dev.Link())
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

// newSandbox is a pod sandbox whose network namespace is a file, which is all that the hooks look at.
func newSandbox(tb testing.TB, pod, id string) (*api.PodSandbox, string) {
	path := filepath.Join(tb.TempDir(), id)
	require.NoError(tb, os.WriteFile(path, nil, 0o600))
	return &api.PodSandbox{
		Id: id, Uid: pod, Name: pod, Namespace: "default",
		Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "ipc"}, {Type: "network", Path: path}}},
	}, path
}
