// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdrivernetworks,singular=ciliumnetworkdrivernetwork,shortName=ndnet
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="Whether claims can join"
// +kubebuilder:printcolumn:name="VLAN",type=integer,JSONPath=`.spec.vlan`,description="VLAN of the network, 0 for none"
// +kubebuilder:printcolumn:name="MTU",type=integer,JSONPath=`.spec.mtu`,description="MTU of its interfaces, empty for that of the device"
// +kubebuilder:printcolumn:name="Used",type=integer,JSONPath=`.status.usedAddresses`,description="Addresses that devices have"
// +kubebuilder:printcolumn:name="Free",type=string,JSONPath=`.status.free`,description="Addresses that are left, of each family"
// +kubebuilder:printcolumn:name="Reserved",type=integer,JSONPath=`.status.reservedAddresses`,description="Addresses that are kept for pods",priority=1
// +kubebuilder:printcolumn:name="Claims",type=integer,JSONPath=`.status.claims`,description="Claims that have an address"
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,description="Why claims cannot join",priority=1
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

	// status is written by the operator.
	//
	// +optional
	Status CiliumNetworkDriverNetworkStatus `json:"status,omitzero"`
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
// +kubebuilder:validation:XValidation:rule="!has(self.subnets) || self.subnets.all(i, a, self.subnets.all(j, b, i == j || !isCIDR(a.cidr) || !isCIDR(b.cidr) || !cidr(a.cidr).containsCIDR(b.cidr)))",message="two subnets of a network must not overlap",fieldPath=".subnets"
// +kubebuilder:validation:XValidation:rule="!has(self.routes) || self.routes.all(r, has(r.via) || !isCIDR(r.to) || (has(self.subnets) && self.subnets.exists(s, isCIDR(s.cidr) && has(s.gateway) && cidr(s.cidr).ip().family() == cidr(r.to).ip().family())))",message="a route without via needs a subnet of its family with a gateway",fieldPath=".routes"
// +kubebuilder:validation:XValidation:rule="!has(self.policyRouting) || has(self.subnets)",message="there is nothing to route by without subnets",fieldPath=".policyRouting"
// +kubebuilder:validation:XValidation:rule="!has(self.addressReuse) || self.addressReuse.mode == 'None' || has(self.subnets)",message="there is no address to use again without subnets",fieldPath=".addressReuse"
// +kubebuilder:validation:XValidation:rule="!has(self.mtu) || self.mtu >= 1280 || !has(self.subnets) || self.subnets.all(s, !isCIDR(s.cidr) || cidr(s.cidr).ip().family() == 4)",message="must be at least 1280 in a network with IPv6",fieldPath=".mtu"
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

	// subnets are the network's addresses. A device gets one of each family,
	// from the first subnet of the family that is for its node and has one
	// left. Without subnets devices get no address.
	//
	// +optional
	// +listType=map
	// +listMapKey=cidr
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:MinItems=1
	Subnets []NetworkSubnet `json:"subnets,omitempty"`

	// addressReuse says what becomes of an address when its device is free.
	// Left out, others can have it.
	//
	// +optional
	AddressReuse *NetworkAddressReuse `json:"addressReuse,omitempty"`

	// routes are set in the pod, beside those to the subnets. One that the pod
	// has already is refused; those of its other interfaces are not touched.
	//
	// +optional
	// +listType=map
	// +listMapKey=to
	// +listMapKey=metric
	// +kubebuilder:validation:MaxItems=32
	Routes []NetworkRoute `json:"routes,omitempty"`

	// policyRouting gives each device a routing table of its own, with the
	// routes to its subnets and routes, for what is sent from its addresses. So
	// two devices of a pod in one subnet answer on the wire they were asked on.
	// An empty object turns it on.
	//
	// +optional
	PolicyRouting *NetworkPolicyRouting `json:"policyRouting,omitempty"`

	// vf are the rights and limits that a VF has in the network. What is left
	// out stays as it is on the host, and what is set is put back after the
	// pod. A device that is no VF is refused where one is set.
	//
	// +optional
	VF *NetworkVF `json:"vf,omitempty"`

	// interface are settings of the interface in the pod. What is left out
	// stays as it is in the pod, but for acceptRA, which is 0 then.
	//
	// +optional
	Interface *NetworkInterface `json:"interface,omitempty"`
}

// Modes of the reuse of addresses.
const (
	// AddressReuseNone gives an address to whoever comes next.
	AddressReuseNone = "None"
	// AddressReusePodName keeps an address for the next pod of the same name.
	AddressReusePodName = "PodName"
)

