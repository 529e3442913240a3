// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package metadata

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	metadataapi "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	testDriver = "networkdriver.cilium.io"
	testNode   = "node1"
)

// device is one that says what it is.
type device struct {
	types.Device // nil: nothing else is asked for
	attrs        map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
}

func (d device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute { return d.attrs }
func (d device) HostState() nic.State                                             { return nic.State{MTU: 1500} }
func (d device) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool             { return true }

type fixture struct {
	*Files
	t           *testing.T
	devices     statedb.RWTable[*tables.DRADevice]
	allocations statedb.RWTable[*tables.DRAAllocation]
	owed        []tables.ClaimRef
}

func newFixture(t *testing.T) *fixture {
	dir := t.TempDir()
	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	f := &fixture{t: t, devices: devices, allocations: allocations}
	f.Files = New(Params{
		Logger: slog.New(slog.DiscardHandler), Driver: testDriver, Node: testNode,
		PluginDir: filepath.Join(dir, "plugin"), CDIFolder: filepath.Join(dir, "cdi"), Client: fake.NewClientset(),
		DB: db, Devices: devices, Allocations: allocations, Owed: func() []tables.ClaimRef { return f.owed },
		Attributes: func(string) pools.Attributes { return pools.Attributes{"example.com/rack": "r7"} },
	})
	f.offer("vf1")
	f.offer("vf2")
	return f
}

func text(s string) resourceapi.DeviceAttribute  { return resourceapi.DeviceAttribute{StringValue: &s} }
func number(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }

func (f *fixture) offer(name string) {
	txn := f.DB.WriteTxn(f.devices)
	_, _, err := f.devices.Insert(txn, &tables.DRADevice{Name: name, Manager: types.DeviceManagerTypeSRIOV, Dev: device{
		attrs: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"ifName": text(name), "mtu": number(1500)},
	}})
	require.NoError(f.t, err)
	txn.Commit()
}

func (f *fixture) withdraw(name string) {
	txn := f.DB.WriteTxn(f.devices)
	_, _, err := f.devices.Delete(txn, &tables.DRADevice{Name: name, Manager: types.DeviceManagerTypeSRIOV})
	require.NoError(f.t, err)
	txn.Commit()
}

// published is what a slice says of the device.
func published(name string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	return map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"ifName": text(name), "mtu": number(1500), "pool": text("fast"), "deviceManager": text("sr-iov"), "example.com/rack": text("r7"),
	}
}

// row is a device of the claim that is prepared.
func (f *fixture) row(claim, uid, request, name string) *tables.DRAAllocation {
	vlan := 100
	return f.set(&tables.DRAAllocation{
		DeviceName: name, Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: device{}, Pool: "fast", PodUID: "pod",
		ClaimUID: kubetypes.UID(uid), ClaimNamespace: "default", ClaimName: claim, Request: request, Config: types.DeviceConfig{Vlan: &vlan},
	})
}

func (f *fixture) set(row *tables.DRAAllocation) *tables.DRAAllocation {
	txn := f.DB.WriteTxn(f.allocations)
	_, _, err := f.allocations.Insert(txn, row)
	require.NoError(f.t, err)
	txn.Commit()
	return row
}

func (f *fixture) free(rows ...*tables.DRAAllocation) {
	txn := f.DB.WriteTxn(f.allocations)
	for _, row := range rows {
		_, _, err := f.allocations.Delete(txn, row)
		require.NoError(f.t, err)
	}
	txn.Commit()
}

// attached is the row with its device in a sandbox.
func attached(row *tables.DRAAllocation) *tables.DRAAllocation {
	return row.With(func(r *tables.DRAAllocation) {
		r.Attachment = &types.Attachment{SandboxID: "s", IfName: "net1", MAC: "02:00:00:00:00:01", IPs: []string{"192.0.2.4/24", "192.0.2.4/24"}}
	})
}

// said is what the file of a request says.
func (f *fixture) said(claim, request string) *metadataapi.DeviceMetadata {
	f.t.Helper()
	file, err := os.Open(f.pathOf(tables.ClaimRef{Namespace: "default", Name: claim}, request))
	require.NoError(f.t, err)
	defer file.Close()
	var m metadataapi.DeviceMetadata
	require.NoError(f.t, devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), &m))
	return &m
}

