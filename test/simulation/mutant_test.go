// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// mutant takes away something that the driver needs, from outside of it. A simulation that does not notice is no good.
type mutant struct {
	// noCDI: the runtime resolves no CDI devices. noHook: containers start without a look at the claim's sandbox.
	// noGroups: that does not look whose IOMMU groups the nodes are of.
	noCDI, noHook, noGroups bool
	// admitAll: no container is refused for another pod's claim.
	admitAll bool
	// noHandOver: claims are not passed on from pod to pod.
	noHandOver bool
	// blind: no device is seen to have changed.
	blind bool
	// forgetful: the journal keeps nothing.
	forgetful bool
	// anyLink: what is moved need not be the link that was there when the VF was looked at.
	anyLink bool
	// oweNothing: it is not kept that kubelet takes a claim for prepared that has lost devices.
	oweNothing bool
	// freeInUse: devices are freed whether or not a sandbox that runs has them.
	freeInUse bool
	// undescribed: what pods read of their devices stays as it was before they had them. keepFiles: it is not removed.
	undescribed, keepFiles bool
	// keepDriver: the driver of a VF stays when it is freed. keepMAC: so does the address that the PF has fixed for it. oldGroup: its IOMMU
	// group is taken for the one that it was set up with at first. openGates: gates stay open.
	keepDriver, keepMAC, oldGroup, openGates bool
	// takeTaken: an address that another one has is taken all the same. returnFirst: one is given back before the link is home.
	// noteLate: the journal knows of one after the API server does. keepAll: what is left is not looked for.
	takeTaken, returnFirst, noteLate, keepAll bool
}

// sandboxesOf returns what of the runtime's sandboxes the room is told of as it gives back.
func (m mutant) sandboxesOf(hooks *nri.Hooks, pod kubetypes.UID) []attachments.Sandbox {
	if m.freeInUse {
		return nil
	}
	return hooks.SandboxesOf(pod)
}

// unpreparer returns what kubelet's requests to unprepare claims go to.
func (m mutant) unpreparer(p *claims.Preparer) *claims.Preparer {
	if !m.freeInUse {
		return p
	}
	params := p.Params
	params.Sandboxes = noSandboxes{}
	return claims.NewPreparer(params)
}

type noSandboxes struct{}

func (noSandboxes) Sandboxes(string) []attachments.Sandbox { return nil }

// take has the keeper take addresses for the row.
func (m mutant) take(ctx context.Context, keeper *networks.Keeper, row *tables.DRAAllocation, note func(*tables.DRAAllocation) error,
) (*tables.DRAAllocation, error) {
	if !m.noteLate {
		return keeper.Take(ctx, row, note)
	}
	taken, err := keeper.Take(ctx, row, func(*tables.DRAAllocation) error { return nil })
	if err == nil {
		err = note(taken)
	}
	return taken, err
}

// pods returns the room as the runtime's hooks have it.
func (m mutant) pods(room *attachments.Room) nri.Pods {
	if m.admitAll {
		return admitting{room}
	}
	return room
}

type admitting struct{ *attachments.Room }

func (admitting) Admit(attachments.Sandbox, []string, []string) error { return nil }
func (a admitting) InPlace(kubetypes.UID, string) bool                { return true }
