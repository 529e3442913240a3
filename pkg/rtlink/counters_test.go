// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"encoding/binary"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// The counters of a link in another namespace are read without entering it, and count what went through.
func TestCountersElsewhere(t *testing.T) {
	testenv.Privileged(t)
	here := dial(t)
	other, err := netnamespace.Open(testenv.NetNS(t))
	require.NoError(t, err)
	t.Cleanup(other.Close)
	there, err := Dial(here.log, other)
	require.NoError(t, err)
	t.Cleanup(there.Close)
	id, err := here.NamespaceID(other)
	require.NoError(t, err)
	again, err := here.NamespaceID(other)
	require.NoError(t, err)
	require.Equal(t, id, again)

	require.NoError(t, there.Add("veth", "d0", 0))
	link, err := there.ByName("d0")
	require.NoError(t, err)
	index := link.Attrs().Index
	all, err := there.List()
	require.NoError(t, err)
	for _, l := range all {
		require.NoError(t, there.Change(l.Attrs().Index, Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}))
	}
	_, before, err := here.Counters(id, index)
	require.NoError(t, err)

	frame := make([]byte, 100)
	copy(frame, net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	binary.BigEndian.PutUint16(frame[12:], 0x88b5) // an EtherType for experiments
	require.NoError(t, osthread.Run(func() error {
		if err := unix.Setns(other.FD, unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for range 10 {
			if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
				return err
			}
		}
		return nil
	}))
	found, after, err := here.Counters(id, index)
	require.NoError(t, err)
	require.Equal(t, "d0", found.Attrs().Name)
	require.GreaterOrEqual(t, after.TxPackets-before.TxPackets, uint64(10))
	require.GreaterOrEqual(t, after.TxBytes-before.TxBytes, uint64(1000))

	none, _, err := here.Counters(id, index+7)
	require.NoError(t, err)
	require.Nil(t, none)
}

// A PF's answer as mlx5_core gives it: padding, counters of 64 bits, an attribute that nobody asked for.
func TestParseVFCounters(t *testing.T) {
	u64 := func(n uint64) []byte { return binary.NativeEndian.AppendUint64(nil, n) }
	info := func(list *nl.RtAttr, vf uint32, first uint64) {
		entry := list.AddRtAttr(nl.IFLA_VF_INFO|unix.NLA_F_NESTED, nil)
		entry.AddRtAttr(nl.IFLA_VF_MAC, append(binary.NativeEndian.AppendUint32(nil, vf), make([]byte, 32)...))
		stats := entry.AddRtAttr(nl.IFLA_VF_STATS|unix.NLA_F_NESTED, nil)
		stats.AddRtAttr(6, nil) // IFLA_VF_STATS_PAD
		for i, attr := range []int{0, 1, 2, 3, 4, 5, 7, 8} {
			stats.AddRtAttr(attr, u64(first+uint64(i)))
		}
	}
	message := func(count int, vfs ...uint32) []byte {
		list := nl.NewRtAttr(unix.IFLA_VFINFO_LIST|unix.NLA_F_NESTED, nil)
		for _, vf := range vfs {
			info(list, vf, uint64(vf)*100)
		}
		msg := make([]byte, unix.SizeofIfInfomsg)
		msg = append(msg, nl.NewRtAttr(unix.IFLA_NUM_VF, nl.Uint32Attr(uint32(count))).Serialize()...)
		return append(msg, list.Serialize()...)
	}
	got, err := parseVFCounters(message(2, 0, 1))
	require.NoError(t, err)
	require.Equal(t, map[int]Counters{
		0: {RxPackets: 0, TxPackets: 1, RxBytes: 2, TxBytes: 3, RxDropped: 6, TxDropped: 7},
		1: {RxPackets: 100, TxPackets: 101, RxBytes: 102, TxBytes: 103, RxDropped: 106, TxDropped: 107},
	}, got)
	_, err = parseVFCounters(message(3, 0, 1))
	require.EqualError(t, err, "the kernel's list of VFs is cut off after 2 of 3")
	_, err = parseVFCounters(nil)
	require.EqualError(t, err, "link message of 0 bytes")
}
