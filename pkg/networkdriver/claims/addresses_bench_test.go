// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	operatorconfig "github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	operatornetworks "github.com/cilium/networkdriver/operator/pkg/networkdriver/networks"
	apiclient "github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/wires"
)

const (
	// fillNode has the addresses that are taken before.
	fillNode = "node-filled"
	// rangeEnv is how many addresses the ranges have.
	rangeEnv = "NETWORKDRIVER_ADDRESSES"
	// maxPrepares are made at each level, fewer where less is free, by so many nodes at the same time.
	maxPrepares, preparers = 200, 4
	// batch is how many addresses are stored at once, fewer than etcd takes.
	batch = 100
)

// traffic counts a client's requests, by verb and resource.
type traffic struct {
	mu       sync.Mutex // guards requests
	requests map[string]int
}

func (t *traffic) wrap(config *rest.Config) {
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return counting{t, next} })
}

type counting struct {
	*traffic
	next http.RoundTripper
}

// RoundTrip implements [http.RoundTripper].
func (c counting) RoundTrip(request *http.Request) (*http.Response, error) {
	what := request.Method
	for _, resource := range []string{v2alpha1.AddressResource, v2alpha1.NetworkResource, "resourceclaims", "namespaces"} {
		if strings.Contains(request.URL.Path, "/"+resource) {
			what += " " + resource
			break
		}
	}
	c.mu.Lock()
	c.requests[what]++
	c.mu.Unlock()
	return c.next.RoundTrip(request)
}

// take returns what was counted, and begins anew.
func (t *traffic) take() map[string]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	requests := t.requests
	t.requests = map[string]int{}
	return requests
}

// sum is the number of requests of any of the verbs.
func sum(requests map[string]int, verbs ...string) (n int) {
	for what, count := range requests {
		if verb, _, _ := strings.Cut(what, " "); slices.Contains(verbs, verb) {
			n += count
		}
	}
	return n
}

// addressCluster is a real API server with one network, whose ranges of both families have the same size.
type addressCluster struct {
	*apiServer
	addresses int
	objects   *networks.Client
	// filled are the addresses of either family that devices of other nodes have, the first ones of order.
	order  []int
	filled int
	// stored are the objects that fill has made.
	stored int
}

func (c *addressCluster) config() *rest.Config {
	config, err := c.plane.RESTConfig()
	require.NoError(c.t, err)
	config.QPS = -1
	return config
}

func coreOf(t testing.TB, config *rest.Config) *kubernetes.Clientset {
	config = rest.CopyConfig(config)
	config.ContentType = kruntime.ContentTypeProtobuf
	core, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	return core
}

var firstAddresses = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("2001:db8::1")}

// nth is the n-th address of a range.
func nth(first netip.Addr, n int) netip.Addr {
	bytes := first.AsSlice()
	for i := len(bytes) - 1; n > 0; i-- {
		n += int(bytes[i])
		bytes[i], n = byte(n), n>>8
	}
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}

