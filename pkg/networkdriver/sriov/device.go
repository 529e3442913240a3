// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// Device is one SR-IOV virtual function. It is immutable, and its JSON form is what a claim's record keeps.
type Device struct {
	// Addr is the PCI address, which is what the device is known by.
	Addr string `json:"pciAddr"`
	// KernelIfaceName is the interface name on the host. It is empty for a VF without an interface.
	KernelIfaceName string `json:"kernelIfName,omitempty"`
	// MTU in bytes, 0 for a VF without an interface.
	MTU int `json:"mtu,omitempty"`
	// MAC is the hardware address in colon notation, empty for a VF without an interface.
	MAC string `json:"mac,omitempty"`
	// PFName is the interface name of the physical function.
	PFName string `json:"pfName"`
	// VFID is the VF's index on its PF.
	VFID int `json:"vfID"`
	// Vendor and DeviceID are the PCI identifiers, such as 0x8086.
	Vendor   string `json:"vendor"`
	DeviceID string `json:"deviceID"`
	// Driver is the bound kernel driver, of a prepared device the one that it was found with.
	Driver string `json:"driver"`
	// PCIeRoot is the root complex, such as pci0000:00; empty if unknown.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// IOMMUGroup is nil for a device that no IOMMU stands before.
	IOMMUGroup *int64 `json:"iommuGroup,omitempty"`
	// NUMANode is nil if the device is near to no node in particular.
	NUMANode *int64 `json:"numaNode,omitempty"`
	// Rates are what the PF has made of the rates that a claim asks for, where that is something else; nil where it is not.
	Rates *Rates `json:"rates,omitempty"`
	// LinkSpeed is the highest in Mbit/s that the PF's link had since the agent was started, 0 if unknown. It is the PF's, and so in no
	// record.
	LinkSpeed int `json:"-"`
	// Original is what the device was like before Setup; nil for a device that is not prepared.
	Original *Original `json:"original,omitempty"`

	manager *Manager
	// rdma is the RDMA device of the interface. It is not recorded: the kernel tells of a NIC's. The journal has what is made of the
	// interface, which ends when that moves into a pod.
	rdma rdma.Device
	// strayed is true for a prepared device that had no interface at Setup, says its record, and has one now that is not
	// on the host.
	strayed bool
}

// Original is what Setup found, and so what the device goes back to.
type Original struct {
	// Link is the VF's own interface. It is zero for a VF without one. Records of older agents have no more than names,
	// mtu, mac and up.
	Link nic.State `json:"link"`
	// PermMAC is the permanent address of the interface where the VF has several, else empty.
	PermMAC string `json:"permanentMAC,omitempty"`
	// Incarnation tells the VF from a later one at the same PCI address; empty if unknown. It counts until the node is booted.
	Incarnation string `json:"incarnation,omitempty"`
	// Rebound is true for a VF that has another driver for as long as it is the claim's.
	Rebound bool `json:"rebound,omitempty"`
	// VF is what the PF had on record for the VF.
	VF VFSettings `json:"vf"`
	// Settings are what ethtool(8) sets of the interface; nil if that is not known. The journal has them and records do not.
	Settings nic.Settings `json:"-"`
}

// Rates are the rates that a PF holds a VF to, in Mbit/s, 0 for none.
type Rates struct {
	MinTx int `json:"minTx,omitempty"`
	MaxTx int `json:"maxTx,omitempty"`
}

var _ types.Device = (*Device)(nil)

// IfName implements [types.Device]: the PCI address as a DNS label, such as 0000-03-00-1.
func (d *Device) IfName() string { return nameOf(d.Addr) }

func nameOf(addr string) string { return strings.NewReplacer(":", "-", ".", "-").Replace(addr) }

// PF returns the interface name of the VF's physical function, and the VF's index there.
func (d *Device) PF() (name string, vf int) { return d.PFName, d.VFID }

// KernelIfName implements [types.Device].
func (d *Device) KernelIfName() string { return d.KernelIfaceName }

// maxAttributeLen is the longest string value that a ResourceSlice takes (resource.k8s.io/v1, DeviceAttribute).
const maxAttributeLen = 64

