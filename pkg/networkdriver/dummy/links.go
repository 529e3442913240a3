// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dummy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	linkKind = "dummy"

	// aliasPrefix begins the alias (IFLA_IFALIAS) of links that this manager made.
	aliasPrefix = "networkdriver:"

	// unfinishedGroup marks a link as ours between its creation and its alias, which the kernel takes only afterwards
	// (rtnl_create_link in net/core/rtnetlink.c): an agent that is killed in between still knows it.
	unfinishedGroup = 0x6e647276 // "ndrv"
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
	// watch calls notify once it receives link events and whenever links came or went, and returns when the context ends
	// or events were lost.
	watch(ctx context.Context, notify func()) error
}

// kernelLinks are the links of a network namespace.
type kernelLinks struct {
	log *slog.Logger
	// netns is the path of the namespace, empty for this process's.
	netns string
	// kind is the kind of the links that are made.
	kind string
}

func (k kernelLinks) open() (*rtlink.Conn, error) { return rtlink.DialPath(k.log, k.netns) }

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
	defer h.Close()
	all, err := h.List()
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
func (k kernelLinks) find(h *rtlink.Conn, name string) (netlink.Link, error) {
	l, err := h.ByName(name)
	if err != nil || l != nil && k.ownerOf(l) == name {
		return l, err
	}
	all, err := h.List() // it may be back from a pod under another name
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
	defer h.Close()
	l, err := k.find(h, name)
	if err != nil {
		return link{}, err
	}
	if l != nil {
		if l.Attrs().Index == keep {
			return k.describe(l), nil
		}
		if err := h.Delete(l.Attrs().Index); err != nil {
			return link{}, fmt.Errorf("delete link %s, which was left from before: %w", l.Attrs().Name, err)
		}
	}
	if l, err = k.add(h, name); err != nil {
		return link{}, err
	}
	index, alias, group := l.Attrs().Index, aliasOf(name), uint32(0)
	if err := h.Change(index, rtlink.Change{Alias: &alias, Group: &group}); err != nil {
		return link{}, fmt.Errorf("mark link %s: %w", name, errors.Join(err, h.Delete(index)))
	}
	l.Attrs().Alias = alias
	return k.describe(l), nil
}

// moduleStray is the link that the dummy module makes for itself when it is loaded (its parameter numdummies), which is
// what the first request for a dummy does.
const moduleStray = linkKind + "0"

func (k kernelLinks) add(h *rtlink.Conn, name string) (netlink.Link, error) {
	removeStray, err := k.watchModule(h)
	if err != nil {
		return nil, err
	}
	err = h.Add(k.kind, name, unfinishedGroup)
	if strayErr := removeStray(); strayErr != nil {
		return nil, strayErr
	}
	if errors.Is(err, unix.EEXIST) && name == moduleStray {
		err = h.Add(k.kind, name, unfinishedGroup)
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return nil, fmt.Errorf("create link %s: %s", name, foreignReason)
	case errors.Is(err, unix.EOPNOTSUPP):
		return nil, fmt.Errorf("create link %s: kernel has no %s link support: %w", name, k.kind, err)
	case err != nil:
		return nil, fmt.Errorf("create link %s: %w", name, err)
	}
	l, err := h.ByName(name)
	if err == nil && l == nil {
		err = fmt.Errorf("link %s is gone although it was made just now", name)
	}
	return l, err
}

// watchModule returns a function that removes the link which the loading of the dummy module has made since.
func (k kernelLinks) watchModule(h *rtlink.Conn) (removeStray func() error, err error) {
	nothing := func() error { return nil }
	if _, err := os.Stat("/sys/module/dummy"); err == nil {
		return nothing, nil
	}
	if before, err := h.ByName(moduleStray); err != nil || before != nil {
		return nothing, err
	}
	return func() error {
		l, err := h.ByName(moduleStray)
		if err != nil || l == nil || l.Type() != linkKind || k.ownerOf(l) != "" {
			return err
		}
		if err := h.Delete(l.Attrs().Index); err != nil {
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
	defer h.Close()
	l, err := k.find(h, name)
	if err != nil || l == nil {
		return err
	}
	if err := h.Delete(l.Attrs().Index); err != nil {
		return fmt.Errorf("delete link %s: %w", l.Attrs().Name, err)
	}
	return nil
}

func (k kernelLinks) watch(ctx context.Context, notify func()) error {
	return rtlink.Subscribe(ctx, k.netns, notify, func(l netlink.Link) {
		if validName(l.Attrs().Name) {
			notify()
		}
	})
}
