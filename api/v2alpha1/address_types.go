// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// LabelNetwork is the label of an address with its network's name.
	LabelNetwork = "networkdriver.cilium.io/network"
	// LabelBlock is the label of an address with the block of 256 that it is in,
	// as AddressBlock names it: by it the addresses near to one are listed.
	LabelBlock = "networkdriver.cilium.io/block"
	// LabelReservation is the label of an address that is reserved with whom it
	// is reserved for, as [AddressReservation.Label] has it: by it a pod's
	// addresses are found.
	LabelReservation = "networkdriver.cilium.io/reservation"
)

// States of an address.
const (
	// AddressInUse is the state of an address that a device has.
	AddressInUse = "InUse"
	// AddressReleased is the state of an address that no device has and that is
	// reserved.
	AddressReleased = "Released"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdriveraddresses,singular=ciliumnetworkdriveraddress,shortName=ndaddr
// +kubebuilder:storageversion
// +kubebuilder:selectablefield:JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Network",type=string,JSONPath=`.spec.network`,description="Network of the address"
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.spec.address`,description="The address"
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.spec.state`,description="InUse, or Released and reserved for the pod"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`,description="Node whose device has it, or had it last"
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.namespace`,description="Namespace of claim and pod"
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.pod.name`,description="Pod that has the device"
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.spec.claim.name`,description="Claim that has the device",priority=1
// +kubebuilder:printcolumn:name="Device",type=string,JSONPath=`.spec.device`,description="The device",priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.startsWith(self.spec.network + '.')",message="the name of an address must be that of its network, a dot and the address",fieldPath=".metadata"
// +kubebuilder:validation:XValidation:rule="!isIP(self.spec.address) || (ip(self.spec.address).family() == 4 ? self.metadata.name == self.spec.network + '.' + self.spec.address : self.metadata.name.matches('[.]([0-9a-f]{4}-){7}[0-9a-f]{4}$') && ip(self.metadata.name.substring(self.metadata.name.size() - 39).replace('-', ':')) == ip(self.spec.address))",message="the name must end with the address, an IPv6 address as eight groups of four digits joined by '-'",fieldPath=".metadata"

// CiliumNetworkDriverAddress says that an address of a network is a device's.
// That the API server takes one object of a name is what makes the address
// unique. The agent of the node makes and deletes it; nobody else should while
// the node exists, as the pod may use the address. One that is reserved is
// Released instead of deleted, and the agent of the node that the pod comes to
// takes it over.
type CiliumNetworkDriverAddress struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says whose the address is.
	//
	// +required
	Spec CiliumNetworkDriverAddressSpec `json:"spec"`
}

// +kubebuilder:object:root=true

// CiliumNetworkDriverAddressList is a list of addresses.
type CiliumNetworkDriverAddressList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []CiliumNetworkDriverAddress `json:"items"`
}

