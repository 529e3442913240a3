// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package inventorytest has a device without hardware or kernel behind it, for tests of what is made of devices.
package inventorytest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// Device is a device that only has a description. Setup and Free do nothing.
type Device struct {
	Name    string
	Kernel  string
	Manager types.DeviceManagerType
	PFName  string
	// VF is the number of a VF, which has eleven attributes that are made of what else is here.
	VF *int `json:",omitempty"`
	// Attributes are the attributes of any other device.
	Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute `json:",omitempty"`
}

var _ types.Device = &Device{}

// Devices returns n devices of the manager that are called prefix and a number.
func Devices(manager types.DeviceManagerType, prefix string, n int) []types.Device {
	devs := make([]types.Device, n)
	for i := range devs {
		name := fmt.Sprintf("%s%d", prefix, i)
		devs[i] = &Device{Name: name, Kernel: name, Manager: manager}
	}
	return devs
}

// VF returns a VF by its number.
func VF(n int) *Device {
	name := strings.NewReplacer(":", "-", ".", "-").Replace(PCIAddr(n))
	return &Device{Name: name, Kernel: fmt.Sprintf("ens1f0v%d", n), Manager: types.DeviceManagerTypeSRIOV, PFName: "ens1f0", VF: &n}
}

// PCIAddr makes a PCI address of a number.
func PCIAddr(n int) string { return fmt.Sprintf("0000:%02x:%02x.%d", n>>8, n>>3&0x1f, n&7) }

// PF returns the name of a VF's physical function, and the VF's number.
func (d *Device) PF() (name string, vf int) {
	if d.VF == nil {
		return "", 0
	}
	return d.PFName, *d.VF
}

func (d *Device) IfName() string       { return d.Name }
func (d *Device) KernelIfName() string { return d.Kernel }

func (d *Device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	if d.VF == nil {
		return d.Attributes
	}
	str := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	num := func(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }
	vf := *d.VF
	return map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"ifName":                          str(d.Name),
		"kernelIfName":                    str(d.Kernel),
		"mtu":                             num(1500),
		"mac":                             str("02:00:00:00:00:01"),
		"pfName":                          str(d.PFName),
		"vfID":                            num(int64(vf)),
		"vendor":                          str("0x8086"),
		"deviceID":                        str("0x10ca"),
		"driver":                          str("igbvf"),
		"resource.kubernetes.io/pcieRoot": str("pci0000:00"),
		"resource.kubernetes.io/pciBusID": str(PCIAddr(vf)),
	}
}

// Match looks at the device manager, the kernel interface name and the PF.
func (d *Device) Match(filter *v2alpha1.CiliumNetworkDriverDeviceFilter) bool {
	has := func(allowed []string, value string) bool {
		return len(allowed) == 0 || slices.Contains(allowed, value)
	}
	return has(filter.DeviceManagers, d.Manager.String()) && has(filter.IfNames, d.Kernel) && has(filter.PfNames, d.PFName)
}

func (d *Device) Link() nic.Identity                { return nic.Identity{} }
func (d *Device) HostState() nic.State              { return nic.State{Name: d.Kernel} }
func (d *Device) Validate(types.DeviceConfig) error { return nil }

func (d *Device) Setup(context.Context, types.DeviceConfig) (types.Device, error) { return d, nil }
func (d *Device) Free(context.Context, types.DeviceConfig) error                  { return nil }

// Merge keeps the kernel interface name that discovery cannot see.
func (d *Device) Merge(prepared types.Device) types.Device {
	merged := *d
	if merged.Kernel == "" {
		merged.Kernel = prepared.KernelIfName()
	}
	return &merged
}

func (d *Device) MarshalJSON() ([]byte, error) {
	type plain Device
	return json.Marshal((*plain)(d))
}
