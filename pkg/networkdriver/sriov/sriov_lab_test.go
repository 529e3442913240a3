// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

const labVFs = 4

// lab is a real PF of an emulated node, and a manager that runs on it.
type lab struct {
	*Manager
	pfName  string
	pfAddr  string
	pfIndex int

	// mu guards what follows.
	mu   sync.Mutex
	last types.Snapshot
	// published is closed and replaced by every publication.
	published chan struct{}
}

// TestLab covers on a real SR-IOV NIC what the other tests can only assume of the kernel. Its parts build on each
// other: it starts with a PF without VFs, or with the four of an earlier run.
func TestLab(t *testing.T) {
	pf := testenv.LabPF(t)
	l := &lab{pfName: pf, published: make(chan struct{})}
	l.Manager = New(Params{
		Logger:    slog.New(slog.NewTextHandler(t.Output(), nil)),
		SysfsPath: "/sys",
		Owners:    nicowner.Dir(t.TempDir()),
		Config: &v2alpha1.SRIOVDeviceManagerConfig{Enabled: true, Ifaces: []v2alpha1.SRIOVDeviceConfig{
			{IfName: pf, VfCount: labVFs}, {IfName: "nosuch0", VfCount: 1},
		}},
	})
	target, err := os.Readlink(filepath.Join("/sys/class/net", pf, "device"))
	require.NoError(t, err)
	l.pfAddr = filepath.Base(target)
	l.pfIndex, err = readInt(filepath.Join("/sys/class/net", pf, "ifindex"))
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- l.Run(ctx, l.publish) }()
	defer func() {
		cancel()
		require.NoError(t, <-ended)
	}()

	l.waitFor(t, "the VFs and their interfaces", func(devices map[string]*Device, _ map[string]string) bool {
		return len(devices) == labVFs && !slices.ContainsFunc(slices.Collect(maps.Values(devices)), func(d *Device) bool { return d.KernelIfaceName == "" })
	})
	t.Run("Provisioned", l.testProvisioned)
	t.Run("VLAN", l.testVLAN)
	t.Run("Address", l.testAddress)
	t.Run("ConcurrentVLANs", l.testConcurrentVLANs)
	t.Run("NodesOwnNetwork", l.testNodesOwnNetwork)
	t.Run("Unbound", l.testUnbound)
	t.Run("VFIO", l.testVFIO)
	t.Run("Restore", l.testRestore)
	t.Run("Incarnation", l.testIncarnation)
}

func (l *lab) publish(s types.Snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = s
	close(l.published)
	l.published = make(chan struct{})
}

// waitFor waits until the last publication fulfils the condition, longer than the manager polls.
func (l *lab) waitFor(t *testing.T, what string, ok func(devices map[string]*Device, skipped map[string]string) bool) map[string]*Device {
	t.Helper()
	timeout := time.After(6 * rescan.PollInterval)
	for {
		l.mu.Lock()
		s, next := l.last, l.published
		l.mu.Unlock()
		devices, skipped := map[string]*Device{}, map[string]string{}
		for _, d := range s.Devices {
			if dev := d.(*Device); dev.PFName == l.pfName {
				devices[d.IfName()] = dev
			}
		}
		for _, sk := range s.Skipped {
			skipped[sk.Device] = sk.Reason
		}
		if ok(devices, skipped) {
			return devices
		}
		select {
		case <-next:
		case <-timeout:
			t.Fatalf("waited too long for %s; devices: %v, skipped: %v", what, slices.Collect(maps.Keys(devices)), skipped)
		}
	}
}

// device waits for the VF with this index to be offered with an interface.
func (l *lab) device(t *testing.T, vf int) *Device {
	t.Helper()
	find := func(devices map[string]*Device) *Device {
		for _, d := range devices {
			if d.VFID == vf && d.KernelIfaceName != "" {
				return d
			}
		}
		return nil
	}
	return find(l.waitFor(t, fmt.Sprintf("VF %d", vf), func(devices map[string]*Device, _ map[string]string) bool {
		return find(devices) != nil
	}))
}

