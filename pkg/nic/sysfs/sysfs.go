// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package sysfs tells from a mounted sysfs which links a device of a bus has. It imports next to nothing, since a program that is
// waited for at each start of a container uses it.
package sysfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// DeviceDir returns the directory of a device of a bus, such as pci, in the sysfs that is mounted at root.
func DeviceDir(root, bus, device string) string {
	return filepath.Join(root, "bus", bus, "devices", device)
}

// Linkless says why the device of the directory has no link in any network namespace, empty if it may have one. Its directory net
// is there as long as it has a link, be it in a namespace that this sysfs does not show.
func Linkless(dir string) string {
	if _, err := os.Stat(filepath.Dir(dir)); err != nil {
		return "" // sysfs cannot be read, so that nothing is known
	}
	if _, err := os.Stat(dir); os.IsNotExist(err) {
		return fmt.Sprintf("the device is not on the %s bus any more", filepath.Base(filepath.Dir(filepath.Dir(dir))))
	}
	if _, err := os.Stat(filepath.Join(dir, "net")); !os.IsNotExist(err) {
		return ""
	}
	driver, err := os.Readlink(filepath.Join(dir, "driver"))
	if err != nil {
		return "the device has no driver"
	}
	return fmt.Sprintf("the device is bound to %s and has no interface", filepath.Base(driver))
}

// Links returns the names of the device's links in the network namespace that the sysfs shows.
func Links(dir string) ([]string, error) {
	net, err := os.Open(filepath.Join(dir, "net"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer net.Close()
	return net.Readdirnames(-1)
}