// Attrs implements [types.Device]. What is unknown is left out, and so is a string that the API would refuse the whole
// slice for.
func (d *Device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	attrs := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, 17)
	for name, value := range map[resourceapi.QualifiedName]string{
		"ifName":                      d.IfName(),
		"kernelIfName":                d.KernelIfaceName,
		"mac":                         d.MAC,
		"pfName":                      d.PFName,
		"vendor":                      d.Vendor,
		"deviceID":                    d.DeviceID,
		"driver":                      d.Driver,
		"rdmaDevice":                  d.rdma.Name,
		types.AttributeMultusDeviceID: d.Addr,
		deviceattribute.StandardDeviceAttributePCIBusID: d.Addr,
		deviceattribute.StandardDeviceAttributePCIeRoot: d.PCIeRoot,
	} {
		if value != "" && len(value) <= maxAttributeLen {
			attrs[name] = resourceapi.DeviceAttribute{StringValue: &value}
		}
	}
	// It is never left out: a selector that asks for what a device does not have is an error, which keeps the claim from being allotted.
	hasRDMA := d.rdma.Name != ""
	attrs["rdma"] = resourceapi.DeviceAttribute{BoolValue: &hasRDMA}
	vfID := int64(d.VFID)
	attrs["vfID"] = resourceapi.DeviceAttribute{IntValue: &vfID}
	if d.MTU != 0 {
		mtu := int64(d.MTU)
		attrs["mtu"] = resourceapi.DeviceAttribute{IntValue: &mtu}
	}
	if d.LinkSpeed != 0 {
		speed := int64(d.LinkSpeed)
		attrs["linkSpeed"] = resourceapi.DeviceAttribute{IntValue: &speed}
	}
	if d.IOMMUGroup != nil {
		group := *d.IOMMUGroup
		attrs["iommuGroup"] = resourceapi.DeviceAttribute{IntValue: &group}
	}
	if d.NUMANode != nil {
		node := *d.NUMANode
		attrs[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &node}
	}
	return attrs
}

var _ types.Verbed = (*Device)(nil)

// RDMADevice implements [types.Verbed]. A NIC's has another name after its driver was loaded anew.
func (d *Device) RDMADevice() rdma.Device {
	if d.rdma.Name == "" || d.rdma.Soft {
		return d.rdma
	}
	now, err := d.manager.rdma.Of(d.Addr, "")
	if err != nil || now.Name == "" {
		return d.rdma
	}
	return now
}

// Match implements [types.Device]. parentIfNames is not asked of a VF, whose parent is its PF.
func (d *Device) Match(f *v2alpha1.CiliumNetworkDriverDeviceFilter) bool {
	if f == nil {
		return false
	}
	match := func(allowed []string, value string) bool {
		return len(allowed) == 0 || value != "" && slices.Contains(allowed, value)
	}
	return match(f.DeviceManagers, types.DeviceManagerTypeSRIOV.String()) &&
		match(f.IfNames, d.KernelIfaceName) &&
		match(f.PfNames, d.PFName) &&
		match(f.PciAddrs, d.Addr) &&
		match(f.VendorIDs, d.Vendor) &&
		match(f.DeviceIDs, d.DeviceID) &&
		match(f.Drivers, d.Driver)
}

// Link implements [types.Device]. A prepared VF has the interface that it had at Setup, whatever driver is bound to it by
// now: who rebinds it must not keep a pod's interface from coming home.
func (d *Device) Link() nic.Identity {
	if !d.hasLink() {
		return nic.Identity{}
	}
	id := nic.PCI(d.Addr)
	if d.Original != nil {
		id.PermMAC = d.Original.PermMAC
	}
	return id
}

func (d *Device) hasLink() bool {
	if d.Original != nil {
		return !d.Original.Rebound && (d.Original.Link.Name != "" || d.strayed)
	}
	return !nic.IsUserspaceDriver(d.Driver)
}

// HostState implements [types.Device]. The address is left out once the VF was made anew: the new one keeps its own.
func (d *Device) HostState() nic.State {
	if d.Original == nil {
		return nic.State{}
	}
	state := d.Original.Link
	if d.isSucceeded() {
		state.MAC = ""
	}
	state.AltNames = slices.Clone(state.AltNames)
	return state
}

// Validate implements [types.Device].
func (d *Device) Validate(cfg types.DeviceConfig) error {
	if vlan := cfg.VLAN(); vlan < 0 || vlan > types.MaxVLAN {
		return fmt.Errorf("vlan: %d is not in 0..%d", vlan, types.MaxVLAN)
	}
	switch {
	case cfg.Vhost && cfg.Driver == "":
		return fmt.Errorf("vhost: is for programs that drive the VF themselves, by the parameter driver: %s", types.DriverVFIO)
	case cfg.RDMA && cfg.Driver == "" && d.rdma.Name == "":
		return fmt.Errorf("rdma: %s has no RDMA device: have the node load the NIC's module for that, or select devices that have the attribute rdma", d.IfName())
	case cfg.Driver == "" && d.Original != nil && d.Original.Rebound:
		return errors.New("driver: the VF was set up for another one than its own")
	case cfg.Driver != "":
		return cfg.CheckLinkless()
	}
	if !d.hasLink() && cfg.MTU() != 0 {
		return fmt.Errorf("mtu: %s has no interface that could have one, it is bound to the driver %s", d.IfName(), d.Driver)
	}
	if !d.hasLink() && cfg.Joined == nil && cfg.InPod() != nil {
		return fmt.Errorf("addresses and routes: %s has no interface that could have them, it is bound to the driver %s", d.IfName(), d.Driver)
	}
	if cfg.PodIfName == "" {
		return nil
	}
	if !d.hasLink() {
		return fmt.Errorf("podIfName: %s has no interface to name, it is bound to the driver %s", d.IfName(), d.Driver)
	}
	if err := types.ValidatePodIfName(cfg.PodIfName); err != nil {
		return fmt.Errorf("podIfName: %w", err)
	}
	return nil
}

