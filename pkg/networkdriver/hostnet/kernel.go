// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostnet

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// Kernel is the [Source] that reads the network namespace of a connection.
type Kernel struct{ *rtlink.Conn }

// Links implements [Source].
func (k Kernel) Links() ([]Link, error) {
	found, err := k.List()
	if err != nil {
		return nil, err
	}
	links := make([]Link, len(found))
	for i, link := range found {
		links[i] = linkOf(link)
	}
	return links, nil
}

func linkOf(link netlink.Link) Link {
	a := link.Attrs()
	l := Link{Index: a.Index, Name: a.Name, Master: a.MasterIndex}
	// IFLA_LINK of a veth or netkit device is its peer, not a lower device; with a namespace id it is an index of
	// another namespace (-1 is none).
	switch link.Type() {
	case "veth", "netkit":
	default:
		if a.NetNsID < 0 && a.ParentIndex != a.Index {
			l.Lower = a.ParentIndex
		}
	}
	return l
}

// DefaultRouteLinks implements [Source].
func (k Kernel) DefaultRouteLinks() ([]int, error) {
	var indexes []int
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		header := nl.NewRtMsg()
		header.Family = family
		found, err := rtlink.Dump(k.Conn, unix.RTM_GETROUTE, unix.RTM_NEWROUTE, defaultRouteLinks, header)
		// A kernel without IPv6 refuses the family.
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EAFNOSUPPORT) {
			return nil, err
		}
		indexes = append(indexes, found...)
	}
	return indexes, nil
}

// defaultRouteLinks returns the interfaces that a route leaves by when it is a default route. Other routes are told by
// their header alone, since a node may have very many.
func defaultRouteLinks(msg []byte) ([]int, error) {
	if len(msg) < unix.SizeofRtMsg {
		return nil, fmt.Errorf("route message of %d bytes", len(msg))
	}
	route := nl.DeserializeRtMsg(msg)
	if route.Dst_len != 0 || route.Type != unix.RTN_UNICAST || route.Flags&unix.RTM_F_CLONED != 0 {
		return nil, nil
	}
	attrs, err := rtlink.Attributes(msg[unix.SizeofRtMsg:])
	if err != nil {
		return nil, err
	}
	var indexes []int
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.RTA_OIF:
			if len(a.Value) >= 4 {
				indexes = append(indexes, int(nl.NativeEndian().Uint32(a.Value)))
			}
		case unix.RTA_MULTIPATH:
			for rest := a.Value; len(rest) >= unix.SizeofRtNexthop; {
				hop := nl.DeserializeRtNexthop(rest)
				indexes = append(indexes, int(hop.Ifindex))
				length := (int(hop.RtNexthop.Len) + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
				if length < unix.SizeofRtNexthop || length > len(rest) {
					break
				}
				rest = rest[length:]
			}
		}
	}
	return indexes, nil
}

// Addresses implements [Source].
func (k Kernel) Addresses() ([]Address, error) {
	found, err := k.Addrs(0)
	if err != nil {
		return nil, err
	}
	var addrs []Address
	for _, a := range found {
		if a.IPNet == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			addrs = append(addrs, Address{Index: a.LinkIndex, Addr: ip.Unmap()})
		}
	}
	return addrs, nil
}
