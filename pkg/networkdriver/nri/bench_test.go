// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/metadata"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// lent is a prepared device with a link of the kernel.
type lent struct {
	types.Device // nil: the hooks ask for nothing else
	name         string
	id           nic.Identity
	host         nic.State
}

func (d lent) IfName() string                                                   { return d.name }
func (d lent) KernelIfName() string                                             { return d.host.Name }
func (d lent) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute { return nil }
func (d lent) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool             { return false }
func (d lent) Link() nic.Identity                                               { return d.id }
func (d lent) HostState() nic.State                                             { return d.host }
func (d lent) MarshalJSON() ([]byte, error)                                     { return json.Marshal(d.name) }

// checker asks the kernel what the manager of VFs asks: for a PF's table of VFs.
type checker struct {
	netns string
	index int
}

func (c checker) Check(_ context.Context, devices []types.Prepared) []error {
	errs := make([]error, len(devices))
	host, err := nic.Open(slog.New(slog.DiscardHandler), c.netns, "")
	if err != nil {
		return []error{err}
	}
	defer host.Close()
	_, errs[0] = host.VFTable(c.index)
	return errs
}

// writeMetadata writes what kubelet's Prepare leaves for the claim's pod to read.
func writeMetadata(b *testing.B, plugin string) {
	value := "as published, in a string of some length"
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for i := range 24 {
		attributes[resourceapi.QualifiedName(fmt.Sprint("attribute", i))] = resourceapi.DeviceAttribute{StringValue: &value}
	}
	data, err := json.Marshal(v1beta1.DeviceMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: "DeviceMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: "claim", Generation: 1},
		Requests: []v1beta1.DeviceMetadataRequest{{Name: "net", Devices: []v1beta1.Device{{
			Driver: "networkdriver.cilium.io", Pool: "node/pool", Name: "v0", Attributes: attributes,
		}}}},
	})
	require.NoError(b, err)
	path := filepath.Join(plugin, "dra-device-metadata", "default_claim", "net", "metadata.json")
	require.NoError(b, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(b, os.WriteFile(path, data, 0o644))
}

// settled is a journal of a node that owes nobody anything.
type settled struct{ attachments.Journal }

func (settled) OwedClaims() []tables.ClaimRef { return nil }

type silent struct{}

func (silent) Warn(attachments.Sandbox, string, string) {}

// BenchmarkHooks is what the runtime waits for at the start and at the end of a pod with one device: the device is checked,
// moved and noted, what the pod reads about it is completed, and the claim's CDI file written and removed. Most of it is the kernel's moving of the link.
func BenchmarkHooks(b *testing.B) {
	log := slog.New(slog.DiscardHandler)
	hostPath, podPath := testenv.NetNS(b), testenv.NetNS(b)
	host, err := nic.Open(log, hostPath, "")
	require.NoError(b, err)
	defer host.Close()
	require.NoError(b, host.Add("veth", "v0", 0))
	link, err := host.ByName("v0")
	require.NoError(b, err)
	alias := "the device"
	require.NoError(b, host.Change(link.Attrs().Index, rtlink.Change{Alias: &alias}))
	link, err = host.ByName("v0")
	require.NoError(b, err)

	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(b, err)
	outside, err := attachments.NewOutside(podnet.New(log, podnet.Config{HostNetNS: hostPath}), podnet.NewAnnouncer(log), silent{})
	require.NoError(b, err)
	outside.Gate = cdi.NewFiles(cdi.Params{Logger: log, Folder: b.TempDir(), Driver: "networkdriver.cilium.io"})
	outside.Journal = settled{}
	plugin := b.TempDir()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(b, err)
	outside.Metadata = metadata.New(metadata.Params{
		Logger: log, Driver: "networkdriver.cilium.io", Node: "node", PluginDir: plugin, CDIFolder: plugin, Client: fake.NewClientset(),
		DB: db, Devices: devices, Allocations: table,
	})
	outside.Checkers = map[types.DeviceManagerType]types.Checker{types.DeviceManagerTypeSRIOV: checker{hostPath, link.Attrs().ParentIndex}}
	metrics, err := attachments.NewMetrics(prometheus.NewRegistry())
	require.NoError(b, err)
	room := attachments.New(log, db, table, outside, metrics)
	require.NoError(b, room.Restore([]*tables.DRAAllocation{{
		DeviceName: "v0", Manager: types.DeviceManagerTypeSRIOV, Pool: "pool", PodUID: kubetypes.UID("pod"), ClaimUID: "claim",
		ClaimNamespace: "default", ClaimName: "claim", PodName: "pod", Request: "net", Config: types.DeviceConfig{PodIfName: "net1"},
		PreparedDevice: lent{name: "v0", id: nic.Identity{Kind: "veth", Index: link.Attrs().Index, Alias: alias}, host: nic.Read(link)},
	}}))
	hooks := NewHooks(room, log)
	pod := &api.PodSandbox{
		Id: "sandbox", Uid: "pod", Name: "pod", Namespace: "default",
		Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "network", Path: podPath}}},
	}
	var run, stop time.Duration
	for b.Loop() {
		writeMetadata(b, plugin)
		start := time.Now()
		if err := hooks.RunPodSandbox(b.Context(), pod); err != nil {
			b.Fatal(err)
		}
		half := time.Now()
		if err := hooks.StopPodSandbox(b.Context(), pod); err != nil {
			b.Fatal(err)
		}
		run, stop = run+half.Sub(start), stop+time.Since(half)
	}
	home, err := host.ByName("v0")
	require.NoError(b, err)
	require.NotNil(b, home, "the device is home")
	b.ReportMetric(float64(run.Nanoseconds())/float64(b.N), "run-ns/op")
	b.ReportMetric(float64(stop.Nanoseconds())/float64(b.N), "stop-ns/op")
}
