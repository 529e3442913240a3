// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apimachinery/pkg/watch"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const testNode = "node-1"

// nodeConfigs is an API server for node configs that have the node's name. What is sent replaces what there is.
type nodeConfigs struct {
	first   *v2alpha1.CiliumNetworkDriverNodeConfig
	changes chan *v2alpha1.CiliumNetworkDriverNodeConfig
}

func (n *nodeConfigs) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	send := func(v any) {
		_ = json.NewEncoder(w).Encode(v)
		w.(http.Flusher).Flush()
	}
	meta := metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NodeConfigKind}
	switch {
	case r.Method != http.MethodGet: // a status
		send(v2alpha1.CiliumNetworkDriverNodeConfig{TypeMeta: meta})
	case r.URL.Query().Get("watch") == "":
		list := v2alpha1.CiliumNetworkDriverNodeConfigList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
		list.APIVersion, list.Kind = meta.APIVersion, meta.Kind+"List"
		if n.first != nil {
			list.Items = append(list.Items, *n.first)
		}
		send(list)
	default:
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		for {
			select {
			case config := <-n.changes:
				config.TypeMeta = meta
				raw, _ := json.Marshal(config)
				send(metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: raw}})
			case <-r.Context().Done():
				return
			}
		}
	}
}

// outage is an API server that can go away. What is written as a node config's status is kept all the same.
type outage struct {
	nodeConfigs
	away atomic.Bool

	mu       sync.Mutex // guards statuses
	statuses []string
}

func (o *outage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodPatch:
		status, _ := io.ReadAll(r.Body)
		o.mu.Lock()
		o.statuses = append(o.statuses, string(status))
		o.mu.Unlock()
		fallthrough
	case !o.away.Load():
		o.nodeConfigs.ServeHTTP(w, r)
	default:
		http.Error(w, "away", http.StatusServiceUnavailable)
	}
}

// refuse has the client refused while the API server is away.
func (o *outage) refuse(clientset *fake.Clientset) {
	clientset.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return o.away.Load(), nil, errors.New("connection refused")
	})
	clientset.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) {
		return o.away.Load(), nil, errors.New("connection refused")
	})
}

// has says whether the newest status has the text.
func (o *outage) has(text string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.statuses) > 0 && strings.Contains(o.statuses[len(o.statuses)-1], text)
}

func nodeConfig(spec v2alpha1.CiliumNetworkDriverNodeConfigSpec) *v2alpha1.CiliumNetworkDriverNodeConfig {
	spec.Default()
	return &v2alpha1.CiliumNetworkDriverNodeConfig{
		ObjectMeta: metav1.ObjectMeta{Name: testNode, UID: "uid", Generation: 1}, Spec: spec,
	}
}

// agent is the driver's cell in an application without a container runtime.
type agent struct {
	checks *health.Checks
	client kubernetes.Interface
	db     *statedb.DB
	stop   func()
}

func startAgent(t *testing.T, configs http.Handler, objects ...runtime.Object) *agent {
	return startAgentIn(t, t.TempDir(), configs, objects...)
}

// startAgentIn starts an agent with all it reads and writes below dir.
func startAgentIn(t *testing.T, dir string, configs http.Handler, objects ...runtime.Object) *agent {
	server := httptest.NewServer(configs)
	t.Cleanup(server.Close)
	clientset := fake.NewClientset(objects...)
	clientset.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.34.0"}
	if o, ok := configs.(*outage); ok {
		o.refuse(clientset)
	}

	a := &agent{checks: &health.Checks{}, client: clientset}
	opts := hive.DefaultOptions()
	opts.ModulePrivateProviders = cell.ModulePrivateProviders{
		func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
			return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
		},
	}
	h := hive.NewWithOptions(opts,
		job.Cell,
		statedb.Cell,
		cell.SimpleHealthCell,
		cell.Provide(
			func() kubernetes.Interface { return clientset },
			func() *rest.Config { return &rest.Config{Host: server.URL} },
			func() prometheus.Registerer { return prometheus.NewRegistry() },
			func() *health.Checks { return a.checks },
		),
		Cell,
		cell.Invoke(func(db *statedb.DB) { a.db = db }),
	)
	hive.AddConfigOverride(h, func(c *Config) {
		c.EnableNetworkDriver, c.NodeName = true, testNode
		c.AutoCreateCiliumNodeResource = false // the server has node configs only
		c.CDISpecDir = filepath.Join(dir, "cdi")
		c.NRISocketPath, c.KubeletRootDir, c.SysfsPath = filepath.Join(dir, "nri.sock"), dir, filepath.Join(dir, "sys")
		c.JournalDir = filepath.Join(dir, "journal")
	})
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	require.NoError(t, h.Start(log, t.Context()))
	stopped := false
	a.stop = func() {
		if !stopped {
			stopped = true
			require.NoError(t, h.Stop(log, context.WithoutCancel(t.Context())))
		}
	}
	t.Cleanup(a.stop)
	return a
}

