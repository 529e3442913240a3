// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/nic"
)

// ethernetClass starts the class of a PCI Ethernet controller (pci_ids.h: base class 02, subclass 00).
const ethernetClass = "0x0200"

// representorPort is the phys_port_name of what stands for another function, such as a VF's representor. It hangs at the
// PF's PCI device like the PF's own interface (Documentation/networking/switchdev.rst).
var representorPort = regexp.MustCompile(`pf\d+((vf|sf)\d+)?$`)

var (
	// errGone is returned for a PCI device that is no longer there.
	errGone = errors.New("the PCI device is gone")
	// errNotVF is returned for a PCI device that is no virtual function.
	errNotVF = errors.New("the PCI device is no SR-IOV virtual function")
)

// sysfs reads what the kernel tells of PCI network devices, below a root that is /sys or where the host's is mounted.
type sysfs struct {
	root string
	// write writes an attribute.
	write func(path, value string) error
}

// netdev is a network interface of a PCI device.
type netdev struct {
	name  string
	index int
	mtu   int
	mac   string
}

// physFn is a physical function.
type physFn struct {
	addr string
	// ifName and ifIndex are those of its interface, empty and 0 when it has none in the host's namespace.
	ifName  string
	ifIndex int
	// speed is its link's in Mbit/s, 0 if unknown.
	speed int
	// vfIDs has the index of every VF by its PCI address.
	vfIDs map[string]int
}

// virtFn is a virtual function.
type virtFn struct {
	addr             string
	class            string
	vendor, deviceID string
	// driver is empty when none is bound.
	driver string
	// netdev is nil when the VF has no interface in the host's namespace.
	netdev *netdev
	pf     *physFn
	id     int
}

// pciAddrs lists all PCI devices. A machine without a PCI bus has none, but has buses.
func (s sysfs) pciAddrs() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.root, "bus/pci/devices"))
	if errors.Is(err, fs.ErrNotExist) {
		if _, noBuses := os.Stat(filepath.Join(s.root, "bus")); noBuses == nil {
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	addrs := make([]string, 0, len(entries))
	for _, e := range entries {
		if nic.IsPCIAddr(e.Name()) {
			addrs = append(addrs, e.Name())
		}
	}
	return addrs, nil
}

func (s sysfs) path(addr string, elem ...string) string {
	return filepath.Join(append([]string{s.root, "bus/pci/devices", addr}, elem...)...)
}

// virtFn reads a virtual function. It takes physical functions from pfs and adds to it what it had to read, so that
// one map serves a scan.
func (s sysfs) virtFn(addr string, pfs map[string]*physFn) (*virtFn, error) {
	v, err := s.readVirtFn(addr, pfs)
	if err != nil {
		// What looks like a broken device may be one that went away while it was read.
		if _, statErr := os.Stat(s.path(addr)); errors.Is(statErr, fs.ErrNotExist) {
			return nil, errGone
		}
		return nil, err
	}
	return v, nil
}

// unseen says why nothing can be told of a PCI device that sysfs does not show: sysfs, or the part of it that devices are in, is
// not there, as in an agent that lacks a mount.
func (s sysfs) unseen(addr string) error {
	if _, err := os.Stat(s.path("")); err != nil {
		return fmt.Errorf("look for the PCI device: %w", err)
	}
	if _, err := os.Lstat(s.path(addr)); err == nil {
		if _, err := os.Stat(s.path(addr)); err != nil {
			return fmt.Errorf("look at the PCI device, which is there: %w", err)
		}
	}
	return nil
}

func (s sysfs) readVirtFn(addr string, pfs map[string]*physFn) (*virtFn, error) {
	pfAddr, err := s.linkBase(addr, "physfn")
	if err != nil {
		return nil, err
	}
	if pfAddr == "" {
		return nil, errNotVF
	}
	v := &virtFn{addr: addr}
	for file, value := range map[string]*string{"class": &v.class, "vendor": &v.vendor, "device": &v.deviceID} {
		if *value, err = readTrimmed(s.path(addr, file)); err != nil {
			return nil, err
		}
	}
	if v.driver, err = s.linkBase(addr, "driver"); err != nil {
		return nil, err
	}
	if v.netdev, err = s.netdev(addr); err != nil {
		return nil, err
	}
	pf, known := pfs[pfAddr]
	if !known {
		if pf, err = s.physFn(pfAddr); err != nil {
			return nil, fmt.Errorf("read its physical function: %w", err)
		}
		pfs[pfAddr] = pf
	}
	id, known := pf.vfIDs[addr]
	if !known {
		return nil, fmt.Errorf("physical function %s has no virtfn link to it", pfAddr)
	}
	v.pf, v.id = pf, id
	return v, nil
}

// physFn reads a physical function and the indexes of its VFs.
func (s sysfs) physFn(addr string) (*physFn, error) {
	pf := &physFn{addr: addr, vfIDs: map[string]int{}}
	entries, err := os.ReadDir(s.path(addr))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "virtfn")
		if !ok {
			continue
		}
		id, err := strconv.Atoi(number)
		if err != nil {
			continue
		}
		vf, err := s.linkBase(addr, e.Name())
		if err != nil {
			return nil, err
		}
		pf.vfIDs[vf] = id
	}
	dev, err := s.netdev(addr)
	if err != nil {
		return nil, err
	}
	if dev != nil {
		pf.ifName, pf.ifIndex, pf.speed = dev.name, dev.index, s.speed(addr, dev.name)
	}
	return pf, nil
}

