// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package types holds what every room of the network driver speaks of: devices and their managers, the
// configuration a claim asks for, and the record of a prepared device that is kept in the claim's status.
package types

import (
	"context"
	"encoding/json"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// DeviceManagerType names a device manager. It is published as the deviceManager attribute and is what a pool
// filter's deviceManagers lists.
type DeviceManagerType string

const (
	// DeviceManagerTypeSRIOV manages SR-IOV virtual functions.
	DeviceManagerTypeSRIOV DeviceManagerType = "sr-iov"
	// DeviceManagerTypeDummy manages Linux dummy links.
	DeviceManagerTypeDummy DeviceManagerType = "dummy"
)

func (t DeviceManagerType) String() string { return string(t) }

// AttributeMultusDeviceID is the attribute by which Multus tells a CNI plugin which device to take: its PCI address.
const AttributeMultusDeviceID resourceapi.QualifiedName = "k8s.cni.cncf.io/deviceID"

// Device is one network device as its manager knows it. Values are immutable, since StateDB readers share them:
// Setup and Merge return new ones. A Device is stored by [json.Marshaler] and comes back by
// [DeviceManager.RestoreDevice].
type Device interface {
	json.Marshaler

	// IfName is the device's stable name: a DNS label, unique on the node, derived from what the device is and not
	// from its present interface name. It is the device's name in ResourceSlices.
	IfName() string

	// KernelIfName is the interface name on the host, the last known one while the link is in a pod; empty for a
	// device without a link.
	KernelIfName() string

	// Attrs returns the attributes to publish, without those that the driver itself adds (pool, deviceManager, Multus's name
	// of the pool, and eight of the administrator's). There are at most 21, with names that a ResourceSlice takes; a string
	// that it does not take is left out.
	Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

	// Match says whether the device passes the filter. All fields that are set must match; an empty filter matches.
	Match(filter *v2alpha1.CiliumNetworkDriverDeviceFilter) bool

	// Link says how to recognise the device's link in any network namespace. It is zero for a device without one.
	Link() nic.Identity

	// HostState is how the link was found on the host before Setup, and so what it is restored to. It is
	// meaningful for a prepared device only.
	HostState() nic.State

	// Validate reports, before anything is touched, what about the configuration this device cannot do. The error
	// names the parameter.
	Validate(cfg DeviceConfig) error

	// Setup brings the device into the state the configuration asks for, all of it and not just the difference, and
	// returns the prepared device that remembers what was there before. It works on the host only; moving the link
	// is podnet's job. Setup of a prepared device is idempotent and keeps the remembered state. When it fails,
	// nothing it did is left behind.
	Setup(ctx context.Context, cfg DeviceConfig) (Device, error)

	// Free undoes Setup after the link is back on the host: it restores what the prepared device remembers. What is
	// gone already is no error.
	Free(ctx context.Context, cfg DeviceConfig) error

	// Merge returns this freshly discovered device completed by what discovery can no longer see because the
	// prepared device's link is in a pod, such as its kernel interface name.
	Merge(prepared Device) Device
}

// Prepared is a device that Setup returned, with the configuration that it was for.
type Prepared struct {
	Device Device
	Config DeviceConfig
}

// Checker is a device manager whose devices have state that somebody else may change while they are prepared, such as a
// VF's VLAN, which its PF keeps.
type Checker interface {
	// Check says of each device how it differs from what Setup made of it, or why that cannot be told; nil for one that is as
	// it should be. It changes nothing, and reads as little as it can, since every pod's start waits for it: what differs is
	// for Setup to put back. An [AstrayError] says that the device must leave its pod until it is.
	Check(ctx context.Context, devices []Prepared) []error
}

// AstrayError is what a [Checker] says of a device whose frames go where its claim does not have them go: a VF in another VLAN is
// in another tenant's network.
type AstrayError struct {
	// Reason says where the device is, and where it should be.
	Reason string
}

func (e AstrayError) Error() string { return e.Reason }

// Rememberer is a device with a state of its own on the host, which Setup changes.
type Rememberer interface {
	// Remember returns the device with what it is found as, as Setup would, and changes nothing. Setup of what it returns
	// keeps that. A device that remembers already is returned as it is.
	Remember(ctx context.Context, cfg DeviceConfig) (Device, error)
}

// Noted is a device that remembers more than its record has. The journal has that too: it is too much for a claim's status,
// or not to be believed of one, and does not outlive the boot.
type Noted interface {
	// MarshalNote returns what MarshalJSON returns, with the rest.
	MarshalNote() ([]byte, error)
	// RestoreNote returns the device with the rest of what MarshalNote returned.
	RestoreNote(note []byte) (Device, error)
}

// Rebindable is a device whose Setup may bind another driver to it, which takes its link away.
type Rebindable interface {
	// BindBack binds the driver again that the device was found with, waits for its link, and returns the device as one that
	// has it: what the link was is for the caller to restore, before Free. It may be repeated. A device whose driver stayed comes
	// back as it is.
	BindBack(ctx context.Context) (Device, error)
}

// Exposure is what containers get of a device that programs of theirs open themselves. It is zero for one that is used by its link alone.
type Exposure struct {
	// Address is the device's on its bus, such as 0000:03:00.1.
	Address string
	// Nodes are the paths of its device nodes, on the node as in the container.
	Nodes []string
	// IOMMUGroup is the number of the IOMMU group that one of them is of, nil for none. It is the device's until that is made anew.
	IOMMUGroup *int64
}

// Exposed is a prepared device that programs may open themselves.
type Exposed interface {
	// Exposes says whether they may with the configuration. The memory that the device reaches is locked then.
	Exposes(cfg DeviceConfig) bool
	// Exposure returns what containers get of the device, which is in its pod. The error says what is missing.
	Exposure(cfg DeviceConfig) (Exposure, error)
}

// IsExposed says whether programs may open the device themselves.
func IsExposed(dev Device, cfg DeviceConfig) bool {
	e, ok := dev.(Exposed)
	return ok && e.Exposes(cfg)
}

// ExposureOf returns what containers get of the device with the configuration.
func ExposureOf(dev Device, cfg DeviceConfig) (Exposure, error) {
	if !IsExposed(dev, cfg) {
		return Exposure{}, nil
	}
	return dev.(Exposed).Exposure(cfg)
}

// Verbed is a device whose link may have an RDMA device.
type Verbed interface {
	// RDMADevice is the one that it had on the host, zero for none.
	RDMADevice() rdma.Device
}

// RDMADeviceOf returns the RDMA device of the device's link, zero for none.
func RDMADeviceOf(dev Device) rdma.Device {
	if v, ok := dev.(Verbed); ok {
		return v.RDMADevice()
	}
	return rdma.Device{}
}

// Unfinished is a device manager whose devices can be freed by what they were before Setup: a Setup that the end of the
// agent interrupted is undone with that.
type Unfinished interface {
	// RestoreUnfinished decodes a device that need not be prepared, and is good for Free only.
	RestoreUnfinished(data []byte) (Device, error)
}

// Skipped is a device that a manager knows of and does not offer.
type Skipped struct {
	// Device is the name it would have, or its address.
	Device string
	// Reason says in words for people why it is left out.
	Reason string
	// Cause and Of say which fault it has, empty for one that is left out on purpose.
	Cause Cause  `json:",omitempty"`
	Of    string `json:",omitempty"`
}

// Problem is something in a manager's configuration or on the host that keeps it from doing all it was told to.
type Problem struct {
	// Field is the path of the NodeConfig field below spec.deviceManagerConfigs that cannot be met, such as
	// sriov.ifaces[0].vfCount.
	Field string
	// Message names the object, the value, and what is allowed.
	Message string
}

// Snapshot is everything a manager sees at one moment.
type Snapshot struct {
	// Devices is the complete inventory: what is not in it is withdrawn, unless it is in Skipped with a cause.
	Devices []Device
	// Skipped are the devices left out, each with its reason.
	Skipped []Skipped
	// Problems are what of the configuration cannot be met at this moment.
	Problems []Problem
}

// DeviceManager discovers one class of devices and restores prepared ones from their record.
type DeviceManager interface {
	Type() DeviceManagerType

	// Run publishes a complete snapshot as soon as it has one, again whenever it changed, and blocks until the
	// context ends. A scan that fails as a whole is not published, so the last good inventory stays.
	Run(ctx context.Context, publish func(Snapshot)) error

	// RestoreDevice decodes a prepared device from the data of its record. The data is untrusted: an error is
	// returned for anything that is not a complete device of this manager, what the manager can see of the device is
	// not taken from the data, and nothing is changed.
	RestoreDevice(data []byte) (Device, error)
}
