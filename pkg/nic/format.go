// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxNameLen is the longest interface name in bytes (IFNAMSIZ without the terminating zero).
	MaxNameLen = 15
	// MaxAltNameLen is the longest alternative name in bytes (ALTIFNAMSIZ without the terminating zero).
	MaxAltNameLen = 127
	// MaxAliasLen is the longest alias in bytes (IFALIASZ without the terminating zero).
	MaxAliasLen = 255
)

// ValidateName checks an interface name: what the kernel takes (dev_valid_name in net/core/dev.c), no character that only
// confuses, and no %, which the kernel takes for a pattern.
func ValidateName(name string) error { return validateName(name, MaxNameLen) }

// ValidateAltName checks an alternative name, which may be longer, and in which % is no pattern.
func ValidateAltName(name string) error { return validateName(name, MaxAltNameLen) }

func validateName(name string, maxLen int) error {
	switch {
	case name == "":
		return errors.New("must not be empty")
	case len(name) > maxLen:
		return fmt.Errorf("%.64q is %d bytes long, at most %d are allowed", name, len(name), maxLen)
	case name == "." || name == "..":
		return fmt.Errorf("%q is not an interface name", name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%q is not valid UTF-8", name)
	}
	for _, r := range name {
		// RuneError is what is left of bytes that were no UTF-8 in a JSON string.
		if r == '/' || r == ':' || r == '%' && maxLen == MaxNameLen || r == utf8.RuneError || unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return fmt.Errorf("%q contains %q, which an interface name must not", name, r)
		}
	}
	return nil
}

// pciAddrFormat is a PCI address as the kernel writes it; a domain has more than four digits only beyond 0xffff.
var pciAddrFormat = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)

// IsPCIAddr says whether a text is a PCI address as the kernel writes it, such as 0000:03:00.1.
func IsPCIAddr(addr string) bool { return pciAddrFormat.MatchString(addr) }

var deviceFormat = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9_.:-]*$`)

// IsDeviceName says whether a text is the name of a bus or of a device on one. It cannot lead elsewhere in sysfs.
func IsDeviceName(name string) bool { return deviceFormat.MatchString(name) }

// IsUserspaceDriver is true for a driver that hands a PCI device to a process instead of making an interface. The vendors'
// variants of vfio-pci have vfio in their names (drivers/vfio/pci).
func IsUserspaceDriver(driver string) bool {
	return strings.Contains(driver, "vfio") || driver == "uio_pci_generic" || driver == "igb_uio"
}

const (
	// StandIn names NICs whose own name another link of the host has; the kernel puts the lowest free number in.
	StandIn       = standInPrefix + "%d"
	standInPrefix = "netdrv"
)

// IsStandIn says whether a name was made from [StandIn].
func IsStandIn(name string) bool {
	number, ok := strings.CutPrefix(name, standInPrefix)
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}
