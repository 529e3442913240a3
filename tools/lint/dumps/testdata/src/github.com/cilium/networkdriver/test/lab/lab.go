// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import "github.com/vishvananda/netlink"

func links() { netlink.LinkList() }
