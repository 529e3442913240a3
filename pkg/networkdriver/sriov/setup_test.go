// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/pause"
)

const vf0 = "0000-03-10-0"

func withVLAN(id int) types.DeviceConfig { return types.DeviceConfig{Vlan: &id} }

// discovered returns the node's manager, the first VF as discovery sees it, and the index of its PF.
func discovered(t *testing.T, node *tree, p Params) (*Manager, *Device, int) {
	t.Helper()
	m := node.manager(p)
	devices, skipped := node.scan(m)
	require.Contains(t, devices, vf0, "skipped: %v", skipped)
	for index, l := range node.kernel.links {
		if l.parent == pfAddr {
			return m, devices[vf0], index
		}
	}
	t.Fatal("the node has no PF")
	return nil, nil, 0
}

func TestSetupAndFree(t *testing.T) {
	qinq := VFSettings{VLAN: 7, QoS: 3, VLANProto: unix.ETH_P_8021AD}
	for name, tc := range map[string]struct {
		found VFSettings
		cfg   types.DeviceConfig
		// inUse is the VLAN while the VF is the claim's.
		inUse   VFSettings
		changes []string
	}{
		"vlan": {VFSettings{}, withVLAN(1001), VFSettings{VLAN: 1001},
			[]string{"vf 0 vlan 1001 qos 0 proto 0", "vf 0 vlan 0 qos 0 proto 0"}},
		"nothing to do": {VFSettings{}, types.DeviceConfig{}, VFSettings{}, nil},
		"no vlan asked for and one left over": {qinq, types.DeviceConfig{}, VFSettings{},
			[]string{"vf 0 vlan 0 qos 0 proto 0", fmt.Sprintf("vf 0 vlan 7 qos 3 proto %d", unix.ETH_P_8021AD)}},
		"vlan 0": {VFSettings{VLAN: 9}, withVLAN(0), VFSettings{},
			[]string{"vf 0 vlan 0 qos 0 proto 0", "vf 0 vlan 9 qos 0 proto 0"}},
		"vlan is there already": {VFSettings{VLAN: 9}, withVLAN(9), VFSettings{VLAN: 9}, nil},
		"only the priority differs": {VFSettings{VLAN: 9, QoS: 5}, withVLAN(9), VFSettings{VLAN: 9},
			[]string{"vf 0 vlan 9 qos 0 proto 0", "vf 0 vlan 9 qos 5 proto 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			var log bytes.Buffer
			_, d, pf := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			node.kernel.vfs[pf][0] = tc.found
			node.kernel.vfs[pf][1] = VFSettings{VLAN: 77}

			dev, err := d.Setup(t.Context(), tc.cfg)
			require.NoError(t, err)
			require.Equal(t, tc.inUse, node.kernel.vfs[pf][0])
			require.Nil(t, d.Original, "a device is immutable")
			require.Equal(t, nic.State{Name: "ens1f0v0", AltNames: []string{"altens1f0v0"}, MTU: 1500, MAC: "02:00:00:00:00:03"}, dev.HostState())

			again, err := dev.Setup(t.Context(), tc.cfg)
			require.NoError(t, err)
			require.Equal(t, dev, again, "the second Setup remembers the same")
			require.Equal(t, tc.found.VLAN != 0, strings.Contains(log.String(), "A VF was in a VLAN before it became a claim's"), log.String())
			require.NoError(t, dev.Free(t.Context(), tc.cfg))
			require.NoError(t, dev.Free(t.Context(), tc.cfg), "Free can be repeated")
			require.Equal(t, tc.found, node.kernel.vfs[pf][0])
			require.Equal(t, tc.changes, node.kernel.changes)
			require.Equal(t, VFSettings{VLAN: 77}, node.kernel.vfs[pf][1], "another VF is not touched")
		})
	}
}

