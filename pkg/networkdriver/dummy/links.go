// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dummy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	linkKind = "dummy"

	// aliasPrefix begins the alias (IFLA_IFALIAS) of links that this manager made.
	aliasPrefix = "networkdriver:"

	// unfinishedGroup marks a link as ours between its creation and its alias, which the kernel takes only afterwards
	// (rtnl_create_link in net/core/rtnetlink.c): an agent that is killed in between still knows it.
	unfinishedGroup = 0x6e647276 // "ndrv"

	// extSkipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h.
	extSkipStats = 1 << 3
	// dumpAttempts is how often a list is read that changed while it was.
	dumpAttempts = 4
)

func aliasOf(name string) string { return aliasPrefix + name }

// link is a link on the host.
type link struct {
	name  string
	ours  bool // made by this manager for the device called name
	index int
	mtu   int
	mac   string
}

// links makes and removes links on the host.
type links interface {
	// list returns the links of the host, of which ours have the name of their device whatever the interface is called.
	list() ([]link, error)
	// create makes the link for the device. One that was made for it before is kept if it has the index to keep, and
	// else makes way, so that nothing of what was done to it remains.
	create(name string, keep int) (link, error)
	// delete removes the link for the device wherever on the host it is. One that is not there is no error.
	delete(name string) error
	// changes reports that links came or went, until the context ends or the kernel drops the subscription; then the
	// channel is closed.
	changes(ctx context.Context) (<-chan struct{}, error)
}

// kernelLinks are the links of a network namespace.
type kernelLinks struct {
	// netns is the path of the namespace, empty for this process's.
	netns string
	// kind is the kind of the links that are made.
	kind string
}

// conn is a handle of the library and a socket for what the library asks too much for.
type conn struct {
	*netlink.Handle
	socket *nl.SocketHandle
}

func (k kernelLinks) open() (*conn, error) {
	ns := netns.None()
	if k.netns != "" {
		var err error
		if ns, err = netns.GetFromPath(k.netns); err != nil {
			return nil, fmt.Errorf("open network namespace %s: %w", k.netns, err)
		}
		defer func() { _ = ns.Close() }()
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open an rtnetlink socket: %w", err)
	}
	s, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open an rtnetlink socket: %w", err)
	}
	return &conn{Handle: h, socket: &nl.SocketHandle{Socket: s}}, nil
}

func (c *conn) close() {
	c.Handle.Close()
	c.socket.Close()
}

// list returns all links without their counters and without the VFs of PFs, of which a node may have thousands.
func (c *conn) list() ([]netlink.Link, error) {
	var (
		msgs [][]byte
		err  error = netlink.ErrDumpInterrupted
	)
	for attempt := 0; errors.Is(err, netlink.ErrDumpInterrupted) && attempt < dumpAttempts; attempt++ {
		req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extSkipStats)))
		req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
		msgs, err = req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	}
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	all := make([]netlink.Link, 0, len(msgs))
	for _, m := range msgs {
		l, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, fmt.Errorf("list links: %w", err)
		}
		all = append(all, l)
	}
	return all, nil
}

// lookup returns the link with the interface name, nil if there is none.
func (c *conn) lookup(name string) (netlink.Link, error) {
	l, err := c.LinkByName(name)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up link %s: %w", name, err)
	}
	return l, nil
}

// ownerOf returns the name of the device that the link was made for, empty if it is not ours.
func (k kernelLinks) ownerOf(l netlink.Link) string {
	attrs := l.Attrs()
	if l.Type() != k.kind {
		return ""
	}
	if name, ok := strings.CutPrefix(attrs.Alias, aliasPrefix); ok && validName(name) {
		return name
	}
	if attrs.Group == unfinishedGroup && attrs.Alias == "" && validName(attrs.Name) {
		return attrs.Name
	}
	return ""
}

func (k kernelLinks) describe(l netlink.Link) link {
	attrs := l.Attrs()
	d := link{name: attrs.Name, index: attrs.Index, mtu: attrs.MTU, mac: attrs.HardwareAddr.String()}
	if owner := k.ownerOf(l); owner != "" {
		d.name, d.ours = owner, true
	}
	return d
}

func (k kernelLinks) list() ([]link, error) {
	h, err := k.open()
	if err != nil {
		return nil, err
	}
	defer h.close()
	all, err := h.list()
	if err != nil {
		return nil, err
	}
	found := make([]link, 0, len(all))
	for _, l := range all {
		found = append(found, k.describe(l))
	}
	return found, nil
}

