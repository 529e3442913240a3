// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// sysfs is a tree of devices that links of the namespace stand for.
type sysfs struct {
	t    *testing.T
	root string
}

func (s sysfs) device(bus, id, driver string, netdevs ...string) {
	s.t.Helper()
	dir := filepath.Join(s.root, "bus", bus, "devices", id)
	require.NoError(s.t, os.MkdirAll(dir, 0o755))
	if driver != "" {
		require.NoError(s.t, os.Symlink("../../drivers/"+driver, filepath.Join(dir, "driver")))
	}
	for _, n := range netdevs {
		require.NoError(s.t, os.MkdirAll(filepath.Join(dir, n), 0o755))
	}
}

func TestSelector(t *testing.T) {
	t.Parallel()
	testenv.Privileged(t)
	host, leaf := newSpace(t), newSpace(t)
	for _, name := range []string{"eth1", "eth2", "eth3"} {
		host.veth(name, leaf, "p"+name)
	}
	tree := sysfs{t, t.TempDir()}
	tree.device("pci", "0000:03:00.1", "igbvf", "net/eth1")
	tree.device("pci", "0000:03:00.2", "igbvf", "net/gone")
	tree.device("pci", "0000:03:00.3", "vfio-pci")
	tree.device("pci", "0000:03:00.4", "")
	tree.device("pci", "0000:03:00.5", "mlx5_core", "net/eth2", "net/eth3")
	tree.device("pci", "0000:03:00.6", "virtio-pci", "virtio3/net/eth3")
	tree.device("pci", "0000:03:00.7", "nvme")
	tree.device("pci", "0000:03:01.0", "mlx5_vfio_pci")
	tree.device("auxiliary", "mlx5_core.sf.2", "mlx5_core", "net/eth2")
	require.NoError(t, os.MkdirAll(filepath.Join(tree.root, "devices/pci0000:00/0000:03:00.1/net/eth1"), 0o755))
	place, err := nic.Open(slog.New(slog.DiscardHandler), host.path, "")
	require.NoError(t, err)
	defer place.Close()
	selector := selector{host: place, sysfs: tree.root}

	for conf, want := range map[string]string{
		`{"pciBusID": "0000:03:00.1"}`:                                              "eth1",
		`{"deviceID": "0000:03:00.1", "device": "eth1"}`:                            "eth1",
		`{"runtimeConfig": {"deviceID": "0000:03:00.6"}}`:                           "eth3",
		`{"runtimeConfig": {"deviceID": "mlx5_core.sf.2"}}`:                         "eth2",
		`{"kernelpath": "/sys/devices/pci0000:00/0000:03:00.1"}`:                    "eth1",
		`{"runtimeConfig": {"deviceID": "0000:03:00.3"}}`:                           "driver vfio-pci",
		`{"pciBusID": "0000:03:01.0"}`:                                              "driver mlx5_vfio_pci",
		`{"deviceID": "0000:03:00.3", "device": "eth1"}`:                            "error: not the same NIC",
		`{"deviceID": "0000:03:00.1", "device": "eth2"}`:                            "error: not the same NIC",
		`{"pciBusID": "0000:03:00.2"}`:                                              "error: no such NIC on the host",
		`{"pciBusID": "0000:03:00.4"}`:                                              "error: has no driver",
		`{"pciBusID": "0000:03:00.5"}`:                                              "error: several NICs, eth2, eth3",
		`{"pciBusID": "0000:03:00.7"}`:                                              "error: no such NIC on the host",
		`{"pciBusID": "0000:09:00.0"}`:                                              "error: no such device",
		`{"runtimeConfig": {"deviceID": "x"}, "pciBusID": "0000:03:00.1"}`:          "error: runtimeConfig.deviceID x",
		`{"kernelpath": "/sys/devices/nowhere"}`:                                    "error: no such NIC",
		`{"hwaddr": "02:ff:ff:ff:ff:ff"}`:                                           "error: no such NIC",
		`{"hwaddr": "` + host.mustLink("eth3").Attrs().HardwareAddr.String() + `"}`: "eth3",
	} {
		chosen, err := selector.choose(parse(t, conf))
		got := ""
		switch {
		case err != nil:
			require.Contains(t, want, "error: ", "%s: %v", conf, err)
			require.ErrorContains(t, err, want[len("error: "):], conf)
			continue
		case chosen.link == nil:
			got = "driver " + chosen.driver
		default:
			got = chosen.link.Attrs().Name
		}
		require.Equal(t, want, got, conf)
	}
}

