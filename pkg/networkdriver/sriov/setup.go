// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// busyAttempts and busyDelay are how often, and with which first pause (doubled each time), a PF that says it is
	// busy is asked again: about 2.5 s in all, within the time that kubelet gives a call.
	busyAttempts = 8
	busyDelay    = 20 * time.Millisecond
	// linkAttempts and linkDelay bound the search for an interface that is being renamed or moved.
	linkAttempts = 5
	linkDelay    = 20 * time.Millisecond
)

// setup establishes the complete state that the configuration asks for, also "no VLAN": whatever a VLAN is left over
// from, its owner must not receive this pod's frames. What was found is remembered and comes back at Free, whoever set it:
// nothing tells an administrator's VLAN from one that an earlier agent left.
//
// The changes to the node are the last steps, so that there is nothing to take back when an earlier one fails: what the PF has on
// record, then the driver. What is left of a driver that could not be bound is undone by Free.
func (m *Manager) setup(ctx context.Context, d *Device, cfg types.DeviceConfig) (*Device, error) {
	prepared, err := m.remember(ctx, d, cfg)
	if err != nil {
		return nil, err
	}
	vf, err := m.setupable(d.Addr, prepared.Original.Rebound)
	if err != nil {
		return nil, err
	}
	prepared, anew, err := m.recognise(ctx, vf, prepared)
	if err != nil {
		return nil, err
	}

	settings, release, err := m.lockPF(ctx, vf)
	if err != nil {
		return nil, err
	}
	defer release()
	found, onRecord := settings[vf.id]
	if anew {
		prepared.Original.VF.MAC = found.MAC
		if prepared.MAC == "" {
			prepared.MAC, prepared.Original.Link.MAC = found.MAC, found.MAC
		}
		m.log.Warn("A VF was made anew while it was a claim's, and goes back with its new address", "device", nameOf(vf.addr),
			"pf", vf.pf.ifName, "vf", vf.id, "mac", prepared.MAC, "before", d.MAC)
	}
	want := prepared.settingsFor(cfg)
	if !onRecord && !want.Rights.IsZero() {
		return nil, fmt.Errorf("vf: its PF %s keeps no record of its VFs", vf.pf.ifName)
	}
	if onRecord {
		err = m.changeAll(ctx, vf, found, want)
	} else if err = m.change(ctx, vf, pfSettings[0], found, want); want.VLAN == 0 && errors.Is(err, unix.EOPNOTSUPP) {
		err = nil // a driver without VLANs for VFs has none to clear
	}
	if err == nil && cfg.Driver != "" {
		err = m.bindAway(ctx, vf, prepared, cfg.Driver)
	}
	if err != nil {
		return nil, err
	}
	return m.withRates(vf, prepared, want, func(now VFSettings) error { return m.changeAll(ctx, vf, now, found) })
}

// withRates returns the device with the rates that the PF has made of the wanted ones, which it may hold a VF to in steps. If it has made
// something else of them, all is taken back.
func (m *Manager) withRates(vf *virtFn, prepared *Device, want VFSettings, takeBack func(now VFSettings) error) (*Device, error) {
	d := *prepared
	d.Rates = nil
	if want.Rights.MinTxRate == nil && want.Rights.MaxTxRate == nil {
		return &d, nil
	}
	settings, err := m.vfSettings(vf)
	now, onRecord := settings[vf.id]
	if err == nil && !onRecord {
		err = errors.New("its PF has no record of it any more")
	}
	if err != nil {
		return nil, errors.Join(err, takeBack(want))
	}
	if sameRates(now, want) {
		return &d, nil
	}
	d.Rates = &Rates{MinTx: ptr.Deref(now.Rights.MinTxRate, 0), MaxTx: ptr.Deref(now.Rights.MaxTxRate, 0)}
	if !sameRates(now, d.expected(want)) {
		err := fmt.Errorf("set %s of VF %d on PF %s: the PF has made it %s", describeRates(want), vf.id, vf.pf.ifName, describeRates(now))
		return nil, errors.Join(err, takeBack(now))
	}
	if prepared.Rates == nil || *prepared.Rates != *d.Rates {
		m.log.Info("A PF holds a VF to the rates that it can, which are not quite those of its network", "device", d.IfName(),
			"pf", vf.pf.ifName, "vf", vf.id, "wanted", describeRates(want), "has", describeRates(now))
	}
	return &d, nil
}

