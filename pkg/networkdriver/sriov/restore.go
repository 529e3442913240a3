// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	// maxHostVLAN is the highest VLAN a VF may be found with: 4095 makes some drivers pass all tags.
	maxHostVLAN = 4095
	// maxNUMANode and maxVFID are the kernel's limits (MAX_NUMNODES; sriov_totalvfs is a 16 bit register).
	maxNUMANode = 1023
	maxVFID     = 1<<16 - 1
)

var (
	pciIDFormat    = regexp.MustCompile(`^0x[0-9a-f]{4}$`)
	driverFormat   = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	pcieRootFormat = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// RestoreDevice implements [types.DeviceManager]. Unknown fields are tolerated, since a newer agent may have written the
// record. What sysfs tells of the VF is not taken from the record, unless the VF is gone: a forged driver, say, would have
// its interface stay in the pod. What the record alone tells is how the interface was found at Setup.
func (m *Manager) RestoreDevice(data []byte) (types.Device, error) {
	d := &Device{}
	if err := json.Unmarshal(data, d); err != nil {
		return nil, fmt.Errorf("decode VF: %w", err)
	}
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("decode VF: %w", err)
	}
	vf, err := m.sysfs.virtFn(d.Addr, map[string]*physFn{})
	switch {
	case errors.Is(err, errNotVF):
		return nil, fmt.Errorf("%s: %w", d.Addr, errNotVF)
	case err == nil:
		seen := m.device(vf)
		d.VFID, d.Vendor, d.DeviceID, d.PCIeRoot, d.NUMANode = seen.VFID, seen.Vendor, seen.DeviceID, seen.PCIeRoot, seen.NUMANode
		d.IOMMUGroup, d.rdma = seen.IOMMUGroup, seen.rdma
		// A VF without a driver and a PF without an interface had them when the device was prepared. The driver that a VF had
		// before it got another one is known from the record alone; only one that takes the VF by itself can be bound back.
		if !d.Original.Rebound {
			d.Driver = cmp.Or(seen.Driver, d.Driver)
		}
		d.PFName = cmp.Or(seen.PFName, d.PFName)
		d.strayed = d.Original.Link.Name == "" && vf.linkMissing()
	}
	d.manager = m
	return d, nil
}

// check verifies the form of a decoded device. The error names the field.
func (d *Device) check() error {
	switch {
	case !nic.IsPCIAddr(d.Addr):
		return fmt.Errorf("pciAddr: %.64q is not a PCI address such as 0000:03:00.1", d.Addr)
	case d.Original == nil:
		return errors.New("original: is missing, the device was not prepared")
	case d.VFID < 0 || d.VFID > maxVFID:
		return fmt.Errorf("vfID: %d is not in 0..%d", d.VFID, maxVFID)
	case !pciIDFormat.MatchString(d.Vendor):
		return fmt.Errorf("vendor: %.64q is not a PCI identifier such as 0x8086", d.Vendor)
	case !pciIDFormat.MatchString(d.DeviceID):
		return fmt.Errorf("deviceID: %.64q is not a PCI identifier such as 0x8086", d.DeviceID)
	case !driverFormat.MatchString(d.Driver):
		return fmt.Errorf("driver: %.64q is not the name of a driver", d.Driver)
	case d.PCIeRoot != "" && !pcieRootFormat.MatchString(d.PCIeRoot):
		return fmt.Errorf("pcieRoot: %.64q is not a PCIe root such as pci0000:00", d.PCIeRoot)
	case d.NUMANode != nil && (*d.NUMANode < 0 || *d.NUMANode > maxNUMANode):
		return fmt.Errorf("numaNode: %d is not in 0..%d", *d.NUMANode, maxNUMANode)
	}
	hasLink := d.KernelIfaceName != "" || d.Original.Link.Name != ""
	return errors.Join(
		nic.State{MTU: d.MTU}.Validate(),
		checkIfName("pfName", d.PFName, true),
		checkIfName("kernelIfName", d.KernelIfaceName, hasLink),
		checkIfName("original.link.name", d.Original.Link.Name, hasLink),
		checkMAC("mac", d.MAC),
		checkMAC("original.permanentMAC", d.Original.PermMAC),
		checkMAC("original.link.mac", d.Original.Link.MAC),
		inField("original.link", d.Original.Link.Validate()),
		checkVFSettings("original.vf", d.Original.VF),
	)
}

// inField names the field that an error about one of its own fields is in.
func inField(field string, err error) error {
	if err != nil {
		return fmt.Errorf("%s.%w", field, err)
	}
	return nil
}

func checkVFSettings(field string, s VFSettings) error {
	switch {
	case s.VLAN < 0 || s.VLAN > maxHostVLAN:
		return fmt.Errorf("%s.vlan: %d is not in 0..%d", field, s.VLAN, maxHostVLAN)
	case s.QoS < 0 || s.QoS > 7:
		return fmt.Errorf("%s.qos: %d is not in 0..7", field, s.QoS)
	case s.VLANProto != 0 && s.VLANProto != unix.ETH_P_8021AD:
		return fmt.Errorf("%s.vlanProto: %d is neither 0 nor %d", field, s.VLANProto, unix.ETH_P_8021AD)
	}
	if err := s.Rights.Check(); err != nil {
		return fmt.Errorf("%s.rights.%w", field, err)
	}
	return checkMAC(field+".mac", s.MAC)
}

func checkIfName(field, name string, required bool) error {
	if name == "" && !required {
		return nil
	}
	if err := nic.ValidateName(name); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	return nil
}

// checkMAC takes an empty address, and an Ethernet address in the notation that the kernel's tools use.
func checkMAC(field, mac string) error {
	if mac == "" {
		return nil
	}
	if addr, err := net.ParseMAC(mac); err != nil || len(addr) != 6 || addr.String() != mac {
		return fmt.Errorf("%s: %.64q is not an Ethernet address such as 02:00:00:00:00:01", field, mac)
	}
	return nil
}
