// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// taintDomain is before the names of all taints, whatever the driver is called: who tolerates one need not know that.
const taintDomain = "networkdriver.cilium.io/"

const (
	// flap is how long a fault that comes and goes by itself may last without being one.
	flap = 1500 * time.Millisecond
	// repeated is how long a device has to go on failing.
	repeated = 30 * time.Second
	// peace is how long a fault has to be gone to count as over.
	peace = 10 * time.Second
)

// rule is what a cause comes to.
type rule struct {
	// taint is the name of the taint's key, empty for what is withdrawn whatever claims tolerate.
	taint string
	// after is how long the fault has to last.
	after time.Duration
	// hard is true for a device that cannot serve at all: where the API server keeps no taints it is withdrawn.
	hard bool
	// evicts is true for a fault that may end pods, where a pool has it so. What another tenant could bring about, and what leaves the
	// pod with a device that works, does not.
	evicts bool
}

var rules = map[types.Cause]rule{
	types.CauseQuarantined:  {"", 0, true, false},
	types.CauseLinkMissing:  {"link-missing", flap, true, true},
	types.CauseDriverGone:   {"driver-gone", flap, true, true},
	types.CausePFDown:       {"pf-down", flap, false, true},
	types.CauseNoCarrier:    {"no-carrier", flap, false, true},
	types.CauseDuplicateMAC: {"duplicate-mac", flap, true, false},
	types.CauseFailing:      {"failing", repeated, true, false},
	types.CauseSlowLink:     {"slow-link", flap, false, false},
}

// Taints returns the taints of a device in a pool with the given effect of faults (v2alpha1.FaultEffect...). Since when they are
// there is for who publishes them to say.
func Taints(h *tables.DeviceHealth, effect string) []resourceapi.DeviceTaint {
	if h == nil {
		return nil
	}
	var taints []resourceapi.DeviceTaint
	for _, f := range h.Faults {
		r := rules[f.Cause]
		if r.taint == "" {
			continue
		}
		taint := resourceapi.DeviceTaint{Key: taintDomain + r.taint, Value: f.Of, Effect: resourceapi.DeviceTaintEffectNoSchedule}
		if r.evicts && effect == v2alpha1.FaultEffectNoExecute {
			taint.Effect = resourceapi.DeviceTaintEffectNoExecute
		}
		taints = append(taints, taint)
	}
	return taints
}

// CannotServe is true for a device that must not be offered where the API server keeps no taints.
func CannotServe(h *tables.DeviceHealth) bool {
	if h == nil {
		return false
	}
	for _, f := range h.Faults {
		if rules[f.Cause].hard {
			return true
		}
	}
	return false
}
