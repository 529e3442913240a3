// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// Change is what one RTM_NEWLINK request does to a link. The kernel does it in the order of the fields (do_setlink in
// net/core/rtnetlink.c), stops at the first failure and does not undo what it has done by then.
type Change struct {
	To  *netnamespace.Namespace // nil: the link stays where it is
	MAC net.HardwareAddr
	MTU int // bytes, 0 leaves it
	// Group is the link's group, nil leaves it.
	Group *uint32
	// Name may be a pattern such as nic%d, of which the kernel takes the lowest free number.
	Name string
	// Alias is a text of at most 255 bytes, nil leaves it.
	Alias *string
	// Flags are new values of the flags in Mask (IFF_UP and so on).
	Flags uint32
	Mask  uint32
	// TxQLen is the length of the transmit queue in packets, nil leaves it.
	TxQLen *uint32
	Sizes  Sizes
}

// Sizes bound the packets that the kernel hands to a link at once (GSO), and makes of those that the link receives (GRO). 0
// leaves one as it is.
type Sizes struct {
	GSO     uint32 `json:"gso,omitempty"`     // bytes, IPv6, and IPv4 on older kernels
	GSOSegs uint32 `json:"gsoSegs,omitempty"` // segments
	GRO     uint32 `json:"gro,omitempty"`     // bytes, IPv6, and IPv4 on older kernels
	GSOIPv4 uint32 `json:"gsoIPv4,omitempty"` // bytes
	GROIPv4 uint32 `json:"groIPv4,omitempty"` // bytes
}

// IsZero says whether nothing is to be changed.
func (ch Change) IsZero() bool {
	return ch.To == nil && len(ch.MAC) == 0 && ch.MTU == 0 && ch.Group == nil && ch.Name == "" && ch.Alias == nil &&
		ch.Mask == 0 && ch.TxQLen == nil && ch.Sizes == Sizes{}
}

// sizeAttrs are the attributes of the sizes in the order that the kernel takes them in: those for IPv4 are set by the others too.
var sizeAttrs = [...]int{
	unix.IFLA_GSO_MAX_SIZE, unix.IFLA_GSO_MAX_SEGS, unix.IFLA_GRO_MAX_SIZE, unix.IFLA_GSO_IPV4_MAX_SIZE, unix.IFLA_GRO_IPV4_MAX_SIZE,
}

func (s Sizes) all() []uint32 { return []uint32{s.GSO, s.GSOSegs, s.GRO, s.GSOIPv4, s.GROIPv4} }

// Max returns the largest number.
func (s Sizes) Max() uint32 { return slices.Max(s.all()) }

// Differ says whether one that the sizes have is another now.
func (s Sizes) Differ(now Sizes) bool {
	present := now.all()
	for i, size := range s.all() {
		if size != 0 && size != present[i] {
			return true
		}
	}
	return false
}

// Change changes a link. The error is or wraps the kernel's answer.
func (c *Conn) Change(index int, ch Change) error {
	req, info := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, index)
	info.Flags, info.Change = ch.Flags&ch.Mask, ch.Mask // without a mask, flags would mean all flags
	if ch.To != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(ch.To.FD))))
	}
	if len(ch.MAC) > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, ch.MAC))
	}
	if ch.MTU > 0 {
		req.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(ch.MTU))))
	}
	if ch.Group != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(*ch.Group)))
	}
	if ch.Name != "" {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(ch.Name)))
	}
	if ch.Alias != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(*ch.Alias))) // an empty one removes it
	}
	if ch.TxQLen != nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_TXQLEN, nl.Uint32Attr(*ch.TxQLen)))
	}
	for i, size := range ch.Sizes.all() {
		if size > 0 {
			req.AddData(nl.NewRtAttr(sizeAttrs[i], nl.Uint32Attr(size)))
		}
	}
	_, err := c.execute(req, 0)
	return err
}

// Add makes a link without hardware of a kind such as dummy, in a group. The error is or wraps the kernel's answer.
func (c *Conn) Add(kind, name string, group uint32) error {
	req, _ := linkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK, 0)
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	req.AddData(info)
	_, err := c.execute(req, 0)
	return err
}

// Delete removes a link without hardware. One that is gone is no error.
func (c *Conn) Delete(index int) error {
	req, _ := linkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK, index)
	if _, err := c.execute(req, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

// AddAltName gives a link an alternative name. The error wraps EEXIST when a link of the namespace has that name.
func (c *Conn) AddAltName(index int, name string) error {
	if err := c.altName(unix.RTM_NEWLINKPROP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, index, name); err != nil {
		return fmt.Errorf("add alternative name %q: %w", name, err)
	}
	return nil
}

// RemoveAltName takes an alternative name off a link, if it has it.
func (c *Conn) RemoveAltName(index int, name string) error {
	err := c.altName(unix.RTM_DELLINKPROP, 0, index, name)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove alternative name %q: %w", name, err)
	}
	return nil
}

func (c *Conn) altName(msgType, flags, index int, name string) error {
	req, _ := linkRequest(msgType, flags|unix.NLM_F_ACK, index)
	props := nl.NewRtAttr(unix.IFLA_PROP_LIST|unix.NLA_F_NESTED, nil)
	props.AddRtAttr(unix.IFLA_ALT_IFNAME, nl.ZeroTerminated(name))
	req.AddData(props)
	_, err := c.execute(req, 0)
	return err
}