var _ types.Rememberer = (*Device)(nil)

// Remember implements [types.Rememberer].
func (d *Device) Remember(ctx context.Context, cfg types.DeviceConfig) (types.Device, error) {
	err := d.refuseTaken(d.manager.owners)
	if err != nil {
		return nil, fmt.Errorf("set up VF %s: %w", d.Addr, err)
	}
	found, err := d.manager.remember(ctx, d, cfg)
	if err != nil {
		return nil, fmt.Errorf("set up VF %s: %w", d.Addr, err)
	}
	return found, nil
}

// Setup implements [types.Device]: it makes the driver the VF's owner on the node, and puts the VF into the VLAN that is
// asked for, or out of any.
func (d *Device) Setup(ctx context.Context, cfg types.DeviceConfig) (types.Device, error) {
	if err := d.Validate(cfg); err != nil {
		return nil, err
	}
	first, err := d.own(d.manager.owners)
	if err != nil {
		return nil, fmt.Errorf("set up VF %s: %w", d.Addr, err)
	}
	prepared, err := d.manager.setup(ctx, d, cfg)
	if err != nil {
		if first {
			err = errors.Join(err, d.disown(d.manager.owners))
		}
		return nil, fmt.Errorf("set up VF %s: %w", d.Addr, err)
	}
	return prepared, nil
}

// settingsFor returns what the PF is to have on record for the prepared VF. Whoever drives the VF himself asks the PF for the
// address, which is to be the one that the VF had.
func (d *Device) settingsFor(cfg types.DeviceConfig) VFSettings {
	s := settingsFor(cfg)
	if d.Original.Rebound {
		s.MAC = d.Original.Link.MAC
	}
	return s
}

// Free implements [types.Device]: the interface's settings, and the VLAN and the address that the PF has for the VF, go back to
// what Setup found, after [Device.BindBack]. The caller vouches that the VF is still the claim's.
func (d *Device) Free(ctx context.Context, cfg types.DeviceConfig) error {
	if d.Original == nil {
		return nil
	}
	err := errors.Join(d.manager.putBack(ctx, d), d.manager.free(ctx, d, cfg))
	if err == nil {
		err = d.disown(d.manager.owners)
	}
	if err != nil {
		return fmt.Errorf("free VF %s: %w", d.Addr, err)
	}
	d.manager.drivers.back(d.Addr)
	return nil
}

// Merge implements [types.Device]. All that is published of a prepared device stays as it was when it was allotted,
// not just what cannot be seen: a claim keeps what it was allotted for. The link's speed is the PF's.
func (d *Device) Merge(prepared types.Device) types.Device {
	p, ok := prepared.(*Device)
	if !ok || p.Addr != d.Addr {
		return d
	}
	merged := *p
	merged.Original, merged.Rates = nil, nil
	merged.manager, merged.LinkSpeed = d.manager, d.LinkSpeed
	return &merged
}

// MarshalJSON implements [json.Marshaler].
func (d *Device) MarshalJSON() ([]byte, error) {
	type fields Device
	return json.Marshal((*fields)(d))
}

var _ types.Noted = (*Device)(nil)

// note is what a note has beyond a record.
type note struct {
	Settings nic.Settings `json:"settings,omitzero"`
	SoftRDMA string       `json:"softRDMA,omitempty"`
}

// MarshalNote implements [types.Noted].
func (d *Device) MarshalNote() ([]byte, error) {
	type fields Device
	n := struct {
		*fields
		note
	}{fields: (*fields)(d)}
	if d.Original != nil {
		n.Settings = d.Original.Settings
		if d.rdma.Soft {
			n.SoftRDMA = d.rdma.Name
		}
	}
	return json.Marshal(n)
}

// RestoreNote implements [types.Noted].
func (d *Device) RestoreNote(data []byte) (types.Device, error) {
	var n note
	if err := json.Unmarshal(data, &n); err != nil {
		return nil, fmt.Errorf("decode VF: %w", err)
	}
	if err := n.Settings.Validate(); err != nil {
		return nil, fmt.Errorf("decode VF: settings: %w", err)
	}
	if d.Original == nil {
		return d, nil
	}
	noted, original := *d, *d.Original
	original.Settings, noted.Original = n.Settings, &original
	if n.SoftRDMA != "" {
		noted.rdma = rdma.Device{Name: n.SoftRDMA, Soft: true}
		if err := noted.rdma.Check(); err != nil {
			return nil, fmt.Errorf("decode VF: softRDMA: %w", err)
		}
	}
	return &noted, nil
}
