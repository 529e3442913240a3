// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// faults are how likely single calls fail, and since when that is so.
type faults struct {
	apiLost, kernel, slow, disk float64
	// remade is how likely VFs are made anew right after somebody has looked at them.
	remade float64
	// starved is how likely a container takes up to a minute to start.
	starved float64
	since   time.Time
	// quiet ends chaos and workload.
	quiet bool
}

func (s *sim) controlPlane() {
	for {
		s.do(&call{process: s.world, key: "control plane", poll: true, takes: span{100 * time.Millisecond, 2 * time.Second}, effect: s.api.control})
	}
}

// workload makes pods and deletes them.
func (s *sim) workload() {
	var shared []*claim
	for i := range 3 {
		shared = append(shared, s.api.newClaim(fmt.Sprint("shared", i), 1+i%2, nil))
		s.chooseUse(shared[i], i == 2)
	}
	for {
		s.do(&call{process: s.world, key: "workload", poll: true, takes: span{300 * time.Millisecond, 8 * time.Second}, effect: func() {
			if s.faults.quiet {
				return
			}
			pods := s.api.sortedPods()
			pods = slices.DeleteFunc(pods, func(p *pod) bool { return p.ending })
			starting := slices.DeleteFunc(slices.Clone(pods), func(p *pod) bool { return !s.starts(p) })
			switch {
			case len(starting) > 0 && s.chance(0.4):
				p := starting[s.rng.IntN(len(starting))]
				s.note("  pod %s is deleted by force while its containers are started", p.name)
				s.api.delete(p, true)
			case len(pods) < maxPods && s.chance(0.6):
				s.makePod(shared)
			case len(pods) > 0 && s.chance(0.5):
				p, force := pods[s.rng.IntN(len(pods))], s.chance(0.4)
				s.note("  pod %s is deleted, by force: %v", p.name, force)
				s.api.delete(p, force)
			}
		}})
	}
}

func (s *sim) makePod(shared []*claim) {
	var p *pod
	name := s.name("pod")
	switch s.rng.IntN(7) {
	case 0, 1:
		p = s.api.newPod(name, nil, 1)
	case 2:
		p = s.api.newPod(name, nil, 2)
	case 3:
		p = s.api.newPod(name, nil, 1, 1)
	case 4, 5:
		p = s.api.newPod(name, []*claim{shared[s.rng.IntN(len(shared))]})
	default:
		p = s.api.newPod(name, []*claim{shared[s.rng.IntN(len(shared))]}, 1)
	}
	var names []string
	for _, c := range p.claims {
		if c.ofPod != nil {
			s.chooseUse(c, s.chance(0.45))
		}
		names = append(names, fmt.Sprintf("%s (VLAN %d %s)", c.name, c.vlan, c.driver))
	}
	s.note("  pod %s with claims %v", p.name, names)
}

// chaos is what goes wrong.
func (s *sim) chaos() {
	s.do(&call{process: s.world, key: "weather", effect: func() {
		s.faults = faults{since: time.Now()}
		for _, p := range []*float64{&s.faults.apiLost, &s.faults.kernel, &s.faults.slow, &s.faults.disk} {
			*p = [...]float64{0, 0, 0.01, 0.03, 0.15}[s.rng.IntN(5)]
		}
		s.faults.remade = [...]float64{0, 0, 0.03}[s.rng.IntN(3)]
		s.faults.starved = [...]float64{0.05, 0.3}[s.rng.IntN(2)]
	}})
	for {
		s.do(&call{process: s.world, key: "chaos", poll: true, takes: span{time.Second, 20 * time.Second}, effect: func() {
			if !s.faults.quiet {
				s.goWrong()
				s.goWrongElsewhere()
			}
		}})
	}
}

