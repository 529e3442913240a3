// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package kmod

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestModuleName(t *testing.T) {
	for path, want := range map[string]string{
		"kernel/drivers/vfio/pci/vfio-pci.ko.xz": "vfio_pci",
		"kernel/fs/ext4/ext4.ko":                 "ext4",
	} {
		name, ok := moduleName(path)
		require.True(t, ok)
		require.Equal(t, want, name)
	}
	_, ok := moduleName("modules.order")
	require.False(t, ok)
}

func TestParseDepends(t *testing.T) {
	require.Equal(t, []string{"i2c-algo-bit", "dca"}, parseDepends([]byte("license=GPL\x00depends=i2c-algo-bit,dca\x00name=igb\x00")))
	require.Empty(t, parseDepends([]byte("depends=\x00name=dummy\x00")))
	require.Empty(t, parseDepends([]byte("name=dummy\x00")))
}
