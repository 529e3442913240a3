// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnetworkdrivernodeconfigs,singular=ciliumnetworkdrivernodeconfig,shortName=ndnc
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="Whether the node works with this configuration"
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why it is ready, or why not"
// +kubebuilder:printcolumn:name="Degraded",type=string,JSONPath=`.status.conditions[?(@.type=="Degraded")].status`,description="Whether a part of the configuration could not be applied"
// +kubebuilder:printcolumn:name="Devices",type=integer,JSONPath=`.status.devices`,description="Devices advertised to the scheduler"
// +kubebuilder:printcolumn:name="Allocated",type=integer,JSONPath=`.status.allocatedDevices`,description="Devices prepared for a claim"
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.status.poolUse`,priority=1,description="Free and advertised devices of each pool"
// +kubebuilder:printcolumn:name="Driver",type=string,JSONPath=`.status.driverName`,priority=1,description="DRA driver name in use"
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Degraded")].message`,priority=1,description="What could not be applied"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="!has(self.spec.pools) || self.spec.pools.all(p, size(self.metadata.name) + 1 + size(p.name) <= 253)",message="the node's name and the pool's name, joined by a slash, must be at most 253 characters",fieldPath=".spec.pools"

// CiliumNetworkDriverNodeConfig configures the network driver of one node: the
// one that has this object's name.
type CiliumNetworkDriverNodeConfig struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the node shall offer.
	//
	// +required
	Spec CiliumNetworkDriverNodeConfigSpec `json:"spec"`

	// status is written by the node's agent.
	//
	// +optional
	Status CiliumNetworkDriverNodeConfigStatus `json:"status,omitzero"`
}

// +kubebuilder:object:root=true

// CiliumNetworkDriverNodeConfigList is a list of node configs.
type CiliumNetworkDriverNodeConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []CiliumNetworkDriverNodeConfig `json:"items"`
}

// CiliumNetworkDriverNodeConfigSpec says which devices a node has and in which
// pools it offers them.
//
// +kubebuilder:validation:XValidation:rule="!has(self.pools) || self.pools.all(p, !has(p.attributes) || p.attributes.all(k, !k.startsWith(self.driverName + '/')))",message="an attribute of the driver's domain is named without it",fieldPath=".pools"
type CiliumNetworkDriverNodeConfigSpec struct {
	// driverName is the name under which the driver registers with kubelet and
	// publishes ResourceSlices. A change takes effect when the agent is
	// restarted, and so does one of a draRegistration field.
	//
	// +optional
	// +kubebuilder:default="networkdriver.cilium.io"
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="must be a DNS subdomain: lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit"
	DriverName string `json:"driverName"`

	// draRegistrationRetryInterval is the time between two attempts to
	// register with kubelet, in seconds.
	//
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	DraRegistrationRetryInterval int32 `json:"draRegistrationRetryInterval"`

	// draRegistrationTimeout is how long one attempt may take, in seconds.
	//
	// +optional
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	DraRegistrationTimeout int32 `json:"draRegistrationTimeout"`

	// draRegistrationMaxAttempts is the number of attempts after which the
	// registration counts as failed; it is then tried again, less often.
	//
	// +optional
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	DraRegistrationMaxAttempts int32 `json:"draRegistrationMaxAttempts"`

	// deviceManagerConfigs turns device managers on and configures them. One
	// that is not mentioned is off.
	//
	// +optional
	DeviceManagerConfigs *CiliumNetworkDriverDeviceManagerConfig `json:"deviceManagerConfigs,omitempty"`

	// pools are the groups in which devices are offered. A device that no pool
	// matches is not offered. One that several match goes to the first of them
	// in the order of their names.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.map(p, has(p.filter) && has(p.filter.ifNames) ? size(p.filter.ifNames) : 0).sum() <= 512",message="the ifNames of all pools together may have at most 512 values"
	// +kubebuilder:validation:XValidation:rule="self.map(p, has(p.filter) && has(p.filter.ifNames) ? size(p.filter.ifNames) : 0).sum() > 512 || self.all(i, p, self.all(j, q, j <= i || !has(p.filter) || !has(p.filter.ifNames) || !has(q.filter) || !has(q.filter.ifNames) || !sets.intersects(p.filter.ifNames, q.filter.ifNames)))",message="an ifNames value names one device and may be in the filter of one pool only"
	Pools []CiliumNetworkDriverDevicePoolConfig `json:"pools,omitempty"`
}

