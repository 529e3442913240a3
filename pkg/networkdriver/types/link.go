// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

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
