// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const vfAddr = "0000:03:10.0"

// vfio is a configuration with the driver, in a VLAN.
func vfio(vlan int) types.DeviceConfig {
	return types.DeviceConfig{Driver: types.DriverVFIO, Vlan: &vlan}
}

// group puts a PCI device into an IOMMU group.
func (t *tree) group(addr string, group int) {
	t.remove(filepath.Join(bus, addr, "iommu_group"))
	t.symlink(fmt.Sprint("../../../../kernel/iommu_groups/", group), filepath.Join(bus, addr, "iommu_group"))
}

func (t *tree) driverOf(addr string) string {
	name, err := sysfs{root: t.root}.linkBase(addr, "driver")
	require.NoError(t.tb, err)
	return name
}

// writeSysfs is what the kernel makes of an attribute that is written to. Of a VF that it binds igbvf to, the interface has
// another index and a name of the kernel's.
func (t *tree) writeSysfs(path, value string) error {
	rel, err := filepath.Rel(t.root, path)
	require.NoError(t.tb, err)
	value = strings.TrimSpace(value)
	addr := value
	switch {
	case strings.HasSuffix(rel, "/driver_override"):
		if value == "" {
			value = noOverride
		}
		t.write(rel, value)
		return nil
	case strings.HasSuffix(rel, "/driver/unbind"):
		if t.driverOf(addr) == "igbvf" {
			index := t.indexOf(addr)
			l, err := t.kernel.Link(index)
			require.NoError(t.tb, err)
			t.hideNetdev(addr, l.Name)
			t.remove(filepath.Join(bus, addr, "net"))
			t.kernel.with(func() { delete(t.kernel.links, index) })
		}
		t.unbind(addr)
		return nil
	}
	driver := filepath.Base(filepath.Dir(rel))
	override, err := sysfs{root: t.root}.driverOverride(addr)
	require.NoError(t.tb, err)
	switch {
	case t.driverOf(addr) != "":
		return unix.EBUSY
	case override != "" && override != driver, override == "" && driver != "igbvf":
		return unix.ENODEV
	}
	t.bind(addr, driver)
	if driver == "igbvf" {
		index := t.netdev(addr, "eth7")
		t.kernel.with(func() {
			l, pf := t.kernel.links[index], t.kernel.vfs[2][0]
			if pf.MAC != "" {
				l.MAC = pf.MAC
			}
			t.kernel.links[index] = l
		})
	}
	return nil
}

// newVFIONode is a node with an IOMMU, vfio-pci, and each function in a group of its own.
func newVFIONode(t *testing.T) *tree {
	node := newNode(t)
	for i, addr := range []string{pfAddr, vfAddr, "0000:03:10.2"} {
		node.group(addr, 10+i)
	}
	node.mkdir("bus/pci/drivers/vfio-pci")
	return node
}

// rebindable is the node's manager with its sysfs, and the VF as discovery sees it.
func rebindable(t *testing.T, node *tree) (*Manager, *Device, int) {
	m, d, pf := discovered(t, node, Params{})
	m.sysfs.write = node.writeSysfs
	return m, d, pf
}

// giveBack is what the room does: the driver, the interface's name and address, the rest.
func (t *tree) giveBack(ctx context.Context, dev types.Device, cfg types.DeviceConfig) error {
	home, err := dev.(types.Rebindable).BindBack(ctx)
	if err != nil {
		return err
	}
	want := home.HostState()
	index := t.indexOf(vfAddr)
	t.rename(index, want.Name)
	l, err := t.kernel.Link(index)
	require.NoError(t.tb, err)
	l.State = want
	t.kernel.set(l)
	require.Equal(t.tb, nic.PCI(vfAddr), home.Link())
	return home.Free(ctx, cfg)
}

