// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics count what the hooks do and whether the runtime is connected.
type Metrics struct {
	moves       *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	connected   prometheus.Gauge
	connections prometheus.Counter
}

// NewMetrics returns the metrics, registered.
func NewMetrics(registry prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		moves: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "moves_total",
			Help: "Devices moved between host and pods, by operation (attach, detach) and result (success, failure).",
		}, []string{"operation", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "move_duration_seconds",
			Help:    "Time to move one device, by operation.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 12),
		}, []string{"operation"}),
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "nri_connected",
			Help: "Whether the driver is connected to the container runtime through NRI.",
		}),
		connections: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "nri_connections_total",
			Help: "Connections to the container runtime that were established; more than one means reconnects.",
		}),
	}
	for _, op := range []string{"attach", "detach"} {
		for _, result := range []string{"success", "failure"} {
			m.moves.WithLabelValues(op, result)
		}
	}
	for _, c := range []prometheus.Collector{m.moves, m.duration, m.connected, m.connections} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Metrics) observe(operation string, start time.Time, err error) {
	result := "success"
	if err != nil {
		result = "failure"
	}
	m.moves.WithLabelValues(operation, result).Inc()
	m.duration.WithLabelValues(operation).Observe(time.Since(start).Seconds())
}