// setupable finds the VF if it can be set up now. One that is between two drivers can be.
func (m *Manager) setupable(addr string, rebound bool) (*virtFn, error) {
	vf, err := m.sysfs.virtFn(addr, map[string]*physFn{})
	if err != nil {
		return nil, err
	}
	if fault := vf.unusable(); fault.Cause != "" && !(rebound && vf.driver == "" && vf.pf.ifName != "") {
		return nil, errors.New(fault.Message)
	}
	if vf.netdev != nil {
		if err := m.refuseOwnNetwork(vf.netdev); err != nil {
			return nil, err
		}
	}
	return vf, nil
}

// remember returns the device with the state of its interface and of the PF's record of it, and changes nothing. A device
// that has them keeps them.
func (m *Manager) remember(ctx context.Context, d *Device, cfg types.DeviceConfig) (*Device, error) {
	if d.Original != nil {
		return d, nil
	}
	vf, err := m.setupable(d.Addr, false)
	if err != nil {
		return nil, err
	}
	if cfg.Driver != "" {
		if err := m.checkRebindable(vf, cfg.Driver); err != nil {
			return nil, err
		}
	}
	prepared, err := m.rememberLink(ctx, vf, d.KernelIfaceName)
	if err != nil {
		return nil, err
	}
	// The driver may have changed since the device was allotted.
	if err := prepared.Validate(cfg); err != nil {
		return nil, err
	}
	if cfg.RDMA {
		if _, err := m.rdma.Nodes(prepared.rdma, prepared.Addr); err != nil {
			return nil, fmt.Errorf("rdma: %w", err)
		}
	}
	prepared.Original.Rebound = cfg.Driver != "" && cfg.Driver != vf.driver
	if err := m.checkMTU(vf, cfg.MTU()); err != nil {
		return nil, err
	}
	settings, release, err := m.lockPF(ctx, vf)
	if err != nil {
		return nil, err
	}
	defer release()
	found := settings[vf.id]
	prepared.Original.VF = found
	if prepared.Original.VF.Rights, err = touched(found.Rights, cfg.Rights()); err != nil {
		return nil, err
	}
	if found.VLAN != 0 {
		m.log.Warn("A VF was in a VLAN before it became a claim's and goes back there afterwards; if nobody has put it there, "+
			"it was left by an agent that kept no journal",
			"device", nameOf(vf.addr), "pf", vf.pf.ifName, "vf", vf.id, "vlan", found.VLAN)
	}
	m.warnOfSharedMAC(vf, prepared.MAC, settings)
	return prepared, nil
}

// checkMTU refuses an MTU that the VF's PF does not carry.
func (m *Manager) checkMTU(vf *virtFn, mtu int) error {
	if mtu == 0 {
		return nil
	}
	pf, err := m.kernel.Link(vf.pf.ifIndex)
	if err != nil {
		return fmt.Errorf("read its PF %s: %w", vf.pf.ifName, err)
	}
	if mtu > pf.MTU {
		return fmt.Errorf("mtu: %d is more than its PF %s has, %d", mtu, vf.pf.ifName, pf.MTU)
	}
	return nil
}

