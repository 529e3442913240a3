// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	manifests "github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/health"
	metricsserver "github.com/cilium/networkdriver/pkg/metrics"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/test/lab"
)

// account is whom the operator is for the API server, with the rights in install/kubernetes and no other.
const account = "system:serviceaccount:kube-system:cilium-network-driver-operator"

var (
	nodeResource          = v2alpha1.CiliumNodeGroupVersion.WithResource(v2alpha1.CiliumNodeResource)
	nodeConfigResource    = v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NodeConfigResource)
	clusterConfigResource = v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.ClusterConfigResource)
)

// cluster is a real API server, and the administrator's hands on it.
type cluster struct {
	server  *lab.ControlPlane
	client  kubernetes.Interface
	dynamic dynamic.Interface
	crds    apiextensionsclient.CustomResourceDefinitionsGetter
}

func startCluster(tb testing.TB) *cluster {
	tb.Helper()
	server, err := lab.StartControlPlane(context.Background(), lab.ControlPlaneOptions{Dir: tb.TempDir(), Bin: []string{testenv.KubeBin(tb)}})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(tb, err)
	config.QPS = -1
	c := &cluster{server: server}
	c.client, err = kubernetes.NewForConfig(config)
	require.NoError(tb, err)
	c.dynamic, err = dynamic.NewForConfig(config)
	require.NoError(tb, err)
	c.crds, err = apiextensionsclient.NewForConfig(config)
	require.NoError(tb, err)
	require.NoError(tb, c.install(context.Background(), manifests.OperatorRBAC))
	return c
}

// installCRDs installs what the operator works with.
func (c *cluster) installCRDs(ctx context.Context) error {
	if err := crds.Install(ctx, c.crds); err != nil {
		return err
	}
	if err := c.install(ctx, manifests.CiliumNodeCRD); err != nil {
		return err
	}
	for {
		_, err := c.dynamic.Resource(nodeResource).List(ctx, metav1.ListOptions{})
		if err == nil || !pause.For(ctx, 20*time.Millisecond) {
			return err
		}
	}
}

// install applies YAML documents of any kind.
func (c *cluster) install(ctx context.Context, documents []byte) error {
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	for _, document := range strings.Split(string(documents), "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			return err
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			return err
		}
		_, err = c.dynamic.Resource(mapping.Resource).Namespace(object.GetNamespace()).
			Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: "test", Force: true})
		if err != nil {
			return fmt.Errorf("%s %s: %w", kind.Kind, object.GetName(), err)
		}
	}
	return nil
}

// clear deletes all objects that the operator works with.
func (c *cluster) clear(tb testing.TB) {
	tb.Helper()
	for _, resource := range []schema.GroupVersionResource{clusterConfigResource, nodeResource, nodeConfigResource} {
		err := c.dynamic.Resource(resource).DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{})
		if !apierrors.IsNotFound(err) {
			require.NoError(tb, err)
		}
	}
}

// traffic is what the operator's client does, seen from outside.
type traffic struct {
	mu sync.Mutex // guards the fields below
	// requests counts by verb and resource, total counts all.
	requests map[string]int
	total    int
	// withheld is closed when watches of node configs may go on; nil when they are not held up.
	withheld chan struct{}
}

func newTraffic() *traffic { return &traffic{requests: map[string]int{}} }

// wrap makes a client go through the traffic.
func (t *traffic) wrap(config *rest.Config) {
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return roundTripper{t, next} })
}

type roundTripper struct {
	*traffic
	next http.RoundTripper
}

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) {
	path := request.URL.Path
	watch := request.URL.Query().Get("watch") != ""
	r.mu.Lock()
	r.total++
	r.mu.Unlock()
	for _, resource := range []string{v2alpha1.NodeConfigResource, v2alpha1.ClusterConfigResource, v2alpha1.CiliumNodeResource} {
		if !strings.Contains(path, "/"+resource) {
			continue
		}
		verb := request.Method
		if watch {
			verb = "WATCH"
		}
		r.mu.Lock()
		r.requests[verb+" "+resource]++
		r.mu.Unlock()
	}
	response, err := r.next.RoundTrip(request)
	if err == nil && watch && strings.Contains(path, v2alpha1.NodeConfigResource) {
		response.Body = &heldBody{response.Body, r.traffic, request.Context()}
	}
	return response, err
}

// heldBody is the stream of a watch.
type heldBody struct {
	io.ReadCloser
	traffic *traffic
	ctx     context.Context
}

// Read keeps what has come back while watches are withheld.
func (b *heldBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.traffic.mu.Lock()
	held := b.traffic.withheld
	b.traffic.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-b.ctx.Done():
		}
	}
	return n, err
}

// withhold holds the watches of node configs up, or lets them go on.
func (t *traffic) withhold(on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.withheld != nil {
		close(t.withheld)
		t.withheld = nil
	}
	if on {
		t.withheld = make(chan struct{})
	}
}

func (t *traffic) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.requests)
	t.total = 0
}

// all returns the number of requests of any kind.
func (t *traffic) all() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.total
}

// count returns how often a verb was used on a resource.
func (t *traffic) count(verb, resource string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests[verb+" "+resource]
}

// writes prints the writes, and the reads of single objects, which there should be none of.
func (t *traffic) writes() string {
	return fmt.Sprintf("create=%d update=%d delete=%d status=%d\n",
		t.count("POST", v2alpha1.NodeConfigResource), t.count("PATCH", v2alpha1.NodeConfigResource),
		t.count("DELETE", v2alpha1.NodeConfigResource), t.count("PATCH", v2alpha1.ClusterConfigResource))
}

// replica is an operator in this process, as in its program but for the client.
type replica struct {
	hive    *hive.Hive
	log     *testenv.LogBuffer
	traffic *traffic
	db      *statedb.DB
	checks  *health.Checks
}

// testConfig is the configuration of operators in tests: they refresh when asked to only, and get a free lease soon.
func testConfig(c *Config) {
	c.EnableNetworkDriver = true
	c.NetworkDriverRefreshInterval = time.Hour
	c.LeaderElectionLeaseDuration = 4 * time.Second
	c.LeaderElectionRenewDeadline = 3 * time.Second
	c.LeaderElectionRetryPeriod = 500 * time.Millisecond
}

// startReplica starts an operator.
func (c *cluster) startReplica(tb testing.TB, change func(*Config)) (*replica, error) {
	tb.Helper()
	config, err := c.server.UserRESTConfig(account)
	if err != nil {
		return nil, err
	}
	r := &replica{log: &testenv.LogBuffer{}, traffic: newTraffic()}
	r.traffic.wrap(config)
	opts := hive.DefaultOptions()
	opts.ModulePrivateProviders = cell.ModulePrivateProviders{
		func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
			return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
		},
	}
	r.hive = hive.NewWithOptions(opts, job.Cell, cell.SimpleHealthCell, statedb.Cell, metricsserver.Cell, health.Cell, Cell,
		cell.Provide(func() *rest.Config { return config }),
		cell.Invoke(func(db *statedb.DB, checks *health.Checks) { r.db, r.checks = db, checks }),
	)
	hive.AddConfigOverride(r.hive, func(c *Config) {
		testConfig(c)
		if change != nil {
			change(c)
		}
	})
	log := slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return r, r.hive.Start(log, context.Background())
}

// stop stops the operator as its program does.
func (r *replica) stop() error {
	return r.hive.Stop(slog.New(slog.NewTextHandler(r.log, nil)), context.Background())
}
