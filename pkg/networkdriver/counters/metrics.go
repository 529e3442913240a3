// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package counters

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// labels are those of every series. There is a set of series for each device that a pod has, and no more.
var labels = []string{"device", "pf", "pool", "network", "namespace", "pod", "claim"}

// families are the metrics and where their values are.
var families = []struct {
	desc  *prometheus.Desc
	value func(rtlink.Counters) uint64
}{
	{counter("device_receive_bytes_total", "Bytes that the pod has received through a device."), func(c rtlink.Counters) uint64 { return c.RxBytes }},
	{counter("device_receive_packets_total", "Packets that the pod has received through a device."), func(c rtlink.Counters) uint64 { return c.RxPackets }},
	{counter("device_receive_dropped_total", "Packets for a device that were dropped."), func(c rtlink.Counters) uint64 { return c.RxDropped }},
	{counter("device_transmit_bytes_total", "Bytes that the pod has sent through a device."), func(c rtlink.Counters) uint64 { return c.TxBytes }},
	{counter("device_transmit_packets_total", "Packets that the pod has sent through a device."), func(c rtlink.Counters) uint64 { return c.TxPackets }},
	{counter("device_transmit_dropped_total", "Packets of a device that were dropped."), func(c rtlink.Counters) uint64 { return c.TxDropped }},
}

func counter(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName("cilium", "networkdriver", name), help, labels, nil)
}
