// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

const (
	// hostNetNS is the namespace that NICs come from and return to: the one that the runtime starts the plugin in.
	hostNetNS = "/proc/thread-self/ns/net"
	// extSkipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h. Without RTEXT_FILTER_VF beside it, a PF's table of
	// VFs, which can exceed the size of a message, is left out too.
	extSkipStats = 1 << 3
	// dumpAttempts is how often a dump is tried that something interfered with.
	dumpAttempts = 5
)

// side is one end of a move: a namespace, and sockets in it. Requests that the library does not have are made raw.
type side struct {
	ns     *netnamespace.Namespace
	handle *netlink.Handle
	socket *nl.SocketHandle
}

func openSide(path string) (*side, error) {
	ns, err := netnamespace.Open(path)
	if err != nil {
		return nil, err
	}
	return sideOf(ns)
}

// sideOf takes the namespace over, also when it fails.
func sideOf(ns *netnamespace.Namespace) (*side, error) {
	handle, err := netlink.NewHandleAt(netns.NsHandle(ns.FD), unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", ns.Path, err)
	}
	socket, err := nl.GetNetlinkSocketAt(netns.NsHandle(ns.FD), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		ns.Close()
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", ns.Path, err)
	}
	// Without extended acknowledgements errors only say less.
	_ = socket.SetExtAck(true)
	return &side{ns: ns, handle: handle, socket: &nl.SocketHandle{Socket: socket}}, nil
}

func (s *side) close() {
	s.socket.Close()
	s.handle.Close()
	s.ns.Close()
}

func (s *side) execute(req *nl.NetlinkRequest, answer uint16) ([][]byte, error) {
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: s.socket}
	return req.Execute(unix.NETLINK_ROUTE, answer)
}

func linkRequest(msgType, flags, index int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(msgType, flags)
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(index)
	req.AddData(info)
	return req
}

// links returns all links of the namespace.
func (s *side) links() ([]netlink.Link, error) {
	var msgs [][]byte
	err := dump(func() (err error) {
		req := linkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP, 0)
		req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
		msgs, err = s.execute(req, unix.RTM_NEWLINK)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list links of %s: %w", s.ns.Path, err)
	}
	links := make([]netlink.Link, 0, len(msgs))
	for _, m := range msgs {
		link, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, fmt.Errorf("list links of %s: %w", s.ns.Path, err)
		}
		links = append(links, link)
	}
	return links, nil
}

// byName returns the link that has the name as its interface name or as an alternative name, nil if there is none.
func (s *side) byName(name string) (netlink.Link, error) {
	req := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, 0)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	attr := unix.IFLA_IFNAME
	if len(name) >= unix.IFNAMSIZ { // the kernel takes no longer one as an interface name
		attr = unix.IFLA_ALT_IFNAME
	}
	req.AddData(nl.NewRtAttr(attr, nl.ZeroTerminated(name)))
	msgs, err := s.execute(req, unix.RTM_NEWLINK)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up link %q in %s: %w", name, s.ns.Path, err)
	case len(msgs) != 1:
		return nil, fmt.Errorf("look up link %q in %s: %d answers", name, s.ns.Path, len(msgs))
	}
	return netlink.LinkDeserialize(nil, msgs[0])
}

// moveTo moves a link to another namespace and names it there with one request, so that nobody sees it under a wrong
// name. The name may be a pattern such as nic%d, of which the kernel takes the lowest free number.
func (s *side) moveTo(to *side, index int, name string) error {
	req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(to.ns.FD))))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	_, err := s.execute(req, 0)
	return err
}

// rename renames a link. The name may be a pattern.
func (s *side) rename(index int, name string) error {
	req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	_, err := s.execute(req, 0)
	return err
}

// setFlags sets those flags of a link that are in mask.
func (s *side) setFlags(index int, flags, mask uint32) error {
	req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	info := req.Data[0].(*nl.IfInfomsg)
	info.Flags, info.Change = flags&mask, mask
	_, err := s.execute(req, 0)
	return err
}

// detachXDP detaches the XDP program that a link has in a mode. One attached by a BPF link that a process holds cannot be
// detached, and goes with that process.
func (s *side) detachXDP(index int, attachMode uint32) error {
	mode, known := map[uint32]uint32{
		nl.XDP_ATTACHED_DRV: nl.XDP_FLAGS_DRV_MODE, nl.XDP_ATTACHED_SKB: nl.XDP_FLAGS_SKB_MODE,
	}[attachMode]
	if !known {
		return fmt.Errorf("mode %d is not known", attachMode)
	}
	req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(^uint32(0)))
	attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
	req.AddData(attr)
	_, err := s.execute(req, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

// addresses returns the addresses of a link, in the kernel's order.
func (s *side) addresses(index int) ([]netlink.Addr, error) {
	var addrs []netlink.Addr
	err := dump(func() (err error) {
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

func dump(once func() error) error {
	var err error
	for range dumpAttempts {
		if err = once(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// isUp says whether the link is up by its administrator's will (IFF_UP), whatever its carrier.
func isUp(link netlink.Link) bool { return link.Attrs().Flags&net.FlagUp != 0 }