// CiliumNetworkDriverAddressSpec says whose an address is.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf || has(oldSelf.reservation)",message="an address is made anew, not changed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.reservation) || has(self.reservation) && self.reservation.claim == oldSelf.reservation.claim && self.reservation.request == oldSelf.reservation.request && self.reservation.ordinal == oldSelf.reservation.ordinal && self.network == oldSelf.network && self.address == oldSelf.address && self.__namespace__ == oldSelf.__namespace__ && self.pod.name == oldSelf.pod.name",message="an address stays reserved for whom it is reserved"
// +kubebuilder:validation:XValidation:rule="oldSelf.state != 'InUse' || self.node == oldSelf.node && self.claim.name == oldSelf.claim.name && self.claim.uid == oldSelf.claim.uid && self.pod.uid == oldSelf.pod.uid && self.request == oldSelf.request && self.device == oldSelf.device && has(self.vlan) == has(oldSelf.vlan) && (!has(self.vlan) || self.vlan == oldSelf.vlan) && has(self.pool) == has(oldSelf.pool) && (!has(self.pool) || self.pool == oldSelf.pool)",message="an address that is InUse is its device's until it is Released"
// +kubebuilder:validation:XValidation:rule="oldSelf.state != 'Released' || self.state == 'InUse' || self == oldSelf",message="an address that is Released changes only as it is taken over, InUse"
// +kubebuilder:validation:XValidation:rule="self.state == 'InUse' ? !has(self.releasedAt) : has(self.releasedAt) && has(self.reservation)",message="an address that is Released has releasedAt and a reservation, and one that is InUse no releasedAt",fieldPath=".state"
type CiliumNetworkDriverAddressSpec struct {
	// network is the name of the network.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Network string `json:"network"`

	// address is the address in canonical form.
	//
	// +required
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip.isCanonical(self)",message="must be an address in canonical form"
	Address string `json:"address"`

	// vlan is the VLAN of the network when the address was taken, 0 for none.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4094
	Vlan int32 `json:"vlan,omitempty"`

	// pool is the configured name of the device's pool.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Pool string `json:"pool,omitempty"`

	// state is InUse while a device has the address. Released is that of one
	// that no device has and that is kept for the pod that it is reserved for.
	//
	// +optional
	// +kubebuilder:default=InUse
	// +kubebuilder:validation:Enum=InUse;Released
	State string `json:"state,omitempty"`

	// releasedAt is when the device was free, of an address that is Released.
	//
	// +optional
	ReleasedAt metav1.Time `json:"releasedAt,omitzero"`

	// reservation says for which device of the pod's name the address is kept
	// after its device is free. Without one the object is deleted then.
	//
	// +optional
	Reservation AddressReservation `json:"reservation,omitzero"`

	// node is the node whose device has it, or had it when it was released.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`

	// namespace is that of claim and pod.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`

	// claim is the claim that the device is prepared for.
	//
	// +required
	Claim AddressOwner `json:"claim"`

	// pod is the pod that has the claim's devices.
	//
	// +required
	Pod AddressOwner `json:"pod"`

	// request is the claim's request that the device satisfies.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=127
	Request string `json:"request"`

	// device is the device's name.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Device string `json:"device"`
}

// AddressReservation tells a device of a pod from its others, in a way that is
// the same for the next pod of the name.
type AddressReservation struct {
	// claim is the name that the pod has for the claim if the claim was made
	// for it from a template, otherwise the claim's own.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Claim string `json:"claim"`

	// request is the claim's request, without subrequest.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Request string `json:"request"`

	// ordinal is the number of the device among those of the request, from 0.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	Ordinal int32 `json:"ordinal"`
}

// AddressOwner names one object.
type AddressOwner struct {
	// name is the object's name.
	//
	// +required
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// uid is the object's UID.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	UID string `json:"uid"`
}

// Holder returns the spec with what says whose the address is, and not whether
// it is released. Two are the same holder where these are equal.
func (s CiliumNetworkDriverAddressSpec) Holder() CiliumNetworkDriverAddressSpec {
	s.State, s.ReleasedAt = AddressInUse, metav1.Time{}
	return s
}

// IsReserved says whether the address is kept after its device is free.
func (s *CiliumNetworkDriverAddressSpec) IsReserved() bool {
	return s.Reservation != AddressReservation{}
}

// ReservedAs says whether both addresses are reserved for the same device of
// the same pod, by its name.
func (s *CiliumNetworkDriverAddressSpec) ReservedAs(other *CiliumNetworkDriverAddressSpec) bool {
	return s.IsReserved() && s.Reservation == other.Reservation &&
		s.Network == other.Network && s.Namespace == other.Namespace && s.Pod.Name == other.Pod.Name
}

// Label returns the value of [LabelReservation] of an address that is reserved
// so for a pod: a hash, since the names may be longer than a label.
func (r AddressReservation) Label(namespace, pod string) string {
	hash := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%s/%s/%d", namespace, pod, r.Claim, r.Request, r.Ordinal))
	return hex.EncodeToString(hash[:16])
}

// AddressName returns the name of the object for an address of a network.
func AddressName(network string, addr netip.Addr) string { return network + "." + addressLabel(addr) }

// AddressBlock returns the name of the block of 256 addresses that an address
// is in: its first address.
func AddressBlock(addr netip.Addr) string {
	block, err := addr.Prefix(addr.BitLen() - 8)
	if err != nil {
		return "" // of no address
	}
	return addressLabel(block.Addr())
}

// addressLabel writes an address as the name of an object and the value of a
// label may have it.
func addressLabel(addr netip.Addr) string {
	if addr.Is4() {
		return addr.String()
	}
	groups := make([]string, 8)
	bytes := addr.As16()
	for i := range groups {
		groups[i] = fmt.Sprintf("%02x%02x", bytes[2*i], bytes[2*i+1])
	}
	return strings.Join(groups, "-")
}
