// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"net/netip"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/truncate"
)

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
	// Moved is true for an interface that the pod has moved into a network namespace of its own. Name, index and addresses
	// are those it had before, and empty if that is not known.
	Moved bool `json:"moved,omitempty"`
	// Again is true for an interface that went out of the running pod, with its VF, and was put back: what the pod had
	// configured on it is lost.
	Again bool `json:"again,omitempty"`
	// IPs are addresses with prefix length, such as 192.0.2.4/24.
	IPs []string `json:"ips,omitempty"`
}

// NetworkData is what there is to say of the interface in the API's terms and within its limits; nil for a device without one.
// Of one that the pod has moved it has no addresses.
func (a *Attachment) NetworkData() *resourceapi.NetworkDeviceData {
	if a.IfName == "" && !a.Moved {
		return nil
	}
	data := &resourceapi.NetworkDeviceData{
		InterfaceName:   truncate.UTF8(a.IfName, resourceapi.NetworkDeviceDataInterfaceNameMaxLength),
		HardwareAddress: truncate.UTF8(a.MAC, resourceapi.NetworkDeviceDataHardwareAddressMaxLength),
	}
	if !a.Moved {
		data.IPs = validIPs(a.IPs)
	}
	return data
}

// validIPs returns of the addresses what the API takes: different CIDRs in canonical form, the first 16 of them.
func validIPs(ips []string) []string {
	var valid []string
	for _, ip := range ips {
		prefix, err := netip.ParsePrefix(ip)
		if err != nil {
			continue
		}
		if s := prefix.String(); !slices.Contains(valid, s) && len(valid) < resourceapi.NetworkDeviceDataMaxIPs {
			valid = append(valid, s)
		}
	}
	return valid
}