// find returns the link that was made for the device, nil if it is not on the host.
func (k kernelLinks) find(h *conn, name string) (netlink.Link, error) {
	l, err := h.lookup(name)
	if err != nil || l != nil && k.ownerOf(l) == name {
		return l, err
	}
	all, err := h.list() // it may be back from a pod under another name
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		if k.ownerOf(l) == name {
			return l, nil
		}
	}
	return nil, nil
}

func (k kernelLinks) create(name string, keep int) (link, error) {
	h, err := k.open()
	if err != nil {
		return link{}, err
	}
	defer h.close()
	l, err := k.find(h, name)
	if err != nil {
		return link{}, err
	}
	if l != nil {
		if l.Attrs().Index == keep {
			return k.describe(l), nil
		}
		if err := h.LinkDel(l); err != nil {
			return link{}, fmt.Errorf("delete link %s, which was left from before: %w", l.Attrs().Name, err)
		}
	}
	if l, err = k.add(h, name); err != nil {
		return link{}, err
	}
	err = h.LinkSetAlias(l, aliasOf(name))
	if err == nil {
		err = h.LinkSetGroup(l, 0)
	}
	if err != nil {
		return link{}, fmt.Errorf("mark link %s: %w", name, errors.Join(err, h.LinkDel(l)))
	}
	l.Attrs().Alias = aliasOf(name)
	return k.describe(l), nil
}

// moduleStray is the link that the dummy module makes for itself when it is loaded (its parameter numdummies), which is
// what the first request for a dummy does.
const moduleStray = linkKind + "0"

func (k kernelLinks) add(h *conn, name string) (netlink.Link, error) {
	removeStray, err := k.watchModule(h)
	if err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = name, unfinishedGroup
	made := &netlink.GenericLink{LinkAttrs: attrs, LinkType: k.kind}
	err = h.LinkAdd(made)
	if strayErr := removeStray(); strayErr != nil {
		return nil, strayErr
	}
	if errors.Is(err, unix.EEXIST) && name == moduleStray {
		err = h.LinkAdd(made)
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return nil, fmt.Errorf("create link %s: %s", name, foreignReason)
	case errors.Is(err, unix.EOPNOTSUPP):
		return nil, fmt.Errorf("create link %s: kernel has no %s link support: %w", name, k.kind, err)
	case err != nil:
		return nil, fmt.Errorf("create link %s: %w", name, err)
	}
	l, err := h.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("look up link %s: %w", name, err)
	}
	return l, nil
}

// watchModule returns a function that removes the link which the loading of the dummy module has made since.
func (k kernelLinks) watchModule(h *conn) (removeStray func() error, err error) {
	nothing := func() error { return nil }
	if _, err := os.Stat("/sys/module/dummy"); err == nil {
		return nothing, nil
	}
	if before, err := h.lookup(moduleStray); err != nil || before != nil {
		return nothing, err
	}
	return func() error {
		l, err := h.lookup(moduleStray)
		if err != nil || l == nil || l.Type() != linkKind || k.ownerOf(l) != "" {
			return err
		}
		if err := h.LinkDel(l); err != nil {
			return fmt.Errorf("remove link %s, which loading the dummy module has made: %w", moduleStray, err)
		}
		return nil
	}, nil
}

func (k kernelLinks) delete(name string) error {
	h, err := k.open()
	if err != nil {
		return err
	}
	defer h.close()
	l, err := k.find(h, name)
	if err != nil || l == nil {
		return err
	}
	if err := h.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete link %s: %w", l.Attrs().Name, err)
	}
	return nil
}

func (k kernelLinks) changes(ctx context.Context) (<-chan struct{}, error) {
	opts := netlink.LinkSubscribeOptions{ErrorCallback: func(error) {}} // the channel is closed then
	if k.netns != "" {
		ns, err := netns.GetFromPath(k.netns)
		if err != nil {
			return nil, fmt.Errorf("open network namespace %s: %w", k.netns, err)
		}
		defer func() { _ = ns.Close() }()
		opts.Namespace = &ns
	}
	updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
	if err := netlink.LinkSubscribeWithOptions(updates, done, opts); err != nil {
		return nil, fmt.Errorf("subscribe to link changes: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(ctx, func() { close(done) })
	changed := make(chan struct{}, 1)
	go func() {
		defer close(changed)
		defer cancel()
		for u := range updates {
			if !validName(u.Attrs().Name) {
				continue
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return changed, nil
}