// waitFor waits until the readiness says reason, empty for ready.
func (a *agent) waitFor(t *testing.T, reason string) {
	t.Helper()
	require.Eventually(t, func() bool {
		status := a.checks.Status()
		if reason == "" {
			return status.Ready
		}
		return !status.Ready && strings.HasPrefix(status.Failures[0].Reason, reason)
	}, 20*time.Second, 10*time.Millisecond, "readiness %q, it is %+v", reason, a.checks)
}

// waitForHeld waits until the device of the holder is restored.
func (a *agent) waitForHeld(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		devices := debugapi.Devices(a.db)
		return len(devices) == 1 && devices[0].Device == "dummy3" && devices[0].Pod == "default/pod"
	}, 20*time.Second, 10*time.Millisecond)
}

func node() *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}} }

// holder is a pod that has dummy3 through its claim, which another life of the agent prepared under the driver's name.
func holder(t *testing.T, driver string) []runtime.Object {
	boot, err := os.ReadFile(bootIDPath)
	require.NoError(t, err)
	record, err := json.Marshal(types.Record{
		Version: types.RecordVersion, Manager: types.DeviceManagerTypeDummy, PodUID: "pod-uid",
		BootID: strings.TrimSpace(string(boot)), Config: types.DeviceConfig{PodIfName: "net1"},
		Device: json.RawMessage(`{"name":"dummy3","ifIndex":7,"mtu":1500,"mac":"02:00:00:00:00:01"}`),
	})
	require.NoError(t, err)
	const pool = testNode + "/pool"
	return []runtime.Object{node(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pod", UID: "pod-uid"},
		Spec: corev1.PodSpec{NodeName: testNode, ResourceClaims: []corev1.PodResourceClaim{
			{Name: "net", ResourceClaimName: ptr.To("claim")},
		}},
	}, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: "claim-uid"},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Request: "net", Driver: driver, Pool: pool, Device: "dummy3"}},
				Config: []resourceapi.DeviceAllocationConfiguration{{
					Source: resourceapi.AllocationConfigSourceClaim,
					DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
						Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(`{"podIfName":"net1"}`)},
					}},
				}},
			}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod-uid"}},
			Devices: []resourceapi.AllocatedDeviceStatus{{
				Driver: driver, Pool: pool, Device: "dummy3", Data: &runtime.RawExtension{Raw: record},
			}},
		},
	}}
}

// A node without a config and without devices in pods has nothing to do, and then does what it is told.
func TestDriverWaitsForConfig(t *testing.T) {
	configs := &nodeConfigs{changes: make(chan *v2alpha1.CiliumNetworkDriverNodeConfig)}
	a := startAgent(t, configs, node())
	a.waitFor(t, "")
	configs.changes <- nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{DriverName: "other.example"})
	a.waitFor(t, reasonWaitingForNRI)
}

// What the status says of the PFs of pools stays while an agent starts, which does not know them yet.
func TestDriverKeepsPFs(t *testing.T) {
	config := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{Pools: []v2alpha1.CiliumNetworkDriverDevicePoolConfig{{PoolName: "a"}}})
	config.Status.Pools = []v2alpha1.DevicePoolStatus{{Name: "a", PFs: []string{"eth0"}}}
	configs := &outage{nodeConfigs: nodeConfigs{first: config}}
	startAgent(t, configs, node())
	require.Eventually(t, func() bool { return configs.has(reasonWaitingForNRI) }, 20*time.Second, 10*time.Millisecond)
	require.True(t, configs.has(`"pfs":["eth0"]`))
}

