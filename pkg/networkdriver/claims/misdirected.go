// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"errors"
	"fmt"
	"reflect"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// ReasonParametersIgnored is that of a claim with parameters for a driver that none of its devices has, and of its pod.
const ReasonParametersIgnored = "ParametersIgnored"

// Events tell the owners of a claim and of its pod what about the claim is not as they may think.
type Events interface {
	// WarnClaim adds an event to the claim and, if its consumer is a pod, to that, some time later and without a promise.
	WarnClaim(claim Ref, consumer resourceapi.ResourceClaimConsumerReference, reason, message string)
}

// misdirected are parameters for a driver that none of the claim's devices has. Nobody looks at them: a misspelt driver is no error to
// the API server and the scheduler.
type misdirected struct {
	// message says in words for people what they are and what to do.
	message string
	// needed says that a device would be given to its pod without them that they are meant for.
	needed bool
}

// misdirectedConfigs returns the parameters in the claim's allocation that are for a driver without a device in it. asked is what is
// asked of the driver's devices, of which there is one at least.
//
// A driver may be absent for a good reason: the scheduler chose another driver's device among several alternatives. So what decides
// is what the parameters say. They are meant for this driver where they can be read as its own, and set something that those
// for it do not set, or where the driver's name is nearly its own and they cannot be read. Then a pod without them would be
// in another network than it was to be.
func misdirectedConfigs(claim *resourceapi.ResourceClaim, driver string, asked []Asked) []misdirected {
	allotted := map[string]bool{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		allotted[result.Driver] = true
	}
	results := resultsOf(claim, driver)
	var found []misdirected
	for _, entry := range claim.Status.Allocation.Devices.Config {
		if entry.Opaque == nil || allotted[entry.Opaque.Driver] {
			continue
		}
		where, byClaim := "parameters from the device class", entry.Source == resourceapi.AllocationConfigSourceClaim
		if byClaim {
			where = "parameters"
		}
		m := misdirected{message: fmt.Sprintf("%s for driver %.64q, which none of the claim's devices has", where, entry.Opaque.Driver)}
		cfg, err := types.ParseDeviceConfig(entry.Opaque.Parameters.Raw)
		near := nearlySame(entry.Opaque.Driver, driver)
		if !near {
			cfg = types.DeviceConfig{Network: cfg.Network, Vlan: cfg.Vlan}
		}
		for i, result := range results {
			said := asked[i].DeviceConfig
			if byClaim {
				said = asked[i].ByClaim
			}
			switch {
			case exactnessOf(entry.Requests, result.Request) == notNamed:
				continue
			case err != nil && near:
				m.message += fmt.Sprintf(", nor can they be read: %v", err)
			case err != nil || says(said, cfg):
				continue
			}
			m.needed = true
			m.message = fmt.Sprintf("request %q: %s; they look like those of %s, without which the device would not be what was asked for: correct the name or, "+
				"where they are for another alternative, have them name its subrequest", result.Request, m.message, driver)
			break
		}
		if !m.needed {
			m.message += ": they are ignored"
		}
		found = append(found, m)
	}
	return found
}

// says whether whatever other sets is set by cfg too. A network and a VLAN are one thing: the wire.
func says(cfg, other types.DeviceConfig) bool {
	if cfg.Network != "" || cfg.Vlan != nil {
		other.Network, other.Vlan = "", nil
	}
	return reflect.DeepEqual(other.Override(cfg), cfg)
}

// nearlySame says whether two names differ by two letters at most that are wrong, missing or too many.
func nearlySame(a, b string) bool {
	const most = 2
	if len(a)-len(b) > most || len(b)-len(a) > most {
		return false
	}
	before := make([]int, len(b)+1)
	for j := range before {
		before[j] = j
	}
	for i := range len(a) {
		row := make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			row[j+1] = min(before[j+1]+1, row[j]+1)
			if a[i] == b[j] {
				row[j+1] = min(row[j+1], before[j])
			} else {
				row[j+1] = min(row[j+1], before[j]+1)
			}
		}
		before = row
	}
	return before[len(b)] <= most
}

// checkMisdirected refuses a claim whose parameters are for a misspelt driver, unless all of its devices are prepared: a pod that has
// them runs, and is not ended by being asked for again. What is not plain is said and not refused.
func (p *Preparer) checkMisdirected(claim *resourceapi.ResourceClaim, pod resourceapi.ResourceClaimConsumerReference, devices []*wanted) error {
	asked := make([]Asked, len(devices))
	prepared := true
	for i, w := range devices {
		asked[i] = w.asked
		prepared = prepared && w.row != nil
	}
	for _, m := range misdirectedConfigs(claim, p.DriverName, asked) {
		if p.Events != nil {
			p.Events.WarnClaim(RefOf(claim), pod, ReasonParametersIgnored, m.message)
		}
		if m.needed && !prepared {
			return permanentError{errors.New(m.message)}
		}
		p.Logger.Warn("Parameters of a claim are ignored", "claim", RefOf(claim), "pod", claim.Namespace+"/"+pod.Name, "reason", m.message)
	}
	return nil
}
