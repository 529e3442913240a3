// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
)

// Metrics count the moves of links.
type Metrics struct {
	moves    *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewMetrics returns the metrics, registered.
func NewMetrics(registry prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		moves: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "moves_total",
			Help: "Devices moved between host and pods and freed, by operation (attach, detach, free) and result (success, failure).",
		}, []string{"operation", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "move_duration_seconds",
			Help:    "Time to move or free one device, by operation and the stage that failed, none if none did.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 12),
		}, []string{"operation", "stage"}),
	}
	for _, op := range []string{"attach", "detach", "free"} {
		for _, result := range []string{"success", "failure"} {
			m.moves.WithLabelValues(op, result)
		}
	}
	for _, c := range []prometheus.Collector{m.moves, m.duration} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Metrics) observe(operation string, took time.Duration, err error) {
	result := "success"
	if err != nil {
		result = "failure"
	}
	m.moves.WithLabelValues(operation, result).Inc()
	m.duration.WithLabelValues(operation, stage.Of(err)).Observe(took.Seconds())
}