// TestFiles goes the way of a claim: a container's file has what slices say from Prepare on, and the attached facts from the
// attach on, whoever writes it then; it is gone when the claim is.
func TestFiles(t *testing.T) {
	f := newFixture(t)
	k := newKubelet(t, f)
	claim := k.claim("web-net", "uid-1")
	claim.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "net"}
	rows := []*tables.DRAAllocation{f.row("web-net", "uid-1", "lan", "vf1"), f.row("web-net", "uid-1", "wan/first", "vf2")}
	k.mustPrepare(claim)

	for request, name := range map[string]string{"lan": "vf1", "wan": "vf2"} {
		m := f.said("web-net", request)
		require.Equal(t, kubetypes.UID("uid-1"), m.UID)
		require.Equal(t, []metadataapi.Device{{Driver: testDriver, Pool: "node1/fast", Name: name, Attributes: published(name)}}, m.Requests[0].Devices)
	}
	require.Equal(t, "wan/first", f.said("web-net", "wan").Requests[0].Name)

	// The runtime finds it by the CDI device that kubelet was given, at the place that programs look at.
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(f.CDIFolder))
	require.NoError(t, err)
	require.Empty(t, cache.GetErrors())
	mount := cache.GetDevice(k.ids("uid-1")[0]).ContainerEdits.Mounts[0]
	require.Equal(t, "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/net/lan/networkdriver.cilium.io-metadata.json", mount.ContainerPath)
	require.FileExists(t, mount.HostPath)
	require.Equal(t, "web-net", f.said("web-net", "lan").Name)

	// Attached, before the row is in the table.
	now := []*tables.DRAAllocation{attached(rows[0]), attached(rows[1])}
	require.NoError(t, f.Describe(now))
	full := published("vf1")
	full[AttributePodMTU], full[AttributeVLAN] = number(1500), number(100)
	want := []metadataapi.Device{{Driver: testDriver, Pool: "node1/fast", Name: "vf1", Attributes: full, NetworkData: &resourceapi.NetworkDeviceData{
		InterfaceName: "net1", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"192.0.2.4/24"},
	}}}
	require.Equal(t, want, f.said("web-net", "lan").Requests[0].Devices)
	require.Equal(t, new("net"), f.said("web-net", "lan").PodClaimName)

	// The same once more is no change.
	before := f.said("web-net", "lan").Generation
	require.NoError(t, f.Describe(now))
	require.Equal(t, before, f.said("web-net", "lan").Generation)

	// Kubelet was restarted, and the device serves no more just now.
	f.set(now[0])
	f.set(now[1])
	f.withdraw("vf1")
	k.mustPrepare(claim)
	require.Equal(t, want, f.said("web-net", "lan").Requests[0].Devices)

	// Kubelet unprepares, with the pod still there and then without.
	k.unprepare("web-net", "uid-1")
	require.Equal(t, want, f.said("web-net", "lan").Requests[0].Devices)
	f.free(rows...)
	k.unprepare("web-net", "uid-1")
	require.Empty(t, f.left())
}

// left are all files that there are.
func (f *fixture) left() []string {
	var left []string
	for _, pattern := range []string{filepath.Join(f.PluginDir, folder, "*"), filepath.Join(f.CDIFolder, "*"), filepath.Join(f.CDIFolder, ".*.tmp")} {
		found, err := filepath.Glob(pattern)
		require.NoError(f.t, err)
		left = append(left, found...)
	}
	return left
}

// TestLate fails no attach of a claim that kubelet has no files of, and does not touch those of a later claim of its name.
func TestLate(t *testing.T) {
	f := newFixture(t)
	row := f.row("c", "uid-1", "net", "vf1")
	require.NoError(t, f.Describe([]*tables.DRAAllocation{attached(row)}))
	require.Empty(t, f.left())

	f.free(row)
	k := newKubelet(t, f)
	f.row("c", "uid-2", "net", "vf2")
	k.mustPrepare(k.claim("c", "uid-2"))
	require.NoError(t, f.Describe([]*tables.DRAAllocation{attached(row)}))
	require.Equal(t, "vf2", f.said("c", "net").Requests[0].Devices[0].Name)
	k.unprepare("c", "uid-1")
	f.Undescribe(tables.ClaimRef{Namespace: "default", Name: "c", UID: "uid-1"})
	require.Len(t, f.left(), 2, "kubelet unprepares the earlier claim late")
}

// TestUnwritten fails the claim whose files cannot be written, and says why; the next Prepare makes up for it.
func TestUnwritten(t *testing.T) {
	f := newFixture(t)
	k := newKubelet(t, f)
	claim := k.claim("c", "uid-1")
	row := f.row("c", "uid-1", "net", "vf1")
	for _, in := range []string{filepath.Join(f.PluginDir, folder), f.CDIFolder} {
		require.NoError(t, os.RemoveAll(in))
		require.NoError(t, os.MkdirAll(filepath.Dir(in), 0o755))
		require.NoError(t, os.WriteFile(in, nil, 0o644), "a file in the place of the folder")
		k.prepare(claim)
		require.ErrorContains(t, f.Check(row.ClaimRef(), k.ids("uid-1")), "not a directory")
		require.NoError(t, os.Remove(in))
	}
	k.mustPrepare(claim)

	// A later write that fails is the attach's to deal with.
	require.NoError(t, os.RemoveAll(filepath.Join(f.folderOf(row.ClaimRef()), "net")))
	require.NoError(t, os.WriteFile(filepath.Join(f.folderOf(row.ClaimRef()), "net"), nil, 0o644))
	require.ErrorContains(t, f.Describe([]*tables.DRAAllocation{attached(row)}), "claim default/c, request net")
}

