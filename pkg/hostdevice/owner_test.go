// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// claim makes a program the owner.
func claim(in nicowner.Dir, key string, by nicowner.Owner) error {
	_, err := in.Claim(key, by)
	return err
}

var driver = nicowner.Owner{Program: "cilium-agent", For: "a claim that has device 0000-03-00-3"}

// A NIC that another program has is left alone, and while a container has one no other program gets it.
func TestOwnerOfNIC(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	key := nic.Identity{MAC: b.host.mustLink(nicName).Attrs().HardwareAddr.String()}.Key()
	require.NoError(t, claim(b.owners(), key, driver))
	_, _, failure := b.run(b.call("ADD", b.single()))
	require.NotNil(t, failure)
	require.Equal(t, int(types.ErrTryAgainLater), int(failure.Code))
	require.Contains(t, failure.Msg, "cilium-agent has it for a claim that has device 0000-03-00-3")
	b.requireHome(before)
	require.NoError(t, b.owners().Release(key, driver.Program))

	b.must("ADD", b.single())
	require.Equal(t, []string{key}, b.owned())
	require.ErrorContains(t, claim(b.owners(), key, driver), "amd-host-device has it for interface net1 of container c1, network fabric")
	b.must("DEL", b.single())
	b.requireHome(before)
}

// What a call that was killed has left is let go by the end of its attachment, which need not be recorded, and by GC.
func TestOwnedByNobody(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	left := nicowner.Owner{Program: Name, For: "a call that was killed"}
	require.NoError(t, claim(b.owners(), "pci-0000:03:00.7", left))
	b.must("DEL", b.single())
	b.requireHome(before)

	b.must("ADD", b.single())
	owned := b.owned()
	require.NoError(t, claim(b.owners(), "pci-0000:03:00.7", left))
	b.must("GC", b.single(`"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "net1"}]`))
	require.Equal(t, owned, b.owned(), "what is recorded stays owned")
	b.must("DEL", b.single())
	b.requireHome(before)
}

// The NICs of a device that has several are owned together, until the last one is home.
func TestOwnerOfDeviceWithSeveralNICs(t *testing.T) {
	dir := t.TempDir()
	s, err := openStore(filepath.Join(dir, "state"))
	require.NoError(t, err)
	c := &call{store: s, owners: nicowner.Dir(filepath.Join(dir, "owners")), boot: "b"}
	recordOf := func(container, mac string) *record {
		id := nic.PCI("0000:03:00.0")
		id.Name, id.PermMAC = "eth1", mac
		return &record{Version: recordVersion, ContainerID: container, IfName: "net1", BootID: "b", NIC: id, State: hostState{State: nic.State{Name: "eth1"}}}
	}
	first, second := recordOf("c1", "02:00:00:00:00:01"), recordOf("c2", "02:00:00:00:00:02")
	for _, r := range []*record{first, second} {
		require.NoError(t, c.own(r))
		require.NoError(t, s.save(r))
	}
	require.NoError(t, c.forget(first))
	require.Error(t, claim(c.owners, first.NIC.Key(), driver))
	require.NoError(t, c.forget(second))
	require.NoError(t, claim(c.owners, first.NIC.Key(), driver))
}

// A device that the driver has is refused also where the plugin would just pass it on, and where it is in the driver's pod.
func TestDeviceOfTheDriver(t *testing.T) {
	t.Parallel()
	testenv.Privileged(t)
	host, pod := newSpace(t), newSpace(t)
	tree := sysfs{t, t.TempDir()}
	tree.device("pci", "0000:03:00.3", "vfio-pci")
	tree.device("pci", "0000:03:00.4", "igbvf")
	dir := t.TempDir()
	node := filepath.Join(dir, "node.json")
	require.NoError(t, os.WriteFile(node, []byte(`{"stateDir": "`+dir+`/state"}`), 0o600))
	plugin := &Plugin{Sysfs: tree.root, NodeConfig: node, Owners: nicowner.Dir(dir + "/owners"), Stderr: io.Discard}
	for _, address := range []string{"0000:03:00.3", "0000:03:00.4"} {
		require.NoError(t, claim(plugin.Owners, nic.PCI(address).Key(), driver))
		conf := `{"cniVersion": "1.0.0", "name": "n", "type": "amd-host-device", "deviceID": "` + address + `"}`
		host.do(func() error {
			c, done, err := plugin.newCall("ADD", strict, &skel.CmdArgs{ContainerID: "c1", IfName: "net1", Netns: pod.path, StdinData: []byte(conf)})
			require.NoError(t, err)
			defer done()
			_, err = c.add(t.Context())
			require.ErrorContains(t, err, "cilium-agent has it for", address)
			return nil
		})
	}
}