func TestDriver(t *testing.T) {
	node := newVFIONode(t)
	m, d, pf := rebindable(t, node)
	require.Equal(t, int64(11), *d.Attrs()["iommuGroup"].IntValue)
	before := node.kernel.links[3].State

	found, err := d.Remember(t.Context(), vfio(1001))
	require.NoError(t, err)
	require.Equal(t, "igbvf", node.driverOf(vfAddr), "nothing is changed")
	dev, err := found.Setup(t.Context(), vfio(1001))
	require.NoError(t, err)
	require.Equal(t, "vfio-pci", node.driverOf(vfAddr))
	require.Equal(t, "vfio-pci", node.read(filepath.Join(bus, vfAddr, "driver_override")))
	require.Equal(t, VFSettings{VLAN: 1001, MAC: before.MAC}, node.kernel.vfs[pf][0], "the program gets the VF's address")
	require.True(t, dev.Link().IsZero(), "nothing is moved")
	require.Equal(t, types.Exposure{Address: vfAddr, Nodes: []string{"/dev/vfio/vfio", "/dev/vfio/11"}, IOMMUGroup: new(int64(11))}, exposure(t, dev, vfio(1001)))
	require.Zero(t, exposure(t, dev, withVLAN(1001)))
	again, err := dev.Setup(t.Context(), vfio(1001))
	require.NoError(t, err)
	require.Equal(t, dev, again)

	// Nobody sees it as the device that it is meanwhile, also not from another life of the agent.
	devices, skipped := node.scan(m)
	require.Empty(t, skipped)
	require.Equal(t, d.Attrs(), devices[vf0].Attrs())
	m, _, _ = rebindable(t, node)
	note, err := dev.(*Device).MarshalNote()
	require.NoError(t, err)
	restored, err := m.RestoreDevice(note)
	require.NoError(t, err)
	restored, err = restored.(*Device).RestoreNote(note)
	require.NoError(t, err)
	require.True(t, restored.Link().IsZero())
	devices, _ = node.scan(m)
	require.Equal(t, d.Attrs(), devices[vf0].Merge(restored).Attrs())
	require.ErrorContains(t, restored.Validate(withVLAN(1001)), "driver: the VF was set up for another one")
	require.NoError(t, m.Check(t.Context(), []types.Prepared{{Device: restored, Config: vfio(1001)}})[0])

	for range 2 { // it can be repeated
		require.NoError(t, node.giveBack(t.Context(), restored, vfio(1001)))
		require.Equal(t, "igbvf", node.driverOf(vfAddr))
		require.Equal(t, noOverride, node.read(filepath.Join(bus, vfAddr, "driver_override")))
		require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
		require.Equal(t, before, node.kernel.links[node.indexOf(vfAddr)].State)
	}
	devices, skipped = node.scan(m)
	require.Empty(t, skipped)
	require.Equal(t, d.Attrs(), devices[vf0].Attrs())
}

// The address that Setup fixed is cleared where the PF's record followed the interface: later pods may have another one.
func TestDriverOfFollowedVF(t *testing.T) {
	node := newVFIONode(t)
	_, d, pf := rebindable(t, node)
	vf := node.kernel.vfs[pf][0]
	vf.MAC = node.kernel.links[3].MAC
	node.kernel.vfs[pf][0] = vf
	found, err := d.Remember(t.Context(), vfio(1001))
	require.NoError(t, err)
	dev, err := found.Setup(t.Context(), vfio(1001))
	require.NoError(t, err)
	require.NoError(t, node.giveBack(t.Context(), dev, vfio(1001)))
	require.Contains(t, node.kernel.changes, "vf 0 mac ")
}

// A program may take another address if its network has the PF trust it. What the PF had is what it has again.
func TestDriverOfTrustedVF(t *testing.T) {
	for trust, want := range map[bool]string{true: "", false: "the PF has it with address 02:00:00:00:00:77 instead of address 02:00:00:00:00:03"} {
		node := newVFIONode(t)
		m, d, pf := rebindable(t, node)
		before := node.kernel.links[3].State
		no := false
		node.kernel.vfs[pf][0] = VFSettings{Rights: types.VFRights{Trust: &no}}
		cfg := types.DeviceConfig{Driver: types.DriverVFIO, Network: "lan", Joined: &types.Network{VF: types.VFRights{Trust: &trust}}}
		dev, err := d.Setup(t.Context(), cfg)
		require.NoError(t, err)
		s := node.kernel.vfs[pf][0]
		s.MAC = "02:00:00:00:00:77"
		node.kernel.vfs[pf][0] = s
		err = m.Check(t.Context(), []types.Prepared{{Device: dev, Config: cfg}})[0]
		if want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, want)
		}
		require.NoError(t, node.giveBack(t.Context(), dev, cfg))
		require.Equal(t, VFSettings{Rights: types.VFRights{Trust: &no}}, node.kernel.vfs[pf][0])
		require.Equal(t, before, node.kernel.links[node.indexOf(vfAddr)].State)
	}
}

