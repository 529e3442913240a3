// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	// maxMTU is far above every card and keeps sums of it in range.
	maxMTU = 1 << 24
	// maxAltNames is more than any tool gives.
	maxAltNames = 64
)

// State is what of a NIC a pod may change and the host gets back. Its JSON form is kept in claims' statuses and in files
// of the CNI plugin, so that fields may be added, and what is missing is not known and stays as it is.
type State struct {
	// Name is the interface name on the host.
	Name string `json:"name,omitempty"`
	// AltNames are the alternative names, which travel with the link.
	AltNames []string `json:"altNames,omitempty"`
	// Alias is a text for people (IFLA_IFALIAS), Group the number that links are grouped by.
	Alias *string `json:"alias,omitempty"`
	Group *uint32 `json:"group,omitempty"`
	// MTU in bytes, 0 for unknown.
	MTU int `json:"mtu,omitempty"`
	// MAC is the hardware address in colon notation, empty for unknown.
	MAC string `json:"mac,omitempty"`
	// TxQLen is the length of the transmit queue in packets.
	TxQLen *uint32 `json:"txQueueLen,omitempty"`
	// Sizes are those of large packets.
	Sizes rtlink.Sizes `json:"sizes,omitzero"`
	// Up, Promisc, AllMulti and NoARP are what the administrator has set of the flags, whatever the carrier.
	Up       bool `json:"up,omitempty"`
	Promisc  bool `json:"promisc,omitempty"`
	AllMulti bool `json:"allMulticast,omitempty"`
	NoARP    bool `json:"noARP,omitempty"`
	// XDP is the ID of the XDP program that the host runs on it, 0 for none.
	XDP uint32 `json:"xdpProgram,omitempty"`
}

// Read returns the state that a link has.
func Read(link netlink.Link) State {
	attrs := link.Attrs()
	alias, group, txQLen := attrs.Alias, attrs.Group, uint32(attrs.TxQLen)
	s := State{
		Name: attrs.Name, AltNames: attrs.AltNames, Alias: &alias, Group: &group, MTU: attrs.MTU,
		MAC: attrs.HardwareAddr.String(), TxQLen: &txQLen,
		Sizes: rtlink.Sizes{
			GSO: attrs.GSOMaxSize, GSOSegs: attrs.GSOMaxSegs, GRO: attrs.GROMaxSize,
			GSOIPv4: attrs.GSOIPv4MaxSize, GROIPv4: attrs.GROIPv4MaxSize,
		},
		Up:       attrs.RawFlags&unix.IFF_UP != 0,
		Promisc:  attrs.RawFlags&unix.IFF_PROMISC != 0,
		AllMulti: attrs.RawFlags&unix.IFF_ALLMULTI != 0,
		NoARP:    attrs.RawFlags&unix.IFF_NOARP != 0,
	}
	if attrs.Xdp != nil && attrs.Xdp.Attached {
		s.XDP = attrs.Xdp.ProgId
	}
	return s
}

// Validate refuses what the kernel could not have reported: a state may come from a file or a claim that others have
// written. A state without a name is complete for a device without a link. The error names the field.
func (s State) Validate() error {
	if s.Name != "" {
		if err := ValidateName(s.Name); err != nil {
			return fmt.Errorf("name: %w", err)
		}
	}
	switch {
	case s.MTU < 0 || s.MTU > maxMTU:
		return fmt.Errorf("mtu: %d is not in 0..%d", s.MTU, maxMTU)
	case s.Alias != nil && len(*s.Alias) > MaxAliasLen:
		return fmt.Errorf("alias: %d bytes are more than %d", len(*s.Alias), MaxAliasLen)
	case s.Sizes.Max() > maxMTU:
		return fmt.Errorf("sizes: %d is not in 0..%d", s.Sizes.Max(), maxMTU)
	case len(s.AltNames) > maxAltNames:
		return fmt.Errorf("altNames: %d are more than %d", len(s.AltNames), maxAltNames)
	}
	if _, err := net.ParseMAC(s.MAC); s.MAC != "" && err != nil {
		return fmt.Errorf("mac: %.64q is not a hardware address", s.MAC)
	}
	for i, name := range s.AltNames {
		if err := ValidateAltName(name); err != nil {
			return fmt.Errorf("altNames[%d]: %w", i, err)
		}
	}
	return nil
}

// stateFlags are the flags of a NIC that it gets back.
const stateFlags = unix.IFF_UP | unix.IFF_PROMISC | unix.IFF_ALLMULTI | unix.IFF_NOARP

func (s State) flags() (flags uint32) {
	for _, f := range []struct {
		set  bool
		flag uint32
	}{{s.Up, unix.IFF_UP}, {s.Promisc, unix.IFF_PROMISC}, {s.AllMulti, unix.IFF_ALLMULTI}, {s.NoARP, unix.IFF_NOARP}} {
		if f.set {
			flags |= f.flag
		}
	}
	return flags
}

// Difference is what has to be changed of a link to give it the state, but for its names and XDP program.
func Difference(link netlink.Link, want State) rtlink.Change {
	attrs := link.Attrs()
	var ch rtlink.Change
	if want.MTU > 0 && attrs.MTU != want.MTU {
		ch.MTU = want.MTU
	}
	mac, err := net.ParseMAC(want.MAC)
	if err == nil && len(mac) == len(attrs.HardwareAddr) && !slices.Equal(mac, attrs.HardwareAddr) {
		ch.MAC = mac
	}
	if want.Alias != nil && attrs.Alias != *want.Alias {
		ch.Alias = want.Alias
	}
	if want.Group != nil && attrs.Group != *want.Group {
		ch.Group = want.Group
	}
	if want.TxQLen != nil && attrs.TxQLen != int(*want.TxQLen) {
		ch.TxQLen = want.TxQLen
	}
	if want.Sizes.Differ(Read(link).Sizes) {
		ch.Sizes = want.Sizes
	}
	ch.Flags = want.flags()
	ch.Mask = (ch.Flags ^ attrs.RawFlags) & stateFlags
	return ch
}
