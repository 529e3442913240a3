// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// announceAgain are the times between two announcements of a link's addresses: neighbours may have another link's hardware address for
// one that is given out again, and a single frame may be lost.
var announceAgain = []time.Duration{time.Second, 2 * time.Second}

// A link that was just moved may have no carrier yet, and the kernel drops what is sent by one that has none. It is looked at
// every carrierPause, for carrierPatience.
const (
	carrierPause    = 200 * time.Millisecond
	carrierPatience = time.Minute
)

var errNoCarrier = errors.New("the link has no carrier")

// maxAnnouncements is how many links may wait to be announced. What comes beyond is left out: neighbours find out in
// the end.
const maxAnnouncements = 1024

// announcement is one link whose addresses are announced.
type announcement struct {
	netns string
	index int
	mac   net.HardwareAddr
	addrs []netip.Prefix
	// due is when it is announced next, the sent-th time again.
	due  time.Time
	sent int
	// end is when a carrier is not waited for any more.
	end time.Time
}

// Announcer tells a link's neighbours which hardware address its addresses have now: by gratuitous ARP (RFC 5227) and unsolicited
// neighbour advertisements (RFC 4861, 7.2.6). That is no part of the attach, which does not wait for it.
type Announcer struct {
	log     *slog.Logger
	queue   chan *announcement
	failing logonce.Problems[string]
}

// NewAnnouncer returns an announcer, which announces while [Announcer.Run] runs.
func NewAnnouncer(log *slog.Logger) *Announcer {
	return &Announcer{log: log, queue: make(chan *announcement, maxAnnouncements)}
}

// Announce has the addresses announced that the attached link got. It does not wait.
func (a *Announcer) Announce(attachment *types.Attachment, config types.DeviceConfig) {
	n := config.InPod()
	if n == nil || len(n.Addresses) == 0 {
		return
	}
	mac, err := net.ParseMAC(attachment.MAC)
	if err != nil || len(mac) != 6 {
		return // a link without Ethernet has no such neighbours
	}
	now := time.Now()
	select {
	case a.queue <- &announcement{netns: attachment.NetNS, index: attachment.IfIndex, mac: mac, addrs: n.Addresses, due: now, end: now.Add(carrierPatience)}:
	default:
		a.log.Warn("Too many links wait for their addresses to be announced, one is left out", "interface", attachment.IfName)
	}
}

// Run announces until the context ends.
func (a *Announcer) Run(ctx context.Context) error {
	var pending []*announcement
	for {
		var next <-chan time.Time
		if len(pending) > 0 {
			wait := time.Until(pending[0].due)
			for _, p := range pending[1:] {
				wait = min(wait, time.Until(p.due))
			}
			next = time.After(max(wait, 0))
		}
		select {
		case p := <-a.queue:
			pending = append(pending, p)
		case <-next:
			pending = a.send(pending)
		case <-ctx.Done():
			return nil
		}
	}
}

// send announces what is due, and returns what is to be announced again.
func (a *Announcer) send(pending []*announcement) (rest []*announcement) {
	for _, p := range pending {
		now := time.Now()
		if now.Before(p.due) {
			rest = append(rest, p)
			continue
		}
		switch err := p.send(a.log); {
		case errors.Is(err, errNoCarrier):
			if now.Before(p.end) {
				p.due = now.Add(carrierPause)
				rest = append(rest, p)
			}
			continue
		case errors.Is(err, netnamespace.ErrNone) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO):
			continue // it has left
		case err != nil:
			a.log.Log(context.Background(), a.failing.Level(err.Error(), slog.LevelWarn), "Addresses of a link are not announced to its neighbours", "netns", p.netns, "error", err)
		}
		if p.sent < len(announceAgain) {
			p.due = now.Add(announceAgain[p.sent])
			p.sent++
			rest = append(rest, p)
		}
	}
	return rest
}

// send sends one frame for each address.
func (p *announcement) send(log *slog.Logger) error {
	ns, err := netnamespace.Open(p.netns)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := p.hasCarrier(log, ns); err != nil {
		return err
	}
	return osthread.Run(func() error {
		if err := unix.Setns(ns.FD, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %q: %w", ns.Path, err)
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // one that receives nothing
		if err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		defer func() { _ = unix.Close(fd) }()
		var errs []error
		for _, a := range p.addrs {
			frame, to := p.frame(a.Addr())
			if err := unix.Sendto(fd, frame, 0, to); err != nil {
				errs = append(errs, fmt.Errorf("announce %s: %w", a.Addr(), err))
			}
		}
		return errors.Join(errs...)
	})
}

// hasCarrier says why nothing that is sent would leave the link.
func (p *announcement) hasCarrier(log *slog.Logger, ns *netnamespace.Namespace) error {
	conn, err := rtlink.Dial(log, ns)
	if err != nil {
		return err
	}
	defer conn.Close()
	link, err := conn.ByIndex(p.index)
	switch {
	case err != nil:
		return err
	case link == nil:
		return unix.ENODEV
	case link.Attrs().RawFlags&unix.IFF_RUNNING == 0:
		return errNoCarrier
	}
	return nil
}

// frame is what is sent for an address, and whom to.
func (p *announcement) frame(addr netip.Addr) ([]byte, *unix.SockaddrLinklayer) {
	to := &unix.SockaddrLinklayer{Ifindex: p.index, Halen: 6}
	if addr.Is4() {
		to.Protocol = htons(unix.ETH_P_ARP)
		copy(to.Addr[:], []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		return arpAnnouncement(p.mac, addr), to
	}
	to.Protocol = htons(unix.ETH_P_IPV6)
	copy(to.Addr[:], []byte{0x33, 0x33, 0, 0, 0, 1}) // ff02::1
	return neighbourAdvertisement(p.mac, addr), to
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }

// arpAnnouncement is an ARP request whose sender and target are the address (RFC 5227, 3).
func arpAnnouncement(mac net.HardwareAddr, addr netip.Addr) []byte {
	frame := make([]byte, 0, 28)
	frame = append(frame, 0, 1, 0x08, 0, 6, 4, 0, 1) // Ethernet, IPv4, lengths, request
	frame = append(append(frame, mac...), addr.AsSlice()...)
	frame = append(frame, 0, 0, 0, 0, 0, 0)
	return append(frame, addr.AsSlice()...)
}

// neighbourAdvertisement is one to all nodes that replaces what they know of the address (RFC 4861, 4.4: flag O).
func neighbourAdvertisement(mac net.HardwareAddr, addr netip.Addr) []byte {
	all := netip.MustParseAddr("ff02::1").As16()
	src := addr.As16()
	message := make([]byte, 32)
	message[0], message[4] = 136, 0x20
	copy(message[8:], src[:])
	message[24], message[25] = 2, 1 // target's hardware address, in units of 8 bytes
	copy(message[26:], mac)

	// The checksum has a pseudo-header of addresses, length and protocol (RFC 8200, 8.1).
	sum := uint32(len(message)) + unix.IPPROTO_ICMPV6
	for _, part := range [][]byte{src[:], all[:], message} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(message[2:], ^uint16(sum))

	header := make([]byte, 40)
	header[0] = 0x60
	binary.BigEndian.PutUint16(header[4:], uint16(len(message)))
	header[6], header[7] = unix.IPPROTO_ICMPV6, 255
	copy(header[8:], src[:])
	copy(header[24:], all[:])
	return append(header, message...)
}
