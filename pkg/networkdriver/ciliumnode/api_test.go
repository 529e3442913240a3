// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ciliumnode

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	manifests "github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

// account is whom the agent is for the API server, with the rights in install/kubernetes and no other.
const account = "system:serviceaccount:kube-system:cilium-network-driver"

// counter counts the writes of a client.
type counter struct {
	next   http.RoundTripper
	writes *atomic.Int32
}

func (c counter) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodGet {
		c.writes.Add(1)
	}
	return c.next.RoundTrip(r)
}

// TestAPI follows a Node's labels on a real API server.
func TestAPI(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(t, err)
	client, err := dynamic.NewForConfig(config)
	require.NoError(t, err)
	kube, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	install := func(documents []byte) {
		mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(kube.Discovery()))
		for _, document := range strings.Split(string(documents), "\n---\n") {
			object := &unstructured.Unstructured{}
			require.NoError(t, yaml.Unmarshal([]byte(document), &object.Object))
			mapping, err := mapper.RESTMapping(object.GroupVersionKind().GroupKind())
			require.NoError(t, err)
			_, err = client.Resource(mapping.Resource).Namespace(object.GetNamespace()).
				Apply(t.Context(), object.GetName(), object, metav1.ApplyOptions{FieldManager: "test", Force: true})
			require.NoError(t, err)
		}
	}
	install(manifests.RBAC)

	var out testenv.LogBuffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	start := func() (writes *atomic.Int32, stop func()) {
		agent, err := server.UserRESTConfig(account)
		require.NoError(t, err)
		writes = &atomic.Int32{}
		agent.Wrap(func(next http.RoundTripper) http.RoundTripper { return counter{next, writes} })
		p, err := NewPublisher(log, agent, "worker")
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		health, _ := cell.NewSimpleHealth()
		go func() { done <- p.Run(ctx, health) }()
		return writes, func() {
			cancel()
			require.NoError(t, <-done)
		}
	}
	// read prints the labels and the owner of a CiliumNode.
	read := func(name string) string {
		object, err := client.Resource(ciliumNodes).Get(context.Background(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "none"
		}
		require.NoError(t, err)
		owner := ""
		for _, o := range object.GetOwnerReferences() {
			owner += string(o.UID)
		}
		return fmt.Sprintf("%v %s", object.GetLabels(), owner)
	}
	eventually := func(want string, node *unstructured.Unstructured) {
		t.Helper()
		want += " " + string(node.GetUID())
		require.Eventually(t, func() bool { return read("worker") == want }, time.Minute, 10*time.Millisecond, "want %s, have %s", want, read("worker"))
	}
	makeNode := func(name string) *unstructured.Unstructured {
		node, err := client.Resource(nodes).Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name, "labels": map[string]any{"a": "1", "b": "2"}},
		}}, metav1.CreateOptions{})
		require.NoError(t, err)
		return node
	}
	patch := func(resource string, body string) {
		t.Helper()
		target := client.Resource(nodes)
		if resource == "ciliumnode" {
			target = client.Resource(ciliumNodes)
		}
		_, err := target.Patch(t.Context(), "worker", types.MergePatchType, []byte(body), metav1.PatchOptions{})
		require.NoError(t, err)
	}

	// It waits for the definition, and makes the node's own object only.
	node := makeNode("worker")
	makeNode("another")
	_, stop := start()
	require.Eventually(t, func() bool {
		return out.Count("Waiting for the CustomResourceDefinition ciliumnodes.cilium.io to be installed") > 0
	}, time.Minute, 10*time.Millisecond)
	install(manifests.CiliumNodeCRD)
	eventually("map[a:1 b:2]", node)
	require.Equal(t, "none", read("another"))

	// It follows the Node's labels; someone else's labels stay; a drift is put right; a lost object comes back.
	patch("node", `{"metadata":{"labels":{"a":null,"b":"3","c":"4"}}}`)
	eventually("map[b:3 c:4]", node)
	patch("ciliumnode", `{"metadata":{"labels":{"theirs":"5","b":"9"}}}`)
	eventually("map[b:3 c:4 theirs:5]", node)
	require.NoError(t, client.Resource(ciliumNodes).Delete(t.Context(), "worker", metav1.DeleteOptions{}))
	eventually("map[b:3 c:4]", node)
	stop()

	// A start with nothing to do writes nothing: the first write is for the label that comes next. Labels that went
	// while it was away go.
	writes, stop := start()
	patch("node", `{"metadata":{"labels":{"d":"6"}}}`)
	eventually("map[b:3 c:4 d:6]", node)
	require.EqualValues(t, 1, writes.Load())
	stop()
	patch("node", `{"metadata":{"labels":{"c":null}}}`)
	_, stop = start()
	eventually("map[b:3 d:6]", node)

	// A Node that is made again owns it.
	require.NoError(t, client.Resource(nodes).Delete(t.Context(), "worker", metav1.DeleteOptions{}))
	node = makeNode("worker")
	eventually("map[a:1 b:2]", node)
	stop()
}
