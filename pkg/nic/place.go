// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic/sysfs"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// Place is a network namespace with a socket in it.
type Place struct {
	*rtlink.Conn
	NS *netnamespace.Namespace

	log   *slog.Logger
	sysfs string
}

// Open opens the namespace that the path leads to. sysfs is the mount point of a sysfs that shows it, empty for none. The
// error is or wraps [netnamespace.ErrNone] when the path leads to no namespace.
func Open(log *slog.Logger, path, sysfs string) (*Place, error) {
	return openBy(log, path, sysfs, rtlink.Dial)
}

// OpenOwn opens the calling thread's namespace, which needs no right to enter namespaces.
func OpenOwn(log *slog.Logger, sysfs string) (*Place, error) {
	return openBy(log, "/proc/thread-self/ns/net", sysfs, func(log *slog.Logger, _ *netnamespace.Namespace) (*rtlink.Conn, error) {
		return rtlink.DialPath(log, "")
	})
}

func openBy(log *slog.Logger, path, sysfs string, dial func(*slog.Logger, *netnamespace.Namespace) (*rtlink.Conn, error)) (*Place, error) {
	ns, err := netnamespace.Open(path)
	if err != nil {
		return nil, err
	}
	conn, err := dial(log, ns)
	if err != nil {
		ns.Close()
		return nil, err
	}
	return &Place{Conn: conn, NS: ns, log: log, sysfs: sysfs}, nil
}

// Close lets go of the namespace.
func (p *Place) Close() {
	p.Conn.Close()
	p.NS.Close()
}

// Find returns the NIC's link, nil if it is not in the namespace. accept, which may be nil, has to take the link too.
func (p *Place) Find(id Identity, accept func(netlink.Link) bool) (netlink.Link, error) {
	link, err := p.FindHinted(id, accept)
	if link != nil || err != nil {
		return link, err
	}
	links, err := p.List()
	if err != nil {
		return nil, err
	}
	return id.pick(links, accept)
}

// FindHinted is [Place.Find] without a list of all links of the namespace: the link may be missed. Where it leads is a
// hint: sysfs gives the index by a name that may change while it is read, so that the kernel is asked whether the index
// is the NIC's.
func (p *Place) FindHinted(id Identity, accept func(netlink.Link) bool) (netlink.Link, error) {
	indexes := p.indexesOf(id)
	if id.Device == "" && id.Index > 0 {
		indexes = append(indexes, id.Index)
	}
	var links []netlink.Link
	for _, index := range indexes {
		link, err := p.ByIndex(index)
		if err != nil {
			return nil, err
		}
		if link != nil {
			links = append(links, link)
		}
	}
	return id.pick(links, accept)
}

// pick returns the link that is the NIC, nil for none. A device of which several links may be meant is an error: which of
// them is lent is not to be guessed.
func (id Identity) pick(links []netlink.Link, accept func(netlink.Link) bool) (found netlink.Link, err error) {
	for _, link := range links {
		if !id.isIt(link, accept) {
			continue
		}
		if found != nil && id.Device != "" {
			return nil, fmt.Errorf("%s has several links, %s and %s, and it is not known which is meant", id, found.Attrs().Name, link.Attrs().Name)
		}
		if found == nil {
			found = link
		}
	}
	return found, nil
}

func (id Identity) isIt(link netlink.Link, accept func(netlink.Link) bool) bool {
	return id.MatchesAtHome(link) && (accept == nil || accept(link))
}

// Identify returns the identity of a link of the host. The permanent address counts for a device that can have several
// links. A VF has one, unless several are there, and may get another permanent address from its PF.
func (p *Place) Identify(link netlink.Link) Identity {
	id := identify(link)
	dir := p.deviceDir(id)
	if dir == "" {
		return id
	}
	if _, err := os.Lstat(filepath.Join(dir, "physfn")); err == nil && len(p.indexesOf(id)) == 1 {
		id.PermMAC = ""
	}
	return id
}

// indexesOf returns the indexes that sysfs has of the links of the NIC's device.
func (p *Place) indexesOf(id Identity) (indexes []int) {
	dir := p.deviceDir(id)
	if dir == "" {
		return nil
	}
	names, _ := sysfs.Links(dir)
	for _, name := range names {
		raw, err := os.ReadFile(filepath.Join(dir, "net", name, "ifindex"))
		if err != nil {
			continue
		}
		if index, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil && index > 0 {
			indexes = append(indexes, index)
		}
	}
	return indexes
}

// deviceDir returns the directory of the NIC's device in sysfs, empty if it has none there.
func (p *Place) deviceDir(id Identity) string {
	if p.sysfs == "" || !IsDeviceName(id.Bus) || !IsDeviceName(id.Device) {
		return ""
	}
	return sysfs.DeviceDir(p.sysfs, id.Bus, id.Device)
}

// Elsewhere says whether a NIC that is not in this namespace has a link in another one, and why it has none if not. The
// error is the context's.
func (p *Place) Elsewhere(ctx context.Context, id Identity) (found bool, why string, err error) {
	if id.Physical() {
		why := p.linkless(id)
		return why == "", why, nil
	}
	for ns := range netnamespace.Reachable(ctx, p.NS.ID) {
		if has, err := p.has(ns, id); err == nil && has {
			return true, "", nil
		}
	}
	return false, "it ended with the network namespace that it was in, or was deleted there", ctx.Err()
}

// has says whether the NIC's link is in the namespace.
func (p *Place) has(ns *netnamespace.Namespace, id Identity) (bool, error) {
	conn, err := rtlink.Dial(p.log, ns)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	link, err := (&Place{Conn: conn, NS: ns, log: p.log}).Find(id, nil)
	return link != nil, err
}

// linkless is [sysfs.Linkless] of the NIC's device. It is empty for a NIC without one.
func (p *Place) linkless(id Identity) string {
	if dir := p.deviceDir(id); dir != "" {
		return sysfs.Linkless(dir)
	}
	return ""
}
