// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// comebackTimeout is how long a driver may take to make the interface of a VF that was bound to it.
	comebackTimeout  = 10 * time.Second
	comebackInterval = 20 * time.Millisecond

	// noOverride is what the kernel says of a device whose driver_override is not set.
	noOverride = "(null)"
	// bridgeClass starts the class of PCI bridges, which an IOMMU group may have beside what it is there for.
	bridgeClass = "0x06"
	// stubDriver holds a device for nobody.
	stubDriver = "pci-stub"
)

// Drivers is what is under way with the drivers of the node's VFs. Managers that follow each other must have the same.
type Drivers struct {
	// changes are of one VF each, by its PCI address: who binds a driver waits for whoever does.
	changes keylock.Locks[string]

	mu sync.Mutex // guards the fields below
	// found are VFs that have another driver than they were found with, as they were found. Discovery goes by these: what it
	// would see instead is offered to nobody.
	found map[string]*Device
}

// away notes that the device will have another driver than it was found with, and back that it has its own again.
func (d *Drivers) away(dev *Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.found == nil {
		d.found = map[string]*Device{}
	}
	d.found[dev.Addr] = dev
}

func (d *Drivers) back(addr string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.found, addr)
}

// foundAs returns the VF as it was found, nil for one that has its own driver.
func (d *Drivers) foundAs(addr string) *Device {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.found[addr]
}

// change does what may keep its caller waiting for as long as a process has the device open: that goes on when the context has
// ended, and the next change waits for it.
func (d *Drivers) change(ctx context.Context, addr string, do func() error) error {
	unlock, err := d.changes.Lock(ctx, addr)
	if err != nil {
		return fmt.Errorf("wait until its driver is changed: %w", err)
	}
	result := make(chan error, 1)
	go func() {
		defer unlock()
		result <- do()
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return fmt.Errorf("its driver is still being changed, a process may have the device open: %w", ctx.Err())
	}
}

// iommuGroup returns the number of the PCI device's IOMMU group, nil for one without.
func (s sysfs) iommuGroup(addr string) (*int64, error) {
	name, err := s.linkBase(addr, "iommu_group")
	if name == "" || err != nil {
		return nil, err
	}
	number, err := strconv.ParseInt(name, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("read its IOMMU group: %w", err)
	}
	return &number, nil
}

// groupOthers returns what else is in the IOMMU group and may be in use, for people: everything but bridges and what is held for
// nobody.
func (s sysfs) groupOthers(addr string, group int64) ([]string, error) {
	addrs, err := s.pciAddrs()
	if err != nil {
		return nil, err
	}
	var others []string
	for _, other := range addrs {
		name, err := s.linkBase(other, "iommu_group")
		if err != nil {
			return nil, fmt.Errorf("read the IOMMU group of %s: %w", other, err)
		}
		if other == addr || name != strconv.FormatInt(group, 10) {
			continue
		}
		driver, err := s.linkBase(other, "driver")
		if err != nil {
			return nil, fmt.Errorf("read the driver of %s: %w", other, err)
		}
		class, err := readTrimmed(s.path(other, "class"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read the class of %s: %w", other, err)
		}
		if driver == "" || driver == stubDriver || strings.HasPrefix(class, bridgeClass) {
			continue
		}
		others = append(others, fmt.Sprintf("%s (%s)", other, driver))
	}
	return others, nil
}

// driverOverride returns which driver alone may be bound to the PCI device, empty for any that fits.
func (s sysfs) driverOverride(addr string) (string, error) {
	name, err := readTrimmed(s.path(addr, "driver_override"))
	if err != nil {
		return "", fmt.Errorf("read driver_override: %w", err)
	}
	if name == noOverride {
		name = ""
	}
	return name, nil
}

// unwritable tells people what keeps the agent from writing.
func unwritable(err error) string {
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
		return "; the agent needs sysfs mounted writable, bus/pci too"
	}
	return ""
}

// setDriverOverride has only the driver fit, or with an empty name any that does.
func (s sysfs) setDriverOverride(addr, driver string) error {
	if err := s.write(s.path(addr, "driver_override"), driver+"\n"); err != nil {
		return fmt.Errorf("set driver_override to %q: %w%s", driver, err, unwritable(err))
	}
	return nil
}

// unbind takes the driver off the PCI device, if it has one.
func (s sysfs) unbind(addr string) error {
	driver, err := s.linkBase(addr, "driver")
	if driver == "" || err != nil {
		return err
	}
	err = s.write(s.path(addr, "driver/unbind"), addr)
	if errors.Is(err, unix.ENODEV) {
		err = nil // somebody else was faster
	}
	if err != nil {
		return fmt.Errorf("unbind the driver %s: %w%s", driver, err, unwritable(err))
	}
	return nil
}

