// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/utils/ptr"

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

// writeMetadata writes what kubelet's Prepare leaves for the pod of a device to read.
func (l *lending) writeMetadata(b *testing.B, device string) {
	value := "as published, in a string of some length"
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for i := range 24 {
		attributes[resourceapi.QualifiedName(fmt.Sprint("attribute", i))] = resourceapi.DeviceAttribute{StringValue: &value}
	}
	data, err := json.Marshal(v1beta1.DeviceMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: "DeviceMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + device, UID: kubetypes.UID("claim-" + device), Generation: 1},
		Requests: []v1beta1.DeviceMetadataRequest{{Name: "net", Devices: []v1beta1.Device{{
			Driver: "networkdriver.cilium.io", Pool: "node/pool", Name: device, Attributes: attributes,
		}}}},
	})
	require.NoError(b, err)
	path := filepath.Join(l.plugin, "dra-device-metadata", "default_claim-"+device, "net", "metadata.json")
	require.NoError(b, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(b, os.WriteFile(path, data, 0o644))
}

// settled is a journal of a node that owes nobody anything.
type settled struct{ attachments.Journal }

func (settled) OwedClaims() []tables.ClaimRef { return nil }

type silent struct{}

func (silent) Warn(attachments.Sandbox, string, string) {}

// lending is a node with one device prepared for each of some pods, and the hooks. The pods have empty network namespaces.
type lending struct {
	host  *nic.Place
	hooks *Hooks
	pods  []*api.PodSandbox
	// plugin is kubelet's directory of the driver.
	plugin string
}

// lend prepares a device for each configuration.
func lend(b *testing.B, configs ...types.DeviceConfig) *lending {
	log := slog.New(slog.DiscardHandler)
	hostPath := testenv.NetNS(b)
	host, err := nic.Open(log, hostPath, "")
	require.NoError(b, err)
	b.Cleanup(host.Close)
	l := &lending{host: host}
	var rows []*tables.DRAAllocation
	parent := 0
	for i, config := range configs {
		name := fmt.Sprint("v", i)
		require.NoError(b, host.Add("veth", name, 0))
		link, err := host.ByName(name)
		require.NoError(b, err)
		parent = link.Attrs().ParentIndex
		alias := "device " + name
		require.NoError(b, host.Change(link.Attrs().Index, rtlink.Change{Alias: &alias}))
		require.NoError(b, host.Change(parent, rtlink.Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}))
		link, err = host.ByName(name)
		require.NoError(b, err)
		uid := kubetypes.UID("pod-" + name)
		rows = append(rows, &tables.DRAAllocation{
			DeviceName: name, Manager: types.DeviceManagerTypeSRIOV, Pool: "pool", PodUID: uid, ClaimUID: kubetypes.UID("claim-" + name),
			ClaimNamespace: "default", ClaimName: "claim-" + name, PodName: "pod-" + name, Request: "net", Config: config,
			PreparedDevice: lent{name: name, id: nic.Identity{Kind: "veth", Index: link.Attrs().Index, Alias: alias}, host: nic.Read(link)},
		})
		l.pods = append(l.pods, &api.PodSandbox{
			Id: "sandbox-" + name, Uid: string(uid), Name: "pod-" + name, Namespace: "default",
			Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "network", Path: testenv.NetNS(b)}}},
		})
	}
	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(b, err)
	outside, err := attachments.NewOutside(podnet.New(log, podnet.Config{HostNetNS: hostPath}), podnet.NewAnnouncer(log), silent{})
	require.NoError(b, err)
	outside.Gate = cdi.NewFiles(cdi.Params{Logger: log, Folder: b.TempDir(), Driver: "networkdriver.cilium.io"})
	outside.Journal = settled{}
	l.plugin = b.TempDir()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(b, err)
	outside.Metadata = metadata.New(metadata.Params{
		Logger: log, Driver: "networkdriver.cilium.io", Node: "node", PluginDir: l.plugin, CDIFolder: l.plugin, Client: fake.NewClientset(),
		DB: db, Devices: devices, Allocations: table, Owed: func() []tables.ClaimRef { return nil },
	})
	outside.Checkers = map[types.DeviceManagerType]types.Checker{types.DeviceManagerTypeSRIOV: checker{hostPath, parent}}
	metrics, err := attachments.NewMetrics(prometheus.NewRegistry())
	require.NoError(b, err)
	room := attachments.New(log, db, table, outside, metrics)
	require.NoError(b, room.Restore(rows))
	l.hooks = NewHooks(room, log)
	return l
}

