// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// pfSetting is one of the things that a PF has on record for a VF and that are set by a request of their own.
type pfSetting struct {
	// describe names it with its value, for people.
	describe func(VFSettings) string
	// same says whether it is as wanted. What is not set in want is.
	same func(now, want VFSettings) bool
	// set makes it what want says, if that says anything.
	set func(k kernel, pfIndex, vf int, now, want VFSettings) error
}

// macSetting is the hardware address that the PF gives to whoever starts the VF. Where none is wanted it is the interface's
// own matter.
var macSetting = pfSetting{
	describe: func(s VFSettings) string { return "address " + cmp.Or(s.MAC, "none") },
	same:     func(now, want VFSettings) bool { return want.MAC == "" || now.MAC == want.MAC },
	set:      func(k kernel, pf, vf int, _, want VFSettings) error { return k.SetVFMAC(pf, vf, want.MAC) },
}

// pfSettings are all of them, the VLAN first: nothing else may let a frame out of it.
var pfSettings = []pfSetting{
	{
		describe: func(s VFSettings) string {
			text := fmt.Sprintf("VLAN %d", s.VLAN)
			if s.QoS != 0 {
				text += fmt.Sprintf(" with priority %d", s.QoS)
			}
			if s.VLANProto != 0 {
				text += " of 802.1ad"
			}
			return text
		},
		same: func(now, want VFSettings) bool { return now.sameVLAN(want) },
		set:  func(k kernel, pf, vf int, _, want VFSettings) error { return k.SetVFVLAN(pf, vf, want) },
	},
	{
		describe: func(s VFSettings) string { return "trust " + onOff(s.Rights.Trust) },
		same:     func(now, want VFSettings) bool { return asWanted(now.Rights.Trust, want.Rights.Trust) },
		set: func(k kernel, pf, vf int, _, want VFSettings) error {
			if want.Rights.Trust == nil {
				return nil
			}
			return k.SetVFTrust(pf, vf, *want.Rights.Trust)
		},
	},
	{
		describe: func(s VFSettings) string { return "spoofCheck " + onOff(s.Rights.SpoofCheck) },
		same:     func(now, want VFSettings) bool { return asWanted(now.Rights.SpoofCheck, want.Rights.SpoofCheck) },
		set: func(k kernel, pf, vf int, _, want VFSettings) error {
			if want.Rights.SpoofCheck == nil {
				return nil
			}
			return k.SetVFSpoofCheck(pf, vf, *want.Rights.SpoofCheck)
		},
	},
	{
		describe: func(s VFSettings) string { return "linkState " + s.Rights.LinkState },
		same: func(now, want VFSettings) bool {
			return want.Rights.LinkState == "" || now.Rights.LinkState == want.Rights.LinkState
		},
		set: func(k kernel, pf, vf int, _, want VFSettings) error {
			if want.Rights.LinkState == "" {
				return nil
			}
			return k.SetVFLinkState(pf, vf, want.Rights.LinkState)
		},
	},
	{
		describe: describeRates,
		same:     sameRates,
		set: func(k kernel, pf, vf int, now, want VFSettings) error {
			lowest, highest := cmp.Or(want.Rights.MinTxRate, now.Rights.MinTxRate), cmp.Or(want.Rights.MaxTxRate, now.Rights.MaxTxRate)
			if lowest == nil || highest == nil {
				return errors.New("the PF does not tell the rates that the VF has")
			}
			return k.SetVFRates(pf, vf, *lowest, *highest)
		},
	},
	macSetting,
}

func describeRates(s VFSettings) string {
	return fmt.Sprintf("minTxRate %s and maxTxRate %s", rate(s.Rights.MinTxRate), rate(s.Rights.MaxTxRate))
}

func sameRates(now, want VFSettings) bool {
	return asWanted(now.Rights.MinTxRate, want.Rights.MinTxRate) && asWanted(now.Rights.MaxTxRate, want.Rights.MaxTxRate)
}

// rateStep is how far a PF may be from a rate that it is asked for, in Mbit/s, or a tenth of that rate if it is more: some count in
// steps of the link's speed.
const rateStep = 50