// settings is the kernel's record of the VF, read another way than the manager's.
func (l *lab) settings(t *testing.T, vf int) netlink.VfInfo {
	t.Helper()
	link, err := netlink.LinkByIndex(l.pfIndex)
	require.NoError(t, err)
	for _, info := range link.Attrs().Vfs {
		if info.ID == vf {
			return info
		}
	}
	t.Fatalf("PF %s has no VF %d", l.pfName, vf)
	return netlink.VfInfo{}
}

func (l *lab) testProvisioned(t *testing.T) {
	n, err := readInt(filepath.Join("/sys/class/net", l.pfName, "device/sriov_numvfs"))
	require.NoError(t, err)
	require.Equal(t, labVFs, n)
	pf, err := l.kernel.Link(l.pfIndex)
	require.NoError(t, err)
	require.True(t, pf.Up, "the PF is up")
	require.Equal(t, l.pfAddr, pf.parent)

	// The first scan does not wait for what is provisioned.
	wanted := []types.Problem{{Field: "sriov.ifaces[1].ifName", Message: "PF nosuch0: the node has no interface of this name"}}
	l.waitFor(t, "the problem", func(map[string]*Device, map[string]string) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return reflect.DeepEqual(wanted, l.last.Problems)
	})

	// Other counts are refused without a write, so the VFs stay the same ones.
	before := l.device(t, 0)
	link, err := netlink.LinkByName(before.KernelIfaceName)
	require.NoError(t, err)
	for _, want := range []int32{2, 6, 200} {
		p := &provisioner{log: l.log, sysfs: l.sysfs, kernel: l.kernel, work: NewPFWork(),
			ifaces: []v2alpha1.SRIOVDeviceConfig{{IfName: l.pfName, VfCount: want}},
			write:  func(path, value string) error { return fmt.Errorf("unexpected write of %s to %s", value, path) }}
		p.provision(t.Context())
		p.await(t)
		problems := p.provision(t.Context())
		require.Len(t, problems, 1)
		require.NotContains(t, problems[0].Message, "unexpected write")
	}
	after, err := netlink.LinkByName(before.KernelIfaceName)
	require.NoError(t, err)
	require.Equal(t, link.Attrs().Index, after.Attrs().Index)
	// What the kernel itself answers to another count is an error that is passed on.
	require.Error(t, writeAttribute(filepath.Join("/sys/class/net", l.pfName, "device/sriov_numvfs"), "6"))
}

func (l *lab) testVLAN(t *testing.T) {
	d := l.device(t, 0)
	before, other := l.settings(t, 0), l.settings(t, 1)
	dev, err := d.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	require.Equal(t, 1001, l.settings(t, 0).Vlan)
	require.Equal(t, other, l.settings(t, 1))
	require.Equal(t, d.KernelIfaceName, dev.HostState().Name)

	again, err := dev.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	require.Equal(t, dev, again)
	require.NoError(t, dev.Free(t.Context(), withVLAN(1001)))
	requireSameSettings(t, before, l.settings(t, 0))

	// A VLAN that someone left, with a claim that asks for none.
	require.NoError(t, l.kernel.SetVFVLAN(l.pfIndex, 0, VFSettings{VLAN: 7, QoS: 3}))
	dev, err = l.device(t, 0).Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	require.Zero(t, l.settings(t, 0).Vlan)
	require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
	require.Equal(t, 7, l.settings(t, 0).Vlan)
	require.Equal(t, 3, l.settings(t, 0).Qos)
	require.NoError(t, l.kernel.SetVFVLAN(l.pfIndex, 0, VFSettings{}))
}

