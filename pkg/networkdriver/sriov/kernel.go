// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/hostnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
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
	// Rights are those that the PF tells of. Of a prepared VF they are those that a claim changes.
	Rights types.VFRights `json:"rights,omitzero"`
}

// settingsFor returns what the PF is to have on record for a VF of the configuration, without the hardware address.
// [Device.settingsFor] has that.
func settingsFor(cfg types.DeviceConfig) VFSettings {
	tag := cfg.Tag()
	s := VFSettings{VLAN: tag.VLAN, QoS: tag.Priority, Rights: cfg.Rights()}
	if tag.Protocol == v2alpha1.VlanProtocol8021ad {
		s.VLANProto = unix.ETH_P_8021AD
	}
	return s
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
	// permMAC is the permanent address of one of several interfaces of a VF, else empty.
	permMAC string
	nic.State
}

// kernel is what the manager needs of rtnetlink in the host's network namespace.
type kernel interface {
	// HostNetwork reads the node's own network.
	HostNetwork(nodeIPs []netip.Addr) (*hostnet.View, error)
	// Link reads one interface.
	Link(index int) (link, error)
	// Settings reads what ethtool(8) sets of an interface, and PutBack sets what differs from that.
	Settings(index int) (nic.Settings, error)
	PutBack(index int, want nic.Settings) error
	SetUp(index int) error
	// PortState reads whether an interface is up and has a carrier.
	PortState(index int) (PortState, error)
	// VFs reads the settings of all VFs of a PF by their index. It is empty for a PF whose driver keeps none.
	VFs(pfIndex int) (map[int]VFSettings, error)
	SetVFVLAN(pfIndex, vf int, vlan VFSettings) error
	// SetVFMAC sets the address on the PF's record, or clears it.
	SetVFMAC(pfIndex, vf int, mac string) error
	SetVFTrust(pfIndex, vf int, trust bool) error
	SetVFSpoofCheck(pfIndex, vf int, check bool) error
	// SetVFLinkState takes the states that the API names.
	SetVFLinkState(pfIndex, vf int, state string) error
	// SetVFRates takes Mbit/s, 0 for none.
	SetVFRates(pfIndex, vf, minTx, maxTx int) error
	// WatchLinks calls notify once it receives link events and for changes of links that may concern a VF, and returns
	// when the context ends or events were lost.
	WatchLinks(ctx context.Context, notify func()) error
}

// PortState is what the kernel says of a PF's link.
type PortState struct {
	// Up is false for an interface that an administrator has set down.
	Up      bool
	Carrier bool
}

// rtnetlink is the real kernel. Each call has a socket of its own, so that a PF whose firmware is slow delays no other.
type rtnetlink struct {
	log *slog.Logger
	// netns is the path of the host's network namespace, empty for the calling thread's, and sysfs shows it.
	netns, sysfs string
}

func (k rtnetlink) with(do func(*nic.Place) error) error {
	open := nic.OpenOwn
	if k.netns != "" {
		open = func(log *slog.Logger, sysfs string) (*nic.Place, error) { return nic.Open(log, k.netns, sysfs) }
	}
	host, err := open(k.log, k.sysfs)
	if err != nil {
		return err
	}
	defer host.Close()
	return do(host)
}

func (k rtnetlink) HostNetwork(nodeIPs []netip.Addr) (view *hostnet.View, err error) {
	err = k.with(func(host *nic.Place) error {
		view, err = hostnet.Scan(hostnet.Kernel{Conn: host.Conn}, nodeIPs)
		return err
	})
	return view, err
}

func (k rtnetlink) Link(index int) (l link, err error) {
	err = k.withLink(index, func(host *nic.Place, found netlink.Link) error {
		a := found.Attrs()
		l = link{index: a.Index, parent: a.ParentDev, permMAC: host.Identify(found).PermMAC, State: nic.Read(found)}
		return nil
	})
	return l, err
}

func (k rtnetlink) withLink(index int, do func(*nic.Place, netlink.Link) error) error {
	return k.with(func(host *nic.Place) error {
		found, err := host.ByIndex(index)
		if err == nil && found == nil {
			err = fmt.Errorf("look up link with index %d: %w", index, unix.ENODEV)
		}
		if err != nil {
			return err
		}
		return do(host, found)
	})
}

func (k rtnetlink) Settings(index int) (s nic.Settings, err error) {
	err = k.withLink(index, func(host *nic.Place, found netlink.Link) error {
		s, err = host.Settings(found)
		return err
	})
	return s, err
}

func (k rtnetlink) PutBack(index int, want nic.Settings) error {
	return k.withLink(index, func(host *nic.Place, found netlink.Link) error { return host.PutBack(found, want) })
}

func (k rtnetlink) SetUp(index int) error {
	return k.with(func(host *nic.Place) error {
		return host.Change(index, rtlink.Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP})
	})
}

func (k rtnetlink) PortState(index int) (s PortState, err error) {
	err = k.withLink(index, func(_ *nic.Place, found netlink.Link) error {
		flags := found.Attrs().RawFlags
		s = PortState{Up: flags&unix.IFF_UP != 0, Carrier: flags&unix.IFF_LOWER_UP != 0}
		return nil
	})
	return s, err
}

func (k rtnetlink) VFs(pfIndex int) (vfs map[int]VFSettings, err error) {
	err = k.with(func(host *nic.Place) error {
		msg, err := host.VFTable(pfIndex)
		if err == nil {
			vfs, err = parseVFs(msg)
		}
		return err
	})
	return vfs, err
}

