// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

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

// sysctls are the files of an interface's settings, below the folder of the network's settings, with what to write. Some have
// a request of their own, accept_ra has none; and the kernel does more on a write than on a request.
func sysctls(name string, s types.InterfaceSettings) map[string]string {
	files := map[string]string{"ipv6/conf/" + name + "/accept_ra": "0"}
	set := func(file string, value *int) {
		if value != nil {
			files[file] = strconv.Itoa(*value)
		}
	}
	set("ipv4/conf/"+name+"/arp_ignore", s.ARPIgnore)
	set("ipv4/conf/"+name+"/arp_announce", s.ARPAnnounce)
	set("ipv4/conf/"+name+"/rp_filter", s.RPFilter)
	set("ipv6/conf/"+name+"/accept_ra", s.AcceptRA)
	if s.Forwarding != nil {
		value := "0"
		if *s.Forwarding {
			value = "1"
		}
		files["ipv4/conf/"+name+"/forwarding"], files["ipv6/conf/"+name+"/forwarding"] = value, value
	}
	return files
}

// setInterface writes the settings of an interface of the namespace. Each namespace has files of its own, which are those of
// whoever looks at them.
func (m *Mover) setInterface(ns *netnamespace.Namespace, name string, s types.InterfaceSettings) error {
	files := sysctls(name, s)
	err := osthread.Run(func() error {
		if err := unix.Setns(ns.FD, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %q: %w", ns.Path, err)
		}
		for _, file := range slices.Sorted(maps.Keys(files)) {
			err := os.WriteFile(filepath.Join(m.cfg.NetSysctls, file), []byte(files[file]), 0)
			if errors.Is(err, os.ErrNotExist) && strings.HasPrefix(file, "ipv6/") {
				continue // a kernel, or a namespace, without IPv6
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("set interface %s: %w", name, err)
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
