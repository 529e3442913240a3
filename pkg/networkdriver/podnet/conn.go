// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// extSkipStats asks the kernel to leave the counters out (RTEXT_FILTER_SKIP_STATS in linux/rtnetlink.h). Not asking
// for RTEXT_FILTER_VF keeps a PF's table of VFs out of the answer.
const extSkipStats = 1 << 3

// xdpHW is XDP_FLAGS_HW_MODE of linux/if_link.h, which the nl package lacks.
const xdpHW = 1 << 3

// conn is an rtnetlink socket in one network namespace. The thread is in that namespace only while the socket is made.
// Requests are made raw, since one request can then move, rename and bring up a link.
type conn struct {
	log    *slog.Logger
	socket *nl.SocketHandle
}

func dial(log *slog.Logger, ns *netnamespace.Namespace) (*conn, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.NsHandle(ns.FD), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", ns.Path, err)
	}
	// Without extended acknowledgements errors only say less, so that a kernel that refuses them is no problem.
	_ = socket.SetExtAck(true)
	return &conn{log: log.With("netns", ns.Path), socket: &nl.SocketHandle{Socket: socket}}, nil
}

func (c *conn) close() { c.socket.Close() }

var requestNames = map[uint16]string{
	unix.RTM_GETLINK:     "RTM_GETLINK",
	unix.RTM_NEWLINK:     "RTM_NEWLINK",
	unix.RTM_NEWLINKPROP: "RTM_NEWLINKPROP",
	unix.RTM_DELLINKPROP: "RTM_DELLINKPROP",
	unix.RTM_GETADDR:     "RTM_GETADDR",
}

func (c *conn) execute(req *nl.NetlinkRequest, answer uint16) ([][]byte, error) {
	c.log.Debug("rtnetlink request", "request", requestNames[req.Type])
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	return req.Execute(unix.NETLINK_ROUTE, answer)
}

func linkRequest(msgType, flags, index int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(msgType, flags)
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(index)
	req.AddData(info)
	return req
}

// byIndex returns the link with the index, nil if there is none.
func (c *conn) byIndex(index int) (netlink.Link, error) {
	return c.get(linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, index), fmt.Sprintf("link with index %d", index))
}

// byName returns the link that has the name as its interface name or as an alternative name, nil if there is none.
func (c *conn) byName(name string) (netlink.Link, error) {
	req := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, 0)
	attr := unix.IFLA_IFNAME
	if len(name) > types.MaxIfNameLen {
		attr = unix.IFLA_ALT_IFNAME
	}
	req.AddData(nl.NewRtAttr(attr, nl.ZeroTerminated(name)))
	return c.get(req, fmt.Sprintf("link %q", name))
}

func (c *conn) get(req *nl.NetlinkRequest, what string) (netlink.Link, error) {
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up %s: %w", what, err)
	case len(msgs) != 1:
		return nil, fmt.Errorf("look up %s: %d answers", what, len(msgs))
	}
	return netlink.LinkDeserialize(nil, msgs[0])
}

// list returns all links of the namespace.
func (c *conn) list() ([]netlink.Link, error) {
	req := linkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP, 0)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list links: %w", err)
	}
	links := make([]netlink.Link, 0, len(msgs))
	for _, m := range msgs {
		l, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		links = append(links, l)
	}
	if err != nil && len(links) == 0 {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

// change is what one RTM_NEWLINK request does to a link. The kernel does it in the order of the fields (do_setlink in
// net/core/rtnetlink.c), stops at the first failure and does not undo what it has done by then.
type change struct {
	to    *netnamespace.Namespace // nil: the link stays where it is
	mac   net.HardwareAddr
	mtu   int
	name  string
	flags uint32 // new values of the flags in mask
	mask  uint32
}

func (c *conn) change(index int, ch change) error {
	req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	info := req.Data[0].(*nl.IfInfomsg)
	info.Flags, info.Change = ch.flags&ch.mask, ch.mask // without a mask, flags would mean all flags
	if ch.to != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(ch.to.FD))))
	}
	if len(ch.mac) > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, ch.mac))
	}
	if ch.mtu > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(ch.mtu))))
	}
	if ch.name != "" {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(ch.name)))
	}
	_, err := c.execute(req, 0)
	return err
}

func (c *conn) addAltName(index int, name string) error {
	if err := c.altName(unix.RTM_NEWLINKPROP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, index, name); err != nil {
		return fmt.Errorf("add alternative name %q: %w", name, err)
	}
	return nil
}

func (c *conn) removeAltName(index int, name string) error {
	err := c.altName(unix.RTM_DELLINKPROP, 0, index, name)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove alternative name %q: %w", name, err)
	}
	return nil
}

func (c *conn) altName(msgType, flags, index int, name string) error {
	req := linkRequest(msgType, flags|unix.NLM_F_ACK, index)
	props := nl.NewRtAttr(unix.IFLA_PROP_LIST|unix.NLA_F_NESTED, nil)
	props.AddRtAttr(unix.IFLA_ALT_IFNAME, nl.ZeroTerminated(name))
	req.AddData(props)
	_, err := c.execute(req, 0)
	return err
}

// removeXDP detaches XDP programs of every mode. A program attached by a BPF link stays until that link is closed; the
// kernel answers EBUSY then.
func (c *conn) removeXDP(l netlink.Link) error {
	xdp := l.Attrs().Xdp
	if xdp == nil || !xdp.Attached {
		return nil
	}
	modes := map[uint32][]uint32{
		nl.XDP_ATTACHED_DRV: {nl.XDP_FLAGS_DRV_MODE},
		nl.XDP_ATTACHED_SKB: {nl.XDP_FLAGS_SKB_MODE},
		nl.XDP_ATTACHED_HW:  {xdpHW},
	}[xdp.AttachMode]
	if modes == nil { // several at once
		modes = []uint32{nl.XDP_FLAGS_SKB_MODE, nl.XDP_FLAGS_DRV_MODE, xdpHW}
	}
	var errs []error
	for _, mode := range modes {
		req := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, l.Attrs().Index)
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(^uint32(0)))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
		req.AddData(attr)
		if _, err := c.execute(req, 0); err != nil && len(modes) == 1 {
			errs = append(errs, fmt.Errorf("detach XDP program %d: %w", xdp.ProgId, err))
		}
	}
	return errors.Join(errs...)
}

// addresses returns the link's addresses with their prefix length. Those of link scope say nothing: the kernel makes
// them up by itself.
func (c *conn) addresses(index int) ([]string, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	req.AddData(nl.NewIfAddrmsg(unix.AF_UNSPEC))
	msgs, err := c.execute(req, unix.RTM_NEWADDR)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var ips []string
	for _, m := range msgs {
		info := nl.DeserializeIfAddrmsg(m)
		if int(info.Index) != index || info.Scope == unix.RT_SCOPE_LINK {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[info.Len():])
		if err != nil {
			return nil, fmt.Errorf("list addresses: %w", err)
		}
		// IFA_LOCAL is the own address and IFA_ADDRESS the peer's on a point-to-point link; IPv6 has only the latter.
		var local, address net.IP
		for _, a := range attrs {
			switch a.Attr.Type {
			case unix.IFA_LOCAL:
				local = a.Value
			case unix.IFA_ADDRESS:
				address = a.Value
			}
		}
		if local == nil {
			local = address
		}
		ips = append(ips, fmt.Sprintf("%s/%d", local, info.Prefixlen))
	}
	return ips, nil
}
