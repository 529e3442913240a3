// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic_test

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/nic"
)

// The host's NIC is up, has a large MTU and captures all frames. A pod has changed that.
func ExampleDifference() {
	host := nic.Read(&netlink.Device{LinkAttrs: netlink.LinkAttrs{
		Name: "eth1", MTU: 9000, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}, RawFlags: unix.IFF_UP | unix.IFF_PROMISC,
	}})
	back := &netlink.Device{LinkAttrs: netlink.LinkAttrs{
		Name: "net1", MTU: 1400, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}, RawFlags: unix.IFF_UP | unix.IFF_ALLMULTI,
	}}
	change := nic.Difference(back, host)
	fmt.Println("MTU:", change.MTU)
	fmt.Println("MAC:", change.MAC != nil)
	fmt.Println("promiscuous:", change.Mask&unix.IFF_PROMISC != 0, change.Flags&unix.IFF_PROMISC != 0)
	fmt.Println("all-multicast:", change.Mask&unix.IFF_ALLMULTI != 0, change.Flags&unix.IFF_ALLMULTI != 0)
	fmt.Println("up:", change.Mask&unix.IFF_UP != 0)
	// Output:
	// MTU: 9000
	// MAC: false
	// promiscuous: true true
	// all-multicast: true false
	// up: false
}

// Each NIC of hardware is known by its PCI function, whatever a pod calls it.
func ExampleIdentity_Matches() {
	id := nic.PCI("0000:03:00.1")
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "net1", ParentDevBus: "pci", ParentDev: "0000:03:00.1"}}
	fmt.Println(id, id.Matches(link))
	// Output: pci 0000:03:00.1 true
}

func ExampleValidateName() {
	fmt.Println(nic.ValidateName("net1"))
	fmt.Println(nic.ValidateName("enp3s0f0-of-rack-7"))
	fmt.Println(nic.ValidateName("a/b"))
	// Output:
	// <nil>
	// "enp3s0f0-of-rack-7" is 18 bytes long, at most 15 are allowed
	// "a/b" contains '/', which an interface name must not
}

func ExampleIsStandIn() {
	fmt.Println(nic.IsStandIn("netdrv0"), nic.IsStandIn("eth1"))
	// Output: true false
}
