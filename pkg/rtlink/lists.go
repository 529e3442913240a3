// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Addrs returns the addresses of the link with the index, or with 0 of all links, in the kernel's order: the first IPv4
// address of a network is its primary one.
func (c *Conn) Addrs(index int) ([]netlink.Addr, error) {
	var link netlink.Link
	if index != 0 {
		link = byIndex(index)
	}
	return list(c, "addresses", func(h *netlink.Handle) ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
}

// Routes returns the routes of a family (netlink.FAMILY_V4 and so on) that the filter's fields in the mask fit. Without a
// table in the mask they are those of the main table.
func (c *Conn) Routes(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return list(c, "routes", func(h *netlink.Handle) ([]netlink.Route, error) { return h.RouteListFiltered(family, filter, mask) })
}

// Rules returns the rules of a family that choose a routing table.
func (c *Conn) Rules(family int) ([]netlink.Rule, error) {
	return list(c, "rules", func(h *netlink.Handle) ([]netlink.Rule, error) { return h.RuleList(family) })
}

func list[T any](c *Conn, what string, once func(*netlink.Handle) ([]T, error)) ([]T, error) {
	h, err := c.library()
	if err != nil {
		return nil, err
	}
	var found []T
	if err := retry(func() (err error) { found, err = once(h); return err }); err != nil {
		return nil, fmt.Errorf("list %s of %s: %w", what, c.netns, err)
	}
	return found, nil
}

// AddAddr gives a link an address. The error wraps EEXIST when it has that.
func (c *Conn) AddAddr(index int, addr *netlink.Addr) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.AddrAdd(byIndex(index), addr)
}

// AddRoute adds a route. The error wraps EEXIST when there is one to its destination of its metric in its table.
func (c *Conn) AddRoute(route *netlink.Route) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.RouteAdd(route)
}

// AddRule adds a rule that chooses a routing table. The error wraps EEXIST when it is there.
func (c *Conn) AddRule(rule *netlink.Rule) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	return h.RuleAdd(rule)
}

// DeleteRule removes a rule. One that is gone is no error.
func (c *Conn) DeleteRule(rule *netlink.Rule) error {
	h, err := c.library()
	if err != nil {
		return err
	}
	if err := h.RuleDel(rule); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// byIndex is what the library takes for a link whose index is known.
func byIndex(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}