// TestUndescribeOthers removes what an agent left that was killed at any time, and nothing else.
func TestUndescribeOthers(t *testing.T) {
	f := newFixture(t)
	k := newKubelet(t, f)
	for i, uid := range []string{"uid-1", "uid-2", "uid-3"} {
		row := f.row("c"+uid, uid, "net", "vf1")
		k.mustPrepare(k.claim("c"+uid, uid))
		if i > 0 {
			f.free(row)
		}
		f.free()
	}
	kept := f.row("cuid-1", "uid-1", "net", "vf1")
	other := filepath.Join(f.CDIFolder, "other.example.com_metadata_uid-9_net.json")
	gate := filepath.Join(f.CDIFolder, testDriver+"-claim_uid-9.json")
	for _, path := range []string{other, gate, filepath.Join(f.CDIFolder, "."+testDriver+"_metadata_uid-9_net.json.123.tmp")} {
		require.NoError(t, os.WriteFile(path, nil, 0o644))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(f.PluginDir, folder, "default_c9", "net"), 0o755))

	owed := tables.ClaimRef{Namespace: "default", Name: "cuid-2", UID: "uid-2"}
	f.UndescribeOthers([]tables.ClaimRef{owed})
	require.ElementsMatch(t, []string{
		f.folderOf(kept.ClaimRef()), f.folderOf(owed), other, gate,
		f.specPrefix() + "uid-1_net.json", f.specPrefix() + "uid-2_net.json",
	}, f.left())

	// The owed claim is gone.
	f.Undescribe(owed)
	require.ElementsMatch(t, []string{f.folderOf(kept.ClaimRef()), other, gate, f.specPrefix() + "uid-1_net.json"}, f.left())
}

// TestOwedKeepsFiles: until kubelet has heard that a claim is unprepared its containers look for the files.
func TestOwedKeepsFiles(t *testing.T) {
	f := newFixture(t)
	k := newKubelet(t, f)
	row := f.row("c", "uid-1", "net", "vf1")
	k.mustPrepare(k.claim("c", "uid-1"))
	f.owed = []tables.ClaimRef{row.ClaimRef()}
	f.free(row)
	k.unprepare("c", "uid-1")
	require.ElementsMatch(t, []string{f.folderOf(row.ClaimRef()), f.specPrefix() + "uid-1_net.json"}, f.left())
	f.owed = nil
	f.Undescribe(row.ClaimRef())
	require.Empty(t, f.left())
}

// TestRepair makes spec files again that somebody has removed or spoilt, also those that an earlier life of the agent has written, and
// none of claims that are gone.
func TestRepair(t *testing.T) {
	f := newFixture(t)
	k := newKubelet(t, f)
	row := f.row("c", "uid-1", "net", "vf1")
	k.mustPrepare(k.claim("c", "uid-1"))
	spec := f.specPrefix() + "uid-1_net.json"
	want, err := os.ReadFile(spec)
	require.NoError(t, err)
	broken := func(files *Files) {
		for _, path := range []string{spec, f.CDIFolder} {
			require.NoError(t, os.RemoveAll(path))
			files.Repair()
			require.FileExists(t, spec, "after %s was removed", path)
		}
		require.NoError(t, os.WriteFile(spec, nil, 0o644))
		files.Repair()
		got, err := os.ReadFile(spec)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	broken(f.Files)
	next := New(f.Params)
	next.UndescribeOthers(nil)
	broken(next)

	// Somebody has removed it, and then the claim is gone.
	f.free(row)
	require.NoError(t, os.Remove(spec))
	k.unprepare("c", "uid-1")
	next.Undescribe(row.ClaimRef())
	next.Repair()
	f.Repair()
	require.Empty(t, f.left())
}

// TestNoVendor has no files of a driver whose CDI devices no runtime would take.
func TestNoVendor(t *testing.T) {
	f := newFixture(t)
	f.Driver = "4g.example.com"
	require.ErrorContains(t, f.Off(), "no vendor")
	require.Empty(t, f.Options())
	row := f.row("c", "uid-1", "net", "vf1")
	require.NoError(t, f.Describe([]*tables.DRAAllocation{attached(row)}))
	require.NoError(t, f.Check(row.ClaimRef(), nil))
	devices := []kubeletplugin.Device{{PoolName: "node1/fast", DeviceName: "vf1"}}
	f.Complete("uid-1", devices)
	require.Nil(t, devices[0].Metadata)
}

// plugin answers kubelet as the driver does.
type plugin struct {
	kubeletplugin.DRAPlugin // nil: nothing else is called
	f                       *fixture
}

func (p plugin) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[kubetypes.UID]kubeletplugin.PrepareResult, error) {
	results := map[kubetypes.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		for row := range p.f.allocations.List(p.f.DB.ReadTxn(), tables.AllocationsByClaim(claim.UID)) {
			devices = append(devices, kubeletplugin.Device{Requests: []string{row.Request}, PoolName: "node1/" + row.Pool, DeviceName: row.DeviceName})
		}
		p.f.Complete(claim.UID, devices)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

func (p plugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[kubetypes.UID]error, error) {
	results := map[kubetypes.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
	}
	return results, nil
}

func (p plugin) HandleError(_ context.Context, err error, msg string) {
	if !errors.Is(err, context.Canceled) {
		p.f.t.Errorf("%s: %v", msg, err)
	}
}

func objectMeta(name, uid string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name, UID: kubetypes.UID(uid)}
}
