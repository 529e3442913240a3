// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// claim makes a program the owner.
func (t *tree) claim(key string, by nicowner.Owner) error {
	_, err := t.owners.Claim(key, by)
	return err
}

const vf0Key = "pci-0000:03:10.0"

// A VF that another program has is left alone, and one that is prepared is the driver's until it is freed.
func TestOwnerOfVF(t *testing.T) {
	node := newNode(t)
	_, d, _ := discovered(t, node, Params{})
	cni := nicowner.Owner{Program: "amd-host-device", For: "interface net1 of container c1"}
	require.NoError(t, node.claim(vf0Key, cni))
	_, err := d.Setup(t.Context(), withVLAN(5))
	require.ErrorContains(t, err, "set up VF 0000:03:10.0: ")
	require.ErrorContains(t, err, "amd-host-device has it for interface net1 of container c1")
	require.Empty(t, node.kernel.changes)
	_, err = d.Remember(t.Context(), withVLAN(5))
	require.ErrorContains(t, err, "set up VF 0000:03:10.0: take NIC pci-0000:03:10.0 for cilium-agent: NIC pci-0000:03:10.0 is taken: amd-host-device has it")
	require.NoError(t, node.owners.Release(vf0Key, cni.Program))

	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.ErrorContains(t, node.claim(vf0Key, cni), "cilium-agent has it for a claim that has device 0000-03-10-0")
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.NoError(t, node.claim(vf0Key, cni))
}

// A failure before the VF is prepared leaves it to nobody; one after does not.
func TestOwnerAfterFailedSetup(t *testing.T) {
	node := newNode(t)
	_, d, _ := discovered(t, node, Params{})
	refuse := func(int, int, VFSettings) error { return unix.EPERM }
	node.kernel.setVLAN = refuse
	found, err := d.Remember(t.Context(), withVLAN(5))
	require.NoError(t, err)
	for _, dev := range []types.Device{d, found} {
		_, err := dev.Setup(t.Context(), withVLAN(5))
		require.ErrorIs(t, err, unix.EPERM)
		owner, err := node.owners.Owner(vf0Key)
		require.NoError(t, err)
		require.Nil(t, owner)
	}

	node.kernel.setVLAN = nil
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.kernel.setVLAN = refuse
	_, err = dev.Setup(t.Context(), withVLAN(6))
	require.ErrorIs(t, err, unix.EPERM)
	require.Error(t, dev.Free(t.Context(), withVLAN(5)))
	owner, err := node.owners.Owner(vf0Key)
	require.NoError(t, err)
	require.NotNil(t, owner)
}

// After a restart the driver owns what is prepared, also what an older agent did not own, and nothing else.
func TestReclaim(t *testing.T) {
	node := newNode(t)
	_, d, _ := discovered(t, node, Params{})
	require.NoError(t, node.claim("pci-0000:03:10.7", nicowner.Owner{Program: ownerProgram, For: "left over"}))
	require.NoError(t, node.claim("pci-0000:03:10.6", nicowner.Owner{Program: ownerProgram, For: "a device that cannot be undone"}))
	require.NoError(t, node.claim("pci-0000:04:00.0", nicowner.Owner{Program: "amd-host-device", For: "x"}))
	Reclaim(slog.New(slog.DiscardHandler), node.owners, []types.Device{d}, []string{"0000-03-10-6"})
	keys, err := node.owners.Owned(ownerProgram)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{vf0Key, "pci-0000:03:10.6"}, keys)
	keys, err = node.owners.Owned("amd-host-device")
	require.NoError(t, err)
	require.Equal(t, []string{"pci-0000:04:00.0"}, keys)
}