// recognise returns a prepared device, and whether its VF was made anew meanwhile, as happens with the number of VFs or by
// another start of the PF's driver. Such a VF has its own address: the former one is not restored to it. Its name and the
// rest are those that the VF at this PCI address had. One whose interface is in a pod already has the address that its PF has
// on record, as far as that goes: it must not stay out of its VLAN for want of a look at the interface.
func (m *Manager) recognise(ctx context.Context, vf *virtFn, d *Device) (prepared *Device, anew bool, err error) {
	now, err := m.sysfs.incarnation(vf.addr)
	if err != nil || !d.isFormer(now) {
		return d, false, err
	}
	another, original := *d, *d.Original
	original.Incarnation, original.Link.MAC, original.Settings = now, "", nil
	if vf.netdev != nil {
		l, err := m.hostLink(ctx, vf.addr)
		if err != nil {
			return nil, false, err
		}
		original.Link.MAC = l.MAC
		if original.Settings, err = m.kernel.Settings(l.index); err != nil {
			return nil, false, err
		}
	}
	if another.IOMMUGroup, err = m.sysfs.iommuGroup(vf.addr); err != nil {
		return nil, false, err
	}
	another.Original, another.MAC = &original, original.Link.MAC
	return &another, true, nil
}

// isFormer says whether the device is of an earlier incarnation of the VF than the present one.
func (d *Device) isFormer(now string) bool {
	return d.Original.Incarnation != "" && now != d.Original.Incarnation
}

// isSucceeded says whether the VF was made anew since the device was prepared, as far as that can be told.
func (d *Device) isSucceeded() bool {
	now, err := d.manager.sysfs.incarnation(d.Addr)
	return err == nil && d.isFormer(now)
}

// refuseOwnNetwork checks again what discovery checked, since an interface may have got an upper device afterwards.
func (m *Manager) refuseOwnNetwork(dev *netdev) error {
	nodeIPs, _ := m.nodeIPs()
	view, err := m.kernel.HostNetwork(nodeIPs)
	if err != nil {
		return fmt.Errorf("read the node's own network: %w", err)
	}
	if reason := view.Reason(dev.index); reason != "" {
		return fmt.Errorf("its interface %s is part of the node's own network: it %s", dev.name, reason)
	}
	return nil
}

// rememberLink returns the VF as a prepared device, with the state of its interface.
func (m *Manager) rememberLink(ctx context.Context, vf *virtFn, knownName string) (*Device, error) {
	incarnation, err := m.sysfs.incarnation(vf.addr)
	if err != nil {
		return nil, err
	}
	prepared := m.device(vf)
	prepared.Original = &Original{Incarnation: incarnation}
	if vf.netdev == nil {
		if vf.linkMissing() {
			return nil, fmt.Errorf("its interface is not in the host's network namespace although the driver %s is bound", vf.driver)
		}
		return prepared, nil
	}
	l, err := m.settledLink(ctx, vf.addr, knownName)
	if err != nil {
		return nil, err
	}
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("its interface %.64q cannot be given back as it is: %w", l.Name, err)
	}
	settings, err := m.kernel.Settings(l.index)
	if err != nil {
		return nil, err
	}
	prepared.Original.Link, prepared.Original.PermMAC, prepared.Original.Settings = l.State, l.permMAC, settings
	prepared.KernelIfaceName, prepared.MTU, prepared.MAC = l.Name, l.MTU, l.MAC
	return prepared, nil
}

// settledLink reads the VF's interface. If its name is not the one that discovery saw, udev is likely at work on it,
// and the name is waited for to stay the same: what is remembered is what the interface is called after the pod.
func (m *Manager) settledLink(ctx context.Context, addr, knownName string) (link, error) {
	l, err := m.hostLink(ctx, addr)
	if err != nil || l.Name == knownName {
		return l, err
	}
	for deadline := time.Now().Add(rescan.MaxSettle); ; {
		if !pause.For(ctx, rescan.QuietPeriod) {
			return link{}, fmt.Errorf("wait for its interface %s to keep its name: %w", l.Name, ctx.Err())
		}
		next, err := m.hostLink(ctx, addr)
		if err != nil {
			return link{}, err
		}
		if next.Name == l.Name {
			return next, nil
		}
		if time.Now().After(deadline) {
			return link{}, fmt.Errorf("its interface is renamed all the time (now %s)", next.Name)
		}
		l = next
	}
}

