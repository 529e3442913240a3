// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

const (
	// repairTime is how long a device may be other than its claim has it after somebody else has changed it, while the agent
	// is at work.
	repairTime = 60 * time.Second
	// attachTime is the longest time from the look at a device to its move into the pod.
	attachTime = 20 * time.Second
)

// claimIn returns the claim by which the pod has the device, nil if there is none. It may be another one's by now, and what it was
// allotted after its pod was deleted by force is not the pod's.
func (s *sim) claimIn(p *pod, device string) (claim *claim) {
	last := 0
	for _, c := range p.claims {
		for _, n := range c.had[device] {
			if n > last && (p.forgotten == 0 || n <= p.forgotten) {
				claim, last = c, n
			}
		}
	}
	return claim
}

// check is what holds after each step.
func (s *sim) check() {
	s.checkHolders()
	s.checkAddresses()
	s.checkOpened()
	for _, v := range s.kernel.vfs {
		ns := s.kernel.namespaces[v.netns]
		if !v.hasLink() || ns == nil {
			continue
		}
		c := s.claimIn(ns.pod, v.name)
		if c == nil {
			s.fail("%s is in pod %s, which has no claim that it was allotted to", v, ns.pod.name)
			return
		}
		if !v.virtual && v.vlan != c.vlan && s.unrepaired(v) {
			s.fail("%s is in pod %s in another VLAN than %d of claim %s, and is not repaired", v, ns.pod.name, c.vlan, c.name)
		}
	}
}

// unrepaired says whether the agent was at work for long since somebody else has changed the VF.
func (s *sim) unrepaired(v *vf) bool {
	since, ready := s.agent.readySince()
	for _, t := range []time.Time{v.upset, s.faults.since} {
		if t.After(since) {
			since = t
		}
	}
	return ready && time.Since(since) > repairTime
}

// checkHolders: no device has two claims.
func (s *sim) checkHolders() {
	a := s.agent
	if a == nil {
		return
	}
	holders := map[string]*tables.DRAAllocation{}
	for row := range a.allocations.All(a.db.ReadTxn()) {
		if other := holders[row.DeviceName]; other != nil {
			s.fail("device %s has two claims: %s and %s", row.DeviceName, other.Claim(), row.Claim())
		}
		holders[row.DeviceName] = row
	}
}

// checkEntered: a VF that comes into a pod's namespace is in its claim's VLAN, unless somebody has changed its VLAN since whoever
// moves it looked. One that was made anew since does not come in.
func (s *sim) checkEntered(v *vf, ns *namespace, actor string) {
	c := s.claimIn(ns.pod, v.name)
	switch {
	case c == nil:
		s.fail("%s came into pod %s, which has no claim that it was allotted to", v, ns.pod.name)
	case !v.virtual && v.vlan != c.vlan && (!v.retagged.After(v.checked[actor]) || time.Since(v.checked[actor]) > attachTime):
		s.fail("%s came into pod %s in another VLAN than %d of claim %s", v, ns.pod.name, c.vlan, c.name)
	}
}

// checkPrepared: a claim that kubelet takes for prepared has its devices, which are in nobody else's pod. One that several pods
// use may be on its way from one of them to another just then.
func (s *sim) checkPrepared(c *claim, p *pod) {
	for _, device := range c.devices() {
		v := s.kernel.vf(device)
		ns := s.kernel.namespaces[v.netns]
		switch {
		case ns != nil && !slices.Contains(ns.pod.claims, c):
			s.fail("claim %s of pod %s is prepared with %s, which is in pod %s", c.name, p.name, v, ns.pod.name)
		case !v.present || v.virtual || time.Since(v.upset) <= repairTime || !c.reservedFor(p) || len(c.object.Status.ReservedFor) > 1:
		case v.vlan != c.vlan:
			s.fail("claim %s of pod %s is prepared with %s, which is not in VLAN %d", c.name, p.name, v, c.vlan)
		case c.driver != "" && v.driver != c.driver:
			s.fail("claim %s of pod %s is prepared with %s, which does not have the driver %s", c.name, p.name, v, c.driver)
		}
	}
}

// checkStarted: a container has the devices of the claims that it lists, and reads that it has them. That of a pod that was deleted by
// force meanwhile, whose claims may be another one's by now, has what was in its sandbox when it was made.
func (s *sim) checkStarted(ctr *container, had []*vf, read []v1beta1.Device) {
	p, sb := ctr.sandbox.pod, ctr.sandbox
	if s.api.pods[p.uid] == nil {
		for _, v := range had {
			if len(ctr.claims) > 0 && v.netns != sb.netns && v.netns != sb.netns+"-own" && !s.lostUnseen(v) {
				s.fail("container %s of pod %s, which was deleted by force, was started in %s without %s", ctr.name, p.name, sb.id, v)
			}
		}
		return
	}
	for _, c := range ctr.claims {
		if !c.reservedFor(p) {
			continue
		}
		if !slices.ContainsFunc(c.devices(), func(device string) bool { return s.lostUnseen(s.kernel.vf(device)) }) {
			s.checkRead(ctr, c, read)
		}
		for _, device := range c.devices() {
			if v := s.kernel.vf(device); !s.has(ctr, c, v) && !s.lostUnseen(v) {
				s.fail("container %s of pod %s was started in %s without %s of claim %s", ctr.name, p.name, sb.id, v, c.name)
			}
		}
	}
}

