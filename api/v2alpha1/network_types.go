// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdrivernetworks,singular=ciliumnetworkdrivernetwork,shortName=ndnet
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="VLAN",type=integer,JSONPath=`.spec.vlan`,description="VLAN of the network, 0 for none"
// +kubebuilder:printcolumn:name="MTU",type=integer,JSONPath=`.spec.mtu`,description="MTU of its interfaces, empty for that of the device"
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.spec.pools`,description="Pools whose devices are on its wire, empty for all",priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63 && !self.metadata.name.contains('.')",message="the name of a network must have at most 63 characters and no dot",fieldPath=".metadata"

// CiliumNetworkDriverNetwork is a network that claims join by its name. It says
// what a device's link is on that network, and whose claims may join.
//
// What a claim is given is what the network says when the claim is prepared: a
// change counts for claims that are prepared after it, and pods keep theirs
// when the network is deleted.
type CiliumNetworkDriverNetwork struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the network is.
	//
	// +required
	Spec CiliumNetworkDriverNetworkSpec `json:"spec"`
}

// +kubebuilder:object:root=true

// CiliumNetworkDriverNetworkList is a list of networks.
type CiliumNetworkDriverNetworkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []CiliumNetworkDriverNetwork `json:"items"`
}

// CiliumNetworkDriverNetworkSpec says what a network is.
//
// +kubebuilder:validation:XValidation:rule="!has(self.vlanPriority) || self.vlanPriority == 0 || (has(self.vlan) && self.vlan > 0)",message="a priority is part of a VLAN's tag: the network needs a vlan, or no vlanPriority",fieldPath=".vlanPriority"
// +kubebuilder:validation:XValidation:rule="!has(self.vlanProtocol) || self.vlanProtocol == '802.1Q' || (has(self.vlan) && self.vlan > 0)",message="a protocol is that of a VLAN's tag: the network needs a vlan, or no vlanProtocol",fieldPath=".vlanProtocol"
type CiliumNetworkDriverNetworkSpec struct {
	// namespaceSelector selects the namespaces whose claims may join the
	// network, by the labels of the namespaces. An empty one selects all of
	// them. Whoever may label a namespace decides about this.
	//
	// +required
	NamespaceSelector *LabelSelector `json:"namespaceSelector"`

	// pools are the pools whose devices are on the network's wire: a claim that
	// is allotted a device of another one is refused. Without it every pool's
	// devices are.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="must be a DNS subdomain: lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit"
	Pools []string `json:"pools,omitempty"`

	// vlan is the VLAN that a VF's PF tags and filters the VF's frames with, 0
	// for none. A device that cannot be held to a VLAN is refused. Without a
	// VLAN a VF's frames are sent as the pod makes them, tagged ones too.
	//
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4094
	Vlan int32 `json:"vlan"`

	// vlanPriority is the priority (802.1p) in the tag, 0 if left out.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=7
	VlanPriority int32 `json:"vlanPriority,omitempty"`

	// vlanProtocol is the tag's protocol, 802.1Q if left out. Few PFs have
	// 802.1ad.
	//
	// +optional
	// +kubebuilder:validation:Enum="802.1Q";"802.1ad"
	VlanProtocol string `json:"vlanProtocol,omitempty"`

	// mtu is the MTU of the interface in the pod, in bytes. Left out, it is
	// that of the device. A VF's may not be larger than its PF's.
	//
	// +optional
	// +kubebuilder:validation:Minimum=68
	// +kubebuilder:validation:Maximum=65535
	MTU int32 `json:"mtu,omitempty"`

	// vf are the rights and limits that a VF has in the network. What is left
	// out stays as it is on the host, and what is set is put back after the
	// pod. A device that is no VF is refused where one is set.
	//
	// +optional
	VF *NetworkVF `json:"vf,omitempty"`
}

// Protocols of a VLAN's tag.
const (
	// VlanProtocol8021Q is the common tag, also called C-tag.
	VlanProtocol8021Q = "802.1Q"
	// VlanProtocol8021ad is the outer tag of provider bridges, also called
	// S-tag.
	VlanProtocol8021ad = "802.1ad"
)

// NetworkVF is what a PF does for its VF.
//
// +kubebuilder:validation:XValidation:rule="!has(self.minTxRate) || !has(self.maxTxRate) || self.maxTxRate == 0 || self.minTxRate <= self.maxTxRate",message="must not be more than maxTxRate",fieldPath=".minTxRate"
type NetworkVF struct {
	// trust lets the pod change what else only the host may: the VF's hardware
	// address, and that it receives frames for others. What exactly is up to the
	// PF's driver.
	//
	// +optional
	Trust *bool `json:"trust,omitempty"`

	// spoofCheck drops frames that the pod sends from another hardware address
	// than the VF's.
	//
	// +optional
	SpoofCheck *bool `json:"spoofCheck,omitempty"`

	// linkState is the carrier that the pod sees: Auto is that of the PF,
	// Enable makes VFs of a PF reach each other without one, Disable is down.
	//
	// +optional
	// +kubebuilder:validation:Enum=Auto;Enable;Disable
	LinkState string `json:"linkState,omitempty"`

	// minTxRate is the rate that the VF can send at in any case, in Mbit/s, 0
	// for none.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinTxRate *int32 `json:"minTxRate,omitempty"`

	// maxTxRate is the highest rate that the VF can send at, in Mbit/s, 0 for
	// no limit.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxTxRate *int32 `json:"maxTxRate,omitempty"`
}

// Carriers that a VF shows.
const (
	// LinkStateAuto is the PF's own.
	LinkStateAuto = "Auto"
	// LinkStateEnable is always up.
	LinkStateEnable = "Enable"
	// LinkStateDisable is always down.
	LinkStateDisable = "Disable"
)