// CiliumNetworkDriverDeviceManagerConfig configures the device managers. One
// that is not mentioned is off.
type CiliumNetworkDriverDeviceManagerConfig struct {
	// sriov configures the manager of SR-IOV virtual functions.
	//
	// +optional
	SRIOV *SRIOVDeviceManagerConfig `json:"sriov,omitempty"`

	// dummy configures the manager of dummy links.
	//
	// +optional
	Dummy *DummyDeviceManagerConfig `json:"dummy,omitempty"`
}

// SRIOVDeviceManagerConfig configures the manager of SR-IOV virtual functions
// (VFs). It finds the VFs of every physical function (PF) of the node; Ifaces
// is needed only to have VFs made.
type SRIOVDeviceManagerConfig struct {
	// enabled turns the manager on.
	//
	// +required
	Enabled bool `json:"enabled"`

	// ifaces are the PFs on which VFs are to be made.
	//
	// +optional
	// +listType=map
	// +listMapKey=ifName
	// +kubebuilder:validation:MaxItems=64
	Ifaces []SRIOVDeviceConfig `json:"ifaces,omitempty"`
}

// SRIOVDeviceConfig configures one physical function.
type SRIOVDeviceConfig struct {
	// ifName is the kernel's interface name of the PF.
	//
	// +required
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self.matches('^[!-.0-9;-~]+$') && self != '.' && self != '..'",message="must be an interface name: 1 to 15 printable ASCII characters without space, '/' and ':', not '.' or '..'"
	IfName string `json:"ifName"`

	// vfCount is the number of VFs the PF shall have. It is written when the
	// PF has none: VFs that are already there are left as they are, whatever
	// their number. 0 makes none. The PF's own limit, sriov_totalvfs, counts
	// too.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4096
	VfCount int32 `json:"vfCount"`
}

// DummyDeviceManagerConfig configures the manager of dummy links.
type DummyDeviceManagerConfig struct {
	// enabled turns the manager on.
	//
	// +required
	Enabled bool `json:"enabled"`

	// count is the number of dummy links to offer: dummy0, dummy1 and so on.
	//
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1024
	Count int32 `json:"count"`
}

// CiliumNetworkDriverDevicePoolConfig describes one pool of devices.
type CiliumNetworkDriverDevicePoolConfig struct {
	// name is the pool's name, which devices carry as their attribute "pool".
	// ResourceSlices have <node>/<pool>, of at most 253 characters.
	//
	// +required
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="must be a DNS subdomain: lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit"
	PoolName string `json:"name"`

	// filter selects the pool's devices. Without a filter the pool has none;
	// an empty filter selects every device. The fields of a filter are ANDed,
	// the values of one field are ORed.
	//
	// +optional
	Filter *CiliumNetworkDriverDeviceFilter `json:"filter,omitempty"`

	// claims is what claims may ask of the pool's devices by parameters of
	// their own. Any lets them ask for any VLAN, address, route, network or driver;
	// NetworkOnly for networks, whose namespaceSelector decides, for addresses
	// of these, and for podIfName; None for nothing. Parameters in a DeviceClass are the administrator's, and not
	// limited by this.
	//
	// +optional
	// +kubebuilder:default=Any
	// +kubebuilder:validation:Enum=Any;NetworkOnly;None
	Claims string `json:"claims,omitempty"`

	// attributes are the administrator's own, which the pool's devices carry in
	// ResourceSlices as strings, such as a rack, a rail or a plane, for the
	// selectors of classes and for matchAttribute. A name is an identifier, with
	// a domain before it or without, for example rail or example.com/rail; one
	// without is of the driver's domain. Names that the driver, Kubernetes or
	// Multus give meaning to are refused.
	//
	// +optional
	// +kubebuilder:validation:MaxProperties=8
	// +kubebuilder:validation:XValidation:rule="self.all(k, k.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z_][A-Za-z0-9_]{0,31}$') && k.indexOf('/') <= 63)",message="an attribute's name must be an identifier of at most 32 letters, digits and '_' that does not begin with a digit, with or without a DNS subdomain of at most 63 characters and '/' before it"
	// +kubebuilder:validation:XValidation:rule="self.all(k, !k.matches('^(pool|deviceManager|ifName|kernelIfName|mtu|mac|pfName|vfID|vendor|deviceID|driver|linkSpeed|iommuGroup|rdma|rdmaDevice|virtual|vlan|podMTU|(.*[.])?(kubernetes[.]io|k8s[.]io|cni[.]cncf[.]io)/.*)$'))",message="the driver's own attributes (pool, deviceManager, ifName, kernelIfName, mtu, mac, pfName, vfID, vendor, deviceID, driver, linkSpeed, iommuGroup, rdma, rdmaDevice, virtual, vlan, podMTU) and those of kubernetes.io, k8s.io and cni.cncf.io are not the administrator's"
	Attributes map[string]PoolAttribute `json:"attributes,omitempty"`

	// faultEffect is the effect of the taints that devices get while they have a
	// fault, such as a PF without a carrier. NoSchedule keeps new pods away.
	// NoExecute also ends the pods that have the device, where its link is gone
	// or dead; a device whose address another one has, that is slower than it
	// was, or that fails to be attached gets NoSchedule all the same.
	//
	// +optional
	// +kubebuilder:default=NoSchedule
	// +kubebuilder:validation:Enum=NoSchedule;NoExecute
	FaultEffect string `json:"faultEffect,omitempty"`
}