func newAddressCluster(b *testing.B) *addressCluster {
	c := &addressCluster{apiServer: startAPIServer(b), addresses: 101_000}
	if n := os.Getenv(rangeEnv); n != "" {
		var err error
		c.addresses, err = strconv.Atoi(n)
		require.NoError(b, err, rangeEnv)
	}
	require.GreaterOrEqual(b, c.addresses, 1000, rangeEnv)
	c.order = rand.New(rand.NewPCG(1, 2)).Perm(c.addresses)
	config := c.config()
	installer, err := apiextensionsclient.NewForConfig(config)
	require.NoError(b, err)
	require.NoError(b, crds.Install(b.Context(), installer))
	core := coreOf(b, config)
	c.objects, err = networks.NewClient(config, core.CoreV1())
	require.NoError(b, err)
	_, err = core.CoreV1().Namespaces().Patch(b.Context(), "default", "application/merge-patch+json", []byte(`{"metadata":{"labels":{"team":"a"}}}`), metav1.PatchOptions{})
	require.NoError(b, err)
	nodes := []string{fillNode}
	for i := range preparers {
		nodes = append(nodes, fmt.Sprint("node-", i))
	}
	for _, node := range nodes {
		_, err = core.CoreV1().Nodes().Create(b.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
		require.NoError(b, err)
	}
	network := &v2alpha1.CiliumNetworkDriverNetwork{Spec: v2alpha1.CiliumNetworkDriverNetworkSpec{
		NamespaceSelector: &v2alpha1.LabelSelector{MatchLabels: map[string]v2alpha1.LabelValue{"team": "a"}},
	}}
	network.APIVersion, network.Kind, network.Name = v2alpha1.SchemeGroupVersion.String(), v2alpha1.NetworkKind, "storage"
	for i, cidr := range []string{"10.0.0.0/15", "2001:db8::/64"} {
		network.Spec.Subnets = append(network.Spec.Subnets, v2alpha1.NetworkSubnet{CIDR: cidr, Ranges: []v2alpha1.AddressRange{
			{From: firstAddresses[i].String(), To: nth(firstAddresses[i], c.addresses-1).String()},
		}})
	}
	custom, _, err := apiclient.NewCustom(config)
	require.NoError(b, err)
	require.NoError(b, custom.Post().Resource(v2alpha1.NetworkResource).Body(network).Do(b.Context()).Error())
	return c
}

// fill has devices of another node have a share of the addresses. They are stored as the API server stores them, since creating them
// one by one would take an hour.
func (c *addressCluster) fill(b *testing.B, has map[netip.Addr]string, share float64) {
	type put struct {
		RequestPut struct {
			Key   []byte `json:"key"`
			Value []byte `json:"value"`
		} `json:"requestPut"`
	}
	var puts []put
	var last netip.Addr
	send := func() {
		body, err := json.Marshal(map[string]any{"success": puts})
		require.NoError(b, err)
		response, err := http.Post(c.plane.EtcdURL()+"/v3/kv/txn", "application/json", bytes.NewReader(body))
		require.NoError(b, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(b, errors.Join(err, response.Body.Close()))
		require.Equal(b, http.StatusOK, response.StatusCode)
		puts = puts[:0]
	}
	began := time.Now()
	for until := int(share * float64(c.addresses)); c.filled < until; c.filled++ {
		for _, first := range firstAddresses {
			addr := nth(first, c.order[c.filled])
			if has[addr] != "" {
				continue
			}
			owner := fmt.Sprint("other-", c.filled)
			address := addressOf(addr, v2alpha1.CiliumNetworkDriverAddressSpec{
				Pool: "pool", Node: fillNode, Namespace: "default", Request: "net", Device: "vf0",
				Claim: v2alpha1.AddressOwner{Name: owner, UID: owner}, Pod: v2alpha1.AddressOwner{Name: owner, UID: owner},
			})
			address.UID, address.Generation, address.CreationTimestamp = uuid.NewUUID(), 1, metav1.Now()
			value, err := json.Marshal(address)
			require.NoError(b, err)
			var p put
			p.RequestPut.Key = []byte("/registry/" + v2alpha1.SchemeGroupVersion.Group + "/" + v2alpha1.AddressResource + "/" + address.Name)
			p.RequestPut.Value = value
			c.stored++
			last = addr
			if puts = append(puts, p); len(puts) == batch {
				send()
			}
		}
	}
	if len(puts) > 0 {
		send()
	}
	// The API server has seen all when its cache, which it looks for free addresses in, has the last.
	require.Eventually(b, func() bool {
		seen, err := c.objects.InBlock(b.Context(), "storage", v2alpha1.AddressBlock(last), false)
		return err == nil && slices.ContainsFunc(seen, func(a v2alpha1.CiliumNetworkDriverAddress) bool { return a.Spec.Address == last.String() })
	}, 10*time.Minute, 100*time.Millisecond)
	b.Logf("filled to %d of %d addresses of each family in %s", c.filled, c.addresses, time.Since(began).Round(time.Second))
}

// addressOf is the object of an address of the network.
func addressOf(addr netip.Addr, spec v2alpha1.CiliumNetworkDriverAddressSpec) *v2alpha1.CiliumNetworkDriverAddress {
	spec.Network, spec.Address = "storage", addr.String()
	return &v2alpha1.CiliumNetworkDriverAddress{
		TypeMeta: metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.AddressKind},
		ObjectMeta: metav1.ObjectMeta{
			Name:   v2alpha1.AddressName("storage", addr),
			Labels: map[string]string{v2alpha1.LabelNetwork: "storage", v2alpha1.LabelBlock: v2alpha1.AddressBlock(addr)},
		},
		Spec: spec,
	}
}

// startOperator starts the operator's part for networks, and returns how to stop it.
func (c *addressCluster) startOperator(b *testing.B) (requests *traffic, stop func()) {
	config := c.config()
	requests = &traffic{requests: map[string]int{}}
	requests.wrap(config)
	opts := hive.DefaultOptions()
	opts.ModulePrivateProviders = cell.ModulePrivateProviders{
		func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
			return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
		},
	}
	h := hive.NewWithOptions(opts, job.Cell, cell.SimpleHealthCell, statedb.Cell, operatornetworks.Cell, cell.Provide(
		func() *rest.Config { return config },
		func() prometheus.Registerer { return prometheus.NewRegistry() },
		func() operatorconfig.Config {
			return operatorconfig.Config{EnableNetworkDriver: true, K8sNamespace: "kube-system", LeaderElectionLeaseDuration: 15 * time.Second,
				LeaderElectionRenewDeadline: 10 * time.Second, LeaderElectionRetryPeriod: 2 * time.Second}
		},
	))
	log := slog.New(slog.NewTextHandler(b.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	require.NoError(b, h.Start(log, context.Background()))
	return requests, func() { require.NoError(b, h.Stop(log, context.Background())) }
}

func heap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// used waits until the operator has counted so many addresses.
func (c *addressCluster) used(b *testing.B, addresses int) {
	b.Helper()
	require.Eventually(b, func() bool {
		all, err := c.objects.ListNetworks(b.Context())
		return err == nil && all[0].Status.UsedAddresses == int64(addresses)
	}, 10*time.Minute, 500*time.Millisecond)
}

// preparer is the driver's of a node, with a counted client.
type preparer struct {
	*fixture
	claims   ClaimClient
	requests *traffic
}

func (c *addressCluster) preparer(b *testing.B, node string) *preparer {
	f := newFixture(b)
	config := c.config()
	requests := &traffic{requests: map[string]int{}}
	requests.wrap(config)
	core := coreOf(b, config)
	client, err := networks.NewClient(config, core.CoreV1())
	require.NoError(b, err)
	claims := NewClaimClient(core.ResourceV1())
	f.NodeName = node
	f.world.StatusWriter = NewWriter(WriterParams{
		Logger: f.Logger, DB: f.db, Allocations: f.allocations, Client: claims, DriverName: testDriver, NodeName: node, BootID: testBoot,
	})
	f.world.Addresses = networks.NewKeeper(networks.Params{Logger: f.Logger, Objects: client, Node: node, Held: f.rows, Waits: func(*tables.DRAAllocation, string) {}})
	f.Networks = networks.NewResolver(client, func() labels.Set { return nil }, wires.NewTable().Between)
	return &preparer{f, claims, requests}
}

// prepared is what the preparation of one claim took, and what it has.
type prepared struct {
	reads, writes, ofAddresses int
	took                       time.Duration
	addresses                  []netip.Prefix
}

// prepare prepares a new claim for a device.
func (p *preparer) prepare(ctx context.Context, c *addressCluster, name string) (prepared, error) {
	p.addDevice(&fakeDevice{Name: name})
	claim := newClaim(name, with("net", name), fromClaim(`{"network":"storage"}`, "net"))
	claim.Status.Allocation.Devices.Results[0].Pool = pools.Name(p.NodeName, "pool")
	c.create(claim)
	p.requests.take()
	start := time.Now()
	claim, err := p.claims.GetClaim(ctx, "default", name) // as kubelet's helper does
	if err == nil {
		_, err = p.Prepare(ctx, claim)
	}
	if err != nil {
		return prepared{}, err
	}
	took := time.Since(start)
	requests := p.requests.take()
	return prepared{
		reads:       sum(requests, http.MethodGet),
		writes:      sum(requests, http.MethodPost, http.MethodPatch, http.MethodPut, http.MethodDelete),
		ofAddresses: requests["GET "+v2alpha1.AddressResource] + requests["POST "+v2alpha1.AddressResource],
		took:        took, addresses: p.row(name).Config.Joined.Addresses,
	}, nil
}

// BenchmarkAPIAddresses prepares claims for a device each that joins a network of both families, whose 101,000 addresses of
// each are 50, 90 and 99 % full, against a real API server: what is asked of it, and what the operator's part for networks takes. It takes
// minutes, and each figure is of one run; make bench-api runs it.
func BenchmarkAPIAddresses(b *testing.B) {
	c := newAddressCluster(b)
	var nodes []*preparer
	for i := range preparers {
		nodes = append(nodes, c.preparer(b, fmt.Sprint("node-", i)))
	}
	has := map[netip.Addr]string{}
	for _, share := range []float64{0.5, 0.9, 0.99} {
		b.Run(fmt.Sprintf("full=%.0f%%", 100*share), func(b *testing.B) {
			c.fill(b, has, share)
			before := heap()
			operator, stop := c.startOperator(b)
			defer stop()
			objects := c.stored + len(has)
			c.used(b, objects)
			b.ReportMetric(float64(int64(heap())-int64(before))/float64(objects), "operator-heap-B/address")
			operator.take()

			prepares := min(maxPrepares, c.addresses/200/preparers*preparers)
			all := make([][]prepared, preparers)
			group, ctx := errgroup.WithContext(b.Context())
			for i, node := range nodes {
				group.Go(func() error {
					for n := range prepares / preparers {
						one, err := node.prepare(ctx, c, fmt.Sprintf("claim-%.0f-%d-%d", 100*share, i, n))
						if err != nil {
							return err
						}
						all[i] = append(all[i], one)
					}
					return nil
				})
			}
			require.NoError(b, group.Wait())
			c.used(b, objects+2*prepares)
			b.ReportMetric(float64(sum(operator.take(), http.MethodPatch))/float64(prepares), "operator-writes/prepare")

			reads, writes, ofAddresses, millis := []float64{}, []float64{}, []float64{}, []float64{}
			for i := range all {
				for _, one := range all[i] {
					reads, writes, ofAddresses = append(reads, float64(one.reads)), append(writes, float64(one.writes)), append(ofAddresses, float64(one.ofAddresses))
					millis = append(millis, float64(one.took.Microseconds())/1000)
					require.Len(b, one.addresses, 2)
					for _, a := range one.addresses {
						require.Empty(b, has[a.Addr()], "%s twice", a)
						has[a.Addr()] = nodes[i].NodeName
					}
				}
			}
			report := func(what string, of []float64) (p99 float64) {
				slices.Sort(of)
				p99 = of[len(of)*99/100-1]
				b.ReportMetric(of[len(of)/2], what+"-p50")
				b.ReportMetric(p99, what+"-p99")
				return p99
			}
			readsP99, writesP99, addressesP99 := report("reads", reads), report("writes", writes), report("address-requests", ofAddresses)
			report("ms", millis)
			b.ReportMetric(0, "ns/op")
			if share <= 0.5 && prepares == maxPrepares {
				require.Equal(b, []float64{3, 3}, []float64{reads[0], writes[0]}, "claim, networks, namespace; two addresses and the status")
			}
			if share <= 0.9 {
				// At most a list and a Create more for either family.
				require.LessOrEqual(b, addressesP99, 6.0)
				require.LessOrEqual(b, readsP99, 5.0)
				require.LessOrEqual(b, writesP99, 5.0)
			}
		})
	}
	c.all(b, nodes, has)
}

// all checks that the server has each address for the node that it was given to.
func (c *addressCluster) all(b *testing.B, nodes []*preparer, has map[netip.Addr]string) {
	count := 0
	for _, node := range nodes {
		own, err := c.objects.OfNode(b.Context(), node.NodeName)
		require.NoError(b, err)
		count += len(own)
		for i := range own {
			require.Equal(b, node.NodeName, has[netip.MustParseAddr(own[i].Spec.Address)])
		}
	}
	require.Len(b, has, count)
}
