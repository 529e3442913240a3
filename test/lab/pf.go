// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"errors"
	"fmt"
)

// pf is an SR-IOV NIC of a node: a PF that is cabled to the uplinks' switch.
type pf struct {
	number int    // from 1; also the slot that it is in
	name   string // of its link on the node
	mac    string
	tap    string // the link in the lab's namespace that it is cabled to
}

// pfs returns the node's SR-IOV NICs.
func (n *Node) pfs() []pf {
	all := []pf{
		{1, Uplink, fmt.Sprintf("52:54:00:00:01:%02x", n.index), fmt.Sprintf("uplink%d", n.index)},
		{2, Uplink2, fmt.Sprintf("52:54:00:00:02:%02x", n.index), fmt.Sprintf("uplink%d-2", n.index)},
	}
	return all[:n.lab.nodeOptions.PFs]
}

// pf returns the node's PF of a name.
func (n *Node) pf(name string) (pf, error) {
	for _, pf := range n.pfs() {
		if pf.name == name {
			return pf, nil
		}
	}
	return pf{}, fmt.Errorf("node %s has no PF %s", n.Name(), name)
}

// Names in QEMU.
func (p pf) id() string     { return fmt.Sprintf("pf%d", p.number) }
func (p pf) port() string   { return fmt.Sprintf("port%d", p.number) }
func (p pf) netdev() string { return fmt.Sprintf("uplink%d", p.number) }

// nic describes a NIC to QEMU, on its command line and as arguments of the
// monitor's device_add.
type nic struct {
	Driver string `json:"driver"`
	ID     string `json:"id"`
	Bus    string `json:"bus"`
	Netdev string `json:"netdev"`
	MAC    string `json:"mac"`
}

func (p pf) nic() nic { return nic{"igb", p.id(), p.port(), p.netdev(), p.mac} }

func (n nic) String() string {
	return fmt.Sprintf("%s,id=%s,bus=%s,netdev=%s,mac=%s", n.Driver, n.ID, n.Bus, n.Netdev, n.MAC)
}

func (n *Node) deleteUplinkTaps() error {
	var errs []error
	for _, pf := range n.pfs() {
		errs = append(errs, n.lab.network.deleteTap(pf.tap))
	}
	return errors.Join(errs...)
}

// SetCarrier plugs the cable of a PF in or pulls it out: Uplink or Uplink2.
func (n *Node) SetCarrier(ctx context.Context, name string, up bool) error {
	pf, err := n.pf(name)
	if err != nil {
		return err
	}
	_, err = n.Monitor(ctx, "set_link", map[string]any{"name": pf.id(), "up": up})
	return err
}

// Unplug takes a PF out of its slot while the node runs, and returns when the
// node has let it go. Its VFs go with it.
func (n *Node) Unplug(ctx context.Context, name string) error {
	pf, err := n.pf(name)
	if err != nil {
		return err
	}
	m, err := n.dialMonitor(ctx)
	if err != nil {
		return err
	}
	defer m.close()
	if _, err := m.execute("device_del", map[string]any{"id": pf.id()}); err != nil {
		return err
	}
	return m.waitDeleted(pf.id())
}

// Plug puts a PF back after Unplug. Its link gets its name a little later.
func (n *Node) Plug(ctx context.Context, name string) error {
	pf, err := n.pf(name)
	if err != nil {
		return err
	}
	_, err = n.Monitor(ctx, "device_add", pf.nic())
	return err
}
