// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"net"
	"net/netip"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/test/lab"
)

// TestEveryPointIsTried: no crash point is in the driver in vain, and each fault has a name of its own.
func TestEveryPointIsTried(t *testing.T) {
	tried := map[crashpoint.Point]bool{}
	for _, p := range places {
		tried[p.point] = true
	}
	for _, p := range crashpoint.Points() {
		require.True(t, tried[p], "%s", p)
	}
	names, titles := map[string]bool{}, map[string]bool{}
	for _, g := range groups {
		titles[g.name] = true
	}
	for _, j := range allJobs() {
		require.False(t, names[j.name()], "%s is there twice", j.name())
		names[j.name()] = true
		require.True(t, titles[j.group], "%s is in no group of the report", j.name())
		require.Positive(t, j.rounds, j.name())
	}
}

func TestChosen(t *testing.T) {
	only := regexp.MustCompile("^agent/after-the-move-into")
	require.Len(t, chosen(options{only: only}), 3)
	for _, j := range chosen(options{only: only, short: true}) {
		require.Equal(t, 1, j.rounds)
	}
	for _, j := range chosen(options{only: only, rounds: 7}) {
		require.Equal(t, 7, j.rounds)
	}
	for _, j := range chosen(options{only: only, kubernetes: "1.34.4"}) {
		require.Equal(t, versions, j.group)
		require.Equal(t, "Kubernetes 1.34.4, after the move into the pod", j.says)
	}
	require.Less(t, len(chosen(options{only: regexp.MustCompile(""), short: true})), 20)
}

func TestContainers(t *testing.T) {
	c := containers{}
	require.NoError(t, c.read("p1-vf-once.init:eth0 lo net0\np1-net-vf-once.app:eth0 lo net0\np2-vf-unlisted.app:eth0 lo\nmoves-1-a.app:net0\n"))
	require.Equal(t, containers{"once init": {1, 0}, "once app": {1, 0}, "unlisted app": {1, 1}, "plain app": {1, 0}}, c)
	err := c.read("p1-vf-once.init:eth0 lo net0\np1-vf-once.app:eth0 lo\n")
	require.ErrorContains(t, err, "p1-vf-once.app STARTED WITHOUT ITS DEVICE")
	require.Equal(t, starts{2, 1}, c["once app"])
	kinds := map[string]bool{}
	for _, p := range promises {
		kinds[p.kind] = true
	}
	for kind := range c {
		require.True(t, kinds[kind], "the page says nothing of %s", kind)
	}
}

// TestAddressWatch: an address that moves from one pod to the next is no fault, one that two have at a time is, however short one of
// the two was seen.
func TestAddressWatch(t *testing.T) {
	addr := netip.MustParseAddr("198.51.100.10")
	one, two := holder{"node1", "cni-1"}, holder{"node2", "cni-2"}
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	w := newAddressWatch()
	w.note(one, []netip.Addr{addr}, at(0), at(1))
	w.note(one, []netip.Addr{addr}, at(2), at(3))
	w.note(two, []netip.Addr{addr}, at(2), at(3))
	w.note(two, []netip.Addr{addr}, at(4), at(5))
	require.NoError(t, w.verdict())

	w.note(one, []netip.Addr{addr}, at(6), at(7))
	require.ErrorContains(t, w.verdict(), "address 198.51.100.10 was in TWO PODS at one time")
	w = newAddressWatch()
	w.note(one, []netip.Addr{addr}, at(0), at(1))
	w.note(two, []netip.Addr{addr}, at(2), at(3))
	w.note(one, []netip.Addr{addr}, at(4), at(5))
	require.ErrorContains(t, w.verdict(), "TWO PODS")

	for _, tc := range []struct {
		name          string
		before, after string
		says          string
	}{
		{"its own", "node1", "node1", ""},
		{"given meanwhile", "", "node1", ""},
		{"given back meanwhile", "node1", "", ""},
		{"nobody's", "", "", "address 198.51.100.10 was in a pod on node1 WITHOUT BEING GIVEN"},
		{"another node's", "node2", "node2", "WITHOUT BEING GIVEN"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newAddressWatch()
			w.compare(map[holder][]netip.Addr{one: {addr}}, map[netip.Addr]string{addr: tc.before}, map[netip.Addr]string{addr: tc.after})
			if tc.says == "" {
				require.NoError(t, w.verdict())
			} else {
				require.ErrorContains(t, w.verdict(), tc.says)
			}
		})
	}
}

