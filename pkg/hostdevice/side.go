// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"fmt"
	"log/slog"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// hostNetNS is the namespace that NICs come from and return to: the one that the runtime starts the plugin in.
const hostNetNS = "/proc/thread-self/ns/net"

// side is one end of a move: a namespace, and sockets in it.
type side struct {
	*rtlink.Conn
	ns *netnamespace.Namespace
	// handle is the library's, for addresses, routes and rules.
	handle *netlink.Handle
}

func openSide(log *slog.Logger, path string) (*side, error) {
	ns, err := netnamespace.Open(path)
	if err != nil {
		return nil, err
	}
	conn, err := rtlink.Dial(log, ns)
	if err != nil {
		ns.Close()
		return nil, err
	}
	handle, err := netlink.NewHandleAt(netns.NsHandle(ns.FD), unix.NETLINK_ROUTE)
	if err != nil {
		conn.Close()
		ns.Close()
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", ns.Path, err)
	}
	return &side{Conn: conn, ns: ns, handle: handle}, nil
}

func (s *side) close() {
	s.handle.Close()
	s.Conn.Close()
	s.ns.Close()
}

// addresses returns the addresses of a link, in the kernel's order.
func (s *side) addresses(index int) ([]netlink.Addr, error) {
	var addrs []netlink.Addr
	err := rtlink.Dump(func() (err error) {
		addrs, err = s.handle.AddrList(device(index), netlink.FAMILY_ALL)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses in %s: %w", s.ns.Path, err)
	}
	return addrs, nil
}

// device is what the library takes for a link whose index is known.
func device(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// isUp says whether the link is up by its administrator's will (IFF_UP), whatever its carrier.
func isUp(link netlink.Link) bool { return link.Attrs().Flags&net.FlagUp != 0 }
