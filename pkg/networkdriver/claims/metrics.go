// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
)

// Metrics counts the calls for claims. A nil *Metrics counts nothing.
type Metrics struct {
	calls    *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewMetrics makes the metrics; they are not registered yet.
func NewMetrics() *Metrics {
	return &Metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "claim_operations_total",
			Help: "Claims prepared and unprepared, by result: success, invalid (the claim must be changed) or error.",
		}, []string{"operation", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "claim_operation_duration_seconds",
			Help:    "Time to prepare or unprepare a claim, by the stage that failed, none if none did.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}, []string{"operation", "stage"}),
	}
}

// Collectors returns what there is to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.calls, m.duration}
}

// done counts one call that began at start.
func (m *Metrics) done(operation string, start time.Time, err error) {
	if m == nil {
		return
	}
	result := "success"
	switch {
	case err != nil && IsPermanent(err):
		result = "invalid"
	case err != nil:
		result = "error"
	}
	m.calls.WithLabelValues(operation, result).Inc()
	m.duration.WithLabelValues(operation, stage.Of(err)).Observe(time.Since(start).Seconds())
}
