// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var _ types.Examiner = (*Manager)(nil)

// Speeds remember how fast the PFs' links were at most since the agent was started, by the PFs' PCI addresses: the speed of a link that is
// down for a moment, or slower than it should be, is still what the PF is for.
type Speeds struct {
	mu      sync.Mutex // guards fastest
	fastest map[string]int
}

// note notes the present speed in Mbit/s, 0 for an unknown one, and returns the highest.
func (s *Speeds) note(pfAddr string, mbit int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fastest == nil {
		s.fastest = map[string]int{}
	}
	s.fastest[pfAddr] = max(s.fastest[pfAddr], mbit)
	return s.fastest[pfAddr]
}

// speed reads how fast the link of a PCI device's interface is in Mbit/s; 0 when that is unknown, as without a carrier.
func (s sysfs) speed(addr, ifName string) int {
	mbit, err := readInt(s.path(addr, "net", ifName, "speed"))
	if err != nil || mbit < 0 {
		return 0
	}
	return mbit
}

// port is what a PF is like, as far as all its VFs depend on it.
type port struct {
	addr, name string
	// fault is of all its VFs, nil for none.
	fault *types.Fault
	// vfs are those on the PF's record.
	vfs map[int]VFSettings
	// twice has the hardware addresses that several functions have.
	twice map[string]bool
}

