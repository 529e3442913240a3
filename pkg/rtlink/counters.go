// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"errors"
	"fmt"

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

// attrTypeMask is NLA_TYPE_MASK of linux/netlink.h.
const attrTypeMask = 0x3fff

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

// parseVFCounters decodes the counters in IFLA_VFINFO_LIST. A list that the kernel has cut off is an error.
func parseVFCounters(msg []byte) (map[int]Counters, error) {
	if len(msg) < unix.SizeofIfInfomsg {
		return nil, fmt.Errorf("link message of %d bytes", len(msg))
	}
	attrs, err := Attributes(msg[unix.SizeofIfInfomsg:])
	if err != nil {
		return nil, err
	}
	vfs, count := map[int]Counters{}, 0
	for _, a := range attrs {
		switch a.Attr.Type & attrTypeMask {
		case unix.IFLA_NUM_VF:
			if len(a.Value) >= 4 {
				count = int(nl.NativeEndian().Uint32(a.Value))
			}
		case unix.IFLA_VFINFO_LIST:
			infos, err := Attributes(a.Value)
			if err != nil {
				return nil, fmt.Errorf("decode the list of VFs: %w", err)
			}
			for _, info := range infos {
				vf, counters, err := parseVFStats(info.Value)
				if err != nil {
					return nil, fmt.Errorf("decode the list of VFs: %w", err)
				}
				vfs[vf] = counters
			}
		}
	}
	if len(vfs) != 0 && len(vfs) < count {
		return nil, fmt.Errorf("the kernel's list of VFs is cut off after %d of %d", len(vfs), count)
	}
	return vfs, nil
}

// parseVFStats decodes one entry of the list (IFLA_VF_INFO).
func parseVFStats(data []byte) (vf int, counters Counters, err error) {
	attrs, err := Attributes(data)
	if err != nil {
		return 0, Counters{}, err
	}
	vf = -1
	for _, a := range attrs {
		switch a.Attr.Type & attrTypeMask {
		case nl.IFLA_VF_MAC:
			if len(a.Value) >= nl.SizeofVfMac {
				vf = int(nl.DeserializeVfMac(a.Value).Vf)
			}
		case nl.IFLA_VF_STATS:
			stats, err := Attributes(a.Value)
			if err != nil {
				return 0, Counters{}, err
			}
			for _, s := range stats {
				field := map[uint16]*uint64{
					vfRxBytes: &counters.RxBytes, vfRxPackets: &counters.RxPackets, vfRxDropped: &counters.RxDropped,
					vfTxBytes: &counters.TxBytes, vfTxPackets: &counters.TxPackets, vfTxDropped: &counters.TxDropped,
				}[s.Attr.Type&attrTypeMask]
				if field != nil && len(s.Value) >= 8 {
					*field = nl.NativeEndian().Uint64(s.Value)
				}
			}
		}
	}
	if vf < 0 {
		return 0, Counters{}, errors.New("an entry has no VF index")
	}
	return vf, counters, nil
}
