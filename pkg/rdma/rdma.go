// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package rdma finds the RDMA device of a network interface (InfiniBand, RoCE, iWARP) and the device nodes by which programs open it,
// and has it follow its interface between network namespaces.
//
// A NIC's RDMA device stays where it is when the interface moves. Where RDMA devices are shared, which is the kernel's default, every
// namespace sees it. Where they are exclusive (rdma-system(8)), only the namespace that it is in can open it, and it has to be
// moved as well; the kernel gives it back to the first namespace when the one that has it ends. Soft-RoCE, which is made of an
// interface in software, ends with the interface's move, and has to be made anew.
package rdma

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Device is an RDMA device. It is zero for none.
type Device struct {
	// Name is the kernel's, such as mlx5_3.
	Name string `json:"name"`
	// Soft is true for Soft-RoCE.
	Soft bool `json:"soft,omitempty"`
}

// What [Sysfs.Mode] returns.
const (
	ModeShared    = "shared"
	ModeExclusive = "exclusive"
)

// nameFormat is what devices are called by drivers and by udev.
var nameFormat = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)

// Check refuses what is not the name of a device.
func (d Device) Check() error {
	if !nameFormat.MatchString(d.Name) {
		return fmt.Errorf("%.64q is not the name of an RDMA device such as mlx5_3", d.Name)
	}
	return nil
}

const (
	verbsClass      = "infiniband_verbs"
	managementClass = "infiniband_mad"
	virtual         = "devices/virtual"
)

// Sysfs is where the node's sysfs is mounted.
type Sysfs string

func (s Sysfs) path(elem ...string) string {
	return filepath.Join(append([]string{string(s)}, elem...)...)
}

// Of returns the RDMA device of a PCI device, or the one that is made of its interface, whose name may be empty.
func (s Sysfs) Of(pciAddr, ifName string) (Device, error) {
	names, err := s.hardware(pciAddr)
	switch {
	case err != nil:
		return Device{}, err
	case len(names) > 1:
		return Device{}, fmt.Errorf("it is not known which of the RDMA devices %s of %s is meant", strings.Join(names, ", "), pciAddr)
	case len(names) == 1:
		return Device{Name: names[0]}, nil
	case ifName == "":
		return Device{}, nil
	}
	soft, err := entries(s.path(virtual, "infiniband"))
	if err != nil {
		return Device{}, err
	}
	for _, name := range soft {
		if parent, err := read(s.path(virtual, "infiniband", name, "parent")); err == nil && parent == ifName {
			return Device{Name: name, Soft: true}, nil
		}
	}
	return Device{}, nil
}

// hardware lists the RDMA devices of a PCI device. Those in another network namespace are seen by their verbs alone.
func (s Sysfs) hardware(pciAddr string) ([]string, error) {
	base := s.base(Device{}, pciAddr)
	names, err := entries(filepath.Join(base, "infiniband"))
	if err != nil {
		return nil, err
	}
	verbs, err := entries(filepath.Join(base, verbsClass))
	for _, v := range verbs {
		if name, err := read(filepath.Join(base, verbsClass, v, "ibdev")); err == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// base is where the kernel has the classes of a device.
func (s Sysfs) base(d Device, pciAddr string) string {
	if d.Soft {
		return s.path(virtual)
	}
	return s.path("bus/pci/devices", pciAddr)
}

// Nodes returns the device nodes of the RDMA device of a PCI device: that of its verbs, that of the connection manager, which all
// devices share, and those for management datagrams where the kernel has them. They may have other numbers after a move.
func (s Sysfs) Nodes(d Device, pciAddr string) ([]string, error) {
	nodes, err := s.nodesIn(d, pciAddr, verbsClass)
	switch {
	case err != nil:
		return nil, err
	case len(nodes) == 0:
		return nil, fmt.Errorf("RDMA device %s has no device node for verbs: load the module ib_uverbs (modprobe ib_uverbs), and at every boot", d.Name)
	}
	if _, err := os.Stat(s.path("class/misc/rdma_cm")); err != nil {
		return nil, fmt.Errorf("the node has no connection manager for RDMA: load the module rdma_ucm (modprobe rdma_ucm), and at every boot: %w", err)
	}
	management, err := s.nodesIn(d, pciAddr, managementClass)
	return append(append(nodes, management...), "/dev/infiniband/rdma_cm"), err
}

// nodesIn returns the device nodes of a class. Those by which a subnet manager is announced (issm) are nobody's.
func (s Sysfs) nodesIn(d Device, pciAddr, class string) (nodes []string, err error) {
	dir := filepath.Join(s.base(d, pciAddr), class)
	names, err := entries(dir)
	for _, name := range names {
		if of, err := read(filepath.Join(dir, name, "ibdev")); err == nil && of == d.Name && !strings.HasPrefix(name, "issm") {
			nodes = append(nodes, "/dev/infiniband/"+name)
		}
	}
	return nodes, err
}

// entries lists a directory, which need not be there.
func entries(dir string) (names []string, err error) {
	found, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for RDMA devices: %w", err)
	}
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names, nil
}

func read(path string) (string, error) {
	content, err := os.ReadFile(path)
	return strings.TrimSpace(string(content)), err
}
