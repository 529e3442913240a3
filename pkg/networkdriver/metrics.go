// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import "github.com/prometheus/client_golang/prometheus"

// metrics tell of what the driver does without, and so of what somebody should see to.
type metrics struct {
	lastConfig  prometheus.Gauge
	quarantined prometheus.Gauge
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
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.lastConfig, m.quarantined}
}
