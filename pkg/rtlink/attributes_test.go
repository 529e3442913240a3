// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func TestAttributes(t *testing.T) {
	padded := nl.NewRtAttr(7|unix.NLA_F_NESTED, []byte("value")).Serialize()
	require.Len(t, padded, 12)
	attrs, err := Attributes(padded)
	require.NoError(t, err)
	require.Len(t, attrs, 1)
	require.EqualValues(t, 7, attrs[0].Attr.Type, "without its flag")
	require.Equal(t, []byte("value"), attrs[0].Value)

	_, err = Attributes(padded[:9])
	require.EqualError(t, err, "attributes of 9 bytes, which is no multiple of 4")
	_, err = Attributes(padded[:8])
	require.ErrorIs(t, err, unix.EINVAL)
}