func (k rtnetlink) SetVFVLAN(pfIndex, vf int, s VFSettings) error {
	return k.with(func(host *nic.Place) error { return host.SetVFVLAN(pfIndex, vf, s.VLAN, s.QoS, s.VLANProto) })
}

func (k rtnetlink) SetVFMAC(pfIndex, vf int, mac string) error {
	addr := make(net.HardwareAddr, 6)
	if mac != "" {
		var err error
		if addr, err = net.ParseMAC(mac); err != nil {
			return err
		}
	}
	return k.with(func(host *nic.Place) error { return host.SetVFMAC(pfIndex, vf, addr) })
}

func (k rtnetlink) SetVFTrust(pfIndex, vf int, trust bool) error {
	return k.with(func(host *nic.Place) error { return host.SetVFTrust(pfIndex, vf, trust) })
}

func (k rtnetlink) SetVFSpoofCheck(pfIndex, vf int, check bool) error {
	return k.with(func(host *nic.Place) error { return host.SetVFSpoofCheck(pfIndex, vf, check) })
}

func (k rtnetlink) SetVFLinkState(pfIndex, vf int, state string) error {
	number := slices.Index(linkStates, state)
	if number < 0 {
		return fmt.Errorf("%q is not a link state", state)
	}
	return k.with(func(host *nic.Place) error { return host.SetVFLinkState(pfIndex, vf, uint32(number)) })
}

func (k rtnetlink) SetVFRates(pfIndex, vf, minTx, maxTx int) error {
	return k.with(func(host *nic.Place) error { return host.SetVFRates(pfIndex, vf, minTx, maxTx) })
}

// linkStates are the API's names of the kernel's link states of VFs, by their numbers (IFLA_VF_LINK_STATE_AUTO and so on).
var linkStates = []string{v2alpha1.LinkStateAuto, v2alpha1.LinkStateEnable, v2alpha1.LinkStateDisable}

func (k rtnetlink) WatchLinks(ctx context.Context, notify func()) error {
	return rtlink.Subscribe(ctx, k.netns, notify, func(l netlink.Link) {
		if concernsVF(l) {
			notify()
		}
	})
}

// concernsVF is false for the links of pods and other software links that are not stacked on another link, which come
// and go all the time on a busy node.
func concernsVF(l netlink.Link) bool {
	if l.Attrs().ParentDevBus == "pci" {
		return true
	}
	return l.Attrs().ParentIndex != 0 && l.Type() != "veth" && l.Type() != "netkit"
}

func parseVFs(msg []byte) (map[int]VFSettings, error) { return rtlink.ParseVFs(msg, parseVF) }

func parseVF(attrs []syscall.NetlinkRouteAttr) (s VFSettings, err error) {
	for _, a := range attrs {
		switch a.Attr.Type {
		case nl.IFLA_VF_MAC:
			if len(a.Value) >= nl.SizeofVfMac {
				if m := nl.DeserializeVfMac(a.Value); m.Mac != [32]byte{} {
					s.MAC = net.HardwareAddr(m.Mac[:6]).String()
				}
			}
		case nl.IFLA_VF_VLAN:
			if len(a.Value) >= nl.SizeofVfVlan {
				v := nl.DeserializeVfVlan(a.Value)
				s.VLAN, s.QoS = int(v.Vlan), int(v.Qos)
			}
		case nl.IFLA_VF_VLAN_LIST:
			s.VLANProto = vlanProto(a.Value)
		case nl.IFLA_VF_TRUST:
			s.Rights.Trust = setting(a.Value)
		case nl.IFLA_VF_SPOOFCHK:
			s.Rights.SpoofCheck = setting(a.Value)
		case nl.IFLA_VF_LINK_STATE:
			if len(a.Value) >= nl.SizeofVfLinkState {
				if state := nl.DeserializeVfLinkState(a.Value).LinkState; state < uint32(len(linkStates)) {
					s.Rights.LinkState = linkStates[state]
				}
			}
		case nl.IFLA_VF_RATE:
			if len(a.Value) >= nl.SizeofVfRate {
				rate := nl.DeserializeVfRate(a.Value)
				s.Rights.MinTxRate, s.Rights.MaxTxRate = ptr.To(int(rate.MinTxRate)), ptr.To(int(rate.MaxTxRate))
			}
		}
	}
	if s.VLAN == 0 && s.QoS == 0 {
		s.VLANProto = 0
	}
	return s, nil
}

// setting decodes a switch (struct ifla_vf_trust, ifla_vf_spoofchk); nil for one that the PF's driver does not tell of, which is
// then neither 0 nor 1.
func setting(value []byte) *bool {
	if len(value) < nl.SizeofVfTrust {
		return nil
	}
	switch nl.DeserializeVfTrust(value).Setting {
	case 0:
		return ptr.To(false)
	case 1:
		return ptr.To(true)
	default:
		return nil
	}
}

// vlanProto returns the tag's EtherType, 0 for 802.1Q. struct ifla_vf_vlan_info ends with it in network byte order.
func vlanProto(list []byte) int {
	attrs, err := rtlink.Attributes(list)
	if err != nil {
		return 0
	}
	for _, a := range attrs {
		if a.Attr.Type == nl.IFLA_VF_VLAN_INFO && len(a.Value) >= nl.SizeofVfVlan+2 {
			if proto := int(binary.BigEndian.Uint16(a.Value[nl.SizeofVfVlan:])); proto != unix.ETH_P_8021Q {
				return proto
			}
		}
	}
	return 0
}
