// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import "net"

// SetVFVLAN gives a PF's VF a VLAN, 0 for none, with a priority and the EtherType of the tag, 0 for 802.1Q's. The error is
// the kernel's answer.
func (c *Conn) SetVFVLAN(pfIndex, vf, vlan, qos, proto int) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	if proto != 0 {
		return h.LinkSetVfVlanQosProto(byIndex(pfIndex), vf, vlan, qos, proto)
	}
	return h.LinkSetVfVlanQos(byIndex(pfIndex), vf, vlan, qos)
}

// SetVFMAC sets the hardware address that a PF has on record for a VF; one of zeros clears it. The error is the kernel's
// answer.
func (c *Conn) SetVFMAC(pfIndex, vf int, mac net.HardwareAddr) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.LinkSetVfHardwareAddr(byIndex(pfIndex), vf, mac)
}
