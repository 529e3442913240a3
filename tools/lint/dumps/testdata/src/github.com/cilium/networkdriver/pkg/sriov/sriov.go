// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// conn has the library's methods.
type conn struct{ *netlink.Handle }

func dump(c conn, h *netlink.Handle) {
	netlink.LinkList()            // want "^LinkList: nothing but pkg/rtlink"
	netlink.RuleList(2)           // want "^RuleList: nothing but pkg/rtlink"
	h.AddrList(netlink.Link{}, 0) // want "^AddrList: nothing but pkg/rtlink"
	c.LinkList()                  // want "^LinkList: nothing but pkg/rtlink"
	list := c.RouteListFiltered   // want "^RouteListFiltered: nothing but pkg/rtlink"
	list(2)
	netlink.LinkSubscribeWithOptions(nil, struct{}{})    // want "^LinkSubscribeWithOptions: nothing but pkg/rtlink"
	request := nl.NewNetlinkRequest(18, unix.NLM_F_DUMP) // want "^NLM_F_DUMP: nothing but pkg/rtlink"
	request.Execute(0, 16)                               // want "^Execute: nothing but pkg/rtlink"
	request.ExecuteIter(0, 16, nil)                      // want "^ExecuteIter: nothing but pkg/rtlink"
}

// command has methods of the same names.
type command struct{}

func (command) Execute() error { return nil }
func (command) LinkList()      {}

func ask(c conn) {
	netlink.LinkByName("eth0")
	c.LinkSetUp(netlink.Link{})
	nl.NewNetlinkRequest(18, unix.NLM_F_ACK).AddData(nil)
	command{}.Execute()
	command{}.LinkList()
}