// expected returns the settings that the PF has on record when it has taken the wanted ones for the device.
func (d *Device) expected(want VFSettings) VFSettings {
	if d.Rates != nil {
		want.Rights.MinTxRate, want.Rights.MaxTxRate = inSteps(d.Rates.MinTx, want.Rights.MinTxRate), inSteps(d.Rates.MaxTx, want.Rights.MaxTxRate)
	}
	return want
}

// inSteps returns the rate that a PF has made of the wanted one, or that one itself where the other is nothing that steps explain.
func inSteps(has int, want *int) *int {
	if want == nil || *want == 0 || has == 0 || max(has-*want, *want-has) > max(*want/10, rateStep) {
		return want
	}
	return &has
}

func asWanted[T comparable](now, want *T) bool { return want == nil || now != nil && *now == *want }

func onOff(b *bool) string {
	switch {
	case b == nil:
		return "as it is"
	case *b:
		return "on"
	default:
		return "off"
	}
}

func rate(mbits *int) string {
	if mbits == nil {
		return "as it is"
	}
	return fmt.Sprint(*mbits, " Mbit/s")
}

// differences returns what of the settings is not as wanted.
func differences(now, want VFSettings) []pfSetting {
	var differ []pfSetting
	for _, s := range pfSettings {
		if !s.same(now, want) {
			differ = append(differ, s)
		}
	}
	return differ
}

// change makes what differs as wanted. The PF's lock is held.
func (m *Manager) change(ctx context.Context, vf *virtFn, s pfSetting, now, want VFSettings) error {
	err := retryBusy(ctx, func() error { return s.set(m.kernel, vf.pf.ifIndex, vf.id, now, want) })
	if err != nil {
		return fmt.Errorf("set %s of VF %d on PF %s: %w", s.describe(want), vf.id, vf.pf.ifName, err)
	}
	return nil
}

// changeAll makes all that differs as wanted, or nothing: what was changed before one change failed is changed back. The PF's
// lock is held.
func (m *Manager) changeAll(ctx context.Context, vf *virtFn, found, want VFSettings) error {
	differ := differences(found, want)
	for i, s := range differ {
		err := m.change(ctx, vf, s, found, want)
		if err == nil {
			continue
		}
		for ; i >= 0; i-- { // the failed one too, of which nobody knows how far it went
			back := differ[i]
			if undo := back.set(m.kernel, vf.pf.ifIndex, vf.id, want, found); undo != nil {
				m.log.Error("Cannot restore a VF's setting after a failed change", "device", nameOf(vf.addr), "pf", vf.pf.ifName, "vf", vf.id,
					"setting", back.describe(found), "error", undo)
			}
		}
		return err
	}
	return nil
}

// touched returns what of the found rights a configuration changes, and an error where the PF does not tell of one: it could
// not be put back.
func touched(found, wanted types.VFRights) (types.VFRights, error) {
	var was types.VFRights
	var missing []string
	if wanted.Trust != nil {
		if was.Trust = found.Trust; was.Trust == nil {
			missing = append(missing, "trust")
		}
	}
	if wanted.SpoofCheck != nil {
		if was.SpoofCheck = found.SpoofCheck; was.SpoofCheck == nil {
			missing = append(missing, "spoofCheck")
		}
	}
	if wanted.LinkState != "" {
		if was.LinkState = found.LinkState; was.LinkState == "" {
			missing = append(missing, "linkState")
		}
	}
	if wanted.MinTxRate != nil || wanted.MaxTxRate != nil {
		if was.MinTxRate, was.MaxTxRate = found.MinTxRate, found.MaxTxRate; was.MinTxRate == nil || was.MaxTxRate == nil {
			missing = append(missing, "minTxRate and maxTxRate")
		}
	}
	if len(missing) > 0 {
		return types.VFRights{}, fmt.Errorf("vf: its PF does not tell what %v of its VFs are, so that they could not be put back after the pod", missing)
	}
	return was, nil
}
