// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the operator's metrics.
type metrics struct {
	writes         *prometheus.CounterVec
	clusterConfigs *prometheus.GaugeVec
	nodes          prometheus.Gauge
	pending        prometheus.Gauge
	frozen         prometheus.Gauge
	drifts         prometheus.Counter
	leader         prometheus.Gauge
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "cilium", Subsystem: "networkdriver_operator", Name: name, Help: help}
	}
	m := &metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts(opts("writes_total",
			"Writes to the Kubernetes API, by resource (nodeconfig, clusterconfig), operation (create, update, delete, status) and result (success, error).")),
			[]string{"resource", "operation", "result"}),
		clusterConfigs: prometheus.NewGaugeVec(prometheus.GaugeOpts(opts("cluster_configs",
			"Cluster configs, by state: active, conflict or invalid.")), []string{"state"}),
		nodes:   prometheus.NewGauge(prometheus.GaugeOpts(opts("nodes", "CiliumNodes in the cluster."))),
		pending: prometheus.NewGauge(prometheus.GaugeOpts(opts("pending_node_configs", "Node configs that are to be written."))),
		frozen: prometheus.NewGauge(prometheus.GaugeOpts(opts("frozen_node_configs",
			"Node configs that stay as they are, since what they were made from is in conflict or invalid, or the CiliumNode is missing."))),
		drifts: prometheus.NewCounter(prometheus.CounterOpts(opts("drifts_total",
			"Node configs that someone else changed and that are put right."))),
		leader: prometheus.NewGauge(prometheus.GaugeOpts(opts("leader", "1 while this replica is the one that writes."))),
	}
	for _, c := range []prometheus.Collector{m.writes, m.clusterConfigs, m.nodes, m.pending, m.frozen, m.drifts, m.leader} {
		if err := registerer.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// wrote counts one write.
func (m *metrics) wrote(resource, operation string, err error) {
	result := "success"
	if err != nil {
		result = "error"
	}
	m.writes.WithLabelValues(resource, operation, result).Inc()
}

// totals is what the ledger counts.
type totals struct {
	nodes, pending, frozen, active, conflicts, invalid int
	drifts                                             uint64
}

// totals returns the counts, and resets that of drifts.
func (l *ledger) totals() totals {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := totals{nodes: l.assignment.Len(), pending: l.pending, frozen: l.frozen, drifts: l.drifts}
	l.drifts = 0
	for row := range l.tables.clusterConfigs.All(l.tables.db.ReadTxn()) {
		switch {
		case row.Invalid != "":
			t.invalid++
		case row.Winner != "":
			t.conflicts++
		default:
			t.active++
		}
	}
	return t
}

func (m *metrics) set(t totals) {
	m.nodes.Set(float64(t.nodes))
	m.pending.Set(float64(t.pending))
	m.frozen.Set(float64(t.frozen))
	m.drifts.Add(float64(t.drifts))
	m.clusterConfigs.WithLabelValues("active").Set(float64(t.active))
	m.clusterConfigs.WithLabelValues("conflict").Set(float64(t.conflicts))
	m.clusterConfigs.WithLabelValues("invalid").Set(float64(t.invalid))
}
