// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// Counters are what has gone through an interface or VF since it was made, as it sees it itself: what its pod receives is Rx.
type Counters struct {
	RxBytes, RxPackets, RxDropped uint64
	TxBytes, TxPackets, TxDropped uint64
}

// Attributes in IFLA_VF_STATS by linux/if_link.h, in which the library's constants leave one out (IFLA_VF_STATS_PAD).
const (
	vfRxPackets = 0
	vfTxPackets = 1
	vfRxBytes   = 2
	vfTxBytes   = 3
	vfRxDropped = 7
	vfTxDropped = 8
)

// NamespaceID returns the number under which the socket's namespace knows another one (ip-netns(8), list-id), and gives it one if it
// has none. The kernel does that by itself when a link moves from the one into the other.
func (c *Conn) NamespaceID(other *netnamespace.Namespace) (int, error) {
	h, err := c.library()
	if err != nil {
		return 0, err
	}
	id, err := h.GetNetNsIdByFd(other.FD)
	if err == nil && id < 0 {
		if err = h.SetNetNsIdByFd(other.FD, -1); err == nil || errors.Is(err, unix.EEXIST) {
			id, err = h.GetNetNsIdByFd(other.FD)
		}
	}
	if err == nil && id < 0 {
		err = errors.New("the kernel gives it none")
	}
	if err != nil {
		return 0, fmt.Errorf("number of %s in %s: %w", other.Path, c.netns, err)
	}
	return id, nil
}

// Counters returns the link with the index in the namespace of the number, which nobody enters for it, and its counters; nil if there
// is none.
func (c *Conn) Counters(namespaceID, index int) (netlink.Link, Counters, error) {
	req, _ := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, index)
	req.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(namespaceID))))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, Counters{}, nil
	case err != nil:
		return nil, Counters{}, fmt.Errorf("read the counters of link %d in namespace %d: %w", index, namespaceID, err)
	case len(msgs) != 1:
		return nil, Counters{}, fmt.Errorf("read the counters of link %d in namespace %d: %d answers", index, namespaceID, len(msgs))
	}
	link, err := netlink.LinkDeserialize(nil, msgs[0])
	if err != nil {
		return nil, Counters{}, err
	}
	s := link.Attrs().Statistics
	if s == nil {
		return nil, Counters{}, fmt.Errorf("read the counters of link %d in namespace %d: it has none", index, namespaceID)
	}
	return link, Counters{s.RxBytes, s.RxPackets, s.RxDropped, s.TxBytes, s.TxPackets, s.TxDropped}, nil
}

// VFCounters returns what a PF tells of its VFs, by their index, in one question. A PF whose driver keeps no counters tells zeros, which
// the kernel does not tell from VFs without traffic.
func (c *Conn) VFCounters(pfIndex int) (map[int]Counters, error) {
	req, _ := linkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK, pfIndex)
	req.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(extVF)))
	msgs, err := c.execute(req, unix.RTM_NEWLINK)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the VFs' counters of link %d: %w", pfIndex, err)
	case len(msgs) != 1:
		return nil, fmt.Errorf("read the VFs' counters of link %d: %d answers", pfIndex, len(msgs))
	}
	return parseVFCounters(msgs[0])
}

func parseVFCounters(msg []byte) (map[int]Counters, error) { return ParseVFs(msg, parseVFStats) }

// parseVFStats decodes the counters of one VF (IFLA_VF_STATS).
func parseVFStats(attrs []syscall.NetlinkRouteAttr) (counters Counters, err error) {
	for _, a := range attrs {
		if a.Attr.Type != nl.IFLA_VF_STATS {
			continue
		}
		stats, err := Attributes(a.Value)
		if err != nil {
			return Counters{}, err
		}
		for _, s := range stats {
			field := map[uint16]*uint64{
				vfRxBytes: &counters.RxBytes, vfRxPackets: &counters.RxPackets, vfRxDropped: &counters.RxDropped,
				vfTxBytes: &counters.TxBytes, vfTxPackets: &counters.TxPackets, vfTxDropped: &counters.TxDropped,
			}[s.Attr.Type]
			if field != nil && len(s.Value) >= 8 {
				*field = nl.NativeEndian().Uint64(s.Value)
			}
		}
	}
	return counters, nil
}