// Examine implements [types.Examiner]: it asks for each PF once. The PF's table of VFs, which a card's firmware may have to be asked
// for, is read again when it has to be fresh.
func (m *Manager) Examine(ctx context.Context, devices []types.Prepared, fresh bool) ([][]types.Fault, error) {
	faults := make([][]types.Fault, len(devices))
	ports := map[string]*port{} // by the name that the devices have of it
	bound := bindings{sysfs: m.sysfs, byDriver: map[string]map[string]bool{}}
	for i, p := range devices {
		d, ok := p.Device.(*Device)
		if !ok {
			continue
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		pf := ports[d.PFName]
		if pf == nil {
			var err error
			if pf, err = m.examinePort(d, fresh); errors.Is(err, errGone) {
				// The next scan will tell of it, and another of the VFs may still be there.
				continue
			} else if err != nil {
				return nil, err
			}
			ports[d.PFName] = pf
		}
		if pf.fault != nil {
			faults[i] = append(faults[i], *pf.fault)
		}
		faults[i] = append(faults[i], recordFaults(d, p.Config, pf)...)
		driver, err := bound.fault(d, p.Config)
		if err != nil {
			return nil, err
		}
		if driver != nil {
			faults[i] = append(faults[i], *driver)
		}
	}
	return faults, nil
}

// examinePort looks at the PF of a VF.
func (m *Manager) examinePort(d *Device, fresh bool) (*port, error) {
	addr, err := m.sysfs.linkBase(d.Addr, "physfn")
	if err != nil {
		return nil, err
	}
	if addr == "" {
		return nil, errGone
	}
	pf := &port{addr: addr, name: d.PFName}
	dev, err := m.sysfs.netdev(addr)
	if err != nil {
		return nil, fmt.Errorf("look for the interface of PF %s: %w", addr, err)
	}
	if dev == nil {
		fault := noInterface(addr)
		pf.fault = &fault
		return pf, nil
	}
	pf.name = dev.name
	state, err := m.kernel.PortState(dev.index)
	if err != nil {
		return nil, fmt.Errorf("look at PF %s: %w", dev.name, err)
	}
	mbit := m.sysfs.speed(addr, dev.name)
	fastest := m.speeds.note(addr, mbit)
	switch {
	case !state.Up:
		pf.fault = &types.Fault{Cause: types.CausePFDown, Of: types.OfPF,
			Message: fmt.Sprintf("its physical function %s is down: ip link set %s up", dev.name, dev.name)}
	case !state.Carrier:
		pf.fault = &types.Fault{Cause: types.CauseNoCarrier, Of: types.OfPF,
			Message: fmt.Sprintf("its physical function %s has no carrier: look at the cable and the switch", dev.name)}
	case mbit > 0 && mbit < fastest:
		pf.fault = &types.Fault{Cause: types.CauseSlowLink, Of: types.OfPF,
			Message: fmt.Sprintf("the link of its physical function %s has %d Mbit/s and had %d", dev.name, mbit, fastest)}
	}
	if pf.vfs, err = m.tables.of(addr, fresh, func() (map[int]VFSettings, error) { return m.kernel.VFs(dev.index) }); err != nil {
		return nil, fmt.Errorf("read the VFs of PF %s: %w", dev.name, err)
	}
	pf.twice = map[string]bool{}
	once := map[string]bool{dev.mac: true}
	for _, vf := range pf.vfs {
		if vf.MAC != "" && once[vf.MAC] {
			pf.twice[vf.MAC] = true
		}
		once[vf.MAC] = true
	}
	return pf, nil
}

// recordFaults returns what the PF's record has against a VF.
func recordFaults(d *Device, cfg types.DeviceConfig, pf *port) (faults []types.Fault) {
	vf, onRecord := pf.vfs[d.VFID]
	if !onRecord {
		return nil
	}
	if vf.Rights.LinkState == v2alpha1.LinkStateDisable && cfg.Rights().LinkState != v2alpha1.LinkStateDisable {
		faults = append(faults, types.Fault{Cause: types.CauseNoCarrier, Of: types.OfVF,
			Message: fmt.Sprintf("its physical function keeps its link down: ip link set %s vf %d state auto", pf.name, d.VFID)})
	}
	if pf.twice[vf.MAC] {
		faults = append(faults, types.Fault{Cause: types.CauseDuplicateMAC, Of: types.OfVF,
			Message: fmt.Sprintf("another function of %s has its address %s too", pf.name, vf.MAC)})
	}
	return faults
}

// bindings are the PCI devices that are bound to drivers, by the drivers' names. Each driver is looked at once.
type bindings struct {
	sysfs    sysfs
	byDriver map[string]map[string]bool
}

// fault says whether a VF that a claim has lost its driver, nil if not. The driver of any other is a matter of the scan.
func (b *bindings) fault(d *Device, cfg types.DeviceConfig) (*types.Fault, error) {
	if d.Original == nil {
		return nil, nil
	}
	want := d.Driver
	if cfg.Driver != "" {
		want = cfg.Driver
	}
	addrs, known := b.byDriver[want]
	if !known {
		addrs = b.sysfs.boundTo(want)
		b.byDriver[want] = addrs
	}
	if addrs[d.Addr] {
		return nil, nil
	}
	switch now, err := b.sysfs.linkBase(d.Addr, "driver"); {
	case err != nil:
		return nil, fmt.Errorf("look at the driver of VF %s: %w", d.Addr, err)
	case now == "":
		fault := noDriver()
		return &fault, nil
	case now != want:
		return &types.Fault{Cause: types.CauseDriverGone, Of: types.OfVF,
			Message: fmt.Sprintf("the driver %s is bound to it instead of %s", now, want)}, nil
	}
	return nil, nil // it was bound meanwhile
}

// WatchLinks implements [types.Examiner].
func (m *Manager) WatchLinks(ctx context.Context, notify func()) error {
	return m.kernel.WatchLinks(ctx, notify)
}

// vfTables are the PFs' tables of VFs as they were read last, by the PFs' PCI addresses.
type vfTables struct {
	mu   sync.Mutex // guards last
	last map[string]map[int]VFSettings
}

// of returns a PF's table, which is read unless it is known and need not be fresh.
func (t *vfTables) of(pfAddr string, fresh bool, read func() (map[int]VFSettings, error)) (map[int]VFSettings, error) {
	t.mu.Lock()
	known, ok := t.last[pfAddr]
	t.mu.Unlock()
	if ok && !fresh {
		return known, nil
	}
	table, err := read()
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last == nil {
		t.last = map[string]map[int]VFSettings{}
	}
	t.last[pfAddr] = table
	return table, nil
}
