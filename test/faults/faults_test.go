// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"net"
	"regexp"
	"testing"

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
	require.Less(t, len(chosen(options{only: regexp.MustCompile(""), short: true})), 20)
}

func TestStartedWithout(t *testing.T) {
	unlisted, err := startedWithout("p1-vf-once.init:eth0 lo net0\np1-vf-once.app:eth0 lo net0\np2-vf-unlisted.app:eth0 lo\n")
	require.NoError(t, err)
	require.Equal(t, 1, unlisted)
	_, err = startedWithout("p1-vf-once.init:eth0 lo net0\np1-vf-once.app:eth0 lo\n")
	require.ErrorContains(t, err, "p1-vf-once.app STARTED WITHOUT ITS DEVICE")
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
