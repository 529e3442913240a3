// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// metrics tell of what the driver does without, and so of what somebody should see to.
type metrics struct {
	lastConfig  prometheus.Gauge
	quarantined prometheus.Gauge
	allocations *prometheus.GaugeVec
	pools       *prometheus.GaugeVec
}

func newMetrics() *metrics {
	return &metrics{
		lastConfig: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "last_config",
			Help: "Whether the driver runs from the last node config, since the API server has not said what it is now since the agent was started.",
		}),
		quarantined: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "quarantined_devices",
			Help: "Devices that are not offered, since what the journal has of them cannot be undone.",
		}),
		allocations: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "allocations",
			Help: "Devices that are prepared for claims, by state: Prepared, Attached, Moved, Releasing or Failed.",
		}, []string{"state"}),
		pools: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "pool_devices",
			Help: "Devices of each pool: offered, those of them that are free, and allocated.",
		}, []string{"pool", "state"}),
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.lastConfig, m.quarantined, m.allocations, m.pools}
}

// inUse counts devices by their states and pools.
func (m *metrics) inUse(rows []*tables.DRAAllocation, pools []v2alpha1.DevicePoolStatus) {
	states := map[string]int{}
	for _, row := range rows {
		states[row.State()]++
	}
	for _, state := range tables.States {
		m.allocations.WithLabelValues(state).Set(float64(states[state]))
	}
	m.pools.Reset()
	for _, p := range pools {
		m.pools.WithLabelValues(p.Name, "offered").Set(float64(p.Devices))
		m.pools.WithLabelValues(p.Name, "free").Set(float64(p.Free))
		m.pools.WithLabelValues(p.Name, "allocated").Set(float64(p.Allocated))
	}
}
