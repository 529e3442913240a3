// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package rtlink is the one place that asks the kernel for lists of links, addresses, routes and rules (rtnetlink(7)), and
// makes those requests about links that the netlink library does not have: one that moves, renames and brings up a link
// at once, so that nobody sees it half-way, and lookups that neither fetch counters nor a PF's table of VFs.
//
// The kernel marks a list during which something changed. Such a list may lack what was there all the time, and what is
// missing in it would count as gone; so it is asked for again, here and nowhere else ([Conn.Dump]).
package rtlink

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

const (
	// extVF asks for a PF's table of VFs (RTEXT_FILTER_VF of linux/rtnetlink.h), which can exceed the size of a message and
	// costs a question to the card's firmware for each VF with some drivers.
	extVF = 1 << 0
	// extSkipStats asks the kernel to leave the counters out (RTEXT_FILTER_SKIP_STATS). With them, the data of 256 VFs do
	// not fit into an attribute, whose length has 16 bits.
	extSkipStats = 1 << 3
	// dumpAttempts is how often a dump is tried that something interfered with.
	dumpAttempts = 10
)

// Conn is an rtnetlink socket in one network namespace. The thread is in that namespace only while the socket is made.
// It may be used by several goroutines.
type Conn struct {
	log    *slog.Logger
	netns  string // the namespace's path, for people
	socket *nl.SocketHandle

	// once guards the library's handle, which is opened when something needs it.
	once      sync.Once
	ns        netns.NsHandle
	handle    *netlink.Handle
	handleErr error
}

// Dial opens a socket in the namespace, which may be closed afterwards. Each request is logged at debug level.
func Dial(log *slog.Logger, ns *netnamespace.Namespace) (*Conn, error) {
	own, err := unix.FcntlInt(uintptr(ns.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("keep %s open: %w", ns.Path, err)
	}
	return dialIn(log, ns.Path, netns.NsHandle(own))
}

// DialPath is [Dial] for the namespace that a path leads to. An empty path is the calling thread's, where a socket needs
// no right to enter namespaces.
func DialPath(log *slog.Logger, path string) (*Conn, error) {
	if path == "" {
		return dialIn(log, "the own network namespace", netns.None())
	}
	ns, err := netnamespace.Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return Dial(log, ns)
}

// dialIn takes over the namespace, which is none for the calling thread's.
func dialIn(log *slog.Logger, name string, ns netns.NsHandle) (*Conn, error) {
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		if ns.IsOpen() {
			_ = ns.Close()
		}
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", name, err)
	}
	// Without extended acknowledgements errors only say less, so that a kernel that refuses them is no problem.
	_ = socket.SetExtAck(true)
	return &Conn{log: log.With("netns", name), netns: name, socket: &nl.SocketHandle{Socket: socket}, ns: ns}, nil
}

// Close closes the socket.
func (c *Conn) Close() {
	c.once.Do(func() { c.handleErr = net.ErrClosed })
	if c.handle != nil {
		c.handle.Close()
	}
	c.socket.Close()
	if c.ns.IsOpen() {
		_ = c.ns.Close()
	}
}

// library returns the netlink library's handle for the namespace.
func (c *Conn) library() (*netlink.Handle, error) {
	c.once.Do(func() { c.handle, c.handleErr = netlink.NewHandleAt(c.ns, unix.NETLINK_ROUTE) })
	if c.handleErr != nil {
		return nil, fmt.Errorf("open an rtnetlink socket in %s: %w", c.netns, c.handleErr)
	}
	return c.handle, nil
}

var requestNames = map[uint16]string{
	unix.RTM_GETLINK:     "RTM_GETLINK",
	unix.RTM_NEWLINK:     "RTM_NEWLINK",
	unix.RTM_NEWLINKPROP: "RTM_NEWLINKPROP",
	unix.RTM_DELLINKPROP: "RTM_DELLINKPROP",
	unix.RTM_DELLINK:     "RTM_DELLINK",
	unix.RTM_GETROUTE:    "RTM_GETROUTE",
}

// execute sends a request and returns the answers of a type.
func (c *Conn) execute(req *nl.NetlinkRequest, answer uint16) ([][]byte, error) {
	c.prepare(req)
	return req.Execute(unix.NETLINK_ROUTE, answer)
}

func (c *Conn) prepare(req *nl.NetlinkRequest) {
	c.log.Debug("rtnetlink request", "request", requestNames[req.Type])
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
}

// Dump makes a request of a type, such as RTM_GETROUTE, with its header and attributes, for a list, and returns what take
// makes of each answer. An answer that take cannot read ends the list with take's error.
func Dump[T any](c *Conn, request, answer uint16, take func(msg []byte) ([]T, error), data ...nl.NetlinkRequestData) ([]T, error) {
	var list []T
	err := retry(func() error {
		list = nil
		req := nl.NewNetlinkRequest(int(request), unix.NLM_F_DUMP)
		for _, d := range data {
			req.AddData(d)
		}
		c.prepare(req)
		var takeErr error
		err := req.ExecuteIter(unix.NETLINK_ROUTE, answer, func(msg []byte) bool {
			var some []T
			some, takeErr = take(msg)
			list = append(list, some...)
			return takeErr == nil
		})
		return cmp.Or(takeErr, err)
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// retry asks for a list again while something interferes with it.
func retry(once func() error) error {
	var err error
	for range dumpAttempts {
		if err = once(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

func linkRequest(msgType, flags, index int) (*nl.NetlinkRequest, *nl.IfInfomsg) {
	req := nl.NewNetlinkRequest(msgType, flags)
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index = int32(index)
	req.AddData(info)
	return req, info
}

// ByIndex returns the link with the index, nil if there is none.
func (c *Conn) ByIndex(index int) (netlink.Link, error) {
	req, _ := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, index)
	return c.get(req, fmt.Sprintf("link with index %d", index))
}

// ByName returns the link that has the name as its interface name or as an alternative name, nil if there is none.
func (c *Conn) ByName(name string) (netlink.Link, error) {
	req, _ := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, 0)
	attr := unix.IFLA_IFNAME // alternative names are found by it too
	if len(name) >= unix.IFNAMSIZ {
		attr = unix.IFLA_ALT_IFNAME // the kernel refuses it as an interface name
	}
	req.AddData(nl.NewRtAttr(attr, nl.ZeroTerminated(name)))
	return c.get(req, fmt.Sprintf("link %q", name))
}

func (c *Conn) get(req *nl.NetlinkRequest, what string) (netlink.Link, error) {
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
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

// List returns all links of the namespace.
func (c *Conn) List() ([]netlink.Link, error) {
	links, err := Dump(c, unix.RTM_GETLINK, unix.RTM_NEWLINK, func(msg []byte) ([]netlink.Link, error) {
		link, err := netlink.LinkDeserialize(nil, msg)
		return []netlink.Link{link}, err
	}, nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
	if err != nil {
		return nil, fmt.Errorf("list links of %s: %w", c.netns, err)
	}
	return links, nil
}

// VFTable returns the message about a PF with its table of VFs (IFLA_VFINFO_LIST), undecoded.
func (c *Conn) VFTable(pfIndex int) ([]byte, error) {
	req, _ := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, pfIndex)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extVF|extSkipStats)))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the VFs of link %d: %w", pfIndex, err)
	case len(msgs) != 1:
		return nil, fmt.Errorf("read the VFs of link %d: %d answers", pfIndex, len(msgs))
	}
	return msgs[0], nil
}
