// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/networkdriver/hostnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// tree is a sysfs of files and links in a temporary directory, laid out as the kernel lays it out.
type tree struct {
	tb     testing.TB
	root   string
	kernel *fakeKernel
	owners nicowner.Dir
	// index is the last interface index that was given.
	index int
}

// bus is the directory of all devices; the tree has one root port.
const bus = "devices/pci0000:00/0000:00:01.0"

func newTree(tb testing.TB) *tree {
	tb.Helper()
	t := &tree{
		tb: tb, root: tb.TempDir(), owners: nicowner.Dir(tb.TempDir()), index: 1,
		kernel: &fakeKernel{links: map[int]link{}, vfs: map[int]map[int]VFSettings{}, settings: map[int]nic.Settings{}},
	}
	t.mkdir("bus/pci/devices")
	t.mkdir("class/net")
	return t
}

func (t *tree) path(elem ...string) string {
	return filepath.Join(append([]string{t.root}, elem...)...)
}

func (t *tree) mkdir(dir string) { require.NoError(t.tb, os.MkdirAll(t.path(dir), 0o755)) }

func (t *tree) write(path, content string) {
	require.NoError(t.tb, os.WriteFile(t.path(path), []byte(content+"\n"), 0o644))
}

func (t *tree) read(path string) string {
	data, err := os.ReadFile(t.path(path))
	require.NoError(t.tb, err)
	return strings.TrimSpace(string(data))
}

func (t *tree) symlink(target, path string) { require.NoError(t.tb, os.Symlink(target, t.path(path))) }

func (t *tree) remove(path string) { require.NoError(t.tb, os.RemoveAll(t.path(path))) }

func (t *tree) device(addr, class, deviceID string) {
	dir := filepath.Join(bus, addr)
	t.mkdir(dir)
	t.write(dir+"/class", class)
	t.write(dir+"/vendor", "0x8086")
	t.write(dir+"/device", deviceID)
	t.write(dir+"/numa_node", "-1")
	t.write(dir+"/driver_override", "(null)")
	t.symlink("../../../"+dir, "bus/pci/devices/"+addr)
}

// pf adds a physical function with its interface, and returns the interface's index.
func (t *tree) pf(addr, ifName string, totalVFs int) int {
	t.device(addr, "0x020000", "0x10c9")
	t.write(filepath.Join(bus, addr, "sriov_totalvfs"), fmt.Sprint(totalVFs))
	t.write(filepath.Join(bus, addr, "sriov_numvfs"), "0")
	t.bind(addr, "igb")
	index := t.netdev(addr, ifName)
	t.kernel.vfs[index] = map[int]VFSettings{}
	return index
}

// vf adds a virtual function without a driver.
func (t *tree) vf(pfAddr string, id int, addr string) {
	t.device(addr, "0x020000", "0x10ca")
	t.symlink("../"+pfAddr, filepath.Join(bus, addr, "physfn"))
	t.symlink("../"+addr, filepath.Join(bus, pfAddr, fmt.Sprintf("virtfn%d", id)))
	t.kernel.with(func() {
		for index, l := range t.kernel.links {
			if l.parent == pfAddr {
				t.kernel.vfs[index][id] = VFSettings{}
			}
		}
	})
}

// kernelVF adds a virtual function with an interface, and returns the interface's index.
func (t *tree) kernelVF(pfAddr string, id int, addr, ifName string) int {
	t.vf(pfAddr, id, addr)
	t.bind(addr, "igbvf")
	return t.netdev(addr, ifName)
}

func (t *tree) bind(addr, driver string) {
	t.unbind(addr)
	t.mkdir("bus/pci/drivers/" + driver)
	t.remove(filepath.Join("bus/pci/drivers", driver, addr))
	t.symlink("../../../../"+filepath.Join(bus, addr), filepath.Join("bus/pci/drivers", driver, addr))
	t.symlink("../../../../bus/pci/drivers/"+driver, filepath.Join(bus, addr, "driver"))
}

func (t *tree) unbind(addr string) {
	if driver, err := os.Readlink(t.path(bus, addr, "driver")); err == nil {
		t.remove(filepath.Join("bus/pci/drivers", filepath.Base(driver), addr))
	}
	t.remove(filepath.Join(bus, addr, "driver"))
}

