// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts registration and publication. A nil *Metrics counts nothing.
type Metrics struct {
	registrations *prometheus.CounterVec
	registered    prometheus.Gauge
	publications  *prometheus.CounterVec
	devices       *prometheus.GaugeVec
	conflicts     prometheus.Gauge
	omissions     prometheus.Gauge
	// upToDate and failing tell an old publication from one that there was nothing to change in.
	upToDate prometheus.Gauge
	failing  prometheus.Gauge
}

// NewMetrics makes the metrics; they are not registered yet.
func NewMetrics() *Metrics {
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: "cilium", Subsystem: "networkdriver", Name: name, Help: help}
	}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "cilium", Subsystem: "networkdriver", Name: name, Help: help}
	}
	return &Metrics{
		registrations: prometheus.NewCounterVec(counter("registration_attempts_total",
			"Attempts to register with kubelet, by result: success or error."), []string{"result"}),
		registered: prometheus.NewGauge(gauge("registered", "1 while the driver is registered with kubelet.")),
		publications: prometheus.NewCounterVec(counter("publications_total",
			"Times a pool's ResourceSlices were brought up to date, by result: success or the reason of the failure."),
			[]string{"result"}),
		devices: prometheus.NewGaugeVec(gauge("published_devices", "Devices advertised in each pool."), []string{"pool"}),
		conflicts: prometheus.NewGauge(gauge("pool_conflicts",
			"Devices that more than one pool lays claim to.")),
		omissions: prometheus.NewGauge(gauge("publication_omissions",
			"Pools and device attributes that are left out because ResourceSlices cannot express them.")),
		upToDate: prometheus.NewGauge(gauge("last_publication_timestamp_seconds",
			"When a pool's ResourceSlices were brought up to date last, in seconds since 1970; 0 before the first time.")),
		failing: prometheus.NewGauge(gauge("publication_failing",
			"1 while ResourceSlices are not as they should be, since they cannot be published.")),
	}
}

// Collectors returns what there is to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.registrations, m.registered, m.publications, m.devices, m.conflicts, m.omissions, m.upToDate, m.failing}
}

func (m *Metrics) attempted(err error) {
	if m == nil {
		return
	}
	result := "success"
	if err != nil {
		result = "error"
	}
	m.registrations.WithLabelValues(result).Inc()
}

func (m *Metrics) isRegistered(registered bool) {
	if m == nil {
		return
	}
	m.registered.Set(0)
	if registered {
		m.registered.Set(1)
	}
}

func (m *Metrics) isFailing(failing bool) {
	if m == nil {
		return
	}
	m.failing.Set(0)
	if failing {
		m.failing.Set(1)
	}
}

// synced counts one pool's slices brought up to date, or not.
func (m *Metrics) synced(p *PublicationProblem) {
	if m == nil {
		return
	}
	result := "success"
	if p != nil {
		result = p.Reason
	}
	m.publications.WithLabelValues(result).Inc()
	if p == nil {
		m.upToDate.SetToCurrentTime()
	}
}

func (m *Metrics) published(old, p *Publication) {
	if m == nil {
		return
	}
	if old != nil {
		for pool := range old.Pools {
			if _, ok := p.Pools[pool]; !ok {
				m.devices.DeleteLabelValues(pool)
			}
		}
	}
	for pool, devices := range p.Pools {
		m.devices.WithLabelValues(pool).Set(float64(devices))
	}
	m.conflicts.Set(float64(len(p.Conflicts)))
	m.omissions.Set(float64(len(p.Omissions)))
}
