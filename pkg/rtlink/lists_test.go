// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/internal/testenv"
)

// A list that the kernel marks as interrupted is asked for again, any other failure is not.
func TestRetry(t *testing.T) {
	interrupted := fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
	for _, c := range []struct {
		answers []error
		want    error
		calls   int
	}{
		{[]error{nil}, nil, 1},
		{[]error{interrupted, interrupted, nil}, nil, 3},
		{[]error{interrupted, unix.EPERM, nil}, unix.EPERM, 2},
		{slices.Repeat([]error{interrupted}, dumpAttempts+1), netlink.ErrDumpInterrupted, dumpAttempts},
	} {
		calls := 0
		err := retry(func() error { calls++; return c.answers[calls-1] })
		require.ErrorIs(t, err, c.want)
		require.Equal(t, c.calls, calls)
	}
}

func TestDumpEndsWithWhatCannotBeRead(t *testing.T) {
	c := dial(t)
	broken := errors.New("cannot be read")
	_, err := Dump(c, unix.RTM_GETLINK, unix.RTM_NEWLINK, func([]byte) ([]int, error) { return nil, broken },
		nl.NewIfInfomsg(unix.AF_UNSPEC))
	require.ErrorIs(t, err, broken)
	links, err := c.List()
	require.NoError(t, err, "the socket is still of use")
	require.Len(t, links, 1)
}

func TestAddChangeDelete(t *testing.T) {
	c := dial(t)
	require.NoError(t, c.Add("veth", "d0", 7))
	require.ErrorIs(t, c.Add("veth", "d0", 7), unix.EEXIST)
	require.ErrorIs(t, c.Add("no-such-kind", "d1", 0), unix.EOPNOTSUPP)
	link, err := c.ByName("d0")
	require.NoError(t, err)
	require.Equal(t, "veth", link.Type())
	require.EqualValues(t, 7, link.Attrs().Group)

	index := link.Attrs().Index
	alias, group, length := "text", uint32(9), uint32(10)
	require.NoError(t, c.Change(index, Change{Alias: &alias, Group: &group, TxQLen: &length}))
	link, err = c.ByIndex(index)
	require.NoError(t, err)
	require.Equal(t, alias, link.Attrs().Alias)
	require.Equal(t, group, link.Attrs().Group)
	require.EqualValues(t, length, link.Attrs().TxQLen)
	none := ""
	require.False(t, Change{Alias: &none}.IsZero())
	require.NoError(t, c.Change(index, Change{Alias: &none}))
	link, err = c.ByIndex(index)
	require.NoError(t, err)
	require.Empty(t, link.Attrs().Alias)

	require.NoError(t, c.Delete(index))
	require.NoError(t, c.Delete(index))
	link, err = c.ByIndex(index)
	require.NoError(t, err)
	require.Nil(t, link)
}

func TestAddrsRoutesRules(t *testing.T) {
	c := dial(t)
	require.NoError(t, c.Add("veth", "d0", 0))
	link, err := c.ByName("d0")
	require.NoError(t, err)
	index := link.Attrs().Index
	require.NoError(t, c.Change(index, Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}))
	for _, s := range []string{"192.0.2.1/24", "192.0.2.2/24"} {
		addr, err := netlink.ParseAddr(s)
		require.NoError(t, err)
		require.NoError(t, c.AddAddr(index, addr))
		require.ErrorIs(t, c.AddAddr(index, addr), unix.EEXIST)
	}
	four := func(index int) (got []string) {
		addrs, err := c.Addrs(index)
		require.NoError(t, err)
		for _, a := range addrs {
			if a.IP.To4() != nil {
				got = append(got, a.IPNet.String())
			}
		}
		return got
	}
	require.Equal(t, []string{"192.0.2.1/24", "192.0.2.2/24"}, four(index))
	require.Equal(t, four(index), four(0))
	require.Empty(t, four(index+1))

	routes, err := c.Routes(netlink.FAMILY_V4, &netlink.Route{}, 0)
	require.NoError(t, err)
	_, network, err := net.ParseCIDR("192.0.2.0/24")
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst.String() == network.String() }))
	rules, err := c.Rules(netlink.FAMILY_V4)
	require.NoError(t, err)
	require.NotEmpty(t, rules)
}

func TestLibraryAfterClose(t *testing.T) {
	c := dial(t)
	c.Close()
	_, err := c.Addrs(0)
	require.ErrorIs(t, err, net.ErrClosed)
}

// A socket in the own namespace needs no right to enter one: an agent without it still sees the host.
func TestOwnNamespaceWithoutRights(t *testing.T) {
	testenv.Privileged(t)
	require.NoError(t, osthread.Run(func() error {
		var caps [2]unix.CapUserData // all capabilities of this thread go
		if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
			return err
		}
		c, err := DialPath(slog.New(slog.DiscardHandler), "")
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.List()
		if err == nil {
			_, err = c.Addrs(0)
		}
		return err
	}))
}

func TestSubscribe(t *testing.T) {
	path := testenv.NetNS(t)
	c, err := DialPath(slog.New(slog.DiscardHandler), path)
	require.NoError(t, err)
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ready, seen, ended := make(chan struct{}), make(chan string, 100), make(chan error, 1)
	go func() {
		ended <- Subscribe(ctx, path, func() { close(ready) }, func(l netlink.Link) { seen <- l.Attrs().Name })
	}()
	<-ready
	require.NoError(t, c.Add("veth", "d0", 0))
	for <-seen != "d0" { // the peer comes too
	}
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Error(t, Subscribe(t.Context(), path+"-none", func() {}, nil))
}