func TestParseAddresses(t *testing.T) {
	found, err := parseAddresses(`cni-1
[{"ifname":"net0","addr_info":[{"family":"inet","local":"198.51.100.10","prefixlen":24},{"family":"inet6","local":"2001:db8:51::10"},{"local":"fe80::1"}]}]
cni-2
[{"ifname":"net0","addr_info":[]}]
`)
	require.NoError(t, err)
	require.Equal(t, map[string][]netip.Addr{"cni-1": {netip.MustParseAddr("198.51.100.10"), netip.MustParseAddr("2001:db8:51::10")}}, found)
}

func TestStrayFrames(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	arp := make([]byte, 28)
	copy(arp[24:], []byte{192, 0, 2, 2}) // as of VLAN 1002
	vfs := map[string]string{mac.String(): "ens1f0v0"}
	for _, tc := range []struct {
		name  string
		frame lab.Frame
		says  string
	}{
		{"in its VLAN", lab.Frame{Src: mac, EtherType: unix.ETH_P_ARP, Payload: arp, VLAN: 1002}, ""},
		{"in another's", lab.Frame{Src: mac, EtherType: unix.ETH_P_ARP, Payload: arp, VLAN: 1001}, "VLAN 1002 LEFT IN VLAN 1001"},
		{"without one", lab.Frame{Src: mac, EtherType: unix.ETH_P_ARP, Payload: arp}, "VLAN 1002 LEFT IN VLAN 0"},
		{"of the VF itself", lab.Frame{Src: mac, EtherType: unix.ETH_P_IPV6}, "VF ens1f0v0 LEFT WITHOUT A VLAN"},
		{"of the PF", lab.Frame{Src: net.HardwareAddr{2, 0, 0, 0, 0, 9}, EtherType: unix.ETH_P_IPV6}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.frame.Node, tc.frame.FromNode = "node1", true
			err := strayFrames([]lab.Frame{tc.frame}, "node1", vfs)
			if tc.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tc.says)
			}
			tc.frame.FromNode = false
			require.NoError(t, strayFrames([]lab.Frame{tc.frame}, "node1", vfs), "what comes is not the node's")
		})
	}
}

func TestReport(t *testing.T) {
	o := options{out: t.TempDir(), resume: true}
	r, err := openReport(o)
	require.NoError(t, err)
	good, bad := places[0], places[1]
	jobs := []job{
		{group: "agent", fault: kill, says: good.says, rounds: 3},
		{group: "agent", fault: kill, says: bad.says, rounds: 1},
	}
	require.NoError(t, r.add(jobs[0], round{Seconds: 4}))
	require.NoError(t, r.add(jobs[0], round{Seconds: 2}))
	require.NoError(t, r.verdict(jobs))
	require.NoError(t, r.add(jobs[1], round{Seconds: 9, Left: "a VLAN | of a VF\n \tthe same\n-\u00a0\tVLAN: 0\n+ \tVLAN: 7"}))
	require.ErrorContains(t, r.verdict(jobs), jobs[1].name())

	// A later run goes on.
	r, err = openReport(o)
	require.NoError(t, err)
	require.Equal(t, 1, r.missing(jobs[0]))
	require.Zero(t, r.missing(jobs[1]))
	page := r.markdown()
	require.Contains(t, page, "2 faults above have fewer rounds than the whole form has. Those without any:\n\n- before the journal's entry: SIGSTOP\n")
	require.Contains(t, page, "| before the journal's entry: KILL | 2 | 2 | 2 / 4 / 4 | nothing |")
	require.Contains(t, page, "| after the journal's entry: KILL | 1 | 0 | - | a VLAN / of a VF - VLAN: 0 + VLAN: 7 |")
}

func TestGrown(t *testing.T) {
	before := figures{memory: 50 << 20, goroutines: 100, descriptors: 40, netlink: 5}
	require.NoError(t, before.grown(before))
	for _, more := range []figures{
		{memory: 80 << 20, goroutines: 100, descriptors: 40, netlink: 5},
		{memory: 50 << 20, goroutines: 150, descriptors: 40, netlink: 5},
		{memory: 50 << 20, goroutines: 100, descriptors: 60, netlink: 5},
		{memory: 50 << 20, goroutines: 100, descriptors: 40, netlink: 20},
	} {
		require.ErrorContains(t, more.grown(before), "uses more than before")
	}
}
