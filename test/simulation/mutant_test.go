// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
)

// mutant takes away something that the driver needs, from outside of it. A simulation that does not notice is no good.
type mutant struct {
	// noCDI: the runtime resolves no CDI devices. noHook: containers start without a look at the claim's sandbox.
	noCDI, noHook bool
	// admitAll: no container is refused for another pod's claim.
	admitAll bool
	// noHandOver: claims are not passed on from pod to pod.
	noHandOver bool
	// blind: no device is seen to have changed.
	blind bool
	// forgetful: the journal keeps nothing.
	forgetful bool
	// oweNothing: it is not kept that kubelet takes a claim for prepared that has lost devices.
	oweNothing bool
	// undescribed: what pods read of their devices stays as it was before they had them.
	undescribed bool
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
