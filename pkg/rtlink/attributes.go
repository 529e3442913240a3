// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes decodes attributes, which the kernel pads to a multiple of four bytes, nested ones included (netlink(7)). The
// library's function, which is called here, panics at a last one that is not.
func Attributes(b []byte) ([]syscall.NetlinkRouteAttr, error) {
	if len(b)%unix.RTA_ALIGNTO != 0 {
		return nil, fmt.Errorf("attributes of %d bytes, which is no multiple of %d", len(b), unix.RTA_ALIGNTO)
	}
	return nl.ParseRouteAttr(b)
}
