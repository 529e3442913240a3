// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// attrTypeMask is NLA_TYPE_MASK of linux/netlink.h.
const attrTypeMask = 0x3fff

// Attributes decodes attributes, which the kernel pads to a multiple of four bytes, nested ones included (netlink(7)). Their types are
// without the flags that a kernel may set in them. The library's function, which is called here, panics at a last one that is not padded.
func Attributes(b []byte) ([]syscall.NetlinkRouteAttr, error) {
	if len(b)%unix.RTA_ALIGNTO != 0 {
		return nil, fmt.Errorf("attributes of %d bytes, which is no multiple of %d", len(b), unix.RTA_ALIGNTO)
	}
	attrs, err := nl.ParseRouteAttr(b)
	for i := range attrs {
		attrs[i].Attr.Type &= attrTypeMask
	}
	return attrs, err
}