// What a VF is found as can be read before it is changed, and a Setup that was interrupted is undone with that.
func TestRememberBeforeSetup(t *testing.T) {
	node := newNode(t)
	m, dev, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 7}
	found, err := dev.Remember(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	require.Empty(t, node.kernel.changes, "nothing is changed")
	data, err := found.MarshalJSON()
	require.NoError(t, err)

	_, err = dev.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	left, err := m.RestoreDevice(data)
	require.NoError(t, err)
	again, err := left.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	require.Equal(t, 7, again.(*Device).Original.VF.VLAN, "not the claim's")
	require.NoError(t, left.Free(t.Context(), withVLAN(1001)))
	require.Equal(t, 7, node.kernel.vfs[pf][0].VLAN)
	same, err := left.(*Device).Remember(t.Context(), withVLAN(1))
	require.NoError(t, err)
	require.Same(t, left, same)
}

// A repeated Setup puts back what was lost meanwhile, also when the link is in the pod.
func TestSetupOfPreparedDeviceInPod(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.hideNetdev("0000:03:10.0", "ens1f0v0")
	node.kernel.vfs[pf][0] = VFSettings{}
	again, err := dev.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.Equal(t, dev, again)
	require.Equal(t, VFSettings{VLAN: 5}, node.kernel.vfs[pf][0])
}

func TestSetupUserspaceDriver(t *testing.T) {
	node := newNode(t)
	node.hideNetdev("0000:03:10.0", "ens1f0v0")
	node.bind("0000:03:10.0", "vfio-pci")
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.Equal(t, VFSettings{VLAN: 5}, node.kernel.vfs[pf][0])
	require.Zero(t, dev.HostState())
	require.True(t, dev.Link().IsZero())
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
}

// What the host had set of the interface is remembered, all of it.
func TestSetupRemembersWholeState(t *testing.T) {
	node := newNode(t)
	m, d, _ := discovered(t, node, Params{})
	alias, group, txQLen := "rack 7", uint32(4), uint32(0)
	l := node.kernel.links[3]
	l.Alias, l.Group, l.TxQLen, l.Promisc, l.AllMulti, l.NoARP, l.XDP = &alias, &group, &txQLen, true, true, true, 11
	node.kernel.set(l)
	dev, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	require.Equal(t, l.State, dev.HostState())
	record, err := json.Marshal(dev)
	require.NoError(t, err)
	restored, err := m.RestoreDevice(record)
	require.NoError(t, err)
	require.Equal(t, l.State, restored.HostState())

	// What the record could not be read with must not get into one.
	l.AltNames = []string{"two words"}
	node.kernel.set(l)
	_, err = d.Setup(t.Context(), types.DeviceConfig{})
	require.ErrorContains(t, err, `its interface "ens1f0v0" cannot be given back as it is: altNames[0]: "two words" contains ' '`)
}

// A VF with an interface per port is the one of the first port, and that one alone.
func TestSeveralInterfaces(t *testing.T) {
	const addr, permMAC = "0000:03:10.0", "02:00:00:00:00:99"
	node := newNode(t)
	first := node.netdev(addr, "zzz0")
	port := func(name, port string) { node.write(filepath.Join(bus, addr, "net", name, "dev_port"), port) }
	port("ens1f0v0", "1")
	port("zzz0", "0")
	l := node.kernel.links[first]
	l.permMAC = permMAC
	node.kernel.set(l)
	m, d, _ := discovered(t, node, Params{})
	require.Equal(t, "zzz0", d.KernelIfName())

	dev, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	want := nic.PCI(addr)
	require.Equal(t, want, d.Link())
	want.PermMAC = permMAC
	require.Equal(t, want, dev.Link())
	record, err := json.Marshal(dev)
	require.NoError(t, err)
	// The other one is all that is seen of it while the first is in a pod.
	node.remove(filepath.Join(bus, addr, "net", "zzz0"))
	node.remove("class/net/zzz0")
	restored, err := m.RestoreDevice(record)
	require.NoError(t, err)
	require.Equal(t, want, restored.Link())
	require.Equal(t, "zzz0", restored.HostState().Name)

	node.showNetdev(l)
	port("zzz0", "1")
	devices, skipped := node.scan(m)
	require.NotContains(t, devices, vf0)
	require.Equal(t, "cannot be read: it is not known which of the interfaces ens1f0v0 and zzz0 is meant, both are for port 1 (dev_port)", skipped[vf0])
}

