// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

// LinkID identifies a link by what it is. Names do not: a pod may rename its interface.
type LinkID struct {
	// PCIAddr is the address of the PCI device that is the link's parent, such as 0000:03:00.1. The kernel reports
	// it as IFLA_PARENT_DEV_NAME in every network namespace.
	PCIAddr string `json:"pciAddr,omitempty"`

	// Kind is the rtnl link kind of a link without hardware, such as dummy.
	Kind string `json:"kind,omitempty"`

	// IfIndex is the interface index of a link without hardware. The kernel keeps it across a move unless the index
	// is taken in the target namespace.
	IfIndex int `json:"ifIndex,omitempty"`

	// Alias is the text (IFLA_IFALIAS) that the manager gave a link without hardware. It travels with the link, so that
	// the link is known again where the kernel had to give it another index.
	Alias string `json:"alias,omitempty"`
}

// IsZero is true for a device without a link, such as a VF bound to a userspace driver.
func (id LinkID) IsZero() bool { return id == LinkID{} }

// LinkState is what of a link a pod may change and the host gets back.
type LinkState struct {
	// Name is the interface name on the host.
	Name string `json:"name,omitempty"`
	// AltNames are the alternative names, which travel with the link.
	AltNames []string `json:"altNames,omitempty"`
	// MTU in bytes.
	MTU int `json:"mtu,omitempty"`
	// MAC is the hardware address in colon notation.
	MAC string `json:"mac,omitempty"`
	// Up is the administrative state (IFF_UP).
	Up bool `json:"up,omitempty"`
}

// Attachment says where a device's link is while it is in a pod.
type Attachment struct {
	// SandboxID is the runtime's id of the pod sandbox.
	SandboxID string `json:"sandboxID"`
	// NetNS is the path of the sandbox's network namespace.
	NetNS string `json:"netns"`
	// IfName is the name of the interface in the pod.
	IfName string `json:"ifName"`
	// IfIndex is the interface's index in the pod.
	IfIndex int `json:"ifIndex"`
	// MAC is the hardware address in colon notation.
	MAC string `json:"mac,omitempty"`
	// IPs are addresses with prefix length, such as 192.0.2.4/24.
	IPs []string `json:"ips,omitempty"`
}
