// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/hostnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// VFSettings is what a PF knows of one of its VFs and a claim may change.
type VFSettings struct {
	// VLAN is the port VLAN that the PF tags and filters the VF's frames with, 0 for none.
	VLAN int `json:"vlan,omitempty"`
	// QoS is the priority (802.1p) in the tag, 0 to 7.
	QoS int `json:"qos,omitempty"`
	// VLANProto is the tag's EtherType if it is another than 802.1Q's, else 0.
	VLANProto int `json:"vlanProto,omitempty"`
	// MAC is the hardware address that the PF has on record, in colon notation; empty for none.
	MAC string `json:"mac,omitempty"`
}

// sameVLAN is true if the VLAN part of the settings is the same.
func (s VFSettings) sameVLAN(other VFSettings) bool {
	return s.VLAN == other.VLAN && s.QoS == other.QoS && s.VLANProto == other.VLANProto
}

// link is what the kernel says of one interface.
type link struct {
	index int
	// parent is the bus address of the device that the interface belongs to (IFLA_PARENT_DEV_NAME).
	parent string
	types.LinkState
}

// kernel is what the manager needs of rtnetlink in the host's network namespace.
type kernel interface {
	hostnet.Source
	// Link reads one interface.
	Link(index int) (link, error)
	SetUp(index int) error
	// VFs reads the settings of all VFs of a PF by their index. It is empty for a PF whose driver keeps none.
	VFs(pfIndex int) (map[int]VFSettings, error)
	SetVFVLAN(pfIndex, vf int, vlan VFSettings) error
	// SetVFMAC sets the address on the PF's record, or clears it.
	SetVFMAC(pfIndex, vf int, mac string) error
	// WatchLinks calls notify for changes of links that may concern a VF, and returns when the context ends or the
	// kernel dropped events.
	WatchLinks(ctx context.Context, notify func()) error
}

// rtnetlink is the real kernel. Requests use sockets of their own, for NETLINK_ROUTE only.
type rtnetlink struct{ hostnet.Kernel }

const (
	// extFilterVF and extFilterSkipStats are RTEXT_FILTER_VF and RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h.
	extFilterVF        = 1 << 0
	extFilterSkipStats = 1 << 3
	// attrTypeMask is NLA_TYPE_MASK of linux/netlink.h.
	attrTypeMask = 0x3fff
)

// getLink reads one interface with no more than what the filter asks for. VF data is slow on large cards, since each
// VF may cost a question to the firmware.
func getLink(index int, filter uint32) ([]byte, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(filter)))
	msgs, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	if len(msgs) != 1 {
		return nil, fmt.Errorf("the kernel returned %d links", len(msgs))
	}
	return msgs[0], nil
}

func (rtnetlink) Link(index int) (link, error) {
	msg, err := getLink(index, extFilterSkipStats)
	if err != nil {
		return link{}, fmt.Errorf("read link %d: %w", index, err)
	}
	l, err := netlink.LinkDeserialize(nil, msg)
	if err != nil {
		return link{}, fmt.Errorf("decode link %d: %w", index, err)
	}
	a := l.Attrs()
	return link{
		index:  a.Index,
		parent: a.ParentDev,
		LinkState: types.LinkState{
			Name: a.Name, AltNames: a.AltNames, MTU: a.MTU, MAC: a.HardwareAddr.String(), Up: a.Flags&net.FlagUp != 0,
		},
	}, nil
}

func (rtnetlink) SetUp(index int) error {
	return netlink.LinkSetUp(byIndex(index))
}

// VFs leaves the counters out: with them the data of 256 VFs does not fit into an attribute, whose length has 16 bits.
func (rtnetlink) VFs(pfIndex int) (map[int]VFSettings, error) {
	msg, err := getLink(pfIndex, extFilterVF|extFilterSkipStats)
	if err != nil {
		return nil, err
	}
	return parseVFs(msg)
}

func (rtnetlink) SetVFVLAN(pfIndex, vf int, s VFSettings) error {
	if s.VLANProto != 0 {
		return netlink.LinkSetVfVlanQosProto(byIndex(pfIndex), vf, s.VLAN, s.QoS, s.VLANProto)
	}
	if s.QoS != 0 {
		return netlink.LinkSetVfVlanQos(byIndex(pfIndex), vf, s.VLAN, s.QoS)
	}
	return netlink.LinkSetVfVlan(byIndex(pfIndex), vf, s.VLAN)
}

func (rtnetlink) SetVFMAC(pfIndex, vf int, mac string) error {
	addr := make(net.HardwareAddr, 6)
	if mac != "" {
		var err error
		if addr, err = net.ParseMAC(mac); err != nil {
			return err
		}
	}
	return netlink.LinkSetVfHardwareAddr(byIndex(pfIndex), vf, addr)
}

