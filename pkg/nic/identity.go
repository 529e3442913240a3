// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"bytes"
	"fmt"

	"github.com/vishvananda/netlink"
)

// busPCI is the name of the bus that most hardware is on (IFLA_PARENT_DEV_BUS_NAME).
const busPCI = "pci"

// Identity recognises a NIC in any namespace. It is comparable.
type Identity struct {
	// Bus and Device are the bus of the NIC's parent device and the parent's name there, such as pci and 0000:03:00.1. The
	// kernel reports them in every namespace.
	Bus    string `json:"bus,omitempty"`
	Device string `json:"device,omitempty"`
	// PermMAC is the hardware address that a NIC of hardware was made with. It tells the links of a device apart that has
	// several; empty, the device's only link is meant, whatever its address.
	PermMAC string `json:"permanentMAC,omitempty"`
	// Kind is the rtnl link kind of a NIC without hardware, such as dummy.
	Kind string `json:"kind,omitempty"`
	// Alias is the text (IFLA_IFALIAS) that marks a NIC without hardware. It travels with the link.
	Alias string `json:"alias,omitempty"`
	// MAC and Name are the hardware address and the name that it had on the host. They count, together, for a NIC without
	// hardware and mark, whose name was kept in the alias while it was away.
	MAC  string `json:"mac,omitempty"`
	Name string `json:"name,omitempty"`
	// Index is the interface index that it had on the host. The kernel keeps it across a move unless the index is taken in
	// the other namespace.
	Index int `json:"index,omitempty"`
}

// PCI is the identity of the only link of a PCI function.
func PCI(addr string) Identity { return Identity{Bus: busPCI, Device: addr} }

// identify returns the identity of a link with all that may tell it from others.
func identify(link netlink.Link) Identity {
	attrs := link.Attrs()
	id := Identity{Name: attrs.Name, Index: attrs.Index, MAC: attrs.HardwareAddr.String()}
	if attrs.ParentDev != "" {
		id.Bus, id.Device = attrs.ParentDevBus, attrs.ParentDev
	}
	id.Kind, id.PermMAC = kindOf(link), permMAC(link)
	return id
}

// kindOf returns a link's kind. A link of hardware has none; the library calls it device.
func kindOf(link netlink.Link) string {
	if kind := link.Type(); kind != "device" {
		return kind
	}
	return ""
}

// permMAC returns the permanent address of a link of hardware. The kernel reports one for links without hardware too: all
// ipvlan links of a NIC have that NIC's.
func permMAC(link netlink.Link) string {
	if mac := link.Attrs().PermHWAddr; kindOf(link) == "" && len(bytes.Trim(mac, "\x00")) != 0 {
		return mac.String()
	}
	return ""
}

// IsZero is true for a device without a link, such as a VF bound to a userspace driver.
func (id Identity) IsZero() bool { return id == Identity{} }

// Physical says whether the kernel keeps the NIC when the namespace dies that it is in.
func (id Identity) Physical() bool { return id.Kind == "" }

// Matches says whether a link of any namespace is the NIC.
func (id Identity) Matches(link netlink.Link) bool {
	attrs := link.Attrs()
	switch {
	case id.Kind != kindOf(link):
		return false
	case id.Device != "":
		return id.Bus == attrs.ParentDevBus && id.Device == attrs.ParentDev && (id.PermMAC == "" || id.PermMAC == permMAC(link))
	case id.Alias != "":
		return id.Alias == attrs.Alias
	case attrs.ParentDev != "" || id.PermMAC != permMAC(link):
		return false
	case id.PermMAC != "":
		return true
	case id.MAC == "":
		return id.Index == attrs.Index
	}
	return id.MAC == attrs.HardwareAddr.String() && (id.Name == attrs.Alias || id.Name == attrs.Name || id.Index == attrs.Index)
}

// MatchesAtHome says whether a link is the NIC that is known to be on the host or in the namespace that it was moved to:
// a NIC without hardware can have another MAC there by now. Elsewhere that would be no more than a resemblance.
func (id Identity) MatchesAtHome(link netlink.Link) bool {
	if id.Matches(link) {
		return true
	}
	attrs := link.Attrs()
	return id.Kind != "" && id.Kind == kindOf(link) && id.Device == "" && id.Alias == "" && attrs.ParentDev == "" &&
		id.Name == attrs.Alias && id.Index == attrs.Index
}

// Key names the NIC for a lock: whoever sees it on the host computes the same.
func (id Identity) Key() string {
	switch {
	case id.Device != "":
		return id.Bus + "-" + id.Device
	case id.PermMAC != "":
		return "mac-" + id.PermMAC
	case id.MAC != "":
		return "mac-" + id.MAC
	}
	return fmt.Sprint("index-", id.Index)
}

// String is for people.
func (id Identity) String() string {
	switch {
	case id.Device != "" && id.Name != "":
		return fmt.Sprintf("%s (%s %s)", id.Name, id.Bus, id.Device)
	case id.Device != "":
		return id.Bus + " " + id.Device
	case id.Alias != "":
		return fmt.Sprintf("%s link %q", id.Kind, id.Alias)
	case id.MAC != "":
		return fmt.Sprintf("%s (%s)", id.Name, id.MAC)
	}
	return fmt.Sprintf("%s link with index %d", id.Kind, id.Index)
}
