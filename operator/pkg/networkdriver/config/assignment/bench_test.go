// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package assignment

import (
	"fmt"
	"runtime"
	"strconv"
	"testing"
	"time"
)

// nodeLabels are labels as a node has them: ten, of which one says its group.
func nodeLabels(node, group int) map[string]string {
	name := fmt.Sprintf("node-%06d", node)
	return map[string]string{
		"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
		"topology.kubernetes.io/region": "r1", "topology.kubernetes.io/zone": strconv.Itoa(node % 3),
		"node.kubernetes.io/instance-type": "metal", "beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux",
		"rack": strconv.Itoa(node / 40), "group": strconv.Itoa(group),
	}
}

// filled has nodes in one group for each config. The memory is what it holds, without the labels.
func filled(tb testing.TB, nodes, configs int) (a *Assignment, bytes uint64) {
	sets := make([]map[string]string, nodes)
	for i := range sets {
		sets[i] = nodeLabels(i, i%configs)
	}
	before := heap()
	a = New()
	for i := range configs {
		a.SetConfig(conf(tb, fmt.Sprintf("config-%03d", i), i, fmt.Sprintf("group=%d", i)))
	}
	for i, set := range sets {
		a.SetNode(set["kubernetes.io/hostname"], set)
		sets[i] = set
	}
	a.Resolve()
	bytes = heap() - before
	runtime.KeepAlive(sets)
	return a, bytes
}

func heap() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

var sizes = []struct{ nodes, configs int }{{5_000, 50}, {100_000, 50}, {100_000, 200}}

// BenchmarkFill is a start over a cluster: all nodes, all configs, owners.
func BenchmarkFill(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d/configs=%d", size.nodes, size.configs), func(b *testing.B) {
			var bytes uint64
			for b.Loop() {
				_, bytes = filled(b, size.nodes, size.configs)
			}
			b.ReportMetric(float64(bytes)/float64(size.nodes), "heap-B/node")
		})
	}
}

// BenchmarkNodeEvent is one relabel: the node moves to another config, and back.
func BenchmarkNodeEvent(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d/configs=%d", size.nodes, size.configs), func(b *testing.B) {
			a, _ := filled(b, size.nodes, size.configs)
			sets := []map[string]string{nodeLabels(7, 8), nodeLabels(7, 7)}
			i := 0
			for b.Loop() {
				a.SetNode("node-000007", sets[i%2])
				if len(a.Resolve().Nodes) != 1 {
					b.Fatal("one relabel changes one node")
				}
				i++
			}
		})
	}
}

// BenchmarkSelectorMoves is an edit of a config's selector: half of its nodes go, and come back.
func BenchmarkSelectorMoves(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d/configs=%d", size.nodes, size.configs), func(b *testing.B) {
			a, _ := filled(b, size.nodes, size.configs)
			i := 0
			for b.Loop() {
				a.SetConfig(conf(b, "config-007", 7, []string{"group=7,topology.kubernetes.io/zone=1", "group=7"}[i%2]))
				a.Resolve()
				i++
			}
		})
	}
}

// BenchmarkAllConflict is the worst overlap: every config selects every node, and the first one goes and comes back.
func BenchmarkAllConflict(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprintf("nodes=%d/configs=%d", size.nodes, size.configs), func(b *testing.B) {
			a := New()
			for i := range size.configs {
				a.SetConfig(conf(b, fmt.Sprintf("config-%03d", i), i, ""))
			}
			for i := range size.nodes {
				a.SetNode(fmt.Sprintf("node-%06d", i), nil)
			}
			a.Resolve()
			start := time.Now()
			for b.Loop() {
				a.DeleteConfig("config-000")
				if len(a.Resolve().Nodes) != size.nodes {
					b.Fatal("all nodes change")
				}
				a.SetConfig(conf(b, "config-000", 0, ""))
				a.Resolve()
			}
			b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(b.N)/float64(2*size.nodes), "ns/node")
		})
	}
}