// Devices that pods have are looked after whatever became of the node config while the agent was away.
func TestDriverServesHeldDevices(t *testing.T) {
	invalid := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DriverName: "other.example", Pools: []v2alpha1.CiliumNetworkDriverDevicePoolConfig{{PoolName: "a"}, {PoolName: "a"}},
	})
	for name, tt := range map[string]struct {
		config *v2alpha1.CiliumNetworkDriverNodeConfig
		driver string
		reason string
	}{
		"no config":      {driver: v2alpha1.DefaultDriverName, reason: reasonWaitingForNRI},
		"invalid config": {config: invalid, driver: "other.example", reason: reasonInvalidConfig},
	} {
		t.Run(name, func(t *testing.T) {
			configs := &nodeConfigs{first: tt.config, changes: make(chan *v2alpha1.CiliumNetworkDriverNodeConfig)}
			dir := t.TempDir()
			a := startAgentIn(t, dir, configs, holder(t, tt.driver)...)
			a.waitForHeld(t)
			require.FileExists(t, filepath.Join(dir, "journal", "dummy3.json"), "a record of a former version gets its entry")
			a.waitFor(t, tt.reason)

			valid := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{
				DriverName:           tt.driver,
				DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: 5}},
			})
			valid.Generation = 2
			configs.changes <- valid
			require.Eventually(t, func() bool { return len(debugapi.Devices(a.db)) == 5 }, 20*time.Second, 10*time.Millisecond)
			a.waitFor(t, reasonWaitingForNRI)
		})
	}
}

// An agent that is started while the API server is away serves from what it was configured by last, and from the journal. What the
// API server says when it is back is a change.
func TestDriverStartsWithoutAPI(t *testing.T) {
	t.Parallel()
	config := func(generation int64, dummies int32) *v2alpha1.CiliumNetworkDriverNodeConfig {
		c := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
			Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: dummies},
		}})
		c.Generation = generation
		return c
	}
	dir := t.TempDir()
	lastConfig := filepath.Join(dir, "journal", "config")
	devices := func(a *agent, offered int, state string) func() bool {
		return func() bool {
			found, held := 0, ""
			for _, device := range debugapi.Devices(a.db) {
				found++
				if device.Device == "dummy3" {
					held = device.State
				}
			}
			return found == offered && held == state
		}
	}
	eventually := func(condition func() bool) {
		t.Helper()
		require.Eventually(t, condition, 30*time.Second, 10*time.Millisecond)
	}
	first := startAgentIn(t, dir, &outage{nodeConfigs: nodeConfigs{first: config(1, 5)}}, holder(t, v2alpha1.DefaultDriverName)...)
	eventually(devices(first, 5, "Prepared"))
	eventually(func() bool { _, err := os.Stat(lastConfig); return err == nil })
	first.stop()
	info, err := os.Stat(lastConfig)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())

	// The claim was deallocated meanwhile, and there are fewer dummies to be offered.
	objects := holder(t, v2alpha1.DefaultDriverName)
	objects[2].(*resourceapi.ResourceClaim).Status = resourceapi.ResourceClaimStatus{}
	api := &outage{nodeConfigs: nodeConfigs{first: config(2, 2)}}
	api.away.Store(true)
	second := startAgentIn(t, dir, api, objects...)
	second.waitFor(t, reasonStarting)
	eventually(devices(second, 5, "Prepared"))
	second.waitFor(t, reasonWaitingForNRI)
	eventually(func() bool {
		return api.has("running from the last node config, of generation 1") && api.has("from the node's journal alone")
	})
	api.away.Store(false)
	eventually(func() bool { return !api.has("LastConfig") && api.has(`"observedGeneration":2`) })
	eventually(devices(second, 2, ""))
	second.stop()

	// The node config is deleted, and is gone then for the next start too.
	third := startAgentIn(t, dir, &outage{}, node())
	third.waitFor(t, "")
	eventually(func() bool { _, err := os.Stat(lastConfig); return errors.Is(err, os.ErrNotExist) })
}

