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

// SetVFTrust lets a PF's VF change what else only the host may, such as its hardware address, or not. The error is the
// kernel's answer.
func (c *Conn) SetVFTrust(pfIndex, vf int, trust bool) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.LinkSetVfTrust(byIndex(pfIndex), vf, trust)
}

// SetVFSpoofCheck has a PF drop frames of its VF that come from another hardware address than the VF's, or not. The error
// is the kernel's answer.
func (c *Conn) SetVFSpoofCheck(pfIndex, vf int, check bool) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.LinkSetVfSpoofchk(byIndex(pfIndex), vf, check)
}

// SetVFLinkState sets the carrier that a PF's VF sees (IFLA_VF_LINK_STATE_AUTO and so on). The error is the kernel's answer.
func (c *Conn) SetVFLinkState(pfIndex, vf int, state uint32) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.LinkSetVfState(byIndex(pfIndex), vf, state)
}

// SetVFRates sets the lowest and the highest rate that a PF's VF sends at, in Mbit/s, 0 for none. The error is the kernel's
// answer.
func (c *Conn) SetVFRates(pfIndex, vf, minTx, maxTx int) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.LinkSetVfRate(byIndex(pfIndex), vf, minTx, maxTx)
}
