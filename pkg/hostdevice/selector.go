// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/networkdriver/hostnet"
	"github.com/cilium/networkdriver/pkg/nic"
)

// selector finds the NIC that a configuration chooses.
type selector struct {
	host  *nic.Place
	sysfs string
}

// choice is what a configuration chooses.
type choice struct {
	// link is the NIC, nil for a PCI device without a network interface.
	link netlink.Link
	// driver is the userspace driver of such a device.
	driver string
}

// choose finds the NIC on the host. If the configuration names several things, they must be one NIC: which of two is
// meant is not for the plugin to guess.
func (s selector) choose(c *config) (choice, error) {
	if !c.hasSelector() {
		return choice{}, errorf(types.ErrInvalidNetworkConfig, "network %q chooses no NIC: give one of runtimeConfig.deviceID, deviceID, pciBusID, device, hwaddr and kernelpath", c.name)
	}
	var chosen choice
	var chosenBy string
	for _, by := range []struct {
		field string
		given bool
		find  func() (choice, error)
	}{
		{fmt.Sprintf("%s %s", c.deviceField, c.deviceID), c.deviceID != "", func() (choice, error) { return s.byDeviceID(c.deviceID) }},
		{"device " + c.device, c.device != "", func() (choice, error) { return s.byName(c.device) }},
		{"hwaddr " + c.hwAddr.String(), c.hwAddr != nil, func() (choice, error) { return s.byMAC(c.hwAddr) }},
		{"kernelpath " + c.kernelPath, c.kernelPath != "", func() (choice, error) {
			return s.inDirectory(filepath.Join(s.sysfs, strings.TrimPrefix(c.kernelPath, "/sys"), "net"))
		}},
	} {
		if !by.given {
			continue
		}
		found, err := by.find()
		if err != nil {
			return choice{}, errorf(types.ErrInvalidNetworkConfig, "network %q: %s: %w", c.name, by.field, err)
		}
		switch {
		case chosenBy == "":
			chosen, chosenBy = found, by.field
		case chosen.link == nil || found.link == nil || chosen.link.Attrs().Index != found.link.Attrs().Index:
			return choice{}, errorf(types.ErrInvalidNetworkConfig, "network %q: %s and %s are not the same NIC", c.name, chosenBy, by.field)
		}
	}
	return chosen, nil
}

var errNotOnHost = errors.New("no such NIC on the host; it may be in a pod")

func (s selector) byName(name string) (choice, error) {
	link, err := s.host.ByName(name)
	if err == nil && link == nil {
		err = errNotOnHost
	}
	return choice{link: link}, err
}

func (s selector) byMAC(mac []byte) (choice, error) {
	links, err := s.host.List()
	if err != nil {
		return choice{}, err
	}
	var found []netlink.Link
	for _, link := range links {
		if bytes.Equal(link.Attrs().HardwareAddr, mac) {
			found = append(found, link)
		}
	}
	return onlyOne(found)
}

func (s selector) byDeviceID(id string) (choice, error) {
	pci := filepath.Join(s.sysfs, "bus/pci/devices", id)
	if _, err := os.Stat(pci); errors.Is(err, fs.ErrNotExist) {
		auxiliary := filepath.Join(s.sysfs, "bus/auxiliary/devices", id)
		if _, err := os.Stat(auxiliary); err != nil {
			return choice{}, errors.New("there is no such device on the PCI bus or the auxiliary bus")
		}
		return s.inDirectory(filepath.Join(auxiliary, "net"))
	} else if err != nil {
		return choice{}, err
	}
	driver, err := os.Readlink(filepath.Join(pci, "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		return choice{}, errors.New("the device has no driver")
	} else if err != nil {
		return choice{}, err
	}
	if name := filepath.Base(driver); nic.IsUserspaceDriver(name) {
		return choice{driver: name}, nil
	}
	dir := filepath.Join(pci, "net")
	if _, err := os.Stat(dir); err != nil {
		// The network interface of a virtio device is below its virtio device.
		if virtio, err := filepath.Glob(filepath.Join(pci, "virtio*", "net")); err == nil && len(virtio) == 1 {
			dir = virtio[0]
		}
	}
	return s.inDirectory(dir)
}

// inDirectory returns the NIC that a directory of sysfs is about.
func (s selector) inDirectory(dir string) (choice, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return choice{}, err
	}
	var found []netlink.Link
	for _, e := range entries {
		link, err := s.host.ByName(e.Name())
		if err != nil {
			return choice{}, err
		}
		if link != nil {
			found = append(found, link)
		}
	}
	return onlyOne(found)
}

// onlyOne refuses to choose among several: the first by chance may be a port's representor.
func onlyOne(links []netlink.Link) (choice, error) {
	switch len(links) {
	case 0:
		return choice{}, errNotOnHost
	case 1:
		return choice{link: links[0]}, nil
	}
	var names []string
	for _, link := range links {
		names = append(names, link.Attrs().Name)
	}
	return choice{}, fmt.Errorf("it has several NICs, %s: choose one by device", strings.Join(names, ", "))
}

// mainRoutes is the kernel's view with the default routes of the main table only: a fabric's NIC has a default route of
// its own in a policy table often enough, and the node does not depend on that one.
type mainRoutes struct{ hostnet.Kernel }

// DefaultRouteLinks implements [hostnet.Source].
func (m mainRoutes) DefaultRouteLinks() ([]int, error) {
	var indexes []int
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// Without a table in the filter, the routes are the main one's.
		routes, err := m.Conn.Routes(family, &netlink.Route{}, netlink.RT_FILTER_DST)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			indexes = append(indexes, r.LinkIndex)
			for _, hop := range r.MultiPath {
				indexes = append(indexes, hop.LinkIndex)
			}
		}
	}
	return indexes, nil
}

// refuseNodeNetwork says why a NIC must not leave the host: the node's own traffic needs it.
func refuseNodeNetwork(host *nic.Place, link netlink.Link, node *nodeConfig) error {
	view, err := hostnet.Scan(mainRoutes{hostnet.Kernel{Conn: host.Conn}}, nil)
	if err != nil {
		return fmt.Errorf("see whether the node itself needs NIC %s: %w", link.Attrs().Name, err)
	}
	reason := view.Reason(link.Attrs().Index)
	if link.Type() == "loopback" || link.Attrs().Name == "lo" {
		reason = "is the loopback interface"
	}
	if reason == "" {
		return nil
	}
	return errorf(types.ErrInvalidNetworkConfig, "NIC %s is part of the node's own network: it %s. It is not moved into a pod unless %s is true, here and in %s on the node",
		link.Attrs().Name, reason, fieldAllow, node.file)
}