// times are what the runtime waits for at the start and at the end of a pod, and what a look at the running pod takes.
type times struct{ run, stop, ensure time.Duration }

// use has the pod start, looks after it once, and has it end.
func (l *lending) use(b *testing.B, pod *api.PodSandbox, sum *times) {
	l.writeMetadata(b, strings.TrimPrefix(pod.Name, "pod-"))
	start := time.Now()
	if err := l.hooks.RunPodSandbox(b.Context(), pod); err != nil {
		b.Fatal(err)
	}
	ran := time.Now()
	l.hooks.Ensure(b.Context())
	ensured := time.Now()
	if err := l.hooks.StopPodSandbox(b.Context(), pod); err != nil {
		b.Fatal(err)
	}
	sum.run, sum.ensure, sum.stop = sum.run+ran.Sub(start), sum.ensure+ensured.Sub(ran), sum.stop+time.Since(ensured)
}

func (t times) report(b *testing.B, suffix string) {
	b.ReportMetric(float64(t.run.Nanoseconds())/float64(b.N), "run"+suffix+"-ns/op")
	b.ReportMetric(float64(t.ensure.Nanoseconds())/float64(b.N), "ensure"+suffix+"-ns/op")
	b.ReportMetric(float64(t.stop.Nanoseconds())/float64(b.N), "stop"+suffix+"-ns/op")
}

// BenchmarkHooks is what the runtime waits for at the start and at the end of a pod with one device: the device is checked,
// moved and noted, what the pod reads about it is completed, and the claim's CDI file written and removed. Most of it is the kernel's moving of the link.
func BenchmarkHooks(b *testing.B) {
	l := lend(b, types.DeviceConfig{PodIfName: "net1"})
	var sum times
	for b.Loop() {
		l.use(b, l.pods[0], &sum)
	}
	home, err := l.host.ByName("v0")
	require.NoError(b, err)
	require.NotNil(b, home, "the device is home")
	sum.report(b, "")
}

// BenchmarkHooksOfNetwork is the same for a pod whose device joins a network, with two addresses, four routes, two rules and
// settings of the interface, each time followed by a pod without. One run gives both times and their ratios.
func BenchmarkHooksOfNetwork(b *testing.B) {
	route := func(to, via string) types.Route {
		return types.Route{To: netip.MustParsePrefix(to), Via: netip.MustParseAddr(via)}
	}
	l := lend(b, types.DeviceConfig{PodIfName: "net1", Network: "storage", Joined: &types.Network{
		Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("2001:db8::10/64")},
		Routes: []types.Route{
			route("10.0.0.0/8", "192.0.2.1"), route("0.0.0.0/0", "192.0.2.2"), route("2001:db8:1::/48", "2001:db8::1"), route("::/0", "2001:db8::1"),
		},
		PolicyRouting: true,
		Interface: types.InterfaceSettings{
			ARPIgnore: ptr.To(1), ARPAnnounce: ptr.To(2), RPFilter: ptr.To(2), Forwarding: ptr.To(false), AcceptRA: ptr.To(0),
		},
	}}, types.DeviceConfig{PodIfName: "net1"})
	var with, without times
	for b.Loop() {
		l.use(b, l.pods[0], &with)
		l.use(b, l.pods[1], &without)
	}
	with.report(b, "")
	without.report(b, "-without")
	b.ReportMetric(float64(with.run)/float64(without.run), "run-ratio")
	b.ReportMetric(float64(with.ensure)/float64(without.ensure), "ensure-ratio")
	b.ReportMetric(float64(with.stop)/float64(without.stop), "stop-ratio")
}
