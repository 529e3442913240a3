// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"fmt"
	"log/slog"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// ownerProgram is what a prepared VF is owned by.
const ownerProgram = "cilium-agent"

// own makes the driver the VF's owner among the programs that give NICs of the node to pods. first is false if it was.
func (d *Device) own(owners nicowner.Dir) (first bool, err error) {
	return owners.Claim(nic.PCI(d.Addr).Key(), nicowner.Owner{Program: ownerProgram, For: "a claim that has device " + d.IfName()})
}

// refuseTaken says that another program has the VF, before anything else that is then not as it should be.
func (d *Device) refuseTaken(owners nicowner.Dir) error {
	key := nic.PCI(d.Addr).Key()
	owner, err := owners.Owner(key)
	if err == nil && owner != nil && owner.Program != ownerProgram {
		err = fmt.Errorf("take NIC %s for %s: %w", key, ownerProgram, &nicowner.TakenError{Key: key, Owner: *owner})
	}
	return err
}

func (d *Device) disown(owners nicowner.Dir) error {
	return owners.Release(nic.PCI(d.Addr).Key(), ownerProgram)
}

// Reclaim makes the driver the owner of the VFs among the devices, and leaves those of quarantined devices as they are. It
// releases all others: an agent that ended in the midst of its work has left them. No device may be set up or freed meanwhile.
func Reclaim(log *slog.Logger, owners nicowner.Dir, prepared []types.Device, quarantined []string) {
	keep := map[string]bool{}
	for _, device := range quarantined {
		keep[nic.PCI(device).Key()] = true
	}
	for _, dev := range prepared {
		vf, ok := dev.(*Device)
		if !ok {
			continue
		}
		keep[nic.PCI(vf.Addr).Key()] = true
		if _, err := vf.own(owners); err != nil {
			log.Error("A VF is prepared for a claim, and the node does not know", "device", vf.IfName(), "error", err)
		}
	}
	owned, err := owners.Owned(ownerProgram)
	for _, key := range owned {
		if keep[key] || keep[nameOf(key)] {
			continue
		}
		if err = owners.Release(key, ownerProgram); err != nil {
			break
		}
	}
	if err != nil {
		log.Error("VFs that are not prepared may be kept from other programs", "error", fmt.Errorf("release what an earlier agent had: %w", err))
	}
}