// NetworkAddressReuse says what becomes of an address when its device is free.
type NetworkAddressReuse struct {
	// mode is None, where others can have the address, or PodName: it is kept
	// for the pod of the same namespace and name, such as a StatefulSet's, which
	// gets it again for the same device of its claim, on any node that its subnet
	// is for. While the former pod's node has not released it the pod waits, and
	// gets no other one.
	//
	// +required
	// +kubebuilder:validation:Enum=None;PodName
	Mode string `json:"mode"`

	// retain is how long an address is kept after it was released: 1s to 8760h,
	// a year. Until then nobody else can have it.
	//
	// +optional
	// +kubebuilder:default="24h"
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]+([.][0-9]+)?(h|m|s|ms))+$`
	// +kubebuilder:validation:XValidation:rule="!self.matches('^([0-9]{1,6}([.][0-9]{1,6})?(h|m|s|ms))+$') || duration(self) >= duration('1s') && duration(self) <= duration('8760h')",message="must be 1s to 8760h"
	Retain string `json:"retain,omitempty"`
}

// NetworkInterface are settings of an interface in the pod, named as the
// kernel's in /proc/sys/net/ipv4/conf and /proc/sys/net/ipv6/conf.
type NetworkInterface struct {
	// arpIgnore is arp_ignore: which ARP requests are answered.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=8
	ARPIgnore *int32 `json:"arpIgnore,omitempty"`

	// arpAnnounce is arp_announce: which address is the sender of ARP requests.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2
	ARPAnnounce *int32 `json:"arpAnnounce,omitempty"`

	// rpFilter is rp_filter: whether packets are dropped whose sender is not
	// reached by this interface, 0 for no, 1 for strict and 2 for loose.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2
	RPFilter *int32 `json:"rpFilter,omitempty"`

	// forwarding is forwarding of both families: whether what comes in by this
	// interface for others is passed on.
	//
	// +optional
	Forwarding *bool `json:"forwarding,omitempty"`

	// acceptRA is accept_ra: whether router advertisements are taken, 0 for no,
	// 1 for where the interface does not forward, 2 for always. Left out it is
	// 0, since whoever sends one on the network could become the pod's default
	// router.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2
	AcceptRA *int32 `json:"acceptRA,omitempty"`
}

// NetworkSubnet is a subnet of a network.
//
// +kubebuilder:validation:XValidation:rule="!has(self.gateway) || !isIP(self.gateway) || !isCIDR(self.cidr) || cidr(self.cidr).containsIP(self.gateway)",message="must be an address of the subnet",fieldPath=".gateway"
// +kubebuilder:validation:XValidation:rule="!has(self.gateway) || !isCIDR(self.cidr) || cidr(self.cidr).prefixLength() < (cidr(self.cidr).ip().family() == 4 ? 32 : 128)",message="a subnet of one address has no gateway",fieldPath=".gateway"
// +kubebuilder:validation:XValidation:rule="!has(self.ranges) || !isCIDR(self.cidr) || self.ranges.all(r, (!isIP(r.from) || cidr(self.cidr).containsIP(r.from)) && (!isIP(r.to) || cidr(self.cidr).containsIP(r.to)))",message="a range must be in the subnet",fieldPath=".ranges"
type NetworkSubnet struct {
	// cidr is the subnet, for example 192.0.2.0/24 or 2001:db8::/64.
	//
	// +required
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a subnet with no bit set beyond the prefix length, in canonical form: for example 192.0.2.0/24 or 2001:db8::/64"
	CIDR string `json:"cidr"`

	// ranges are what of the subnet is given out. Left out it is every address.
	// Never given out are the gateway and, of a subnet of more than two, the
	// first address (of IPv6 the routers' anycast address) and the last one of
	// IPv4.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Ranges []AddressRange `json:"ranges,omitempty"`

	// exclude are addresses and subnets that are not given out.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) ? ip.isCanonical(self) : isCIDR(self) && string(cidr(self).masked()) == self",message="must be an address or a subnet in canonical form"
	Exclude []string `json:"exclude,omitempty"`

	// gateway is the router of the subnet. It is not given out, and the next
	// hop of routes without via; no default route comes of it.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self)",message="must be an address in canonical form"
	Gateway string `json:"gateway,omitempty"`

	// nodeSelector selects the nodes that the subnet is for, by the labels of
	// their Node objects, as racks may have subnets of their own. Left out it
	// is for all of them.
	//
	// +optional
	NodeSelector *SubnetNodeSelector `json:"nodeSelector,omitempty"`
}

// SubnetNodeSelector selects the nodes of a subnet.
//
// +structType=atomic
type SubnetNodeSelector struct {
	// matchLabels are labels that a node must have, with these values.
	//
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(key, key.size() > 0 && key.size() <= 317)",message="a label key must have 1 to 317 characters"
	MatchLabels map[string]LabelValue `json:"matchLabels,omitempty"`
}

// AddressRange is a range of addresses, the ends included.
type AddressRange struct {
	// from is the first address.
	//
	// +required
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self)",message="must be an address in canonical form"
	From string `json:"from"`

	// to is the last address, not before from.
	//
	// +required
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self)",message="must be an address in canonical form"
	To string `json:"to"`
}

// NetworkRoute is a route in the pod.
//
// +kubebuilder:validation:XValidation:rule="!has(self.via) || !isIP(self.via) || !isCIDR(self.to) || ip(self.via).family() == cidr(self.to).ip().family()",message="must be of the family of to",fieldPath=".via"
type NetworkRoute struct {
	// to is the destination, 0.0.0.0/0 or ::/0 for a default route.
	//
	// +required
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a subnet with no bit set beyond the prefix length, in canonical form: for example 192.0.2.0/24 or 2001:db8::/64"
	To string `json:"to"`

	// via is the next hop, which must be in one of the subnets, and is given
	// out to no device. Left out it is the gateway of the device's subnet.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self)",message="must be an address in canonical form"
	Via string `json:"via,omitempty"`

	// metric is the route's priority: of two to one destination the lower one
	// is used. 0 is the kernel's default of the family.
	//
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	Metric int32 `json:"metric"`
}

// NetworkPolicyRouting configures the routing table of a device.
type NetworkPolicyRouting struct {
	// derive adds a route for each IPv4 address, derived from the address as
	// the CNI plugin amd-host-device does it.
	//
	// +optional
	Derive *DerivedRoutes `json:"derive,omitempty"`
}

// DerivedRoutes says how to derive a route from an address.
type DerivedRoutes struct {
	// nexthopNetAddrOffset is the number of the next hop in the address's
	// subnet: 1 is the first host. It is given out to no device. It does not
	// count in a /31, whose other address is the next hop.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	NexthopNetAddrOffset int64 `json:"nexthopNetAddrOffset"`

	// routeDstPrefixLen is the prefix length of the destination, which is the
	// address cut to it; 0 is the default route.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=32
	RouteDstPrefixLen int32 `json:"routeDstPrefixLen"`
}

// ConditionNetworkConflicting is True on a network that has addresses of an older one
// on the same wire: of the same VLAN, and with a pool in common. Claims cannot
// join it.
const ConditionNetworkConflicting = "Conflicting"

// ConditionNetworkUntagged is True on a network without a VLAN: its VFs' frames
// go out as their pods make them, so that a pod may tag them itself, and is in
// every VLAN that the PF's port carries.
const ConditionNetworkUntagged = "Untagged"

// CiliumNetworkDriverNetworkStatus is what the operator has made of the
// network.
type CiliumNetworkDriverNetworkStatus struct {
	// observedGeneration is the generation of the object of which the status
	// speaks.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions are the network's conditions: Ready, Conflicting and Untagged.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// usedAddresses is the number of addresses that devices have.
	//
	// +optional
	UsedAddresses int64 `json:"usedAddresses,omitempty"`

	// reservedAddresses is the number of addresses that no device has and that
	// are kept for pods: addressReuse.
	//
	// +optional
	ReservedAddresses int64 `json:"reservedAddresses,omitempty"`

	// free is the number of addresses that are left of each family, for people:
	// from a million on as a power of two, such as "250 IPv4, 2^64 IPv6".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Free string `json:"free,omitempty"`

	// freeAddresses is the number of addresses that are left, at most 2^63-1.
	//
	// +optional
	FreeAddresses int64 `json:"freeAddresses,omitempty"`

	// claims is the number of claims that have an address of the network.
	//
	// +optional
	Claims int32 `json:"claims,omitempty"`

	// subnets counts the addresses of each subnet.
	//
	// +optional
	// +listType=map
	// +listMapKey=cidr
	// +kubebuilder:validation:MaxItems=64
	Subnets []NetworkSubnetStatus `json:"subnets,omitempty"`
}

// NetworkSubnetStatus counts the addresses of a subnet.
type NetworkSubnetStatus struct {
	// cidr is the subnet.
	//
	// +required
	// +kubebuilder:validation:MaxLength=43
	CIDR string `json:"cidr"`

	// used is the number of addresses that devices have.
	//
	// +required
	Used int64 `json:"used"`

	// reserved is the number of addresses that are kept for pods.
	//
	// +optional
	Reserved int64 `json:"reserved,omitempty"`

	// free is the number of addresses that are left, at most 2^63-1.
	//
	// +required
	Free int64 `json:"free"`
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
