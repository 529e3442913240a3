// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// nodeEvent is a CiliumNode with ten labels, as the cache has it.
func nodeEvent(node, group int) event[*metav1.PartialObjectMetadata] {
	name := fmt.Sprintf("node-%06d", node)
	return event[*metav1.PartialObjectMetadata]{object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), ResourceVersion: strconv.Itoa(node + 1), Labels: map[string]string{
			"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
			"topology.kubernetes.io/region": "r1", "topology.kubernetes.io/zone": strconv.Itoa(node % 3),
			"node.kubernetes.io/instance-type": "metal", "beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux",
			"rack": strconv.Itoa(node / 40), "group": strconv.Itoa(group),
		},
	}}}
}

func newTestLedger(tb testing.TB) *ledger {
	tb.Helper()
	tables, err := newTables(statedb.New())
	require.NoError(tb, err)
	l, err := newLedger(slog.New(slog.DiscardHandler), tables, definitions{})
	require.NoError(tb, err)
	return l
}

// serve answers a change as an API server would, and returns the work that follows.
func serve(l *ledger, c change, version int) work {
	if c.operation == opDelete {
		return l.wrote(c, nil)
	}
	answer := &nodeConfig{
		ObjectMeta: metav1.ObjectMeta{
			Name: c.node, UID: types.UID(c.node), ResourceVersion: strconv.Itoa(version), Generation: int64(version),
			Labels:      map[string]string{v2alpha1.LabelManagedBy: v2alpha1.ManagedByOperator},
			Annotations: map[string]string{v2alpha1.AnnotationClusterConfig: c.clusterConfig},
		},
		digest: c.digest,
	}
	return l.wrote(c, answer)
}

func clusterConfigEvent(name string, second int, selector map[string]v2alpha1.LabelValue, dummies int) event[*clusterConfig] {
	return event[*clusterConfig]{object: &clusterConfig{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name), Generation: 1, ResourceVersion: "1",
			CreationTimestamp: metav1.NewTime(time.Unix(int64(second), 0)),
		},
		Spec: clusterConfigSpec{
			NodeSelector: &v2alpha1.LabelSelector{MatchLabels: selector},
			Spec:         json.RawMessage(fmt.Sprintf(`{"deviceManagerConfigs":{"dummy":{"enabled":true,"count":%d}}}`, dummies)),
		},
	}}
}

// settled returns a ledger over a cluster in which all is written, and the heap that it holds.
func settled(tb testing.TB, nodes, configs int) (l *ledger, bytes uint64) {
	tb.Helper()
	b := newBatch()
	for i := range configs {
		name := fmt.Sprintf("config-%03d", i)
		b.clusterConfigs[name] = clusterConfigEvent(name, i, map[string]v2alpha1.LabelValue{"group": v2alpha1.LabelValue(strconv.Itoa(i))}, i)
	}
	for i := range nodes {
		e := nodeEvent(i, i%configs)
		b.nodes[e.object.Name] = e
	}
	before := heap()
	l = newTestLedger(tb)
	for node := range l.apply(b).nodes {
		serve(l, l.plan(node), 1)
	}
	require.Zero(tb, l.totals().pending)
	bytes = heap() - before
	runtime.KeepAlive(b)
	return l, bytes
}

func heap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// BenchmarkRelabel takes one node from one config to another, with all that the operator does beside the write itself:
// assignment, tables, planning the write, taking in the answer, and the two statuses.
func BenchmarkRelabel(b *testing.B) {
	for _, size := range []struct{ nodes, configs int }{{5_000, 50}, {100_000, 50}, {100_000, 200}} {
		b.Run(fmt.Sprintf("nodes=%d/configs=%d", size.nodes, size.configs), func(b *testing.B) {
			l, bytes := settled(b, size.nodes, size.configs)
			events := []*batch{newBatch(), newBatch()}
			for i, e := range events {
				e.nodes["node-000007"] = nodeEvent(7, 8-i)
			}
			version, writes := 1, 0
			for b.Loop() {
				w := l.apply(events[version%2])
				version++
				for node := range w.nodes {
					writes++
					for name := range serve(l, l.plan(node), version).configs {
						w.configs[name] = struct{}{}
					}
				}
				for name := range w.configs {
					l.verdict(name).status()
				}
			}
			b.ReportMetric(float64(bytes)/float64(size.nodes), "heap-B/node")
			b.ReportMetric(float64(writes)/float64(b.N), "writes/op")
		})
	}
}

