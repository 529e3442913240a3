// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// metrics are those of networks.
type metrics struct {
	addresses *prometheus.GaugeVec
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	m := &metrics{addresses: prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "cilium", Subsystem: "networkdriver_operator", Name: "network_addresses",
		Help: "Addresses of networks, by network, family (ipv4, ipv6) and state (used, reserved, free).",
	}, []string{"network", "family", "state"})}
	return m, registerer.Register(m.addresses)
}

func (m *metrics) set(network *v2alpha1.CiliumNetworkDriverNetwork) {
	m.forget(network.Name)
	for _, s := range network.Status.Subnets {
		family := "ipv6"
		if prefix, err := netip.ParsePrefix(s.CIDR); err == nil && prefix.Addr().Is4() {
			family = "ipv4"
		}
		m.addresses.WithLabelValues(network.Name, family, "used").Add(float64(s.Used))
		m.addresses.WithLabelValues(network.Name, family, "reserved").Add(float64(s.Reserved))
		m.addresses.WithLabelValues(network.Name, family, "free").Add(float64(s.Free))
	}
}

func (m *metrics) forget(network string) {
	m.addresses.DeletePartialMatch(prometheus.Labels{"network": network})
}
