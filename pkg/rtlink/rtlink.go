// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package rtlink makes those rtnetlink(7) requests about links that the netlink library does not have: one that moves,
// renames and brings up a link at once, so that nobody sees it half-way, and lookups that neither fetch counters nor a
// PF's table of VFs.
package rtlink

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
)

const (
	// extSkipStats asks the kernel to leave the counters out (RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h). Without
	// RTEXT_FILTER_VF beside it, a PF's table of VFs, which can exceed the size of a message, is left out too.
	extSkipStats = 1 << 3
	// dumpAttempts is how often a dump is tried that something interfered with.
	dumpAttempts = 10
)

// Conn is an rtnetlink socket in one network namespace. The thread is in that namespace only while the socket is made.
type Conn struct {
	log    *slog.Logger
	netns  string // the namespace's path, for people
	socket *nl.SocketHandle
}

// Dial opens a socket in the namespace, which may be closed afterwards. Each request is logged at debug level.
func Dial(log *slog.Logger, ns *netnamespace.Namespace) (*Conn, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.NsHandle(ns.FD), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", ns.Path, err)
	}
	// Without extended acknowledgements errors only say less, so that a kernel that refuses them is no problem.
	_ = socket.SetExtAck(true)
	return &Conn{log: log.With("netns", ns.Path), netns: ns.Path, socket: &nl.SocketHandle{Socket: socket}}, nil
}

// Close closes the socket.
func (c *Conn) Close() { c.socket.Close() }

var requestNames = map[uint16]string{
	unix.RTM_GETLINK:     "RTM_GETLINK",
	unix.RTM_NEWLINK:     "RTM_NEWLINK",
	unix.RTM_NEWLINKPROP: "RTM_NEWLINKPROP",
	unix.RTM_DELLINKPROP: "RTM_DELLINKPROP",
	unix.RTM_GETADDR:     "RTM_GETADDR",
}

// Execute sends a request and returns the answers of a type.
func (c *Conn) Execute(req *nl.NetlinkRequest, answer uint16) ([][]byte, error) {
	c.log.Debug("rtnetlink request", "request", requestNames[req.Type])
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	return req.Execute(unix.NETLINK_ROUTE, answer)
}

func request(msgType, flags, index int) (*nl.NetlinkRequest, *nl.IfInfomsg) {
	req := nl.NewNetlinkRequest(msgType, flags)
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(index)
	req.AddData(info)
	return req, info
}

// ByIndex returns the link with the index, nil if there is none.
func (c *Conn) ByIndex(index int) (netlink.Link, error) {
	req, _ := request(unix.RTM_GETLINK, unix.NLM_F_ACK, index)
	return c.get(req, fmt.Sprintf("link with index %d", index))
}

// ByName returns the link that has the name as its interface name or as an alternative name, nil if there is none.
func (c *Conn) ByName(name string) (netlink.Link, error) {
	req, _ := request(unix.RTM_GETLINK, unix.NLM_F_ACK, 0)
	attr := unix.IFLA_IFNAME // alternative names are found by it too
	if len(name) >= unix.IFNAMSIZ {
		attr = unix.IFLA_ALT_IFNAME // the kernel refuses it as an interface name
	}
	req.AddData(nl.NewRtAttr(attr, nl.ZeroTerminated(name)))
	return c.get(req, fmt.Sprintf("link %q", name))
}

func (c *Conn) get(req *nl.NetlinkRequest, what string) (netlink.Link, error) {
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	msgs, err := c.Execute(req, unix.RTM_NEWLINK)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up %s in %s: %w", what, c.netns, err)
	case len(msgs) != 1:
		return nil, fmt.Errorf("look up %s in %s: %d answers", what, c.netns, len(msgs))
	}
	return netlink.LinkDeserialize(nil, msgs[0])
}

// List returns all links of the namespace. A list that something interfered with is never taken for a whole one: a link
// that is missing in it would count as gone.
func (c *Conn) List() ([]netlink.Link, error) {
	var msgs [][]byte
	err := Dump(func() (err error) {
		req, _ := request(unix.RTM_GETLINK, unix.NLM_F_DUMP, 0)
		req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
		msgs, err = c.Execute(req, unix.RTM_NEWLINK)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list links of %s: %w", c.netns, err)
	}
	links := make([]netlink.Link, 0, len(msgs))
	for _, m := range msgs {
		l, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, fmt.Errorf("list links of %s: %w", c.netns, err)
		}
		links = append(links, l)
	}
	return links, nil
}

// Dump calls a function that asks the kernel for a list again while something interferes.
func Dump(once func() error) error {
	var err error
	for range dumpAttempts {
		if err = once(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// Change is what one RTM_NEWLINK request does to a link. The kernel does it in the order of the fields (do_setlink in
// net/core/rtnetlink.c), stops at the first failure and does not undo what it has done by then.
type Change struct {
	To  *netnamespace.Namespace // nil: the link stays where it is
	MAC net.HardwareAddr
	MTU int // bytes, 0 leaves it
	// Name may be a pattern such as nic%d, of which the kernel takes the lowest free number.
	Name string
	// Flags are new values of the flags in Mask (IFF_UP and so on).
	Flags uint32
	Mask  uint32
}

// IsZero says whether nothing is to be changed.
func (ch Change) IsZero() bool {
	return ch.To == nil && len(ch.MAC) == 0 && ch.MTU == 0 && ch.Name == "" && ch.Mask == 0
}

// Change changes a link. The error is or wraps the kernel's answer.
func (c *Conn) Change(index int, ch Change) error {
	req, info := request(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	info.Flags, info.Change = ch.Flags&ch.Mask, ch.Mask // without a mask, flags would mean all flags
	if ch.To != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(ch.To.FD))))
	}
	if len(ch.MAC) > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, ch.MAC))
	}
	if ch.MTU > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(ch.MTU))))
	}
	if ch.Name != "" {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(ch.Name)))
	}
	_, err := c.Execute(req, 0)
	return err
}

// AddAltName gives a link an alternative name. The error wraps EEXIST when a link of the namespace has that name.
func (c *Conn) AddAltName(index int, name string) error {
	if err := c.altName(unix.RTM_NEWLINKPROP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, index, name); err != nil {
		return fmt.Errorf("add alternative name %q: %w", name, err)
	}
	return nil
}

// RemoveAltName takes an alternative name off a link, if it has it.
func (c *Conn) RemoveAltName(index int, name string) error {
	err := c.altName(unix.RTM_DELLINKPROP, 0, index, name)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove alternative name %q: %w", name, err)
	}
	return nil
}

func (c *Conn) altName(msgType, flags, index int, name string) error {
	req, _ := request(msgType, flags|unix.NLM_F_ACK, index)
	props := nl.NewRtAttr(unix.IFLA_PROP_LIST|unix.NLA_F_NESTED, nil)
	props.AddRtAttr(unix.IFLA_ALT_IFNAME, nl.ZeroTerminated(name))
	req.AddData(props)
	_, err := c.Execute(req, 0)
	return err
}