// What happened between discovery and Setup is seen at Setup, before anything is touched.
func TestSetupRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(node *tree, pf int)
		cfg    types.DeviceConfig
		want   string
	}{
		"device gone": {func(n *tree, _ int) { n.remove("bus/pci/devices/0000:03:10.0") }, types.DeviceConfig{}, "the PCI device is gone"},
		"no VF any more": {func(n *tree, _ int) { n.remove(filepath.Join(bus, "0000:03:10.0", "physfn")) }, types.DeviceConfig{},
			"no SR-IOV virtual function"},
		"driver gone": {func(n *tree, _ int) { n.remove(filepath.Join(bus, "0000:03:10.0", "driver")) }, types.DeviceConfig{},
			"no driver is bound"},
		"driver changed": {func(n *tree, _ int) { n.hideNetdev("0000:03:10.0", "ens1f0v0"); n.bind("0000:03:10.0", "vfio-pci") },
			types.DeviceConfig{PodIfName: "net1"}, "podIfName: 0000-03-10-0 has no interface"},
		"link elsewhere": {func(n *tree, _ int) { n.hideNetdev("0000:03:10.0", "ens1f0v0") }, types.DeviceConfig{},
			"not in the host's network namespace"},
		"PF gone": {func(n *tree, _ int) { n.hideNetdev(pfAddr, pfName) }, types.DeviceConfig{}, "physical function 0000:03:00.0 has no interface"},
		"node's own network": {func(n *tree, _ int) { n.kernel.routes = []int{3} }, types.DeviceConfig{},
			"its interface ens1f0v0 is part of the node's own network: it carries a default route"},
		"guard blind": {func(n *tree, _ int) { n.kernel.scanErr = errors.New("boom") }, types.DeviceConfig{}, "read the node's own network"},
		"index is another interface's": {func(n *tree, _ int) { n.kernel.set(link{index: 3, parent: "0000:99:00.0"}) }, types.DeviceConfig{},
			`belongs to "0000:99:00.0", not to 0000:03:10.0`},
		"PF's index is another interface's": {func(n *tree, pf int) { n.kernel.set(link{index: pf, parent: "0000:99:00.0"}) }, types.DeviceConfig{},
			`belongs to "0000:99:00.0", not to the PF 0000:03:00.0`},
		"vlan too large": {func(*tree, int) {}, withVLAN(4095), "vlan: 4095 is not in 0..4094"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			_, d, pf := discovered(t, node, Params{})
			tc.change(node, pf)
			dev, err := d.Setup(t.Context(), tc.cfg)
			require.ErrorContains(t, err, tc.want)
			require.Nil(t, dev)
			require.Empty(t, node.kernel.changes)
		})
	}
}

func TestSetupFailureLeavesNothing(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9}
	// The driver fails half-way: the VLAN is set and an error returned.
	node.kernel.setVLAN = func(pfIndex, vf int, s VFSettings) error {
		if s.VLAN == 1001 {
			node.kernel.vfs[pfIndex][vf] = s
			return unix.EIO
		}
		return nil
	}
	_, err := d.Setup(t.Context(), withVLAN(1001))
	require.ErrorIs(t, err, unix.EIO)
	require.ErrorContains(t, err, "set up VF 0000:03:10.0: set VLAN 1001 of VF 0 on PF ens1f0")
	require.Equal(t, VFSettings{VLAN: 9}, node.kernel.vfs[pf][0])
}

// Some drivers have no VLANs for VFs: that is an error only for a claim that wants one.
func TestSetupWithoutVFSettings(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	delete(node.kernel.vfs, pf)
	node.kernel.setVLAN = func(int, int, VFSettings) error { return unix.EOPNOTSUPP }
	dev, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
	_, err = d.Setup(t.Context(), withVLAN(5))
	require.ErrorIs(t, err, unix.EOPNOTSUPP)
}

func TestBusyIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		_, d, _ := discovered(t, node, Params{})
		calls := 0
		node.kernel.setVLAN = func(int, int, VFSettings) error {
			if calls++; calls < 5 {
				return unix.EBUSY
			}
			return nil
		}
		_, err := d.Setup(t.Context(), withVLAN(5))
		require.NoError(t, err)
		require.Equal(t, 5, calls)

		node.kernel.setVLAN = func(int, int, VFSettings) error { return unix.EBUSY }
		start := time.Now()
		_, err = d.Setup(t.Context(), withVLAN(6))
		require.ErrorIs(t, err, unix.EBUSY)
		require.Less(t, time.Since(start), 5*time.Second)

		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = d.Setup(ctx, withVLAN(6))
		require.ErrorIs(t, err, unix.EBUSY)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// Seven claims at once on one PF: calls to the PF do not overlap, and every VF gets its own VLAN. Another PF that does
// not answer delays none of them.
func TestConcurrentSetup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newTree(t)
		pf := node.pf(pfAddr, pfName, 7)
		for i := range 7 {
			node.kernelVF(pfAddr, i, fmt.Sprintf("0000:03:10.%d", i), fmt.Sprintf("ens1f0v%d", i))
		}
		other := node.pf("0000:04:00.0", "ens2f0", 7)
		node.kernelVF("0000:04:00.0", 0, "0000:04:10.0", "ens2f0v0")
		// Devices of managers that followed each other, as after a restart and a new configuration.
		pfs := &PFLocks{}
		var devices [2]map[string]*Device
		for i := range devices {
			devices[i], _ = node.scan(node.manager(Params{PFs: pfs}))
			require.Len(t, devices[i], 8)
		}

		var busy atomic.Bool
		slow := make(chan struct{})
		node.kernel.setVLAN = func(pfIndex, vf int, s VFSettings) error {
			if pfIndex == other {
				<-slow
				return nil
			}
			if !busy.CompareAndSwap(false, true) {
				return unix.EIO
			}
			pause.For(t.Context(), time.Millisecond)
			busy.Store(false)
			return nil
		}
		var stuck, rest sync.WaitGroup
		stuck.Go(func() {
			_, err := devices[0]["0000-04-10-0"].Setup(t.Context(), withVLAN(5))
			require.NoError(t, err)
		})
		synctest.Wait()
		for i := range 7 {
			rest.Go(func() {
				_, err := devices[i%2][fmt.Sprintf("0000-03-10-%d", i)].Setup(t.Context(), withVLAN(100+i))
				require.NoError(t, err)
			})
		}
		rest.Wait()
		for i := range 7 {
			require.Equal(t, 100+i, node.kernel.vfs[pf][i].VLAN)
		}

		// Who waits for the stuck PF can be told to give up.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := devices[0]["0000-04-10-0"].Setup(ctx, withVLAN(6))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "wait for other work on PF 0000:04:00.0")
		close(slow)
		stuck.Wait()
	})
}

// udev renames the VF while it is set up: what is remembered is the name that it keeps.
func TestSetupRemembersSettledName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		_, d, _ := discovered(t, node, Params{})
		node.rename(3, "dev3")
		renamed := time.AfterFunc(rescan.QuietPeriod/2, func() { node.rename(3, "fast0") })
		defer renamed.Stop()
		dev, err := d.Setup(t.Context(), types.DeviceConfig{})
		require.NoError(t, err)
		require.Equal(t, "fast0", dev.HostState().Name)
		require.Equal(t, "fast0", dev.KernelIfName())
	})
}

func TestFreeOfWhatIsGone(t *testing.T) {
	for name, vanish := range map[string]func(node *tree){
		"VF":           func(n *tree) { n.remove("bus/pci/devices/0000:03:10.0") },
		"PF":           func(n *tree) { n.hideNetdev(pfAddr, pfName); n.remove(filepath.Join(bus, pfAddr, "driver")) },
		"PF in vfio":   func(n *tree) { n.hideNetdev(pfAddr, pfName); n.bind(pfAddr, "vfio-pci") },
		"another kind": func(n *tree) { n.remove(filepath.Join(bus, "0000:03:10.0", "physfn")) },
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			var log bytes.Buffer
			_, d, _ := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			dev, err := d.Setup(t.Context(), withVLAN(5))
			require.NoError(t, err)
			vanish(node)
			require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
			require.Len(t, node.kernel.changes, 1, "only Setup's")
			require.Contains(t, log.String(), vf0)
		})
	}
	require.NoError(t, (&Device{Addr: "0000:03:10.0"}).Free(t.Context(), types.DeviceConfig{}), "what is not prepared has nothing to restore")
}

