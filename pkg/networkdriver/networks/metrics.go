// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts what devices are given of networks. A nil *Metrics counts nothing.
type Metrics struct {
	allocations *prometheus.CounterVec
	duration    prometheus.Histogram
}

// NewMetrics makes the metrics; they are not registered yet.
func NewMetrics() *Metrics {
	return &Metrics{
		allocations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "network_allocations_total",
			Help: "Devices that were to get addresses of a network, by result: success, full (no address is left) or error.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "network_allocation_duration_seconds",
			Help:    "Time until a device had its addresses, or was refused, with the wait for a network that was full.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}),
	}
}

// Collectors returns what there is to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.allocations, m.duration}
}

// done counts one device, whose addresses were asked for at start.
func (m *Metrics) done(start time.Time, err error) {
	if m == nil {
		return
	}
	result := "success"
	switch {
	case errors.Is(err, errFull):
		result = "full"
	case err != nil:
		result = "error"
	}
	m.allocations.WithLabelValues(result).Inc()
	m.duration.Observe(time.Since(start).Seconds())
}