// A VF that the administrator has bound to vfio-pci stays there.
func TestDriverOfItsOwn(t *testing.T) {
	node := newVFIONode(t)
	node.hideNetdev(vfAddr, "ens1f0v0")
	node.bind(vfAddr, "vfio-pci")
	node.write(filepath.Join(bus, vfAddr, "driver_override"), "vfio-pci")
	m, d, pf := rebindable(t, node)
	dev, err := d.Setup(t.Context(), vfio(5))
	require.NoError(t, err)
	require.Equal(t, []string{"/dev/vfio/vfio", "/dev/vfio/11", "/dev/vhost-net", "/dev/net/tun"},
		exposure(t, dev, types.DeviceConfig{Driver: types.DriverVFIO, Vhost: true}).Nodes)
	// Somebody gives it another one while it is a claim's.
	node.bind(vfAddr, "pci-stub")
	require.ErrorContains(t, m.Check(t.Context(), []types.Prepared{{Device: dev, Config: vfio(5)}})[0], "the driver pci-stub is bound to it instead of vfio-pci")
	_, err = dev.Setup(t.Context(), vfio(5))
	require.ErrorContains(t, err, "driver: the VF had vfio-pci bound to it and now has pci-stub: bind vfio-pci again")
	node.bind(vfAddr, "vfio-pci")

	home, err := dev.(types.Rebindable).BindBack(t.Context())
	require.NoError(t, err)
	require.Same(t, dev, home)
	require.NoError(t, home.Free(t.Context(), vfio(5)))
	require.Equal(t, "vfio-pci", node.driverOf(vfAddr))
	require.Equal(t, "vfio-pci", node.read(filepath.Join(bus, vfAddr, "driver_override")))
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
}

// What a program must not have is refused before anything is changed.
func TestDriverRefused(t *testing.T) {
	const other = "0000:03:10.2"
	subnet := &types.Network{Offer: &types.Offer{}}
	for name, tc := range map[string]struct {
		change func(*tree)
		cfg    types.DeviceConfig
		want   string
	}{
		"no IOMMU": {func(node *tree) {
			node.remove(filepath.Join(bus, vfAddr, "iommu_group"))
		}, vfio(5), "driver: the node has no IOMMU at work"},
		"vfio without IOMMU": {func(node *tree) {
			node.remove(filepath.Join(bus, pfAddr, "iommu_group"))
		}, vfio(5), "driver: the node has no IOMMU at work"},
		"module": {func(node *tree) { node.remove("bus/pci/drivers/vfio-pci") }, vfio(5), "driver: the driver vfio-pci is not loaded on the node: load it (modprobe vfio-pci)"},
		"PF in the group": {func(node *tree) { node.group(pfAddr, 11) }, vfio(5),
			"driver: its IOMMU group 11 also has " + pfAddr + " (igb), which a program that has the device would get as well"},
		"another VF in the group": {func(node *tree) { node.group(other, 11) }, vfio(5), "also has " + other + " (igbvf)"},
		"another VF in the group, of a program": {func(node *tree) {
			node.group(other, 11)
			node.bind(other, "vfio-pci")
		}, vfio(5), "also has " + other + " (vfio-pci)"},
		"override": {func(node *tree) { node.write(filepath.Join(bus, vfAddr, "driver_override"), "uio_pci_generic") }, vfio(5),
			`driver: driver_override of the VF says "uio_pci_generic", which somebody else has set`},
		"addresses": {func(*tree) {}, types.DeviceConfig{Driver: types.DriverVFIO, Network: "lan", Joined: subnet}, "network: lan has subnets"},
		"mtu": {func(*tree) {}, types.DeviceConfig{Driver: types.DriverVFIO, Network: "lan", Joined: &types.Network{MTU: 1400}},
			"network: lan has an mtu or settings of interfaces"},
		"vhost alone": {func(*tree) {}, types.DeviceConfig{Vhost: true}, "vhost: is for programs that drive the VF themselves"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newVFIONode(t)
			tc.change(node)
			_, d, pf := rebindable(t, node)
			err := d.Validate(tc.cfg)
			if err == nil {
				_, err = d.Remember(t.Context(), tc.cfg)
			}
			require.ErrorContains(t, err, tc.want)
			_, err = d.Setup(t.Context(), tc.cfg)
			require.ErrorContains(t, err, tc.want)
			require.Equal(t, "igbvf", node.driverOf(vfAddr))
			require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
		})
	}
	// Bridges and what is held for nobody do not matter.
	node := newVFIONode(t)
	node.device("0000:00:1c.0", "0x060400", "0x1234")
	node.bind("0000:00:1c.0", "pcieport")
	node.group("0000:00:1c.0", 11)
	node.group(other, 11)
	node.bind(other, "pci-stub")
	_, d, _ := rebindable(t, node)
	_, err := d.Setup(t.Context(), vfio(5))
	require.NoError(t, err)
}