// hostLink resolves the PCI address to the interface and makes sure that the kernel says the same of the index it got:
// between two looks the index may have gone to another interface.
func (m *Manager) hostLink(ctx context.Context, addr string) (link, error) {
	var err error
	for range linkAttempts {
		var dev *netdev
		dev, err = m.sysfs.netdev(addr)
		if err == nil && dev == nil {
			err = errors.New("its interface is not in the host's network namespace")
		}
		if err == nil {
			var l link
			l, err = m.kernel.Link(dev.index)
			if err == nil && l.parent == addr {
				return l, nil
			}
			if err == nil {
				err = fmt.Errorf("interface %d (%s) belongs to %q, not to %s", l.index, l.Name, l.parent, addr)
			}
		}
		if !pause.For(ctx, linkDelay) {
			return link{}, errors.Join(err, ctx.Err())
		}
	}
	return link{}, err
}

// lockPF waits for other work on the VF's PF, and reads the PF's record of its VFs as it is then. release lets the next one
// at the PF.
func (m *Manager) lockPF(ctx context.Context, vf *virtFn) (settings map[int]VFSettings, release func(), err error) {
	if release, err = m.pfs.acquire(ctx, vf.pf.addr); err != nil {
		return nil, nil, err
	}
	if settings, err = m.vfSettings(vf); err != nil {
		release()
		return nil, nil, err
	}
	return settings, release, nil
}

// vfSettings reads the PF's record of its VFs.
func (m *Manager) vfSettings(vf *virtFn) (map[int]VFSettings, error) {
	l, err := m.kernel.Link(vf.pf.ifIndex)
	if err != nil {
		return nil, fmt.Errorf("read its PF %s: %w", vf.pf.ifName, err)
	}
	if l.parent != vf.pf.addr {
		return nil, fmt.Errorf("interface %d (%s) belongs to %q, not to the PF %s", l.index, l.Name, l.parent, vf.pf.addr)
	}
	settings, err := m.kernel.VFs(vf.pf.ifIndex)
	if err != nil {
		return nil, fmt.Errorf("read the VFs of PF %s: %w", vf.pf.ifName, err)
	}
	return settings, nil
}

// warnOfSharedMAC tells of another VF of the PF with the same address, whose frames this one may get.
func (m *Manager) warnOfSharedMAC(vf *virtFn, mac string, settings map[int]VFSettings) {
	for id, s := range settings {
		if id != vf.id && mac != "" && s.MAC == mac {
			m.log.Warn("Two VFs have the same hardware address, frames may reach the wrong one",
				"device", nameOf(vf.addr), "pf", vf.pf.ifName, "vf", vf.id, "otherVF", id, "mac", mac)
		}
	}
}

// putBack gives the VF's interface, which is home, the settings that it had. One that is gone took them with it, and so did
// a VF that was made anew since.
func (m *Manager) putBack(ctx context.Context, d *Device) error {
	if d.Original.Settings == nil {
		if d.Original.Link.Name != "" {
			m.log.Warn("What a pod has set of a VF by ethtool stays, since it is not known what the host had; bind the VF to its driver anew to be rid of it",
				"device", d.IfName())
		}
		return nil
	}
	dev, err := m.sysfs.netdev(d.Addr)
	switch {
	case errors.Is(err, errGone), err == nil && dev == nil:
		return nil
	case err != nil:
		return err
	}
	if now, err := m.sysfs.incarnation(d.Addr); err != nil || d.isFormer(now) {
		return err
	}
	l, err := m.hostLink(ctx, d.Addr)
	if err != nil {
		return err
	}
	return m.kernel.PutBack(l.index, d.Original.Settings)
}