// bind binds the driver to the PCI device, which has none.
func (s sysfs) bind(addr, driver string) error {
	if err := s.isLoaded(driver); err != nil {
		return err
	}
	err := s.write(filepath.Join(s.driverDir(driver), "bind"), addr)
	if now, lookErr := s.linkBase(addr, "driver"); lookErr == nil && now == driver {
		return nil
	}
	if err == nil {
		err = errors.New("it does not take it")
	}
	return fmt.Errorf("bind the driver %s: %w%s", driver, err, unwritable(err))
}

func (s sysfs) driverDir(driver string) string {
	return filepath.Join(s.root, "bus/pci/drivers", driver)
}

// isLoaded says what to do about a driver that the kernel does not have.
func (s sysfs) isLoaded(driver string) error {
	switch _, err := os.Stat(s.driverDir(driver)); {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the driver %s is not loaded on the node: load it (modprobe %s), and at every boot", driver, driver)
	case err != nil:
		return fmt.Errorf("look for the driver %s: %w", driver, err)
	}
	return nil
}

// checkGroup says why a program must not have the VF: what else is in its IOMMU group would be the program's as well, and
// without one all of the node's memory.
func (m *Manager) checkGroup(vf *virtFn) error {
	group, err := m.sysfs.iommuGroup(vf.addr)
	if err != nil {
		return err
	}
	// vfio's mode without IOMMU makes up a group for the VF alone.
	ofPF, err := m.sysfs.iommuGroup(vf.pf.addr)
	if err != nil {
		return err
	}
	if group == nil || ofPF == nil {
		return errors.New("driver: the node has no IOMMU at work, without which a program that has the device could reach all memory: " +
			"turn it on in the firmware's setup (VT-d, AMD-Vi), and boot with intel_iommu=on where that is needed")
	}
	others, err := m.sysfs.groupOthers(vf.addr, *group)
	if err != nil {
		return err
	}
	if len(others) > 0 {
		return fmt.Errorf("driver: its IOMMU group %d also has %s, which a program that has the device would get as well: "+
			"put the NIC into a slot whose root port has ACS, or bind what nobody uses to %s", *group, strings.Join(others, ", "), stubDriver)
	}
	return nil
}

// checkRebindable says why the driver cannot be bound to the VF, or it must not. It changes nothing.
func (m *Manager) checkRebindable(vf *virtFn, driver string) error {
	if err := m.checkGroup(vf); err != nil {
		return err
	}
	if vf.driver == driver {
		return nil
	}
	if err := m.sysfs.isLoaded(driver); err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	switch override, err := m.sysfs.driverOverride(vf.addr); {
	case err != nil:
		return err
	case override != "":
		return fmt.Errorf("driver: driver_override of the VF says %.64q, which somebody else has set: clear it (echo > /sys/bus/pci/devices/%s/driver_override), "+
			"or have the VF bound to %s for good", override, vf.addr, driver)
	}
	return nil
}

// bindAway binds the driver that the configuration has to the prepared VF. The PF has it in its VLAN already. When it fails the
// VF has the driver again that it was found with, as far as that goes.
func (m *Manager) bindAway(ctx context.Context, vf *virtFn, d *Device, driver string) error {
	if vf.driver == driver {
		return nil
	}
	if !d.Original.Rebound {
		return fmt.Errorf("driver: the VF had %s bound to it and now has %s: bind %s again", driver, cmp.Or(vf.driver, "none"), driver)
	}
	if err := m.checkGroup(vf); err != nil {
		return err
	}
	m.drivers.away(d)
	err := m.drivers.change(ctx, d.Addr, func() error {
		switch override, err := m.sysfs.driverOverride(d.Addr); {
		case err != nil:
			return err
		case override != "" && override != driver:
			return fmt.Errorf("driver: driver_override of the VF says %.64q, which somebody else has set", override)
		case override == "":
			if err := m.sysfs.setDriverOverride(d.Addr, driver); err != nil {
				return err
			}
		}
		crashpoint.Here(crashpoint.DriverChosen)
		if err := m.sysfs.unbind(d.Addr); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.DriverUnbound)
		err := m.sysfs.bind(d.Addr, driver)
		crashpoint.Here(crashpoint.DriverBound)
		return err
	})
	if err != nil {
		return err
	}
	m.log.Info("Driver bound to a VF for its claim", "device", d.IfName(), "driver", driver, "before", d.Driver)
	return nil
}

var _ types.Rebindable = (*Device)(nil)

// BindBack implements [types.Rebindable]. The address that the PF has for the VF goes back while the VF has no driver, which
// would not hear of it.
func (d *Device) BindBack(ctx context.Context) (types.Device, error) {
	if d.Original == nil || !d.Original.Rebound {
		return d, nil
	}
	home, original := *d, *d.Original
	original.Rebound, home.Original = false, &original
	if err := d.manager.bindBack(ctx, d); err != nil {
		return nil, fmt.Errorf("bind the driver %s back to VF %s: %w", d.Driver, d.Addr, err)
	}
	return &home, nil
}