// requireSameSettings compares all but the counters: spoof check, trust and the rest are not touched.
func requireSameSettings(t *testing.T, want, have netlink.VfInfo) {
	t.Helper()
	for _, v := range []*netlink.VfInfo{&want, &have} {
		v.RxPackets, v.TxPackets, v.RxBytes, v.TxBytes = 0, 0, 0, 0
		v.Multicast, v.Broadcast, v.RxDropped, v.TxDropped = 0, 0, 0, 0
	}
	require.Equal(t, want, have)
}

// The address that a pod gives its interface is also on the PF's record, which follows when it is restored.
func (l *lab) testAddress(t *testing.T) {
	d := l.device(t, 1)
	before := l.settings(t, 1)
	dev, err := d.Setup(t.Context(), types.DeviceConfig{})
	require.NoError(t, err)
	link, err := netlink.LinkByName(d.KernelIfaceName)
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetHardwareAddr(link, []byte{2, 0xff, 0, 0, 0, 9}))
	require.NoError(t, netlink.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr))
	require.NoError(t, dev.Free(t.Context(), types.DeviceConfig{}))
	after := l.settings(t, 1)
	require.Contains(t, []string{before.Mac.String(), link.Attrs().HardwareAddr.String()}, after.Mac.String())
	link, err = netlink.LinkByName(d.KernelIfaceName)
	require.NoError(t, err)
	require.Equal(t, d.MAC, link.Attrs().HardwareAddr.String())
}

func (l *lab) testConcurrentVLANs(t *testing.T) {
	for round := range 10 {
		var all sync.WaitGroup
		errs := make(chan error, labVFs)
		prepared := make([]types.Device, labVFs)
		for vf := range labVFs {
			d := l.device(t, vf)
			all.Go(func() {
				dev, err := d.Setup(t.Context(), withVLAN(100*(round+1)+vf))
				prepared[vf] = dev
				errs <- err
			})
		}
		all.Wait()
		for vf := range labVFs {
			require.NoError(t, <-errs)
			require.Equal(t, 100*(round+1)+vf, l.settings(t, vf).Vlan)
		}
		for vf := range labVFs {
			require.NoError(t, prepared[vf].Free(t.Context(), withVLAN(100*(round+1)+vf)))
			require.Zero(t, l.settings(t, vf).Vlan)
		}
	}
}

func (l *lab) testNodesOwnNetwork(t *testing.T) {
	d := l.device(t, 2)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "brlab"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	require.NoError(t, netlink.LinkAdd(bridge))
	removed := false
	remove := func() {
		if !removed {
			removed = true
			require.NoError(t, netlink.LinkDel(bridge))
		}
	}
	defer remove()
	link, err := netlink.LinkByName(d.KernelIfaceName)
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetMaster(link, bridge))
	_, err = d.Setup(t.Context(), withVLAN(5))
	require.ErrorContains(t, err, "has the upper device brlab")
	require.Zero(t, l.settings(t, 2).Vlan)
	l.waitFor(t, "the VF to be withdrawn", func(_ map[string]*Device, skipped map[string]string) bool { return skipped[d.IfName()] != "" })
	remove()
	l.device(t, 2)
}

// bindVF gives the VF to another driver, none if empty.
func (l *lab) bindVF(t *testing.T, addr, driver string) {
	t.Helper()
	dir := filepath.Join("/sys/bus/pci/devices", addr)
	if err := writeAttribute(filepath.Join(dir, "driver/unbind"), addr); !errors.Is(err, fs.ErrNotExist) {
		require.NoError(t, err)
	}
	if driver != "" {
		require.NoError(t, writeAttribute(filepath.Join(dir, "driver_override"), driver))
		require.NoError(t, writeAttribute("/sys/bus/pci/drivers_probe", addr))
		require.NoError(t, writeAttribute(filepath.Join(dir, "driver_override"), "\n"))
	}
}

