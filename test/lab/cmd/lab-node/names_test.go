// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAddedLink(t *testing.T) {
	link, ok := addedLink([]byte("add@/devices/x/net/eth0\x00ACTION=add\x00SUBSYSTEM=net\x00INTERFACE=eth0\x00"))
	require.True(t, ok)
	require.Equal(t, "eth0", link)
	for _, event := range []string{
		"remove@/x\x00ACTION=remove\x00SUBSYSTEM=net\x00INTERFACE=eth0\x00",
		"add@/x\x00ACTION=add\x00SUBSYSTEM=pci\x00",
		"",
	} {
		_, ok := addedLink([]byte(event))
		require.False(t, ok, "%q", event)
	}
}

func TestVFName(t *testing.T) {
	sysfs := t.TempDir()
	pf, vf := filepath.Join(sysfs, "devices", "pf"), filepath.Join(sysfs, "devices", "vf")
	for _, d := range []string{filepath.Join(pf, "net", "ens1f0"), filepath.Join(vf, "net", "eth0"), filepath.Join(sysfs, "class", "net")} {
		require.NoError(t, os.MkdirAll(d, 0o755))
	}
	require.NoError(t, os.Symlink("../vf", filepath.Join(pf, "virtfn3")))
	require.NoError(t, os.Symlink("../pf", filepath.Join(vf, "physfn")))
	for link, device := range map[string]string{"eth0": vf, "ens1f0": pf} {
		net := filepath.Join(device, "net", link)
		require.NoError(t, os.Symlink(device, filepath.Join(net, "device")))
		require.NoError(t, os.Symlink(net, filepath.Join(sysfs, "class", "net", link)))
	}
	name, err := vfName(sysfs, "eth0")
	require.NoError(t, err)
	require.Equal(t, "ens1f0v3", name)

	name, err = vfName(sysfs, "ens1f0")
	require.NoError(t, err)
	require.Empty(t, name, "a PF is left alone")
}

// A link that somebody named is left alone, whatever it is: nothing of it is looked at, so no error is made of what is missing.
func TestNamedNIC(t *testing.T) {
	sysfs := t.TempDir()
	dir := filepath.Join(sysfs, "class", "net", "foo")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	assigned := filepath.Join(dir, "name_assign_type")
	require.NoError(t, os.WriteFile(assigned, []byte("4\n"), 0o644))
	require.NoError(t, nameNIC(sysfs, "foo", nil))
	require.NoError(t, os.WriteFile(assigned, []byte("1\n"), 0o644))
	require.Error(t, nameNIC(sysfs, "foo", nil))
}