// lostUnseen says whether somebody else has taken the VF out of its pod, and the driver has not had the time to notice.
func (s *sim) lostUnseen(v *vf) bool {
	since, ready := s.agent.readySince()
	return v.upset.After(v.entered) && (!ready || time.Since(v.upset) < repairTime || time.Since(since) < repairTime)
}

// owed returns what is not as it should be when everything has been at rest for long.
func (s *sim) owed() []string {
	var owed []string
	say := func(format string, args ...any) { owed = append(owed, fmt.Sprintf(format, args...)) }
	a := s.agent
	if _, ready := a.readySince(); !ready {
		return []string{"the agent is not ready"}
	}
	for _, p := range s.api.sortedPods() {
		switch {
		case p.ending:
			say("pod %s does not end", p.name)
		case !p.bound:
			if len(p.claims) > 0 && !s.waitsForDevices(p) {
				say("pod %s is not bound although there are devices", p.name)
			}
		case s.othersTurn(p):
		default:
			for _, c := range p.containers {
				if !c.started || !c.sandbox.ready {
					say("container %s of pod %s does not run", c.name, p.name)
				}
			}
			for _, c := range p.claims {
				for _, device := range c.devices() {
					v := s.kernel.vf(device)
					if c.driver != "" && !slices.ContainsFunc(s.users(v), func(ctr *container) bool { return ctr.sandbox.pod == p }) {
						say("pod %s has claim %s, but not the node of %s", p.name, c.name, v)
					}
					if c.driver == "" && (!v.hasLink() || s.kernel.podOf(v.netns) != p.uid) || !v.virtual && v.vlan != c.vlan {
						say("pod %s has claim %s in VLAN %d, but not %s", p.name, c.name, c.vlan, v)
					}
				}
			}
		}
	}
	allotted := map[string]*claim{}
	for _, c := range s.api.sortedClaims() {
		for _, device := range c.devices() {
			allotted[device] = c
		}
	}
	for _, v := range s.kernel.vfs {
		if allotted[v.name] == nil && !v.atHome() {
			say("%s is nobody's and not as it was", v)
		}
		if !slices.Contains(s.api.published, v.name) {
			say("%s is not offered", v)
		}
	}
	for row := range a.allocations.All(a.db.ReadTxn()) {
		if c := allotted[row.DeviceName]; c == nil || c.uid != row.ClaimUID {
			say("row of %s for claim %s: %s %s", row.DeviceName, row.Claim(), row.State(), row.Error)
		}
	}
	for _, e := range a.journal.Entries() {
		if c := allotted[e.Name]; c == nil || c.uid != e.ClaimUID || e.Quarantine != "" {
			say("journal entry of %s for claim %s, quarantine %q", e.Name, e.Claim(), e.Quarantine)
		}
	}
	for _, c := range s.api.sortedClaims() {
		if got := len(c.object.Status.Devices); got != len(c.devices()) && !s.unprepared(c) && !c.emptied {
			say("status of claim %s has %d devices, allotted are %v", c.name, got, c.devices())
		}
	}
	for _, path := range s.leftMetadata() {
		say("what pods have read is left: %s", path)
	}
	owed = append(owed, s.owedAddresses(allotted)...)
	gates, _ := os.ReadDir(s.cdiDir())
	for _, file := range gates {
		if strings.Contains(file.Name(), "_metadata_") {
			continue
		}
		live := slices.ContainsFunc(s.api.sortedClaims(), func(c *claim) bool {
			return len(c.devices()) > 0 && strings.Contains(file.Name(), "_"+string(c.uid)+".")
		})
		if !live {
			say("gate %s is open", file.Name())
		}
	}
	return owed
}

// unprepared says whether none of the claim's pods has come as far as to have it prepared.
func (s *sim) unprepared(c *claim) bool {
	return s.kubelet == nil || s.kubelet.claims[c.uid] == nil || !s.kubelet.claims[c.uid].prepared
}

// waitsForDevices says whether the scheduler has too few devices for the pod.
func (s *sim) waitsForDevices(p *pod) bool {
	needed, free := needs{}, slices.Clone(s.api.published)
	for _, c := range p.claims {
		if len(c.devices()) == 0 {
			needed.add(c, len(c.requests))
		}
	}
	for _, c := range s.api.sortedClaims() {
		free = slices.DeleteFunc(free, func(device string) bool { return slices.Contains(c.devices(), device) })
	}
	return !needed.met(s.kernel, free)
}

// othersTurn says whether a claim of the pod is another pod's for now, which is among those that it is reserved for.
func (s *sim) othersTurn(p *pod) bool {
	for _, c := range p.claims {
		if c.object == nil || len(c.object.Status.ReservedFor) < 2 {
			continue
		}
		for _, device := range c.devices() {
			v := s.kernel.vf(device)
			holder := s.kernel.podOf(v.netns)
			for _, ctr := range s.users(v) {
				holder = ctr.sandbox.pod.uid
			}
			if holder != "" && holder != p.uid && slices.ContainsFunc(c.object.Status.ReservedFor, hasUID(holder)) {
				return true
			}
		}
	}
	return false
}