// An agent that does not see PCI devices, since it lacks a mount, takes no VF for gone, which would leave that in its VLAN.
func TestFreeWithoutSysfs(t *testing.T) {
	for name, missing := range map[string]string{"no sysfs": "", "no bus": "bus/pci", "no list of devices": "bus/pci/devices", "no devices": bus} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			_, d, pf := discovered(t, node, Params{})
			dev, err := d.Setup(t.Context(), withVLAN(5))
			require.NoError(t, err)
			away := filepath.Join(t.TempDir(), "away")
			require.NoError(t, os.Rename(node.path(missing), away))
			require.ErrorContains(t, dev.Free(t.Context(), withVLAN(5)), "the PCI device")
			require.NoError(t, os.Rename(away, node.path(missing)))
			require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
			require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
		})
	}
}

// The VF's index and its PF are those of this moment, not those remembered.
func TestFreeResolvesAnew(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.remove(filepath.Join(bus, pfAddr, "virtfn0"))
	node.symlink("../0000:03:10.0", filepath.Join(bus, pfAddr, "virtfn6"))
	node.kernel.vfs[pf] = map[int]VFSettings{6: {VLAN: 5}, 0: {VLAN: 5}}
	node.rename(pf, "renamed0")
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.Equal(t, map[int]VFSettings{6: {}, 0: {VLAN: 5}}, node.kernel.vfs[pf])
}

func TestFreeWarnsOfForeignVLAN(t *testing.T) {
	node := newNode(t)
	var log bytes.Buffer
	_, d, pf := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 66}
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
	require.Contains(t, log.String(), "was changed while it was a claim's")
}

// The interface of a PF may be given away while its VFs are in use. A VLAN that cannot be taken off is not forgotten.
func TestFreeWithPFOutOfReach(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	tagged, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	link, err := node.kernel.Link(pf)
	require.NoError(t, err)
	node.hideNetdev(pfAddr, pfName)
	require.ErrorContains(t, tagged.Free(t.Context(), withVLAN(5)), "physical function 0000:03:00.0 has no interface")
	node.showNetdev(link)
	require.NoError(t, tagged.Free(t.Context(), withVLAN(5)))
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])

	untagged, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	node.hideNetdev(pfAddr, pfName)
	require.NoError(t, untagged.Free(t.Context(), types.DeviceConfig{}), "there is nothing to take off")
}

func TestFreeFailureIsReported(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.kernel.setVLAN = func(int, int, VFSettings) error { return unix.EIO }
	require.ErrorIs(t, dev.Free(t.Context(), withVLAN(5)), unix.EIO)
	node.kernel.setVLAN = nil
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
}

