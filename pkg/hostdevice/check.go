// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/nic"
)

// check says what an attachment lacks. The sub-plugin's own CHECK is not asked: it looks for routes in the main table,
// from where sbr has taken them.
func (c *call) check(ctx context.Context) error {
	if c.conf.prevResult == nil {
		return errorf(types.ErrInvalidNetworkConfig, "network %q: prevResult is missing", c.conf.name)
	}
	result, err := c.previousResult()
	if err != nil {
		return err
	}
	rec, err := c.store.load(c.attachment())
	if err != nil {
		return errorf(types.ErrIOFailure, "%w", err)
	}
	if rec == nil {
		return c.checkUnrecorded()
	}
	host, err := c.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	pod, err := c.openPod(host)
	if err != nil {
		return err
	}
	defer pod.Close()
	link, err := pod.ByName(c.args.IfName)
	if err != nil {
		return err
	}
	switch {
	case link == nil:
		return fmt.Errorf("the container has no interface %s", c.args.IfName)
	case !rec.NIC.Matches(link) && (pod.NS.ID != rec.NetNSID || !rec.NIC.MatchesAtHome(link)):
		return fmt.Errorf("interface %s of the container is not NIC %s", c.args.IfName, rec.NIC)
	case !nic.Read(link).Up:
		return fmt.Errorf("interface %s of the container is down", c.args.IfName)
	}
	for _, i := range result.Interfaces {
		if mac := link.Attrs().HardwareAddr.String(); i.Name == c.args.IfName && i.Mac != "" && i.Mac != mac {
			return fmt.Errorf("interface %s of the container has the MAC %s instead of %s", i.Name, mac, i.Mac)
		}
	}
	var expected []netip.Addr
	for _, ip := range result.IPs {
		// Without an index, an address belongs to the one interface there is.
		if i := ip.Interface; i != nil && (*i < 0 || *i >= len(result.Interfaces) || result.Interfaces[*i].Name != c.args.IfName) {
			continue
		}
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			expected = append(expected, addr.Unmap())
		}
	}
	return errors.Join(
		checkAddresses(pod, link, expected),
		checkRoutes(pod, link, rec.Routes),
		c.ipam(ctx, "CHECK"),
	)
}

// checkUnrecorded is right for a device without a network interface, of which there is nothing to record.
func (c *call) checkUnrecorded() error {
	host, err := c.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	chosen, err := selector{host: host, sysfs: c.sysfs}.choose(c.conf)
	if err == nil && chosen.link == nil {
		return nil
	}
	return errorf(types.ErrUnknownContainer, "interface %s of container %s is not recorded as attached", c.args.IfName, c.args.ContainerID)
}

// checkAddresses says which addresses a link lacks.
func checkAddresses(in *nic.Place, link netlink.Link, expected []netip.Addr) error {
	addrs, err := addressesOf(in, link.Attrs().Index)
	if err != nil {
		return err
	}
	have := map[netip.Addr]bool{}
	for _, a := range addrs {
		have[a.Local] = true
	}
	var errs []error
	for _, addr := range expected {
		if !have[addr] {
			errs = append(errs, fmt.Errorf("interface %s of the container has lost its address %s", link.Attrs().Name, addr))
		}
	}
	return errors.Join(errs...)
}

// checkRoutes says which policy routes are missing. A route in the main table is there for all; where sbr has put it
// into another, a rule must lead from the address to that table.
func checkRoutes(in *nic.Place, link netlink.Link, routes []recordedRoute) error {
	if len(routes) == 0 {
		return nil
	}
	installed, err := in.Routes(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return err
	}
	rules, err := in.Rules(netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	const mainTable = 254 // RT_TABLE_MAIN
	var errs []error
	for _, want := range routes {
		tables := map[int]bool{}
		for _, r := range installed {
			if r.LinkIndex == link.Attrs().Index && samePrefix(r.Dst, want.Dst) && r.Gw.Equal(want.Via.AsSlice()) {
				tables[r.Table] = true
			}
		}
		led := tables[mainTable]
		for _, rule := range rules {
			led = led || tables[rule.Table] && samePrefix(rule.Src, netip.PrefixFrom(want.From, want.From.BitLen()))
		}
		switch {
		case len(tables) == 0:
			errs = append(errs, fmt.Errorf("the container has lost the route %s via %s", want.Dst, want.Via))
		case !led:
			errs = append(errs, fmt.Errorf("the container has no rule that leads from %s to its route %s via %s", want.From, want.Dst, want.Via))
		}
	}
	return errors.Join(errs...)
}

// samePrefix compares the library's form of a prefix, in which nil is everything.
func samePrefix(n *net.IPNet, p netip.Prefix) bool {
	if n == nil {
		return p.Bits() == 0
	}
	ones, _ := n.Mask.Size()
	addr, ok := netip.AddrFromSlice(n.IP)
	return ok && ones == p.Bits() && addr.Unmap() == p.Addr()
}