func (l *lab) testUnbound(t *testing.T) {
	d := l.device(t, 3)
	l.bindVF(t, d.Addr, "")
	l.waitFor(t, "the VF to be withdrawn", func(devices map[string]*Device, skipped map[string]string) bool {
		return devices[d.IfName()] == nil && skipped[d.IfName()] == "no driver is bound to it"
	})
	_, err := d.Setup(t.Context(), withVLAN(5))
	require.ErrorContains(t, err, "no driver is bound")
	l.bindVF(t, d.Addr, d.Driver)
	l.device(t, 3)
}

func (l *lab) testVFIO(t *testing.T) {
	if _, err := os.Stat("/sys/bus/pci/drivers/vfio-pci"); err != nil {
		t.Skip("needs the driver vfio-pci: modprobe vfio-pci")
	}
	d := l.device(t, 3)
	l.bindVF(t, d.Addr, "vfio-pci")
	defer func() {
		l.bindVF(t, d.Addr, d.Driver)
		l.device(t, 3)
	}()
	devices := l.waitFor(t, "the VF with vfio-pci", func(devices map[string]*Device, _ map[string]string) bool {
		return devices[d.IfName()] != nil && devices[d.IfName()].Driver == "vfio-pci"
	})
	vf := devices[d.IfName()]
	require.Empty(t, vf.KernelIfName())
	require.True(t, vf.Link().IsZero())
	dev, err := vf.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.Equal(t, 5, l.settings(t, 3).Vlan)
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
	require.Zero(t, l.settings(t, 3).Vlan)
}

// A restored device is as good as the one whose record it comes from.
func (l *lab) testRestore(t *testing.T) {
	dev, err := l.device(t, 0).Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	data, err := json.Marshal(dev)
	require.NoError(t, err)
	restored, err := New(Params{Logger: l.log, SysfsPath: "/sys", Owners: l.owners}).RestoreDevice(data)
	require.NoError(t, err)
	require.NoError(t, restored.Free(t.Context(), withVLAN(1001)))
	require.Zero(t, l.settings(t, 0).Vlan)
}

// A VF stays the one that it is while its interface is in another namespace, has another name or is made by another start of
// its driver, and is another one when the PF has made its VFs anew.
func (l *lab) testIncarnation(t *testing.T) {
	d := l.device(t, 3)
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	check := func() error { return l.Check(t.Context(), []types.Prepared{{Device: dev, Config: withVLAN(5)}})[0] }
	require.NoError(t, check())

	host, err := netns.Get()
	require.NoError(t, err)
	defer host.Close()
	pod, err := netns.GetFromPath(testenv.NetNS(t))
	require.NoError(t, err)
	defer pod.Close()
	inside, err := netlink.NewHandleAt(pod, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	defer inside.Close()
	link, err := netlink.LinkByName(d.KernelIfaceName)
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetNsFd(link, int(pod)))
	require.NoError(t, check())
	link, err = inside.LinkByName(d.KernelIfaceName)
	require.NoError(t, err)
	require.NoError(t, inside.LinkSetName(link, "moved0"))
	require.NoError(t, check())
	require.NoError(t, inside.LinkSetName(link, d.KernelIfaceName))
	require.NoError(t, inside.LinkSetNsFd(link, int(host)))
	require.NoError(t, check())

	l.bindVF(t, d.Addr, "")
	l.bindVF(t, d.Addr, d.Driver)
	l.device(t, 3)
	require.NoError(t, check())

	former := d.MAC
	numVFs := filepath.Join("/sys/class/net", l.pfName, "device/sriov_numvfs")
	require.NoError(t, writeAttribute(numVFs, "0"))
	require.Error(t, check())
	l.waitFor(t, "the VFs to be withdrawn", func(devices map[string]*Device, _ map[string]string) bool { return len(devices) == 0 })
	require.NoError(t, writeAttribute(numVFs, strconv.Itoa(labVFs)))
	d = l.device(t, 3)
	require.ErrorContains(t, check(), "the PF has it with VLAN 0 instead of VLAN 5")
	dev, err = dev.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.NoError(t, check())
	require.Equal(t, d.MAC, dev.HostState().MAC, "not %s", former)
	require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
}