// netdev adds an interface to sysfs and to the kernel.
func (t *tree) netdev(addr, name string) int {
	t.index++
	mac := fmt.Sprintf("02:00:00:00:%02x:%02x", t.index>>8, t.index&0xff)
	l := link{index: t.index, parent: addr, State: nic.State{
		Name: name, MTU: 1500, MAC: mac, AltNames: []string{"alt" + name},
	}}
	t.kernel.set(l)
	t.kernel.with(func() { t.kernel.settings[l.index] = nic.Settings{"ring sizes": {256, 0, 0, 256}} })
	t.showNetdev(l)
	return l.index
}

// showNetdev makes the interface visible in the host's namespace.
func (t *tree) showNetdev(l link) {
	dir := filepath.Join(bus, l.parent, "net", l.Name)
	t.mkdir(dir)
	t.write(dir+"/ifindex", fmt.Sprint(l.index))
	t.write(dir+"/mtu", fmt.Sprint(l.MTU))
	t.write(dir+"/address", l.MAC)
	t.symlink("../../../"+l.parent, dir+"/device")
	t.symlink("../../"+dir, "class/net/"+l.Name)
}

// hideNetdev is what the move of an interface to another namespace looks like on the host.
func (t *tree) hideNetdev(addr, name string) {
	t.remove(filepath.Join(bus, addr, "net", name))
	t.remove("class/net/" + name)
}

// remake ends a VF and makes another one with the same address, whose interface has yet to come. The directory of the first
// is kept elsewhere, so that the second one's has another number.
func (t *tree) remake(addr, ifName string) {
	t.hideNetdev(addr, ifName)
	former := filepath.Join(t.tb.TempDir(), addr)
	require.NoError(t.tb, os.Rename(t.path(bus, addr), former))
	require.NoError(t.tb, os.CopyFS(t.path(bus, addr), os.DirFS(former)))
}

// rename renames an interface in sysfs and in the kernel.
func (t *tree) rename(index int, to string) {
	l, err := t.kernel.Link(index)
	require.NoError(t.tb, err)
	t.hideNetdev(l.parent, l.Name)
	l.Name = to
	t.kernel.set(l)
	t.showNetdev(l)
}

func (t *tree) manager(p Params) *Manager {
	if p.Logger == nil {
		p.Logger = slog.New(slog.DiscardHandler)
	}
	p.SysfsPath = t.root
	if p.Owners == "" {
		p.Owners = t.owners
	}
	return newManager(p, t.kernel)
}

// scan returns the snapshot's devices and reasons for leaving out by name.
func (t *tree) scan(m *Manager) (devices map[string]*Device, skipped map[string]string) {
	t.tb.Helper()
	s, err := m.scan()
	require.NoError(t.tb, err)
	devices, skipped = map[string]*Device{}, map[string]string{}
	for _, d := range s.Devices {
		devices[d.IfName()] = d.(*Device)
	}
	for _, sk := range s.Skipped {
		skipped[sk.Device] = sk.Reason
	}
	return devices, skipped
}

// indexOf returns the index of the interface of a PCI function.
func (t *tree) indexOf(addr string) int {
	for index, l := range t.kernel.links {
		if l.parent == addr {
			return index
		}
	}
	t.tb.Fatalf("%s has no interface", addr)
	return 0
}

// fakeKernel answers what rtnetlink would, and fails where told to.
type fakeKernel struct {
	// mu guards the fields below.
	mu      sync.Mutex
	links   map[int]link
	vfs     map[int]map[int]VFSettings
	routes  []int
	scanErr error
	// addresses are those of the links.
	addresses []hostnet.Address
	setUpErr  error
	up        []int
	// settings are those of links, and putBackErr keeps them from being put back.
	settings   map[int]nic.Settings
	putBackErr error
	// ports are the states of interfaces that are not up with a carrier.
	ports map[int]PortState
	// setVLAN is asked before a VLAN is set.
	setVLAN      func(pfIndex, vf int, s VFSettings) error
	setMAC       func(mac string) error
	refuseRights func(what string) error
	// round is what the PF makes of a rate.
	round func(mbits int) int
	// reads counts the looks at a PF's record, scans those at the node's own network.
	reads, scans int
	// changes are the VLANs and addresses that were set.
	changes []string
	events  chan error
}

// with changes the kernel while a manager runs on it.
func (k *fakeKernel) with(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
}

func (k *fakeKernel) set(l link) { k.with(func() { k.links[l.index] = l }) }

func (k *fakeKernel) Links() ([]hostnet.Link, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return nil, k.scanErr
}

func (k *fakeKernel) DefaultRouteLinks() ([]int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.routes, nil
}

func (k *fakeKernel) Addresses() ([]hostnet.Address, error) { return k.addresses, nil }

