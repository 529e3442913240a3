// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func Dump() ([][]byte, error) {
	return nl.NewNetlinkRequest(18, unix.NLM_F_DUMP).Execute(0, 16)
}
