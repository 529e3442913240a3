// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Metrics count faults. A nil *Metrics counts nothing.
type Metrics struct {
	unhealthy *prometheus.GaugeVec
	faults    *prometheus.CounterVec
}

// NewMetrics makes the metrics; they are not registered yet.
func NewMetrics() *Metrics {
	m := &Metrics{
		unhealthy: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "unhealthy_devices",
			Help: "Devices that have a fault, by its cause. A device may have several.",
		}, []string{"cause"}),
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "device_faults_total",
			Help: "Faults of devices that lasted, by cause.",
		}, []string{"cause"}),
	}
	for _, cause := range types.Causes() {
		m.unhealthy.WithLabelValues(string(cause))
		m.faults.WithLabelValues(string(cause))
	}
	return m
}

// Collectors returns what there is to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.unhealthy, m.faults}
}

// changed counts that a device's row is another one; nil stands for a healthy device.
func (m *Metrics) changed(before, after *tables.DeviceHealth) {
	if m == nil {
		return
	}
	was, is := causesOf(before), causesOf(after)
	for cause := range was {
		if !is[cause] {
			m.unhealthy.WithLabelValues(string(cause)).Dec()
		}
	}
	for cause := range is {
		if !was[cause] {
			m.unhealthy.WithLabelValues(string(cause)).Inc()
			m.faults.WithLabelValues(string(cause)).Inc()
		}
	}
}

func causesOf(h *tables.DeviceHealth) map[types.Cause]bool {
	causes := map[types.Cause]bool{}
	if h != nil {
		for _, f := range h.Faults {
			causes[f.Cause] = true
		}
	}
	return causes
}
