// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ParseVFs returns what decode makes of each VF's attributes (IFLA_VF_INFO) in the message about a PF, by the VF's index; nothing where
// the PF's driver tells of none. Older kernels cut off a list that does not fit (IFLA_VFINFO_LIST), which is an error.
func ParseVFs[T any](msg []byte, decode func(attrs []syscall.NetlinkRouteAttr) (T, error)) (map[int]T, error) {
	if len(msg) < unix.SizeofIfInfomsg {
		return nil, fmt.Errorf("link message of %d bytes", len(msg))
	}
	attrs, err := Attributes(msg[unix.SizeofIfInfomsg:])
	if err != nil {
		return nil, err
	}
	vfs, count := map[int]T{}, 0
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFLA_NUM_VF:
			if len(a.Value) >= 4 {
				count = int(nl.NativeEndian().Uint32(a.Value))
			}
		case unix.IFLA_VFINFO_LIST:
			if err := parseVFList(a.Value, vfs, decode); err != nil {
				return nil, fmt.Errorf("decode the list of VFs: %w", err)
			}
		}
	}
	if len(vfs) != 0 && len(vfs) < count {
		return nil, fmt.Errorf("the kernel's list of VFs is cut off after %d of %d", len(vfs), count)
	}
	return vfs, nil
}

func parseVFList[T any](list []byte, vfs map[int]T, decode func([]syscall.NetlinkRouteAttr) (T, error)) error {
	entries, err := Attributes(list)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		attrs, err := Attributes(entry.Value)
		if err != nil {
			return err
		}
		index, err := vfIndex(attrs)
		if err != nil {
			return err
		}
		if vfs[index], err = decode(attrs); err != nil {
			return err
		}
	}
	return nil
}

// vfIndex finds the VF's index beside its hardware address, which the kernel tells of every VF, be it of zeros.
func vfIndex(attrs []syscall.NetlinkRouteAttr) (int, error) {
	for _, a := range attrs {
		if a.Attr.Type == nl.IFLA_VF_MAC && len(a.Value) >= nl.SizeofVfMac {
			return int(nl.DeserializeVfMac(a.Value).Vf), nil
		}
	}
	return 0, errors.New("an entry has no VF index")
}