func (s *sim) goWrong() {
	var attached, opened []*vf
	for _, v := range s.kernel.vfs {
		switch {
		case v.virtual:
		case v.hasLink() && s.kernel.namespaces[v.netns] != nil:
			attached = append(attached, v)
		case len(s.users(v)) > 0:
			opened = append(opened, v)
		}
	}
	var running []*sandbox
	for _, sb := range s.runtime.sandboxes {
		if sb.ready {
			running = append(running, sb)
		}
	}
	switch n := s.rng.IntN(103); {
	case n < 6 && s.agent != nil && len(running) > 0:
		// A pod is deleted by force while neither the agent nor kubelet is there to see it: its sandbox goes on.
		p := running[s.rng.IntN(len(running))].pod
		s.note("  agent and kubelet end, and pod %s is deleted by force", p.name)
		s.condemn(s.agent.process, s.kubelet.process)
		s.killAgent()
		s.agentBack()
		s.restartKubelet(false)
		if s.api.pods[p.uid] != nil {
			s.api.delete(p, true)
		}
	case n < 35:
		if s.agent != nil && s.agent.crashIn == 0 {
			s.agent.crashIn = 1 + s.rng.IntN(60)
			s.agentBack()
		}
	case n < 41:
		s.restartKubelet(s.chance(0.15))
	case n < 43:
		s.note("  the runtime is restarted")
		s.restartRuntime()
	case n < 50:
		s.note("  NRI is lost")
		s.runtime.off = true
		s.runtime.lose()
		s.after("NRI is back", span{100 * time.Millisecond, 40 * time.Second}, func() { s.runtime.off = false })
	case n < 58:
		if s.chance(0.3) {
			s.cutOff(nodeName)
		} else if !s.api.away {
			s.note("  the API server is away")
			s.api.away = true
			s.after("the API server is back", span{time.Second, 60 * time.Second}, func() { s.api.away = false; s.faults.since = time.Now() })
		}
	case n < 64:
		s.remakeVFs(span{10 * time.Millisecond, 2 * time.Second})
	case n < 72 && len(attached)+len(opened) > 0:
		some := append(attached, opened...)
		v := some[s.rng.IntN(len(some))]
		v.vlan, v.upset, v.retagged = 900+s.rng.IntN(10), time.Now(), time.Now()
		s.note("  an administrator changes %s", v)
	case n < 78 && len(attached) > 0:
		v := attached[s.rng.IntN(len(attached))]
		if ns := s.kernel.namespaces[v.netns]; !ns.own && slices.ContainsFunc(running, func(sb *sandbox) bool { return sb.netns == ns.path && len(sb.containers) > 0 }) {
			own := ns.path + "-own"
			if s.kernel.namespaces[own] == nil {
				s.kernel.namespaces[own] = &namespace{path: own, pod: ns.pod, own: true}
			}
			v.netns, v.ifName = own, fmt.Sprintf("own%d", v.id)
			s.note("  pod %s moves %s", ns.pod.name, v)
		}
	case n < 84 && len(running) > 0:
		sb := running[s.rng.IntN(len(running))]
		s.note("  sandbox %s dies", sb)
		s.runtime.die(sb)
		if s.chance(0.3) {
			s.kernel.end(sb.netns)
		}
	case n < 90 && len(running) > 0:
		sb := running[s.rng.IntN(len(running))]
		if len(sb.containers) > 0 {
			c := sb.containers[s.rng.IntN(len(sb.containers))]
			s.note("  container %s of %s dies", c.name, sb.pod.name)
			s.runtime.exit(c)
		}
	case n < 98:
		v := s.kernel.vfs[s.rng.IntN(len(s.kernel.vfs))]
		switch {
		case v.present && !v.virtual && s.chance(0.25):
			s.note("  somebody wants the driver %s for %s", othersDriver, v)
			v.override, v.upset = othersDriver, time.Now()
			s.after("somebody does not want the driver for "+v.name+" any more", span{time.Second, 40 * time.Second}, func() {
				if v.override == othersDriver {
					v.override, v.upset = v.overrideOfNode(), time.Now()
				}
			})
		case v.present && s.chance(0.3):
			s.note("  something else in the IOMMU group of %s is in use", v)
			v.crowded = true
			s.after("nothing else in the IOMMU group of "+v.name+" is in use", span{time.Second, 40 * time.Second}, func() { v.crowded = false })
		case v.present && v.driver == types.DriverVFIO:
			s.note("  %s is unbound", v)
			s.lose(v)
			v.driver, v.upset = "", time.Now()
			v.bindings++
			if v.ofNode == types.DriverVFIO {
				s.after("driver of "+v.name+" is bound", span{time.Second, 40 * time.Second}, func() {
					if v.present && v.driver == "" {
						v.driver, v.upset = v.ofNode, time.Now()
						v.bindings++
					}
				})
			}
		case v.hasLink() && !v.virtual && v.netns != "" && v.netns != limbo:
			v.driver, v.upset, v.netns = "", time.Now(), ""
			s.note("  the driver of %s is unbound", v)
			s.after("driver of "+v.name+" is bound", span{time.Second, 40 * time.Second}, func() {
				if v.driver == "" {
					v.upset = time.Now()
					v.bindOwn()
				}
			})
		}
	case n < 101:
		s.note("  the folder of CDI files is emptied")
		if s.agent != nil && s.agent.serving && s.agent.crashIn == 0 {
			_ = os.RemoveAll(s.cdiDir())
			return
		}
		// Of metadata that is removed while the agent is away nobody knows what it was, until kubelet is restarted.
		gates, _ := filepath.Glob(filepath.Join(s.cdiDir(), "*-claim_*"))
		for _, path := range gates {
			_ = os.Remove(path)
		}
	case n < 102:
		if claims := s.api.sortedClaims(); len(claims) > 0 {
			c := claims[s.rng.IntN(len(claims))]
			s.note("  somebody empties the status of claim %s", c.name)
			c.object.Status.Devices, c.emptied = nil, true
		}
	default:
		s.reboot()
	}
}

