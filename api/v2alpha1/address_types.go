// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
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
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdriveraddresses,singular=ciliumnetworkdriveraddress,shortName=ndaddr
// +kubebuilder:storageversion
// +kubebuilder:selectablefield:JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Network",type=string,JSONPath=`.spec.network`,description="Network of the address"
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.spec.address`,description="The address"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`,description="Node whose device has it"
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
// the node exists, as the pod may use the address.
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
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="an address is made anew, not changed"
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

	// node is the node whose device has it.
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