// Of two VFs in one group neither can be had by a program, whoever comes first.
func TestDriverRace(t *testing.T) {
	node := newVFIONode(t)
	node.group("0000:03:10.2", 11)
	m, d, _ := rebindable(t, node)
	devices, _ := node.scan(m)
	errs := make(chan error)
	for _, dev := range []*Device{d, devices["0000-03-10-2"]} {
		go func() {
			_, err := dev.Setup(t.Context(), vfio(5))
			errs <- err
		}()
	}
	for range 2 {
		require.ErrorContains(t, <-errs, "its IOMMU group 11 also has")
	}
}

// An agent that ends before any write to the kernel leaves what another one can undo, or go on with.
func TestDriverInterrupted(t *testing.T) {
	killed := errors.New("the agent ended here")
	cfg := vfio(7)
	for _, ending := range []string{"setup", "free"} {
		for step := 0; ; step++ {
			node := newVFIONode(t)
			m, d, pf := rebindable(t, node)
			before := node.kernel.links[3].State
			found, err := d.Remember(t.Context(), cfg)
			require.NoError(t, err)
			dev := found
			if ending == "free" {
				dev, err = found.Setup(t.Context(), cfg)
				require.NoError(t, err)
			}
			note, err := dev.(*Device).MarshalNote()
			require.NoError(t, err)

			left := step
			die := func() error {
				if left--; left < 0 {
					return killed
				}
				return nil
			}
			m.sysfs.write = func(path, value string) error {
				if err := die(); err != nil {
					return err
				}
				return node.writeSysfs(path, value)
			}
			node.kernel.setVLAN = func(int, int, VFSettings) error { return die() }
			node.kernel.setMAC = func(string) error { return die() }
			if ending == "setup" {
				_, err = found.Setup(t.Context(), cfg)
			} else {
				err = node.giveBack(t.Context(), dev, cfg)
			}
			node.kernel.setVLAN, node.kernel.setMAC = nil, nil
			if err == nil {
				require.Greater(t, step, 3, "there were steps to interrupt")
				break
			}
			require.ErrorIs(t, err, killed)

			next := node.manager(Params{})
			next.sysfs.write = node.writeSysfs
			restored, err := next.RestoreDevice(note)
			require.NoError(t, err)
			restored, err = restored.(*Device).RestoreNote(note)
			require.NoError(t, err)
			if step%2 == 1 { // kubelet asks again first
				restored, err = restored.Setup(t.Context(), cfg)
				require.NoError(t, err)
				require.Equal(t, "vfio-pci", node.driverOf(vfAddr))
			}
			require.NoError(t, node.giveBack(t.Context(), restored, cfg), "%s interrupted before write %d", ending, step)
			require.Equal(t, "igbvf", node.driverOf(vfAddr))
			require.Equal(t, noOverride, node.read(filepath.Join(bus, vfAddr, "driver_override")))
			require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
			require.Equal(t, before, node.kernel.links[node.indexOf(vfAddr)].State)
		}
	}
}

