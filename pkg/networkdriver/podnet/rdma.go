// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// Follower has RDMA devices follow their links, as [rdma.Follower] does.
type Follower interface {
	Leave(d rdma.Device, host *netnamespace.Namespace) error
	Enter(d rdma.Device, host, pod *netnamespace.Namespace, ifName string) error
	Return(d rdma.Device, host, pod *netnamespace.Namespace, ifName string) error
}

// leaveRDMA is for a link that is on the host, before it moves.
func (m *Mover) leaveRDMA(host *nic.Place, dev types.Device) error {
	if d := types.RDMADeviceOf(dev); d.Name != "" {
		return m.cfg.RDMA.Leave(d, host.NS)
	}
	return nil
}

// enterRDMA is for a link that has moved into the pod. Programs whose claim asks for no RDMA device get none there.
func (m *Mover) enterRDMA(host, pod *nic.Place, dev types.Device, ifName string, config types.DeviceConfig) error {
	if !config.RDMA {
		return nil
	}
	return m.cfg.RDMA.Enter(types.RDMADeviceOf(dev), host.NS, pod.NS, ifName)
}

// returnRDMA is for a link that is on the host again, by whatever name. pod is nil for a namespace that has ended.
func (m *Mover) returnRDMA(host, pod *nic.Place, dev types.Device) error {
	d := types.RDMADeviceOf(dev)
	if d.Name == "" {
		return nil
	}
	link, err := host.Find(dev.Link(), nil)
	if link == nil || err != nil {
		return err
	}
	var from *netnamespace.Namespace
	if pod != nil {
		from = pod.NS
	}
	return m.cfg.RDMA.Return(d, host.NS, from, link.Attrs().Name)
}
