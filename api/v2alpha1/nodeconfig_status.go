// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Condition types of a node config. Ready is also used on a cluster config.
const (
	// ConditionReady is True when the object of the observed generation is
	// applied and works.
	ConditionReady = "Ready"

	// ConditionDegraded is True when a part of the configuration could not be
	// applied. The rest is at work.
	ConditionDegraded = "Degraded"
	// ConditionContainerGate is False when containers that list a claim may
	// start without its devices while the agent is away, or may not start
	// with them: the runtime does not resolve CDI devices, or the folder of
	// CDI spec files cannot be written. It is Unknown until the runtime was
	// seen to resolve one.
	ConditionContainerGate = "ContainerGate"
)

// MaxSkippedDevices is the most entries that status.skippedDevices may have.
// Counts per manager are exact.
const MaxSkippedDevices = 64

// MaxPoolPFs is the most entries that status.pools[].pfs may have.
const MaxPoolPFs = 64

// MaxReasonLength is the most characters of a skipped device's reason.
const MaxReasonLength = 1024

// CiliumNetworkDriverNodeConfigStatus is what the node's agent has made of the
// configuration.
type CiliumNetworkDriverNodeConfigStatus struct {
	// observedGeneration is the generation of the object which the agent has
	// applied and of which the rest of the status speaks.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions are the configuration's conditions: Ready, Degraded and
	// ContainerGate.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// driverName is the DRA driver name in use.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	DriverName string `json:"driverName,omitempty"`

	// devices is the number of devices advertised to the scheduler.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Devices int32 `json:"devices"`

	// allocatedDevices is the number of devices prepared for a claim.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	AllocatedDevices int32 `json:"allocatedDevices"`

	// managers counts the devices of each device manager that is on.
	//
	// +optional
	// +listType=map
	// +listMapKey=manager
	// +kubebuilder:validation:MaxItems=16
	Managers []DeviceManagerStatus `json:"managers,omitempty"`

	// pools counts the devices of each pool, also of one that is no longer
	// configured but holds allocated devices.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=1024
	Pools []DevicePoolStatus `json:"pools,omitempty"`

	// rdmaMode says whether the node's network namespaces share RDMA devices,
	// as rdma-system(8) shows it. It is left out where the kernel has no RDMA.
	//
	// +optional
	// +kubebuilder:validation:Enum=shared;exclusive
	RDMAMode string `json:"rdmaMode,omitempty"`

	// poolUse says how many devices of each pool are free and advertised, for
	// people, such as "sriov-pool 4/7". Of many pools it has the first.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	PoolUse string `json:"poolUse,omitempty"`

	// withoutCounters are the physical functions that tell no counters of
	// their virtual functions while programs drive some of these, so that
	// there are no metrics of their traffic.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=15
	WithoutCounters []string `json:"withoutCounters,omitempty"`

	// skippedDevices are devices that are deliberately not offered, with the
	// reason. The list ends after 64 entries; the managers' counts do not.
	//
	// +optional
	// +listType=map
	// +listMapKey=manager
	// +listMapKey=device
	// +kubebuilder:validation:MaxItems=64
	SkippedDevices []SkippedDevice `json:"skippedDevices,omitempty"`
}

// DeviceManagerStatus counts the devices of one manager.
type DeviceManagerStatus struct {
	// manager is the name of the device manager.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Manager string `json:"manager"`

	// devices is the number of devices in the inventory.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	Devices int32 `json:"devices"`

	// skipped is the number of devices that were found and are deliberately
	// not offered.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Skipped int32 `json:"skipped"`
}

// DevicePoolStatus counts the devices of one pool.
type DevicePoolStatus struct {
	// name is the name of the pool.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// devices is the number of devices advertised in the pool.
	//
	// +required
	// +kubebuilder:validation:Minimum=0
	Devices int32 `json:"devices"`

	// allocated is the number of the pool's devices prepared for a claim.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Allocated int32 `json:"allocated"`

	// free is the number of the pool's advertised devices that are not
	// prepared for a claim.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	Free int32 `json:"free"`

	// pfs are the physical functions that the pool's devices come from. One
	// whose devices are away stays until the node config changes. Pools that
	// share one are one wire. Devices such as dummies have none. Of many, the
	// list has the first 64.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=15
	PFs []string `json:"pfs,omitempty"`
}

// SkippedDevice is a device that is deliberately not offered.
type SkippedDevice struct {
	// manager is the name of the device's manager.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Manager string `json:"manager"`

	// device is the name under which the device would be offered.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Device string `json:"device"`

	// reason says why it is not, for people.
	//
	// +required
	// +kubebuilder:validation:MaxLength=1024
	Reason string `json:"reason"`
}
