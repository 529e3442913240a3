// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// xdpHW is XDP_FLAGS_HW_MODE of linux/if_link.h, which the nl package lacks.
const xdpHW = 1 << 3

// RemoveXDP detaches a link's XDP programs of every mode. A program attached by a BPF link stays until whoever holds that
// lets go of it; the error wraps EBUSY then.
func (c *Conn) RemoveXDP(l netlink.Link) error {
	xdp := l.Attrs().Xdp
	if xdp == nil || !xdp.Attached {
		return nil
	}
	modes := map[uint32][]uint32{
		nl.XDP_ATTACHED_DRV: {nl.XDP_FLAGS_DRV_MODE},
		nl.XDP_ATTACHED_SKB: {nl.XDP_FLAGS_SKB_MODE},
		nl.XDP_ATTACHED_HW:  {xdpHW},
	}[xdp.AttachMode]
	if modes == nil { // several at once, of which the kernel does not say which
		modes = []uint32{nl.XDP_FLAGS_SKB_MODE, nl.XDP_FLAGS_DRV_MODE, xdpHW}
	}
	for _, mode := range modes {
		req, _ := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, l.Attrs().Index)
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(^uint32(0)))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
		req.AddData(attr)
		if _, err := c.execute(req, 0); err != nil && len(modes) == 1 {
			return fmt.Errorf("detach XDP program %d: %w", xdp.ProgId, err)
		}
	}
	return nil
}