// free restores what the PF had on record for the VF. A VF that is gone, with its PF or without, took its settings with
// it; one whose PF is merely out of reach did not. A VLAN that is no longer the claim's was changed by someone else while
// the VF was the claim's; the VF goes back as it was found all the same.
func (m *Manager) free(ctx context.Context, d *Device, cfg types.DeviceConfig) error {
	log := m.log.With("device", d.IfName())
	vf, err := m.sysfs.virtFn(d.Addr, map[string]*physFn{})
	switch {
	case errors.Is(err, errGone), errors.Is(err, errNotVF):
		if err := m.sysfs.unseen(d.Addr); err != nil {
			return err
		}
		log.Warn("Nothing to restore of a VF that is gone", "pf", d.PFName)
		return nil
	case err != nil:
		return err
	case vf.pf.ifName == "":
		return m.freeWithoutPF(vf, d, cfg)
	}

	settings, release, err := m.lockPF(ctx, vf)
	if err != nil {
		return err
	}
	defer release()
	log = log.With("pf", vf.pf.ifName, "vf", vf.id)
	now, onRecord := settings[vf.id]
	was := d.Original.VF
	was.MAC, was.Rights = "", was.Rights.Of(cfg.Rights())
	if !onRecord {
		// Without a record on the PF the only known change is the claim's own.
		now = settingsFor(cfg)
	}
	if !now.sameVLAN(was) && now.VLAN != cfg.VLAN() {
		log.Warn("A VF's VLAN was changed while it was a claim's", "vlan", now.VLAN, "claimVLAN", cfg.VLAN(), "restored", was.VLAN)
	}
	for _, s := range differences(now, was) {
		if err := m.change(ctx, vf, s, now, was); err != nil {
			return err
		}
	}
	crashpoint.Here(crashpoint.FreeVLAN)
	if d.isSucceeded() {
		return nil // another VF, with an address of its own
	}
	return m.restoreMAC(ctx, vf, now.MAC, d.Original)
}

// freeWithoutPF is what is left to do when the PF has no interface on the host. Without a driver the PF has lost its
// record; else somebody has moved the interface, and the VF is still in its VLAN.
func (m *Manager) freeWithoutPF(vf *virtFn, d *Device, cfg types.DeviceConfig) error {
	was := d.Original.VF
	was.MAC, was.Rights = "", was.Rights.Of(cfg.Rights())
	driver, err := m.sysfs.linkBase(vf.pf.addr, "driver")
	if err != nil {
		return fmt.Errorf("read the driver of its physical function %s: %w", vf.pf.addr, err)
	}
	if driver == "" || nic.IsUserspaceDriver(driver) || len(differences(settingsFor(cfg), was)) == 0 {
		m.log.Warn("Nothing to restore of a VF whose PF is gone", "device", d.IfName(), "pf", d.PFName)
		return nil
	}
	return fmt.Errorf("its physical function %s has no interface in the host's network namespace, by which VLAN %d could be set back to %d; bring %s back",
		vf.pf.addr, cfg.VLAN(), d.Original.VF.VLAN, d.PFName)
}

// restoreMAC removes an address from the PF's record that the pod left there. Most often there is nothing to do: the
// record follows the VF's interface, whose address is back already. An empty record is no one's address; writing into
// it would take from the VF the right to choose one.
func (m *Manager) restoreMAC(ctx context.Context, vf *virtFn, now string, was *Original) error {
	if now == "" || now == was.VF.MAC || now == was.Link.MAC {
		return nil
	}
	err := retryBusy(ctx, func() error { return m.kernel.SetVFMAC(vf.pf.ifIndex, vf.id, was.VF.MAC) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		m.log.Warn("The PF's driver does not take back a VF's hardware address", "device", nameOf(vf.addr), "pf", vf.pf.ifName,
			"vf", vf.id, "mac", now, "restored", was.VF.MAC, "error", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore the address of VF %d on PF %s to %q: %w", vf.id, vf.pf.ifName, was.VF.MAC, err)
	}
	return nil
}

// retryBusy repeats what fails because the PF is busy with something else.
func retryBusy(ctx context.Context, do func() error) error {
	delay := busyDelay
	for attempt := 1; ; attempt++ {
		err := do()
		if attempt == busyAttempts || !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
		if !pause.For(ctx, delay) {
			return errors.Join(err, ctx.Err())
		}
		delay *= 2
	}
}