func (m *Manager) bindBack(ctx context.Context, d *Device) error {
	vf, err := m.sysfs.virtFn(d.Addr, map[string]*physFn{})
	switch {
	case errors.Is(err, errGone), errors.Is(err, errNotVF):
		return m.sysfs.unseen(d.Addr)
	case err != nil:
		return err
	}
	override, err := m.sysfs.driverOverride(d.Addr)
	if err != nil {
		return err
	}
	lent, err := m.lentMAC(ctx, vf, d)
	if err != nil {
		return err
	}
	if vf.driver == d.Driver && override == "" && !lent {
		return m.awaitInterface(ctx, d)
	}
	m.drivers.away(d)
	err = m.drivers.change(ctx, d.Addr, func() error {
		if override == types.DriverVFIO {
			if err := m.sysfs.setDriverOverride(d.Addr, ""); err != nil {
				return err
			}
		}
		crashpoint.Here(crashpoint.DriverCleared)
		return m.sysfs.unbind(d.Addr)
	})
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DriverReleased)
	if lent {
		if err := m.returnMAC(ctx, vf, d); err != nil {
			return err
		}
	}
	err = m.drivers.change(ctx, d.Addr, func() error { return m.sysfs.bind(d.Addr, d.Driver) })
	crashpoint.Here(crashpoint.DriverBack)
	if err != nil {
		return err
	}
	m.log.Info("Driver of a VF is back after its claim", "device", d.IfName(), "driver", d.Driver)
	return m.awaitInterface(ctx, d)
}

// lentMAC says whether the PF has, or may have, another address for the VF than it had before Setup. A VF that was made anew has its
// own.
func (m *Manager) lentMAC(ctx context.Context, vf *virtFn, d *Device) (bool, error) {
	if vf.pf.ifName == "" || d.isSucceeded() {
		return false, nil
	}
	settings, release, err := m.lockPF(ctx, vf)
	if err != nil {
		return false, err
	}
	defer release()
	now, onRecord := settings[vf.id]
	return onRecord && (now.MAC != d.Original.VF.MAC || d.followed()), nil
}

// followed says whether the PF's record may have followed the address of the VF's interface, as igb's does. The address that Setup
// fixed there would forbid later pods any other one, and multicast, so that it is cleared: the interface has its own again
// when it is restored, and the record follows. Nothing tells such a record from an address that somebody had fixed before.
func (d *Device) followed() bool {
	return d.Original.Link.MAC != "" && d.Original.VF.MAC == d.Original.Link.MAC
}

func (m *Manager) returnMAC(ctx context.Context, vf *virtFn, d *Device) error {
	settings, release, err := m.lockPF(ctx, vf)
	if err != nil {
		return err
	}
	defer release()
	if d.followed() {
		if err := m.kernel.SetVFMAC(vf.pf.ifIndex, vf.id, ""); err != nil {
			return fmt.Errorf("clear the address of VF %d on PF %s: %w", vf.id, vf.pf.ifName, err)
		}
		return nil
	}
	return m.change(ctx, vf, macSetting, settings[vf.id], d.Original.VF)
}

// awaitInterface waits for the interface that the driver makes, as the VF had one.
func (m *Manager) awaitInterface(ctx context.Context, d *Device) error {
	if d.Original.Link.Name == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, comebackTimeout)
	defer cancel()
	for {
		dev, err := m.sysfs.netdev(d.Addr)
		if err == nil && dev != nil {
			_, err = m.settledLink(ctx, d.Addr, d.Original.Link.Name)
			return err
		}
		if !pause.For(ctx, comebackInterval) {
			return errors.Join(fmt.Errorf("the driver %s has made no interface: %w", d.Driver, ctx.Err()), err)
		}
	}
}

var _ types.Exposed = (*Device)(nil)

// Exposes implements [types.Exposed].
func (d *Device) Exposes(cfg types.DeviceConfig) bool {
	return cfg.RDMA || cfg.Driver != "" && d.IOMMUGroup != nil
}

// Exposure implements [types.Exposed]. Containers get the VF's IOMMU group or its RDMA device of a claim that asks for that, and no
// other way to it.
func (d *Device) Exposure(cfg types.DeviceConfig) (types.Exposure, error) {
	if cfg.RDMA {
		nodes, err := d.manager.rdma.Nodes(d.RDMADevice(), d.Addr)
		return types.Exposure{Address: d.Addr, Nodes: nodes}, err
	}
	nodes := []string{"/dev/vfio/vfio", fmt.Sprintf("/dev/vfio/%d", *d.IOMMUGroup)}
	if cfg.Vhost {
		nodes = append(nodes, "/dev/vhost-net", "/dev/net/tun")
	}
	return types.Exposure{Address: d.Addr, Nodes: nodes, IOMMUGroup: d.IOMMUGroup}, nil
}