// A device of which it is not known what it is to be given back as is not offered, and it is said why, until somebody has seen to
// it.
func TestDriverQuarantines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	entry := filepath.Join(dir, "journal", "dummy2.json")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "journal"), 0o700))
	require.NoError(t, os.WriteFile(entry, []byte("{"), 0o600))
	a := startAgentIn(t, dir, &nodeConfigs{first: nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: 3}},
	})}, node())
	require.Eventually(t, func() bool {
		offered, quarantined := 0, false
		for _, device := range debugapi.Devices(a.db) {
			if device.State == "NotOffered" {
				quarantined = device.Device == "dummy2" && strings.HasPrefix(device.Reason, "quarantined: journal entry")
			} else {
				offered++
			}
		}
		return offered == 2 && quarantined
	}, 20*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		events, err := a.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		count := map[string]int{}
		for _, event := range events.Items {
			switch {
			case event.Reason == "DeviceQuarantined" && strings.HasPrefix(event.Message, "device dummy2 is not offered: journal entry"),
				event.Reason == reasonQuarantined && strings.HasPrefix(event.Message, "Degraded is True: device dummy2: journal entry"):
				count[event.InvolvedObject.Kind+" "+event.InvolvedObject.Name]++
			}
		}
		return err == nil && maps.Equal(count, map[string]int{"Node " + testNode: 1, v2alpha1.NodeConfigKind + " " + testNode: 1})
	}, 20*time.Second, 10*time.Millisecond)

	dump := httptest.NewRecorder()
	debugapi.NewHandler(debugapi.Params{DB: a.db, Checks: a.checks}).ServeHTTP(dump, httptest.NewRequest(http.MethodGet, "/dump/networkdriver-journal", nil))
	require.Equal(t, http.StatusOK, dump.Code)
	require.Regexp(t, `"name":"dummy2".*"quarantine":"journal entry .* cannot be read`, dump.Body.String())

	require.NoError(t, os.Remove(entry))
	require.Eventually(t, func() bool {
		devices := debugapi.Devices(a.db)
		return len(devices) == 3 && !slices.ContainsFunc(devices, func(d debugapi.Device) bool { return d.State == "NotOffered" })
	}, 30*time.Second, 10*time.Millisecond)
}

// Two agents on one node do not get into each other's way.
func TestDriverWaitsForAnotherAgent(t *testing.T) {
	dir := t.TempDir()
	config := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{})
	first := startAgentIn(t, dir, &nodeConfigs{first: config}, node())
	first.waitFor(t, reasonWaitingForNRI)
	second := startAgentIn(t, dir, &nodeConfigs{first: config}, node())
	second.waitFor(t, reasonRestoring+": another agent is at work on this node")
	first.stop()
	second.waitFor(t, reasonWaitingForNRI)
}

// The claims of pods do not choose the name that the agent registers with kubelet.
func TestDriverNameIsNotTakenFromClaims(t *testing.T) {
	configs := &nodeConfigs{changes: make(chan *v2alpha1.CiliumNetworkDriverNodeConfig)}
	a := startAgent(t, configs, holder(t, "other.example")...)
	a.waitFor(t, "")
	require.Empty(t, debugapi.Devices(a.db))
	configs.changes <- nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{DriverName: "other.example"})
	a.waitForHeld(t)
}

// A device manager that cannot find its devices keeps the driver from serving, and is named as the cause.
func TestDriverNamesManagerThatHasNotDiscovered(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "sys/bus/pci"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sys/bus/pci/devices"), nil, 0o644))
	config := nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
		SRIOV: &v2alpha1.SRIOVDeviceManagerConfig{Enabled: true},
	}})
	a := startAgentIn(t, dir, &nodeConfigs{first: config}, node())
	a.waitFor(t, reasonDiscovering+": waiting for the first inventory of the device managers sr-iov,")
}

// An agent that is stopped before its node is registered in Kubernetes stops.
func TestDriverStopsWithoutNode(t *testing.T) {
	asked := make(chan struct{})
	configs := &nodeConfigs{first: nodeConfig(v2alpha1.CiliumNetworkDriverNodeConfigSpec{})}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") != "" {
			close(asked) // the list has been delivered
		}
		configs.ServeHTTP(w, r)
	})
	a := startAgent(t, handler)
	<-asked
	a.stop()
}