func byIndex(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

func (rtnetlink) WatchLinks(ctx context.Context, notify func()) error {
	return watchLinks(ctx, func(l netlink.Link) {
		if concernsVF(l) {
			notify()
		}
	})
}

// watchLinks calls changed for every link that changed.
func watchLinks(ctx context.Context, changed func(netlink.Link)) error {
	updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
	// lost holds the last error; the receiving goroutine ends after a failed receive and closes updates.
	lost := make(chan error, 1)
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback: func(err error) {
			select {
			case lost <- err:
			default:
			}
		},
	})
	if err != nil {
		close(done)
		return fmt.Errorf("subscribe to link events: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { close(done) })
	for u := range updates {
		changed(u.Link)
	}
	if !stop() {
		return ctx.Err()
	}
	close(done)
	select {
	case err := <-lost:
		return err
	default:
		return errors.New("the subscription to link events ended")
	}
}

// concernsVF is false for the links of pods and other software links that are not stacked on another link, which come
// and go all the time on a busy node.
func concernsVF(l netlink.Link) bool {
	if l.Attrs().ParentDevBus == "pci" {
		return true
	}
	return l.Attrs().ParentIndex != 0 && l.Type() != "veth" && l.Type() != "netkit"
}

// parseVFs decodes IFLA_VFINFO_LIST. The message is checked for completeness, because older kernels cut off a list
// that does not fit.
func parseVFs(msg []byte) (map[int]VFSettings, error) {
	if len(msg) < unix.SizeofIfInfomsg {
		return nil, fmt.Errorf("link message of %d bytes", len(msg))
	}
	attrs, err := rtlink.Attributes(msg[unix.SizeofIfInfomsg:])
	if err != nil {
		return nil, err
	}
	vfs, count := map[int]VFSettings{}, 0
	for _, a := range attrs {
		switch a.Attr.Type & attrTypeMask {
		case unix.IFLA_NUM_VF:
			if len(a.Value) >= 4 {
				count = int(nl.NativeEndian().Uint32(a.Value))
			}
		case unix.IFLA_VFINFO_LIST:
			infos, err := rtlink.Attributes(a.Value)
			if err != nil {
				return nil, fmt.Errorf("decode the list of VFs: %w", err)
			}
			for _, info := range infos {
				id, s, err := parseVF(info.Value)
				if err != nil {
					return nil, fmt.Errorf("decode the list of VFs: %w", err)
				}
				vfs[id] = s
			}
		}
	}
	if len(vfs) != 0 && len(vfs) < count {
		return nil, fmt.Errorf("the kernel's list of VFs is cut off after %d of %d", len(vfs), count)
	}
	return vfs, nil
}

func parseVF(data []byte) (int, VFSettings, error) {
	attrs, err := rtlink.Attributes(data)
	if err != nil {
		return 0, VFSettings{}, err
	}
	id, s := -1, VFSettings{}
	for _, a := range attrs {
		switch a.Attr.Type & attrTypeMask {
		case nl.IFLA_VF_MAC:
			if len(a.Value) >= nl.SizeofVfMac {
				m := nl.DeserializeVfMac(a.Value)
				id = int(m.Vf)
				if mac := net.HardwareAddr(m.Mac[:6]); m.Mac != [32]byte{} {
					s.MAC = mac.String()
				}
			}
		case nl.IFLA_VF_VLAN:
			if len(a.Value) >= nl.SizeofVfVlan {
				v := nl.DeserializeVfVlan(a.Value)
				id, s.VLAN, s.QoS = int(v.Vf), int(v.Vlan), int(v.Qos)
			}
		case nl.IFLA_VF_VLAN_LIST:
			s.VLANProto = vlanProto(a.Value)
		}
	}
	if id < 0 {
		return 0, VFSettings{}, errors.New("an entry has no VF index")
	}
	if s.VLAN == 0 && s.QoS == 0 {
		s.VLANProto = 0
	}
	return id, s, nil
}

// vlanProto returns the tag's EtherType, 0 for 802.1Q. struct ifla_vf_vlan_info ends with it in network byte order.
func vlanProto(list []byte) int {
	attrs, err := rtlink.Attributes(list)
	if err != nil {
		return 0
	}
	for _, a := range attrs {
		if a.Attr.Type&attrTypeMask == nl.IFLA_VF_VLAN_INFO && len(a.Value) >= nl.SizeofVfVlan+2 {
			if proto := int(binary.BigEndian.Uint16(a.Value[nl.SizeofVfVlan:])); proto != unix.ETH_P_8021Q {
				return proto
			}
		}
	}
	return 0
}
