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

// Kernel is the [Source] that reads the network namespace of the calling thread through rtnetlink.
type Kernel struct{}

// extFilterSkipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h.
const extFilterSkipStats = 1 << 3

// dumpAttempts is how often a dump is tried that the kernel reports as inconsistent, because something changed while
// it ran.
const dumpAttempts = 5

// Links implements [Source]. It does not ask for the VFs of physical functions, which takes long on large cards and
// can exceed the size of a netlink message.
func (Kernel) Links() ([]Link, error) {
	var links []Link
	err := dump(func() error {
		links = nil
		req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extFilterSkipStats)))
		var parseErr error
		err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWLINK, func(msg []byte) bool {
			link, err := netlink.LinkDeserialize(nil, msg)
			if err != nil {
				parseErr = err
				return false
			}
			links = append(links, linkOf(link))
			return true
		})
		return errors.Join(err, parseErr)
	})
	return links, err
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
func (Kernel) DefaultRouteLinks() ([]int, error) {
	var indexes []int
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		var found []int
		err := dump(func() error {
			found = nil
			req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
			rtmsg := nl.NewRtMsg()
			rtmsg.Family = uint8(family)
			req.AddData(rtmsg)
			var parseErr error
			err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(msg []byte) bool {
				oifs, err := defaultRouteLinks(msg)
				if err != nil {
					parseErr = err
					return false
				}
				found = append(found, oifs...)
				return true
			})
			return errors.Join(err, parseErr)
		})
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
func (Kernel) Addresses() ([]Address, error) {
	var addrs []Address
	err := dump(func() error {
		addrs = nil
		list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		for _, a := range list {
			if a.IPNet == nil {
				continue
			}
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				addrs = append(addrs, Address{Index: a.LinkIndex, Addr: ip.Unmap()})
			}
		}
		return err
	})
	return addrs, err
}

func dump(once func() error) error {
	var err error
	for range dumpAttempts {
		if err = once(); !errors.Is(err, nl.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}