// A device that a userspace driver has goes to the sub-plugin as it is. There is nothing to record, nothing to bring
// home, and nothing to check.
func TestUserspaceDriver(t *testing.T) {
	t.Parallel()
	testenv.Privileged(t)
	host, pod := newSpace(t), newSpace(t)
	tree := sysfs{t, t.TempDir()}
	tree.device("pci", "0000:03:00.3", "vfio-pci")
	bin := t.TempDir()
	script := "#!/bin/sh\ncat > " + bin + "/stdin\necho '{\"cniVersion\": \"1.0.0\", \"interfaces\": [{\"name\": \"net1\"}]}'\n"
	require.NoError(t, os.WriteFile(filepath.Join(bin, subPlugin), []byte(script), 0o755))
	node := filepath.Join(bin, "node.json")
	require.NoError(t, os.WriteFile(node, []byte(`{"stateDir": "`+bin+`/state"}`), 0o600))
	conf := `{"cniVersion": "1.0.0", "name": "dpdk", "type": "amd-host-device", "deviceID": "0000:03:00.3",` +
		` "nexthopNetAddrOffset": 1, "routeDstPrefixLen": 19, "prevResult": {"cniVersion": "1.0.0"}}`
	var log bytes.Buffer
	host.do(func() error {
		plugin := &Plugin{Sysfs: tree.root, NodeConfig: node, Owners: nicowner.Dir(t.TempDir()), Stderr: &log}
		args := &skel.CmdArgs{ContainerID: "c1", IfName: "net1", Netns: pod.path, Path: bin, StdinData: []byte(conf)}
		c, done, err := plugin.newCall("ADD", strict, args)
		require.NoError(t, err)
		defer done()
		result, err := c.add(t.Context())
		require.NoError(t, err)
		require.NotNil(t, result)
		require.NoError(t, c.check(t.Context()))
		require.NoError(t, c.del(t.Context()))
		return nil
	})
	require.Contains(t, log.String(), "vfio-pci")
	passed, err := os.ReadFile(filepath.Join(bin, "stdin"))
	require.NoError(t, err)
	require.Contains(t, string(passed), `"pciBusID":"0000:03:00.3"`)
	require.NotContains(t, string(passed), "ipam")
}

// The sub-plugin may not know the driver, and fails then with what it looked for.
func TestUserspaceDriverThatTheSubPluginRefuses(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	tree := sysfs{t, t.TempDir()}
	tree.device("pci", "0000:ff:1f.7", "mlx5_vfio_pci")
	b.host.do(func() error {
		plugin := &Plugin{Sysfs: tree.root, NodeConfig: filepath.Join(b.bin, "node.json"), Owners: nicowner.Dir(t.TempDir()), Stderr: io.Discard}
		conf := `{"cniVersion": "1.0.0", "name": "dpdk", "type": "amd-host-device", "deviceID": "0000:ff:1f.7"}`
		args := &skel.CmdArgs{ContainerID: "c1", IfName: "net1", Netns: b.pod.path, Path: b.bin, StdinData: []byte(conf)}
		c, done, err := plugin.newCall("ADD", strict, args)
		require.NoError(t, err)
		defer done()
		_, err = c.add(t.Context())
		require.ErrorContains(t, err, "device 0000:ff:1f.7, which is bound to mlx5_vfio_pci and has no network interface: ADD of plugin")
		return nil
	})
	require.Empty(t, b.recorded())
}
