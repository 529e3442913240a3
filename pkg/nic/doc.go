// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nic is what a network interface is to whoever lends one to a pod: how it is known again, what it had on the host,
// and how it comes home and gets that back. The network driver and the CNI plugin amd-host-device both stand on it, so
// that there is one rule for each of these questions.
//
// A NIC is known by what it is ([Identity]) and never by its name, which a pod may change.
//
// What is restored ([Place.Restore]) is what a pod can change of a link by rtnetlink and that outlives the move: name,
// alternative names, alias, group, MAC, MTU, length of the transmit queue, sizes of large packets, and the flags up,
// promiscuous, all-multicast and no-ARP. Each gets the value that the host had, whatever it was: a host that captures all frames on a NIC goes on to.
// What was not known when the state was recorded stays as it is.
//
// What ethtool(8) sets ([Settings]) is read and put back apart from that ([Place.Settings], [Place.PutBack]), since each
// setting takes a request to the driver, and some an answer of the card. The requests are ioctls: netlink has none for flow
// rules.
//
// What is cleared: an XDP program that is not the one the host had on record is detached, since it would see the host's
// frames; one that a process still holds (a BPF link) cannot be, and is logged. It is not put back, since the program may be
// gone. The kernel itself drops addresses, multicast addresses, routes, rules, qdiscs and tc filters with a move. Links that a
// pod stacked on the NIC in the same namespace (VLAN, macvlan, ipvlan, macsec), and with them VLAN filters, are deleted before it
// moves: the kernel would let them go on using it. One that the pod has moved to yet another namespace dies with that.
//
// A NIC comes home ([Place.Fetch]) from where it is: the host, the namespaces that the caller names, those that somebody
// on the node holds, and last from the kernel, which takes a dead namespace apart in the background and puts hardware on
// the host. That is waited for for [HomecomingTimeout], or until the context ends: a caller with less patience says so by
// its context. A link without hardware ends with its namespace, and a device without any link, which sysfs tells, has
// none to wait for, whichever driver it is bound to.
//
// If another link of the host has taken the NIC's name meanwhile, the NIC comes home under a stand-in such as netdrv0
// ([IsStandIn]): a move must not fail for something that the pod, which waits to end, cannot mend.
package nic