// cpu is the time that this process has computed.
func cpu() time.Duration {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkAPI is a cluster of 5,000 nodes and 50 configs on a real API server: from nothing to settled, relabels, and
// restarts. It takes minutes, and each figure is of one run; make bench-api runs it.
func BenchmarkAPI(b *testing.B) {
	const nodes, configs = 5000, 50
	c := startCluster(b)
	require.NoError(b, c.installCRDs(context.Background()))
	c.nodes(b, nodes, configs)
	for i := range configs {
		c.config(b, fmt.Sprintf("config-%02d", i), i, i)
	}
	start := func() *replica {
		r, err := c.startReplica(b, func(config *Config) {
			*config = defaultConfig
			config.EnableNetworkDriver = true
			config.NetworkDriverWriteQPS, config.NetworkDriverWriteBurst = 2000, 2000
		})
		require.NoError(b, err)
		return r
	}
	// report gives the figures of one thing, in place of those of the benchmark's loop.
	report := func(name string, run func(b *testing.B) (r *replica, n int)) {
		b.Run(name, func(b *testing.B) {
			before, began := cpu(), time.Now()
			r, n := run(b)
			b.ReportMetric(float64(time.Since(began).Microseconds())/float64(n), "µs/op")
			b.ReportMetric(float64((cpu()-before).Microseconds())/float64(n), "cpu-µs/op")
			b.ReportMetric(0, "ns/op")
			nodeWrites := r.traffic.count("POST", v2alpha1.NodeConfigResource) + r.traffic.count("PATCH", v2alpha1.NodeConfigResource) +
				r.traffic.count("DELETE", v2alpha1.NodeConfigResource)
			b.ReportMetric(float64(nodeWrites)/float64(n), "node-config-writes/op")
			b.ReportMetric(float64(r.traffic.count("PATCH", v2alpha1.ClusterConfigResource))/float64(n), "status-writes/op")
			b.ReportMetric(float64(r.traffic.count("GET", v2alpha1.NodeConfigResource)), "reads")
		})
	}
	settled := func(b *testing.B) {
		b.Helper()
		require.Eventually(b, func() bool {
			for i := range configs {
				if !c.ready(b, fmt.Sprintf("config-%02d", i), nodes/configs) {
					return false
				}
			}
			return true
		}, 10*time.Minute, 250*time.Millisecond)
	}
	var r *replica
	report("settle", func(b *testing.B) (*replica, int) {
		r = start()
		settled(b)
		return r, 1
	})
	// relabel moves one node to another group, and returns when its node config is that group's.
	relabel := func(b *testing.B, i int) {
		b.Helper()
		name := fmt.Sprintf("node-%04d", i)
		group := (i + 1) % configs
		watch, err := c.dynamic.Resource(nodeConfigResource).Watch(context.Background(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		require.NoError(b, err)
		defer watch.Stop()
		_, err = c.dynamic.Resource(nodeResource).Patch(context.Background(), name, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"labels":{"group":"%d"}}}`, group), metav1.PatchOptions{})
		require.NoError(b, err)
		for e := range watch.ResultChan() {
			if e.Object.(*unstructured.Unstructured).GetAnnotations()[v2alpha1.AnnotationClusterConfig] == fmt.Sprintf("config-%02d", group) {
				return
			}
		}
		b.Fatal("the watch ended")
	}
	report("relabel", func(b *testing.B) (*replica, int) {
		r.traffic.reset()
		const n = 20
		for i := range n {
			// Each takes a node from one config and gives it to another, whose statuses change.
			relabel(b, 2*i)
		}
		require.Eventually(b, func() bool {
			return c.ready(b, "config-01", nodes/configs+1) && c.ready(b, "config-39", nodes/configs+1)
		}, time.Minute, 10*time.Millisecond)
		return r, n
	})
	report("restart", func(b *testing.B) (*replica, int) {
		require.NoError(b, r.stop())
		r = start()
		require.Eventually(b, func() bool { return r.checks.Status().Ready }, time.Minute, time.Millisecond)
		return r, 1
	})
	// What the restarted operator writes is for the next relabel only.
	report("relabel-after-restart", func(b *testing.B) (*replica, int) {
		relabel(b, 101) // to config-02, which has lost a node to config-03 before
		require.Eventually(b, func() bool { return c.ready(b, "config-02", nodes/configs) }, time.Minute, 10*time.Millisecond)
		return r, 1
	})
	require.NoError(b, r.stop())
}
