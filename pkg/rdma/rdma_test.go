// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rdma

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

const addr = "0000:03:10.0"

// write makes a file of a sysfs.
func write(t *testing.T, root Sysfs, path, content string) {
	t.Helper()
	file := root.path(path)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(content+"\n"), 0o644))
}

// A NIC's RDMA device is below its PCI device, with its nodes. Where it is in another namespace its verbs alone are seen.
func TestHardware(t *testing.T) {
	root := Sysfs(t.TempDir())
	d, err := root.Of(addr, "ens1f0v0")
	require.NoError(t, err)
	require.Zero(t, d, "a kernel without RDMA")

	pci := "bus/pci/devices/" + addr + "/"
	write(t, root, pci+"infiniband/mlx5_3/node_guid", "0")
	want := Device{Name: "mlx5_3"}
	d, err = root.Of(addr, "ens1f0v0")
	require.NoError(t, err)
	require.Equal(t, want, d)
	_, err = root.Nodes(d, addr)
	require.EqualError(t, err, "RDMA device mlx5_3 has no device node for verbs: load the module ib_uverbs (modprobe ib_uverbs), and at every boot")

	write(t, root, pci+"infiniband_verbs/uverbs7/ibdev", "mlx5_3")
	_, err = root.Nodes(d, addr)
	require.ErrorContains(t, err, "load the module rdma_ucm")
	write(t, root, "class/misc/rdma_cm/dev", "10:62")
	nodes, err := root.Nodes(d, addr)
	require.NoError(t, err)
	require.Equal(t, []string{"/dev/infiniband/uverbs7", "/dev/infiniband/rdma_cm"}, nodes)
	write(t, root, pci+"infiniband_mad/umad7/ibdev", "mlx5_3")
	write(t, root, pci+"infiniband_mad/issm7/ibdev", "mlx5_3")
	nodes, err = root.Nodes(d, addr)
	require.NoError(t, err)
	require.Equal(t, []string{"/dev/infiniband/uverbs7", "/dev/infiniband/umad7", "/dev/infiniband/rdma_cm"}, nodes, "a subnet manager is nobody's to play")

	require.NoError(t, os.RemoveAll(root.path(pci+"infiniband")))
	d, err = root.Of(addr, "")
	require.NoError(t, err)
	require.Equal(t, want, d)

	write(t, root, pci+"infiniband_verbs/uverbs8/ibdev", "mlx5_4")
	_, err = root.Of(addr, "")
	require.EqualError(t, err, "it is not known which of the RDMA devices mlx5_3, mlx5_4 of 0000:03:10.0 is meant")
}

// Soft-RoCE is found by the interface that it is made of, and its nodes are its own.
func TestSoft(t *testing.T) {
	root := Sysfs(t.TempDir())
	for name, ifName := range map[string]string{"rxe0": "ens1f0v1", "rxe1": "ens1f0v0"} {
		write(t, root, virtual+"/infiniband/"+name+"/parent", ifName)
	}
	write(t, root, virtual+"/infiniband_verbs/uverbs0/ibdev", "rxe0")
	write(t, root, virtual+"/infiniband_verbs/uverbs1/ibdev", "rxe1")
	write(t, root, virtual+"/infiniband_mad/umad0/ibdev", "rxe0")
	write(t, root, "class/misc/rdma_cm/dev", "10:62")
	d, err := root.Of(addr, "ens1f0v0")
	require.NoError(t, err)
	require.Equal(t, Device{Name: "rxe1", Soft: true}, d)
	nodes, err := root.Nodes(d, addr)
	require.NoError(t, err)
	require.Equal(t, []string{"/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm"}, nodes)
	for _, ifName := range []string{"", "other"} {
		d, err = root.Of(addr, ifName)
		require.NoError(t, err)
		require.Zero(t, d)
	}
}

// A name from a file must be one.
func TestCheck(t *testing.T) {
	for _, name := range []string{"mlx5_3", "rocep3s0f0v1", "rxe0"} {
		require.NoError(t, Device{Name: name}.Check())
	}
	for _, name := range []string{"", "../x", "a/b", "a b", "-a"} {
		require.Error(t, Device{Name: name}.Check())
	}
}

// A kernel without RDMA has no mode, and is not asked for one, which would load the module.
func TestModeOfNone(t *testing.T) {
	mode, err := Sysfs(t.TempDir()).Mode()
	require.NoError(t, err)
	require.Empty(t, mode)
}
