// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// Frame is an Ethernet frame seen between a node's PF and the uplinks' switch.
type Frame struct {
	Node      string // whose uplink it was seen on
	FromNode  bool   // sent by the node, else to it
	Src, Dst  net.HardwareAddr
	VLAN      int // ID of the 802.1Q tag, 0 if there is none or a tag of priority only
	Tagged    bool
	EtherType uint16 // of the payload, below the tag
	Payload   []byte
}

// Capture records the frames on the nodes' uplinks.
type Capture struct {
	closed atomic.Bool
	wg     sync.WaitGroup

	mu     sync.Mutex // guards frames and more
	frames []Frame
	more   chan struct{} // closed when a frame is added
}

// captureLimit is how many frames a capture keeps: later ones are dropped.
const captureLimit = 100_000

// CaptureUplinks starts to record the frames on the uplinks of the present
// nodes, until Close.
func (l *Lab) CaptureUplinks() (*Capture, error) {
	c := &Capture{more: make(chan struct{})}
	for _, n := range l.Nodes() {
		for _, pf := range n.pfs() {
			fd, err := l.network.packetSocket(pf.tap)
			if err != nil {
				c.Close()
				return nil, fmt.Errorf("capture on %s: %w", pf.tap, err)
			}
			c.wg.Go(func() { c.read(fd, n.Name()) })
		}
	}
	return c, nil
}

// packetSocket returns a socket that gets all frames of a link in the
// namespace.
func (n network) packetSocket(link string) (fd int, err error) {
	err = netns.Do(n.path(), func() error {
		iface, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = errors.Join(
			// The kernel takes the tag out of the frame and tells of it apart.
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<20),
			// Now and then the reader looks whether the capture was closed.
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: iface.Index}),
		)
		if err != nil {
			unix.Close(fd)
		}
		return err
	})
	return fd, err
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (c *Capture) read(fd int, node string) {
	defer unix.Close(fd)
	buf, oob := make([]byte, 1<<16), make([]byte, 256)
	for !c.closed.Load() {
		n, oobn, _, from, err := unix.Recvmsg(fd, buf, oob, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return // the link went away
		}
		frame, ok := parseFrame(buf[:n], oob[:oobn])
		if !ok {
			continue
		}
		frame.Node = node
		if ll, ok := from.(*unix.SockaddrLinklayer); ok {
			frame.FromNode = ll.Pkttype != unix.PACKET_OUTGOING
		}
		c.add(frame)
	}
}

func (c *Capture) add(f Frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.frames) < captureLimit {
		c.frames = append(c.frames, f)
		close(c.more)
		c.more = make(chan struct{})
	}
}

// parseFrame reads a frame and the kernel's word on its tag.
func parseFrame(data, oob []byte) (Frame, bool) {
	const header, tag = 14, 4
	if len(data) < header {
		return Frame{}, false
	}
	// A copy: the buffer is used again.
	data = append([]byte(nil), data...)
	f := Frame{Dst: data[0:6], Src: data[6:12], EtherType: binary.BigEndian.Uint16(data[12:14]), Payload: data[header:]}
	if f.EtherType == unix.ETH_P_8021Q && len(data) >= header+tag {
		f.setTag(binary.BigEndian.Uint16(data[14:16]))
		f.EtherType, f.Payload = binary.BigEndian.Uint16(data[16:18]), data[header+tag:]
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return f, true
	}
	for _, m := range messages {
		// struct tpacket_auxdata of linux/if_packet.h: status, len and snaplen of 32
		// bits, mac, net, vlan_tci and vlan_tpid of 16.
		if m.Header.Level != unix.SOL_PACKET || m.Header.Type != unix.PACKET_AUXDATA || len(m.Data) < 20 {
			continue
		}
		if status := binary.NativeEndian.Uint32(m.Data); status&unix.TP_STATUS_VLAN_VALID != 0 {
			f.setTag(binary.NativeEndian.Uint16(m.Data[16:18]))
		}
	}
	return f, true
}

func (f *Frame) setTag(tci uint16) {
	f.Tagged = true
	f.VLAN = int(tci & 0xfff)
}

// Frames returns the frames recorded so far.
func (c *Capture) Frames() []Frame {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Frame(nil), c.frames...)
}

// WaitFor returns the first frame that matches, recorded already or later.
func (c *Capture) WaitFor(ctx context.Context, match func(Frame) bool) (Frame, error) {
	for next := 0; ; {
		c.mu.Lock()
		frames, more := c.frames, c.more
		c.mu.Unlock()
		for ; next < len(frames); next++ {
			if match(frames[next]) {
				return frames[next], nil
			}
		}
		select {
		case <-ctx.Done():
			return Frame{}, fmt.Errorf("no such frame among %d: %w", len(frames), ctx.Err())
		case <-more:
		}
	}
}

// Close ends the recording. Frames stay readable.
func (c *Capture) Close() {
	c.closed.Store(true)
	c.wg.Wait()
}