// PoolAttribute is the value of an attribute of a pool's devices.
//
// +kubebuilder:validation:MaxLength=64
type PoolAttribute string

// What claims may ask of a pool's devices.
const (
	// ClaimsAny lets claims use every parameter.
	ClaimsAny = "Any"
	// ClaimsNetworkOnly lets them use network, addresses of it, and podIfName.
	ClaimsNetworkOnly = "NetworkOnly"
	// ClaimsNone lets them use none.
	ClaimsNone = "None"
)

// Effects of the taints of devices that have a fault.
const (
	// FaultEffectNoSchedule keeps new pods away.
	FaultEffectNoSchedule = "NoSchedule"
	// FaultEffectNoExecute also ends the pods that have the device.
	FaultEffectNoExecute = "NoExecute"
)

// CiliumNetworkDriverDeviceFilter selects devices. A device matches when every
// field that is given has one value that fits.
type CiliumNetworkDriverDeviceFilter struct {
	// deviceManagers matches the manager of the device: sr-iov for VFs, dummy
	// for dummy links.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:Enum=sr-iov;dummy
	DeviceManagers []string `json:"deviceManagers,omitempty"`

	// ifNames matches the interface name of the device on the host; of a VF the
	// last known one while it is in a pod. A value may be in one pool only, and
	// all pools together may have 512.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=15
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[!-.0-9;-~]+$') && self != '.' && self != '..'",message="must be an interface name: 1 to 15 printable ASCII characters without space, '/' and ':', not '.' or '..'"
	IfNames []string `json:"ifNames,omitempty"`

	// pfNames matches the interface name of a VF's physical function. Dummy
	// links are not asked: to keep them out, say deviceManagers too.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=15
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[!-.0-9;-~]+$') && self != '.' && self != '..'",message="must be an interface name: 1 to 15 printable ASCII characters without space, '/' and ':', not '.' or '..'"
	PfNames []string `json:"pfNames,omitempty"`

	// parentIfNames matches the interface name of a device's parent link. VFs
	// are not asked, dummy links have no parent and do not match.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=15
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[!-.0-9;-~]+$') && self != '.' && self != '..'",message="must be an interface name: 1 to 15 printable ASCII characters without space, '/' and ':', not '.' or '..'"
	ParentIfNames []string `json:"parentIfNames,omitempty"`

	// pciAddrs matches the PCI address of a VF. Dummy links have none and do not
	// match, here and in the fields below.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=16
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f][.][0-7]$')",message="must be a PCI address as the kernel writes it, domain:bus:device.function in lower case hexadecimal, for example 0000:03:00.1"
	PciAddrs []string `json:"pciAddrs,omitempty"`

	// vendorIDs matches the PCI vendor of a VF.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=6
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^0x[0-9a-f]{4}$')",message="must be a PCI identifier: 0x and four lower case hexadecimal digits, for example 0x8086"
	VendorIDs []string `json:"vendorIDs,omitempty"`

	// deviceIDs matches the PCI device identifier of a VF, which is not its
	// PF's.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=6
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^0x[0-9a-f]{4}$')",message="must be a PCI identifier: 0x and four lower case hexadecimal digits, for example 0x8086"
	DeviceIDs []string `json:"deviceIDs,omitempty"`

	// drivers matches the kernel driver that a VF is bound to, for example igbvf
	// or vfio-pci.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:items:XValidation:rule="self.matches('^[A-Za-z0-9._-]+$')",message="must be the name of a kernel driver: letters, digits, '.', '_' and '-'"
	Drivers []string `json:"drivers,omitempty"`
}
