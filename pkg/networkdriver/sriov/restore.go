// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"regexp"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// maxAltNameLen is the longest alternative name (ALTIFNAMSIZ without the terminating zero), maxAltNames more than
	// any tool gives.
	maxAltNameLen = 127
	maxAltNames   = 64
	// maxMTU is far above every card and keeps sums of it in range.
	maxMTU = 1 << 24
	// maxHostVLAN is the highest VLAN a VF may be found with: 4095 makes some drivers pass all tags.
	maxHostVLAN = 4095
	// maxNUMANode and maxVFID are the kernel's limits (MAX_NUMNODES; sriov_totalvfs is a 16 bit register).
	maxNUMANode = 1023
	maxVFID     = 1<<16 - 1
)

var (
	driverFormat   = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	pcieRootFormat = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)
)

// RestoreDevice implements [types.DeviceManager]. Unknown fields are tolerated, since a newer agent may have written
// the record. Where the VF's PF is and which index the VF has on it is never taken from the record: Free asks sysfs.
func (m *Manager) RestoreDevice(data []byte) (types.Device, error) {
	d := &Device{}
	if err := json.Unmarshal(data, d); err != nil {
		return nil, fmt.Errorf("decode VF: %w", err)
	}
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("decode VF: %w", err)
	}
	if _, err := m.sysfs.virtFn(d.Addr, map[string]*physFn{}); errors.Is(err, errNotVF) {
		return nil, fmt.Errorf("%s: %w", d.Addr, errNotVF)
	}
	d.manager = m
	return d, nil
}

// check verifies the form of a decoded device. The error names the field.
func (d *Device) check() error {
	switch {
	case !pciAddrFormat.MatchString(d.Addr):
		return fmt.Errorf("pciAddr: %.64q is not a PCI address such as 0000:03:00.1", d.Addr)
	case d.Original == nil:
		return errors.New("original: is missing, the device was not prepared")
	case d.MTU < 0 || d.MTU > maxMTU:
		return fmt.Errorf("mtu: %d is not in 0..%d", d.MTU, maxMTU)
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
	hasLink := !d.Link().IsZero()
	return errors.Join(
		checkIfName("pfName", d.PFName, true),
		checkIfName("kernelIfName", d.KernelIfaceName, hasLink),
		checkMAC("mac", d.MAC),
		checkLinkState("original.link", d.Original.Link, hasLink),
		checkVFSettings("original.vf", d.Original.VF),
	)
}

func checkLinkState(field string, s types.LinkState, hasLink bool) error {
	errs := []error{checkIfName(field+".name", s.Name, hasLink), checkMAC(field+".mac", s.MAC)}
	if s.MTU < 0 || s.MTU > maxMTU {
		errs = append(errs, fmt.Errorf("%s.mtu: %d is not in 0..%d", field, s.MTU, maxMTU))
	}
	if len(s.AltNames) > maxAltNames {
		return fmt.Errorf("%s.altNames: %d are more than %d", field, len(s.AltNames), maxAltNames)
	}
	for i, name := range s.AltNames {
		if !isLinkName(name, maxAltNameLen) {
			errs = append(errs, fmt.Errorf("%s.altNames[%d]: %.64q is not an interface name", field, i, name))
		}
	}
	return errors.Join(errs...)
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
	return checkMAC(field+".mac", s.MAC)
}

func checkIfName(field, name string, required bool) error {
	if name == "" && !required || isLinkName(name, types.MaxIfNameLen) {
		return nil
	}
	return fmt.Errorf("%s: %.64q is not an interface name", field, name)
}

// isLinkName is true for what the kernel takes as an interface name (dev_valid_name in net/core/dev.c), without
// characters that only confuse.
func isLinkName(name string, maxLen int) bool {
	if name == "" || len(name) > maxLen || name == "." || name == ".." || !utf8.ValidString(name) {
		return false
	}
	for _, r := range name {
		if r == '/' || r == ':' || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return false
		}
	}
	return true
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