func (k *fakeKernel) Link(index int) (link, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	l, ok := k.links[index]
	if !ok {
		return link{}, unix.ENODEV
	}
	return l, nil
}

func (k *fakeKernel) Settings(index int) (nic.Settings, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.settings[index]), nil
}

func (k *fakeKernel) PutBack(index int, want nic.Settings) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.putBackErr == nil {
		k.settings[index] = maps.Clone(want)
	}
	return k.putBackErr
}

func (k *fakeKernel) SetUp(index int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.up = append(k.up, index)
	return k.setUpErr
}

func (k *fakeKernel) PortState(index int) (PortState, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.links[index]; !ok {
		return PortState{}, unix.ENODEV
	}
	if s, ok := k.ports[index]; ok {
		return s, nil
	}
	return PortState{Up: true, Carrier: true}, nil
}

func (k *fakeKernel) VFs(pfIndex int) (map[int]VFSettings, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reads++
	vfs := map[int]VFSettings{}
	for id, s := range k.vfs[pfIndex] {
		vfs[id] = s
	}
	return vfs, nil
}

func (k *fakeKernel) SetVFVLAN(pfIndex, vf int, s VFSettings) error {
	if k.setVLAN != nil {
		if err := k.setVLAN(pfIndex, vf, s); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.changes = append(k.changes, fmt.Sprintf("vf %d vlan %d qos %d proto %d", vf, s.VLAN, s.QoS, s.VLANProto))
	s.MAC, s.Rights = k.vfs[pfIndex][vf].MAC, k.vfs[pfIndex][vf].Rights
	k.vfs[pfIndex][vf] = s
	return nil
}

// setRight changes a right, unless refuseRights says why not.
func (k *fakeKernel) setRight(pfIndex, vf int, what string, change func(*types.VFRights)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuseRights != nil {
		if err := k.refuseRights(what); err != nil {
			return err
		}
	}
	k.changes = append(k.changes, fmt.Sprintf("vf %d %s", vf, what))
	s := k.vfs[pfIndex][vf]
	change(&s.Rights)
	k.vfs[pfIndex][vf] = s
	return nil
}

func (k *fakeKernel) SetVFTrust(pfIndex, vf int, trust bool) error {
	return k.setRight(pfIndex, vf, fmt.Sprint("trust ", trust), func(r *types.VFRights) { r.Trust = &trust })
}

func (k *fakeKernel) SetVFSpoofCheck(pfIndex, vf int, check bool) error {
	return k.setRight(pfIndex, vf, fmt.Sprint("spoofchk ", check), func(r *types.VFRights) { r.SpoofCheck = &check })
}

func (k *fakeKernel) SetVFLinkState(pfIndex, vf int, state string) error {
	return k.setRight(pfIndex, vf, "state "+state, func(r *types.VFRights) { r.LinkState = state })
}

func (k *fakeKernel) SetVFRates(pfIndex, vf, minTx, maxTx int) error {
	return k.setRight(pfIndex, vf, fmt.Sprintf("rates %d %d", minTx, maxTx), func(r *types.VFRights) {
		if k.round != nil {
			minTx, maxTx = k.round(minTx), k.round(maxTx)
		}
		r.MinTxRate, r.MaxTxRate = &minTx, &maxTx
	})
}

func (k *fakeKernel) SetVFMAC(pfIndex, vf int, mac string) error {
	if k.setMAC != nil {
		if err := k.setMAC(mac); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.changes = append(k.changes, fmt.Sprintf("vf %d mac %s", vf, mac))
	s := k.vfs[pfIndex][vf]
	s.MAC = mac
	k.vfs[pfIndex][vf] = s
	return nil
}

func (k *fakeKernel) HostNetwork(nodeIPs []netip.Addr) (*hostnet.View, error) {
	k.with(func() { k.scans++ })
	return hostnet.Scan(k, nodeIPs)
}

// WatchLinks takes a nil from events for a link event, and an error for the end of the subscription.
func (k *fakeKernel) WatchLinks(ctx context.Context, notify func()) error {
	notify()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-k.events:
			if err != nil {
				return err
			}
			notify()
		}
	}
}

// await waits until nobody is at work on the PFs.
func (p *provisioner) await(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		p.work.mu.Lock()
		defer p.work.mu.Unlock()
		for _, pf := range p.work.pfs {
			if !pf.since.IsZero() {
				return false
			}
		}
		return true
	}, time.Minute, time.Millisecond)
}
