// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

// patches counts the writes that go through a client.
type patches struct {
	next  http.RoundTripper
	count *atomic.Int32
}

func (p patches) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPatch {
		p.count.Add(1)
	}
	return p.next.RoundTrip(r)
}

// cluster is a real API server with this package's two sides connected to it.
type cluster struct {
	server  *lab.ControlPlane
	configs dynamic.ResourceInterface
	watcher *Watcher
	writer  *StatusWriter
	writes  *atomic.Int32
	logs    *syncBuffer
}

// TestAPI takes a node config through its life on a real API server.
func TestAPI(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{
		Dir: t.TempDir(),
		Bin: []string{testenv.KubeBin(t)},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })

	c := connect(t, server)
	require.Eventually(t, func() bool { return strings.Contains(c.logs.String(), "to be installed") }, testTimeout, 10*time.Millisecond)
	requireNoEvent(t, c.watcher)
	installer, err := apiextensionsclient.NewForConfig(restConfig(t, server))
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer))
	require.Nil(t, nextEvent(t, c.watcher).Config, "the definition is there, the object is not")

	c.create(t, "another-node")
	c.create(t, "worker")
	event := nextEvent(t, c.watcher)
	require.Equal(t, "worker", event.Config.Name, "the other node's config is not ours")
	require.Equal(t, v2alpha1.DefaultDriverName, event.Config.Spec.DriverName)
	require.NotNil(t, event.Config.Spec.Pools[0].Filter)

	c.testStatus(t, event)

	// A change of the spec comes through, the writes of the status did not.
	requireNoEvent(t, c.watcher)
	patch := []byte(`{"spec": {"driverName": "nics.example.com"}}`)
	_, err = c.configs.Patch(t.Context(), "worker", types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(t, err)
	changed := nextEvent(t, c.watcher)
	require.EqualValues(t, 2, changed.Config.Generation)

	// What happened while the API server was away is made up for.
	require.NoError(t, server.StopProgram(lab.APIServer))
	require.NoError(t, server.Start(t.Context(), lab.APIServer))
	require.NoError(t, c.configs.Delete(t.Context(), "worker", metav1.DeleteOptions{}))
	require.Nil(t, nextEvent(t, c.watcher).Config)

	// A status for the object before is not written to its successor.
	c.create(t, "worker")
	successor := nextEvent(t, c.watcher)
	c.writer.Update(changed.Config, ready(2, true))
	require.Eventually(t, func() bool { return strings.Contains(c.logs.String(), "The node config is gone") }, testTimeout, 10*time.Millisecond)
	require.Empty(t, c.status(t).Conditions)
	c.writer.Update(successor.Config, ready(1, true))
	require.Eventually(t, func() bool { return c.status(t).ObservedGeneration == 1 }, testTimeout, 10*time.Millisecond)
}

// testStatus writes a status, the same again, another one, and one after a
// restart.
func (c *cluster) testStatus(t *testing.T, event Event) {
	t.Helper()
	status := v2alpha1.CiliumNetworkDriverNodeConfigStatus{
		ObservedGeneration: event.Config.Generation,
		Conditions: []metav1.Condition{
			Condition(v2alpha1.ConditionReady, true, "Applied", "all is well"),
			Condition(v2alpha1.ConditionDegraded, false, "Applied", ""),
		},
		DriverName:       v2alpha1.DefaultDriverName,
		Devices:          3,
		AllocatedDevices: 1,
		Managers:         []v2alpha1.DeviceManagerStatus{{Manager: "dummy", Devices: 3, Skipped: 1}},
		Pools:            []v2alpha1.DevicePoolStatus{{Name: "a", Devices: 2, Allocated: 1}, {Name: "b", Devices: 1}},
		SkippedDevices:   []v2alpha1.SkippedDevice{{Manager: "dummy", Device: "dummy9", Reason: "carries the default route"}},
	}
	c.writer.Update(event.Config, status)
	require.Eventually(t, func() bool { return len(c.status(t).Conditions) == 2 }, testTimeout, 10*time.Millisecond)
	got := c.status(t)
	require.Equal(t, complete(status, got, metav1.Now()), got, "what was asked for")
	require.EqualValues(t, 1, c.writes.Load())

	// The same again is no write; then a pool goes.
	c.writer.Update(event.Config, status)
	require.Eventually(t, c.writer.idle, testTimeout, time.Millisecond)
	require.EqualValues(t, 1, c.writes.Load())
	status.Pools = status.Pools[1:]
	c.writer.Update(event.Config, status)
	require.Eventually(t, func() bool { return len(c.status(t).Pools) == 1 }, testTimeout, 10*time.Millisecond)
	require.Equal(t, "b", c.status(t).Pools[0].Name)
	require.EqualValues(t, 2, c.writes.Load())

	// An agent that starts again has nothing to write.
	again := connect(t, c.server)
	again.writer.Update(nextEvent(t, again.watcher).Config, status)
	require.Eventually(t, again.writer.idle, testTimeout, time.Millisecond)
	require.Zero(t, again.writes.Load())
}

// idle returns whether there is nothing to be written.
func (w *StatusWriter) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pending == nil && len(w.wake) == 0
}

func restConfig(t *testing.T, server *lab.ControlPlane) *rest.Config {
	t.Helper()
	config, err := server.RESTConfig()
	require.NoError(t, err)
	return config
}

func connect(t *testing.T, server *lab.ControlPlane) *cluster {
	t.Helper()
	admin, err := dynamic.NewForConfig(restConfig(t, server))
	require.NoError(t, err)
	c := &cluster{
		server:  server,
		configs: admin.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NodeConfigResource)),
		writes:  &atomic.Int32{},
		logs:    &syncBuffer{},
	}
	config := restConfig(t, server)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return patches{next: next, count: c.writes} })
	client, err := NewClient(config)
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(c.logs, nil))
	c.watcher = NewWatcher(log, client, "worker")
	c.writer = NewStatusWriter(log, client, "worker")

	ctx, cancel := context.WithCancel(t.Context())
	health, _ := cell.NewSimpleHealth()
	watched, written := make(chan error), make(chan error)
	go func() { watched <- c.watcher.Run(ctx, health) }()
	go func() { written <- c.writer.Run(ctx, health) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-watched)
		require.NoError(t, <-written)
	})
	return c
}

func (c *cluster) create(t *testing.T, name string) {
	t.Helper()
	_, err := c.configs.Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v2alpha1.SchemeGroupVersion.String(),
		"kind":       v2alpha1.NodeConfigKind,
		"metadata":   map[string]any{"name": name},
		"spec":       map[string]any{"pools": []any{map[string]any{"name": "all", "filter": map[string]any{}}}},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
}

func (c *cluster) status(t *testing.T) v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	t.Helper()
	object, err := c.configs.Get(t.Context(), "worker", metav1.GetOptions{})
	require.NoError(t, err)
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, config))
	return config.Status
}
