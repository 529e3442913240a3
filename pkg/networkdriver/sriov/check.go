// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var _ types.Checker = (*Manager)(nil)

// record is what a PF has on record, and the error of reading it.
type record struct {
	settings map[int]VFSettings
	err      error
}

// Check implements [types.Checker]. Each PF's record is read once, without the PF's lock: a reader waits for nobody, and
// what is found is looked at again by Setup.
func (m *Manager) Check(ctx context.Context, devices []types.Prepared) []error {
	errs := make([]error, len(devices))
	records := map[string]*record{}
	for i, p := range devices {
		d, ok := p.Device.(*Device)
		switch {
		case !ok || d.Original == nil:
		case ctx.Err() != nil:
			errs[i] = ctx.Err()
		default:
			errs[i] = m.check(d, p.Config, records)
		}
	}
	return errs
}

// check adds the record that it reads to records, which are by the PF's PCI address.
func (m *Manager) check(d *Device, cfg types.DeviceConfig, records map[string]*record) error {
	pf, err := m.sysfs.linkBase(d.Addr, "physfn")
	if err != nil {
		return err
	}
	if pf == "" {
		return errGone
	}
	if vf, err := m.sysfs.linkBase(pf, fmt.Sprint("virtfn", d.VFID)); err != nil || vf != d.Addr {
		return errors.Join(err, fmt.Errorf("it is not VF %d of PF %s any more", d.VFID, pf))
	}
	if records[pf] == nil {
		records[pf] = m.readRecord(pf)
	}
	if err := records[pf].err; err != nil {
		return err
	}
	// Without a record on the PF there is nothing to compare.
	now, onRecord := records[pf].settings[d.VFID]
	want := d.expected(d.settingsFor(cfg))
	if trust := want.Rights.Trust; trust != nil && *trust {
		want.MAC = "" // a program that the PF trusts may take another one
	}
	if differ := differences(now, want); onRecord && len(differ) > 0 {
		reason := fmt.Sprintf("the PF has it with %s instead of %s", differ[0].describe(now), differ[0].describe(want))
		if now.VLAN == want.VLAN && now.VLANProto == want.VLANProto {
			return errors.New(reason)
		}
		return types.AstrayError{Reason: reason}
	}
	switch now, err := m.sysfs.incarnation(d.Addr); {
	case err != nil:
		return err
	case d.isFormer(now):
		return errors.New("it was made anew")
	case cfg.Driver == "":
		return nil
	}
	return m.checkDriver(d, cfg.Driver)
}

// checkDriver says how what a program has of the VF is not what the claim asks for.
func (m *Manager) checkDriver(d *Device, driver string) error {
	now, err := m.sysfs.linkBase(d.Addr, "driver")
	switch {
	case err != nil:
		return err
	case now == "":
		return fmt.Errorf("no driver is bound to it instead of %s", driver)
	case now != driver:
		return fmt.Errorf("the driver %s is bound to it instead of %s", now, driver)
	}
	return nil
}

func (m *Manager) readRecord(pf string) *record {
	dev, err := m.sysfs.netdev(pf)
	if err == nil && dev == nil {
		err = errors.New("it has no interface in the host's network namespace")
	}
	var settings map[int]VFSettings
	if err == nil {
		settings, err = m.kernel.VFs(dev.index)
	}
	if err != nil {
		return &record{err: fmt.Errorf("read the VFs of PF %s: %w", pf, err)}
	}
	return &record{settings: settings}
}