// incarnation tells a PCI device from a later one at the same address: it is the number of the directory that the kernel
// made for it. It stays the same with another driver, and wherever the device's interface is.
func (s sysfs) incarnation(addr string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(s.path(addr), &st); err != nil {
		return "", fmt.Errorf("look at PCI device %s: %w", addr, err)
	}
	return strconv.FormatUint(st.Ino, 10), nil
}

// netdevAttempts is how often an interface is looked for that is renamed while it is read.
const netdevAttempts = 5

// netdev reads the interface of a PCI device, nil if it has none in the host's namespace. Of several it is the one with the
// lowest port number (dev_port).
func (s sysfs) netdev(addr string) (*netdev, error) {
	var err error
	for range netdevAttempts {
		var names []string
		if names, err = s.netdevNames(addr); err != nil {
			return nil, err
		}
		if len(names) == 0 {
			return nil, nil
		}
		var dev *netdev
		if dev, err = s.readFirstPort(addr, names); err == nil {
			return dev, nil
		}
		// It vanished under this name: renamed, moved or removed. Look again.
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, err
}

// netdevNames lists the interfaces of a PCI device without the representors of VFs.
func (s sysfs) netdevNames(addr string) ([]string, error) {
	entries, err := os.ReadDir(s.path(addr, "net"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if len(names) > 1 {
		names = slices.DeleteFunc(names, func(name string) bool {
			// Drivers without port names fail the read.
			port, err := readTrimmed(s.path(addr, "net", name, "phys_port_name"))
			return err == nil && representorPort.MatchString(port)
		})
	}
	return names, nil
}

// readFirstPort reads that of a PCI device's interfaces that is for its first port. Which one is meant must neither change
// from one look to the next nor be guessed.
func (s sysfs) readFirstPort(addr string, names []string) (*netdev, error) {
	first, lowest := names[0], -1
	for _, name := range names {
		if len(names) == 1 {
			break
		}
		port, err := readInt(s.path(addr, "net", name, "dev_port"))
		switch {
		case err != nil:
			return nil, err
		case port == lowest:
			return nil, fmt.Errorf("it is not known which of the interfaces %s and %s is meant, both are for port %d (dev_port)", first, name, port)
		case lowest < 0 || port < lowest:
			first, lowest = name, port
		}
	}
	return s.readNetdev(addr, first)
}

func (s sysfs) readNetdev(addr, name string) (*netdev, error) {
	dev := &netdev{name: name}
	var err error
	if dev.mac, err = readTrimmed(s.path(addr, "net", name, "address")); err != nil {
		return nil, err
	}
	if dev.mtu, err = readInt(s.path(addr, "net", name, "mtu")); err != nil {
		return nil, err
	}
	if dev.index, err = readInt(s.path(addr, "net", name, "ifindex")); err != nil {
		return nil, err
	}
	return dev, nil
}

// boundTo returns the PCI devices that are bound to a driver; none if that cannot be told, as of a driver that is not loaded.
func (s sysfs) boundTo(driver string) map[string]bool {
	entries, err := os.ReadDir(filepath.Join(s.root, "bus/pci/drivers", driver))
	if err != nil {
		return nil
	}
	addrs := make(map[string]bool, len(entries))
	for _, e := range entries {
		addrs[e.Name()] = true
	}
	return addrs
}

// linkBase returns the last element that a symbolic link of a PCI device points to, empty if there is no such link.
func (s sysfs) linkBase(addr, name string) (string, error) {
	target, err := os.Readlink(s.path(addr, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Base(target), nil
}

func readTrimmed(path string) (string, error) {
	data, err := os.ReadFile(path)
	return strings.TrimSpace(string(data)), err
}

func readInt(path string) (int, error) {
	text, err := readTrimmed(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}
