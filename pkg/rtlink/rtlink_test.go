// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
)

func dial(t *testing.T) *Conn {
	t.Helper()
	ns, err := netnamespace.Open(testenv.NetNS(t))
	require.NoError(t, err)
	t.Cleanup(ns.Close)
	c, err := Dial(slog.New(slog.DiscardHandler), ns)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// The kernel takes names of links in two attributes, by their length.
func TestByName(t *testing.T) {
	c := dial(t)
	lo, err := c.ByName("lo")
	require.NoError(t, err)
	index := lo.Attrs().Index
	alts := []string{"short", strings.Repeat("f", 15), strings.Repeat("s", 16), strings.Repeat("l", 127)}
	for _, alt := range alts {
		none, err := c.ByName(alt)
		require.NoError(t, err, alt)
		require.Nil(t, none)
		require.NoError(t, c.AddAltName(index, alt))
		require.ErrorIs(t, c.AddAltName(index, alt), unix.EEXIST)
		link, err := c.ByName(alt)
		require.NoError(t, err, alt)
		require.Equal(t, "lo", link.Attrs().Name)
	}
	link, err := c.ByIndex(index)
	require.NoError(t, err)
	require.Equal(t, alts, link.Attrs().AltNames)
	for _, alt := range alts {
		require.NoError(t, c.RemoveAltName(index, alt))
		require.NoError(t, c.RemoveAltName(index, alt))
	}
	links, err := c.List()
	require.NoError(t, err)
	require.Len(t, links, 1)
	require.Empty(t, links[0].Attrs().AltNames)
	none, err := c.ByIndex(index + 1)
	require.NoError(t, err)
	require.Nil(t, none)
}

// A flag that is not in the mask is left alone.
func TestChange(t *testing.T) {
	c := dial(t)
	lo, err := c.ByName("lo")
	require.NoError(t, err)
	require.NoError(t, c.Change(lo.Attrs().Index, Change{MTU: 9000, Flags: unix.IFF_UP | unix.IFF_PROMISC, Mask: unix.IFF_UP}))
	lo, err = c.ByName("lo")
	require.NoError(t, err)
	require.Equal(t, 9000, lo.Attrs().MTU)
	require.EqualValues(t, unix.IFF_UP, lo.Attrs().RawFlags&(unix.IFF_UP|unix.IFF_PROMISC))
	require.True(t, Change{}.IsZero())
	require.False(t, Change{Mask: unix.IFF_UP}.IsZero())
}
