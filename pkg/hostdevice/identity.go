// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// identity recognises a NIC in any namespace. Its name does not: the pod has it under another.
type identity struct {
	// Bus and Device are the bus of the NIC's parent device and the parent's name there, such as pci and 0000:03:00.1.
	Bus    string `json:"bus,omitempty"`
	Device string `json:"device,omitempty"`
	// PermMAC is the hardware address that a NIC of hardware was made with.
	PermMAC string `json:"permanentMAC,omitempty"`
	// Kind is the rtnl link kind of a NIC without hardware, such as veth.
	Kind string `json:"kind,omitempty"`
	// MAC and Name are the hardware address and the name that it had on the host. The sub-plugin keeps the name in the
	// alias while the NIC is away. They count for a NIC that has nothing better.
	MAC  string `json:"mac,omitempty"`
	Name string `json:"name"`
	// Index is the interface index that it had on the host.
	Index int `json:"index"`
}

func identify(link netlink.Link) identity {
	attrs := link.Attrs()
	id := identity{Name: attrs.Name, Index: attrs.Index, MAC: attrs.HardwareAddr.String()}
	if attrs.ParentDev != "" {
		id.Bus, id.Device = attrs.ParentDevBus, attrs.ParentDev
	}
	// A link of hardware has no kind; the library calls it device.
	if kind := link.Type(); kind != "device" {
		id.Kind = kind
	} else if !zero(attrs.PermHWAddr) {
		// The kernel reports one for links without hardware too: all ipvlan links of a NIC have that NIC's.
		id.PermMAC = attrs.PermHWAddr.String()
	}
	return id
}

func zero(mac net.HardwareAddr) bool { return len(bytes.Trim(mac, "\x00")) == 0 }

// physical says whether the kernel keeps the NIC when the namespace dies that it is in.
func (id identity) physical() bool { return id.Kind == "" }

// matches says whether a link of any namespace is the NIC.
func (id identity) matches(link netlink.Link) bool {
	other := identify(link)
	if id.Kind != other.Kind {
		return false
	}
	if id.Device != "" || other.Device != "" {
		// One PCI device can have several NICs, which differ in their permanent addresses.
		return id.Bus == other.Bus && id.Device == other.Device && id.PermMAC == other.PermMAC
	}
	if id.PermMAC != "" || other.PermMAC != "" {
		return id.PermMAC == other.PermMAC
	}
	return id.MAC != "" && id.MAC == other.MAC &&
		(link.Attrs().Alias == id.Name || other.Name == id.Name || other.Index == id.Index)
}

// matchesAtHome says whether a link is the NIC that is known to be on the host or in the namespace that it was moved to:
// a NIC without hardware can have another MAC there by now. Elsewhere that would be no more than a resemblance.
func (id identity) matchesAtHome(link netlink.Link) bool {
	if id.matches(link) {
		return true
	}
	other := identify(link)
	return id.Device == "" && id.PermMAC == "" && other.Device == "" && other.PermMAC == "" && id.Kind == other.Kind &&
		link.Attrs().Alias == id.Name && other.Index == id.Index
}

// key names the lock of the NIC: whoever sees it on the host computes the same.
func (id identity) key() string {
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
func (id identity) String() string {
	if id.Device != "" {
		return fmt.Sprintf("%s (%s %s)", id.Name, id.Bus, id.Device)
	}
	return fmt.Sprintf("%s (%s)", id.Name, id.MAC)
}

// find returns the first link that is the NIC, nil if it is not in the namespace.
func find(in *rtlink.Conn, is func(netlink.Link) bool) (netlink.Link, error) {
	links, err := in.List()
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(links, is); i >= 0 {
		return links[i], nil
	}
	return nil, nil
}
