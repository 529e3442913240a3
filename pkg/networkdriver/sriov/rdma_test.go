// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// verbs gives the VF of the tree a NIC's RDMA device.
func (t *tree) verbs(addr, name, number string) {
	dir := filepath.Join(bus, addr)
	for path, content := range map[string]string{
		"infiniband/" + name + "/node_guid": "0", "infiniband_verbs/uverbs" + number + "/ibdev": name, "infiniband_mad/umad" + number + "/ibdev": name,
	} {
		t.mkdir(filepath.Dir(filepath.Join(dir, path)))
		t.write(filepath.Join(dir, path), content)
	}
	t.mkdir("class/misc/rdma_cm")
}

// A VF with an RDMA device says so, and gives it to claims that ask for it. Its nodes are those of the moment: a move between
// namespaces, and a driver that is loaded anew, change their numbers.
func TestRDMA(t *testing.T) {
	node := newVFIONode(t)
	_, d, _ := rebindable(t, node)
	require.False(t, *d.Attrs()["rdma"].BoolValue)
	require.NotContains(t, d.Attrs(), "rdmaDevice")
	cfg := types.DeviceConfig{RDMA: true, PodIfName: "rdma0"}
	require.ErrorContains(t, d.Validate(cfg), "rdma: 0000-03-10-0 has no RDMA device: have the node load")

	node.verbs(vfAddr, "mlx5_3", "7")
	m, d, _ := rebindable(t, node)
	require.True(t, *d.Attrs()["rdma"].BoolValue)
	require.Equal(t, "mlx5_3", *d.Attrs()["rdmaDevice"].StringValue)
	dev, err := d.Setup(t.Context(), cfg)
	require.NoError(t, err)
	nodes := func(number string) []string {
		return []string{"/dev/infiniband/uverbs" + number, "/dev/infiniband/umad" + number, "/dev/infiniband/rdma_cm"}
	}
	require.Equal(t, types.Exposure{Address: vfAddr, Nodes: nodes("7")}, exposure(t, dev, cfg))
	require.Zero(t, exposure(t, dev, types.DeviceConfig{}), "a claim that does not ask for it")
	require.False(t, types.IsExposed(dev, types.DeviceConfig{}))
	require.False(t, dev.Link().IsZero(), "the interface goes into the pod as well")

	for _, dir := range []string{"infiniband", "infiniband_verbs", "infiniband_mad"} {
		node.remove(filepath.Join(bus, vfAddr, dir))
	}
	_, err = types.ExposureOf(dev, cfg)
	require.ErrorContains(t, err, "RDMA device mlx5_3 has no device node for verbs")
	node.verbs(vfAddr, "mlx5_5", "2")
	require.Equal(t, nodes("2"), exposure(t, dev, cfg).Nodes)

	// The record says nothing of it, since the kernel does.
	data, err := dev.MarshalJSON()
	require.NoError(t, err)
	require.NotContains(t, string(data), "mlx5")
	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	require.Equal(t, rdma.Device{Name: "mlx5_5"}, types.RDMADeviceOf(restored))
	devices, _ := node.scan(m)
	require.Equal(t, "mlx5_3", *devices[vf0].Merge(dev).Attrs()["rdmaDevice"].StringValue, "it is published as it was allotted")
}

// What programs would lack is refused before anything is changed.
func TestRDMAWithoutModules(t *testing.T) {
	node := newVFIONode(t)
	node.verbs(vfAddr, "mlx5_3", "7")
	_, d, pf := rebindable(t, node)
	node.remove("class/misc/rdma_cm")
	for range 2 {
		_, err := d.Remember(t.Context(), types.DeviceConfig{RDMA: true})
		require.ErrorContains(t, err, "rdma: the node has no connection manager for RDMA: load the module rdma_ucm")
		_, err = d.Setup(t.Context(), types.DeviceConfig{RDMA: true})
		require.ErrorContains(t, err, "load the module rdma_ucm")
	}
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
}

// Soft-RoCE ends when the interface moves. The journal remembers it, and a record is not believed: who forges it could name another
// pod's.
func TestSoftRDMA(t *testing.T) {
	node := newVFIONode(t)
	for path, content := range map[string]string{"infiniband/rxe0/parent": "ens1f0v0", "infiniband_verbs/uverbs0/ibdev": "rxe0"} {
		node.mkdir(filepath.Dir("devices/virtual/" + path))
		node.write("devices/virtual/"+path, content)
	}
	node.mkdir("class/misc/rdma_cm")
	m, d, _ := rebindable(t, node)
	cfg := types.DeviceConfig{RDMA: true}
	dev, err := d.Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}, exposure(t, dev, cfg).Nodes)
	note, err := dev.(*Device).MarshalNote()
	require.NoError(t, err)
	node.hideNetdev(vfAddr, "ens1f0v0")

	restored, err := m.RestoreDevice(note)
	require.NoError(t, err)
	require.Zero(t, types.RDMADeviceOf(restored))
	restored, err = restored.(*Device).RestoreNote(note)
	require.NoError(t, err)
	require.Equal(t, rdma.Device{Name: "rxe0", Soft: true}, types.RDMADeviceOf(restored))
	_, err = restored.(*Device).RestoreNote([]byte(`{"softRDMA":"../x"}`))
	require.ErrorContains(t, err, `decode VF: softRDMA: "../x" is not the name of an RDMA device`)
}
