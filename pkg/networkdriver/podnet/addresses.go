// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	// firstTable is added to a link's index in the pod for the number of its own routing table, beyond those that people and
	// other plugins use.
	firstTable = 1 << 20
	// rulePriority is the priority of the rules that lead there: after the kernel's for local addresses, before that for
	// the main table.
	rulePriority = 1000
	// ruleProtocol marks these rules (FRA_PROTOCOL), so that no others are removed. The kernel has no meaning for the number.
	ruleProtocol = 78
)

// refuseAdvertisements has the kernel take no router advertisement on a link of the namespace: it would install a default
// route of whoever is on the same network. There is no request for that, only a file that each namespace has its own of.
func (m *Mover) refuseAdvertisements(ns *netnamespace.Namespace, name string) error {
	path := filepath.Join(m.cfg.NetSysctls, "ipv6", "conf", name, "accept_ra")
	err := osthread.Run(func() error {
		if err := unix.Setns(ns.FD, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %q: %w", ns.Path, err)
		}
		err := os.WriteFile(path, []byte("0"), 0)
		if errors.Is(err, os.ErrNotExist) {
			return nil // a kernel, or a namespace, without IPv6
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("have interface %s take no router advertisements: %w", name, err)
	}
	return nil
}

// configure gives a link that is up in the pod its network's addresses, routes and rules. again says that some of them may be
// there from an earlier try. What was done before a failure is not undone: it goes with the link, but for rules.
func configure(pod *nic.Place, index int, n *types.Network, again bool) error {
	there := func(err error) bool { return again && errors.Is(err, unix.EEXIST) }
	for _, a := range n.Addresses {
		addr := &netlink.Addr{IPNet: netipx.PrefixIPNet(a)}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // it is the pod's alone, and usable at once
		}
		if err := pod.AddAddr(index, addr); err != nil && !there(err) {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	table := 0
	if n.PolicyRouting {
		table = firstTable + index
		for _, a := range n.Addresses {
			if err := policyRoute(pod, index, table, a); err != nil && !there(err) {
				return err
			}
		}
	}
	for _, r := range n.Routes {
		err := pod.AddRoute(&netlink.Route{LinkIndex: index, Dst: netipx.PrefixIPNet(r.To), Gw: r.Via.AsSlice(), Priority: r.Metric, Table: table})
		switch {
		case err == nil || there(err):
		case errors.Is(err, unix.EEXIST):
			return fmt.Errorf("route to %s: the pod has one already", r.To)
		default:
			return fmt.Errorf("add route to %s via %s: %w", r.To, r.Via, err)
		}
	}
	return nil
}

// policyRoute has what is sent from the address go by the table, which gets the route to the address's subnet.
func policyRoute(pod *nic.Place, index, table int, a netip.Prefix) error {
	route := &netlink.Route{LinkIndex: index, Dst: netipx.PrefixIPNet(a.Masked()), Scope: netlink.SCOPE_LINK, Table: table}
	if a.Addr().Is4() {
		route.Src = a.Addr().AsSlice()
	}
	if err := pod.AddRoute(route); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add route to %s to table %d: %w", a.Masked(), table, err)
	}
	if err := pod.AddRule(ruleFrom(a, table)); err != nil {
		return fmt.Errorf("add rule from %s to table %d: %w", a.Addr(), table, err)
	}
	return nil
}

func ruleFrom(a netip.Prefix, table int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family = netlink.FAMILY_V4
	if a.Addr().Is6() {
		rule.Family = netlink.FAMILY_V6
	}
	rule.Src = netipx.AddrIPNet(a.Addr())
	rule.Table, rule.Priority, rule.Protocol = table, rulePriority, ruleProtocol
	return rule
}

// removeRules removes from a pod that lives on what leads to the table of a link that leaves it.
func removeRules(pod *nic.Place, n *types.Network) error {
	if n == nil || !n.PolicyRouting {
		return nil
	}
	for _, a := range n.Addresses {
		want := ruleFrom(a, 0)
		rules, err := pod.Rules(want.Family)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // a kernel without the family has no rules of it
		}
		if err != nil {
			return err
		}
		for _, rule := range rules {
			if rule.Protocol != ruleProtocol || rule.Src == nil || rule.Src.String() != want.Src.String() {
				continue
			}
			want.Table = rule.Table
			if err := pod.DeleteRule(want); err != nil {
				return fmt.Errorf("remove the rule from %s to table %d: %w", a.Addr(), rule.Table, err)
			}
		}
	}
	return nil
}