// condemn is for processes that end in the same step, before the first of them does: what wakes up then must find all of them
// dead.
func (s *sim) condemn(processes ...*process) {
	for _, p := range processes {
		if !p.dead {
			p.dead = true
		}
	}
}

// agentBack starts the agent again some time after it was killed.
func (s *sim) agentBack() {
	takes := span{time.Second, 40 * time.Second}
	if s.chance(0.1) {
		takes = span{time.Minute, 4 * time.Minute}
	}
	go s.do(&call{process: s.world, key: "the agent is started", takes: takes,
		ready: func() bool { return s.agent == nil }, effect: s.startAgent})
}

func (s *sim) restartKubelet(lost bool) {
	k := s.kubelet
	if k.away {
		return
	}
	s.condemn(k.process)
	k.process.cancel()
	checkpoint := k.claims
	if lost {
		s.note("  kubelet loses its checkpoint")
		checkpoint = map[kubetypes.UID]*claimInfo{}
	}
	if s.chance(0.6) {
		s.startKubelet(checkpoint)
		return
	}
	s.note("  kubelet is away")
	s.kubelet = &kubelet{sim: s, process: k.process, claims: checkpoint, away: true}
	s.after("kubelet is started", span{time.Second, 90 * time.Second}, func() { s.startKubelet(s.kubelet.claims) })
}

// restartRuntime ends what the runtime is doing. What it has made stays.
func (s *sim) restartRuntime() {
	r := s.runtime
	s.condemn(r.process)
	r.process.cancel()
	half := slices.DeleteFunc(slices.Clone(r.sandboxes), func(sb *sandbox) bool { return sb.listed })
	for _, sb := range half {
		r.remove(sb)
		s.kernel.end(sb.netns)
	}
	r.process, r.requests, r.syncing, r.plugin = newProcess("runtime"), 0, false, nil
}

// remakeVFs is what a change of the number of VFs does, which takes so long.
func (s *sim) remakeVFs(takes span) {
	s.note("  VFs are made anew")
	vfs := slices.DeleteFunc(slices.Clone(s.kernel.vfs), func(v *vf) bool { return v.virtual })
	for _, v := range vfs {
		s.lose(v)
		v.present, v.upset, v.netns = false, time.Now(), ""
	}
	for _, v := range vfs {
		s.after(v.name+" is back", takes, func() {
			if !v.present {
				s.kernel.group(v)
				v.make()
				v.upset = time.Now()
			}
		})
	}
}

// reboot is a power cut: nothing is left of what is not on disk.
func (s *sim) reboot() {
	s.note("  the node is rebooted")
	s.condemn(s.runtime.process, s.kubelet.process)
	if s.agent != nil {
		s.condemn(s.agent.process)
		s.killAgent()
		s.agentBack()
	}
	for _, v := range s.kernel.vfs {
		v.make()
		v.upset, v.present = time.Now(), !v.virtual
	}
	vfs := slices.Clone(s.kernel.vfs[:vfCount])
	s.rng.Shuffle(len(vfs), func(i, j int) { vfs[i].iommuGroup, vfs[j].iommuGroup = vfs[j].iommuGroup, vfs[i].iommuGroup })
	clear(s.kernel.namespaces)
	s.bootID = s.name("boot")
	_ = os.RemoveAll(s.dir)
	for _, sb := range s.runtime.sandboxes {
		s.runtime.die(sb)
	}
	s.restartRuntime()
	s.restartKubelet(false)
}

// rest ends the faults, and puts right what they broke and nobody else would.
func (s *sim) rest() {
	s.note("rest")
	s.faults = faults{since: time.Now(), quiet: true}
	if s.agent != nil {
		s.agent.crashIn = 0
	}
	for _, n := range s.others {
		if n.agent != nil {
			n.agent.crashIn = 0
		}
	}
	clear(s.api.cutOff)
	s.api.away, s.runtime.off = false, false
}
