// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import "github.com/prometheus/client_golang/prometheus"

// Metrics tell whether the runtime is connected.
type Metrics struct {
	connected   prometheus.Gauge
	connections prometheus.Counter
}

// NewMetrics returns the metrics, registered.
func NewMetrics(registry prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "nri_connected",
			Help: "Whether the driver is connected to the container runtime through NRI.",
		}),
		connections: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "cilium", Subsystem: "networkdriver", Name: "nri_connections_total",
			Help: "Connections to the container runtime that were established; more than one means reconnects.",
		}),
	}
	for _, c := range []prometheus.Collector{m.connected, m.connections} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