// What ethtool sets of the VF's interface goes back to what Setup found.
func TestFreePutsSettingsBack(t *testing.T) {
	const addr = "0000:03:10.0"
	ofPod := nic.Settings{"ring sizes": {64, 0, 0, 64}, "flow rules": {1}}
	for name, tc := range map[string]struct {
		change func(*tree, *Device) *Device
		back   bool
		log    string
	}{
		"by the pod": {func(_ *tree, d *Device) *Device { return d }, true, ""},
		"VF made anew": {func(n *tree, d *Device) *Device {
			l, _ := n.kernel.Link(n.indexOf(addr))
			n.remake(addr, l.Name)
			n.showNetdev(l)
			return d
		}, false, ""},
		"in vfio": {func(n *tree, d *Device) *Device { n.hideNetdev(addr, "ens1f0v0"); n.bind(addr, "vfio-pci"); return d }, false, ""},
		"not known": {func(_ *tree, d *Device) *Device {
			before, original := *d, *d.Original
			original.Settings, before.Original = nil, &original
			return &before
		}, false, "by ethtool stays"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			var log bytes.Buffer
			_, d, pf := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			index := node.indexOf(addr)
			before, err := node.kernel.Settings(index)
			require.NoError(t, err)
			dev, err := d.Setup(t.Context(), withVLAN(5))
			require.NoError(t, err)
			node.kernel.settings[index] = ofPod
			require.NoError(t, tc.change(node, dev.(*Device)).Free(t.Context(), withVLAN(5)))
			if tc.back {
				require.Equal(t, before, node.kernel.settings[index])
			} else {
				require.Equal(t, ofPod, node.kernel.settings[index], "not this one's to put back")
			}
			require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
			require.Equal(t, tc.log != "", strings.Contains(log.String(), "ethtool"), log.String())
			require.Contains(t, log.String(), tc.log)
		})
	}
}

// A VF whose settings cannot be put back is not free, and out of the claim's VLAN all the same.
func TestFreeWithSettingsThatStay(t *testing.T) {
	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	node.kernel.putBackErr = errors.New("rule 9 stays")
	require.ErrorContains(t, dev.Free(t.Context(), withVLAN(5)), "free VF 0000:03:10.0: rule 9 stays")
	require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
	node.kernel.putBackErr = nil
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
}

// The settings of a VF that was made anew are its own: those of the former one do not count any more.
func TestSettingsOfVFMadeAnew(t *testing.T) {
	const addr = "0000:03:10.0"
	node := newNode(t)
	_, d, _ := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	index := node.indexOf(addr)
	l, err := node.kernel.Link(index)
	require.NoError(t, err)
	node.remake(addr, l.Name)
	node.showNetdev(l)
	anew := nic.Settings{"ring sizes": {1024, 0, 0, 1024}}
	node.kernel.settings[index] = anew
	again, err := dev.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.Equal(t, anew, again.(*Device).Original.Settings)
}

func TestFreeRestoresPFsAddress(t *testing.T) {
	const own, admin, foreign = "02:00:00:00:00:03", "02:aa:00:00:00:01", "02:ff:00:00:00:09"
	for name, tc := range map[string]struct {
		was, now, want string
	}{
		"follows the interface":           {own, own, own},
		"none before, own now":            {"", own, own},
		"the pod's, none before":          {"", foreign, ""},
		"the pod's, own before":           {own, foreign, own},
		"the pod's, administrator's was":  {admin, foreign, admin},
		"cleared by a reset of the VF":    {own, "", ""},
		"administrator's is still there":  {admin, admin, admin},
		"administrator's, VF's own is on": {admin, own, own},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t)
			_, d, pf := discovered(t, node, Params{})
			node.kernel.vfs[pf][0] = VFSettings{MAC: tc.was}
			dev, err := d.Setup(t.Context(), types.DeviceConfig{})
			require.NoError(t, err)
			node.kernel.vfs[pf][0] = VFSettings{MAC: tc.now}
			require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
			require.Equal(t, tc.want, node.kernel.vfs[pf][0].MAC)
		})
	}

	node := newNode(t)
	_, d, pf := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	node.kernel.vfs[pf][0] = VFSettings{MAC: foreign}
	node.kernel.setMAC = func(string) error { return unix.EINVAL }
	require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}), "a driver that never takes it must not block the device")
	node.kernel.setMAC = func(string) error { return unix.EIO }
	require.ErrorIs(t, dev.Free(t.Context(), types.DeviceConfig{}), unix.EIO)
}

func TestSetupWarnsOfSharedAddress(t *testing.T) {
	node := newNode(t)
	var log bytes.Buffer
	_, d, pf := discovered(t, node, Params{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	node.kernel.vfs[pf][1] = VFSettings{MAC: d.MAC}
	_, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	require.Contains(t, log.String(), "same hardware address")
	require.Contains(t, log.String(), "otherVF=1")
}