// A VF that was made anew while a program had it has its former driver, another address and another group.
func TestDriverOfVFMadeAnew(t *testing.T) {
	node := newVFIONode(t)
	m, d, pf := rebindable(t, node)
	dev, err := d.Setup(t.Context(), vfio(7))
	require.NoError(t, err)
	node.kernel.with(func() { node.kernel.vfs[pf][0] = VFSettings{} })
	node.remove(filepath.Join(bus, vfAddr, "driver"))
	node.remake(vfAddr, "none")
	node.write(filepath.Join(bus, vfAddr, "driver_override"), "(null)")
	node.group(vfAddr, 30)
	node.bind(vfAddr, "igbvf")
	anew := node.kernel.links[node.netdev(vfAddr, "ens1f0v0")]

	devices, _ := node.scan(m)
	require.Equal(t, anew.MAC, devices[vf0].MAC, "it is seen as what it is")
	require.ErrorContains(t, m.Check(t.Context(), []types.Prepared{{Device: dev, Config: vfio(7)}})[0], "instead of VLAN 7")
	dev, err = dev.Setup(t.Context(), vfio(7))
	require.NoError(t, err)
	require.Equal(t, VFSettings{VLAN: 7, MAC: anew.MAC}, node.kernel.vfs[pf][0])
	require.Equal(t, "vfio-pci", node.driverOf(vfAddr))
	require.Contains(t, exposure(t, dev, vfio(7)).Nodes, "/dev/vfio/30")
	require.NoError(t, node.giveBack(t.Context(), dev, vfio(7)))
	require.Equal(t, anew.MAC, node.kernel.links[node.indexOf(vfAddr)].MAC)

	// And one that is gone has nothing to bind back.
	dev, err = d.Setup(t.Context(), vfio(7))
	require.NoError(t, err)
	node.remove("bus/pci/devices/" + vfAddr)
	home, err := dev.(types.Rebindable).BindBack(t.Context())
	require.NoError(t, err)
	require.NoError(t, home.Free(t.Context(), vfio(7)))
}

// Who takes what the driver needs keeps the VF from nobody for good.
func TestDriverCannotComeBack(t *testing.T) {
	node := newVFIONode(t)
	m, d, _ := rebindable(t, node)
	dev, err := d.Setup(t.Context(), vfio(7))
	require.NoError(t, err)
	record, err := json.Marshal(dev)
	require.NoError(t, err)

	node.remove("bus/pci/drivers/igbvf")
	require.ErrorContains(t, node.giveBack(t.Context(), dev, vfio(7)), "the driver igbvf is not loaded on the node: load it (modprobe igbvf)")
	node.mkdir("bus/pci/drivers/igbvf")

	// A record that somebody has forged: the kernel does not bind a driver that the VF is not for.
	node.mkdir("bus/pci/drivers/nvme")
	forged, err := m.RestoreDevice([]byte(strings.Replace(string(record), "igbvf", "nvme", 1)))
	require.NoError(t, err)
	require.ErrorContains(t, node.giveBack(t.Context(), forged, vfio(7)), "bind the driver nvme: no such device")
	require.NoError(t, node.giveBack(t.Context(), dev, vfio(7)))
}

// The kernel does not unbind a driver while a process has the device: who waits for that can give up, and the next one waits for
// the same.
func TestDriverInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newVFIONode(t)
		m, d, _ := rebindable(t, node)
		dev, err := d.Setup(t.Context(), vfio(7))
		require.NoError(t, err)
		closed, unbound := make(chan struct{}), 0
		m.sysfs.write = func(path, value string) error {
			if strings.HasSuffix(path, "/unbind") {
				unbound++
				<-closed
			}
			return node.writeSysfs(path, value)
		}
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), comebackTimeout)
			_, err = dev.(types.Rebindable).BindBack(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		close(closed)
		synctest.Wait()
		require.NoError(t, node.giveBack(t.Context(), dev, vfio(7)))
		require.Equal(t, 1, unbound)
	})
}

// exposure is what containers get of the device.
func exposure(t *testing.T, dev types.Device, cfg types.DeviceConfig) types.Exposure {
	t.Helper()
	e, err := types.ExposureOf(dev, cfg)
	require.NoError(t, err)
	return e
}
