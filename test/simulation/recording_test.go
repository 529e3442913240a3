// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"
)

// recorded is one line of a recording: the seconds since its beginning, and what happened.
type recorded struct {
	at   time.Duration
	what string
	// answer is what came of a request: ok, failed or refused; empty for what has no answer.
	answer string
}

// story is what the agent of a recording logged about devices, each message with its pod.
type story []string

// storyLine takes the message and the pod out of what the agent logs.
var storyLine = regexp.MustCompile(`^(Device prepared|Device attached to its pod|Device is back from its pod|Device freed|` +
	`Device is left over and is given back|Claim is passed on to the next pod that it is reserved for)\b.* pod=default/(\S+)`)

// readRecording reads a file of lines such as
//
//	1.4  kubelet prepare a -> ok
//
// with # before comments. What the agent logs is in the story, everything else is what happened to it:
//
//	claim NAME VLAN                      a claim for one device
//	pod POD CLAIM                        a pod that uses the claim is bound to the node
//	pod POD gone                         its object is gone, since kubelet is done with it
//	pod POD deleted by force             its object is gone at once
//	claim NAME gone                      so is the claim's
//	kubelet prepare POD, unprepare POD   what kubelet asks for, and the answer: ok or failed
//	kubelet restarted
//	runtime run POD, start POD CONTAINER, stop POD, remove POD
//	                                     what the runtime does, and what comes of it: ok or refused
//	agent killed                         at once
//	agent killed after: CALL             the next call of the name is its last one
//	agent started
//	agent MESSAGE: POD                   what it logs
func readRecording(t *testing.T, path string) (lines []recorded, told story) {
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(data), "\n") {
		line, _, _ = strings.Cut(line, "#")
		at, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		if at == "" {
			continue
		}
		seconds, err := strconv.ParseFloat(at, 64)
		if err != nil {
			t.Fatalf("%s: %q: %v", path, line, err)
		}
		what, answer, _ := strings.Cut(strings.TrimSpace(what), " -> ")
		if message, ok := strings.CutPrefix(what, "agent "); ok && storyLine.MatchString(strings.Replace(message, ": ", " pod=default/", 1)) {
			told = append(told, message)
			continue
		}
		lines = append(lines, recorded{time.Duration(seconds * float64(time.Second)), what, answer})
	}
	return lines, told
}

// TestRecordings replays what was recorded on real nodes. The driver has to do the same here as it did there, and kubelet and
// the runtime have to have done what they do here: where they have not, the simulation is wrong.
func TestRecordings(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			lines, told := readRecording(t, path)
			r := replay(t, lines, told)
			if r.failure != "" {
				t.Errorf("%s\n%s", r.log(lastLines), r.failure)
			}
		})
	}
}

// replay has the lines happen at their times.
func replay(t *testing.T, lines []recorded, told story) (r result) {
	dir := filepath.Join(stateDir(t), "recording")
	synctest.Test(t, func(t *testing.T) {
		s := newSim(1, dir, mutant{})
		var heard story
		s.heard = func(line string) {
			if found := storyLine.FindStringSubmatch(line); found != nil {
				heard = append(heard, found[1]+": "+found[2])
			}
		}
		s.startAgent()
		s.kubelet = &kubelet{sim: s, process: newProcess("kubelet"), claims: map[kubetypes.UID]*claimInfo{}}
		s.kubelet.client = client{sim: s, process: s.kubelet.process, node: nodeName}
		go s.controlPlane()
		s.run(func() bool {
			_, ready := s.agent.readySince()
			return ready && len(s.api.published) == len(s.kernel.vfs)
		})

		p := &player{sim: s, pods: map[string]*pod{}, begin: time.Now()}
		go p.play(lines)
		s.run(func() bool { return p.played })
		s.settled("after the recording")
		if s.failure == "" && !slices.Equal(heard, told) {
			s.fail("the agent logged\n  %s\nand where it was recorded\n  %s", strings.Join(heard, "\n  "), strings.Join(told, "\n  "))
		}
		s.shutdown()
		r = result{steps: s.steps, failure: s.failure, trace: s.trace}
	})
	return r
}

// player plays a recording.
type player struct {
	sim    *sim
	pods   map[string]*pod
	begin  time.Time
	played bool
}

func (p *player) play(lines []recorded) {
	s := p.sim
	for _, line := range lines {
		at := line.at - time.Since(p.begin)
		s.do(&call{process: s.world, key: line.what, takes: span{at, at}, effect: func() { p.begins(line) }})
	}
	s.do(&call{process: s.world, key: "the end", takes: span{20 * time.Second, 20 * time.Second}, effect: func() { p.played = true }})
}

// begins is the beginning of what the line tells of.
func (p *player) begins(line recorded) {
	s, k, r := p.sim, p.sim.kubelet, p.sim.runtime
	words := strings.Fields(line.what)
	switch who := words[0]; {
	case who == "claim" && words[2] == "gone":
		s.api.claims[words[1]].object = nil
		delete(s.api.claims, words[1])
		return
	case who == "claim":
		s.api.newClaim(words[1], 1, nil).vlan, _ = strconv.Atoi(words[2])
		return
	case who == "agent" && words[1] == "started":
		s.startAgent()
		return
	case line.what == "agent killed":
		s.killAgent()
		return
	case who == "agent" && strings.HasPrefix(line.what, "agent killed after: "):
		s.killAfter = strings.TrimPrefix(line.what, "agent killed after: ")
		return
	case line.what == "kubelet restarted":
		k.process.dead = true
		k.process.cancel()
		for _, info := range k.claims {
			info.prepared = false
		}
		s.kubelet = &kubelet{sim: s, process: newProcess("kubelet"), claims: k.claims}
		s.kubelet.client = client{sim: s, process: s.kubelet.process, node: nodeName}
		return
	case who == "pod" && words[2] == "deleted":
		s.api.delete(p.pods[words[1]], true)
		return
	case who == "pod" && words[2] != "gone":
		pod := s.api.newPod(words[1], []*claim{s.api.claims[words[2]]})
		p.pods[pod.name] = pod
		s.api.control() // binds it
		if !pod.bound {
			s.fail("pod %s cannot be bound", pod.name)
		}
		return
	case who == "pod":
		pod := p.pods[words[1]]
		if info := p.needsUnprepare(pod); info != nil {
			s.fail("kubelet ended pod %s without unpreparing claim %s, which it does here", pod.name, info.name)
		}
		for _, info := range k.claims {
			delete(info.pods, pod.uid)
		}
		delete(s.api.pods, pod.uid)
		return
	}
	pod := p.pods[words[2]]
	newest := func() *sandbox {
		all := r.of(pod.uid)
		if len(all) == 0 {
			s.fail("pod %s has no sandbox", pod.name)
			return &sandbox{pod: pod}
		}
		return all[len(all)-1]
	}
	switch who, verb := words[0], words[1]; who + " " + verb {
	case "kubelet prepare":
		if p.isPrepared(pod) {
			s.fail("kubelet prepared the claims of pod %s, which it does not here, since they are", pod.name)
		}
		p.request(line, k.process, func() error { return k.prepare(pod) })
	case "kubelet unprepare":
		if p.needsUnprepare(pod) == nil {
			s.fail("kubelet unprepared a claim of pod %s, which it does not here", pod.name)
		}
		p.request(line, k.process, func() error { return k.unprepare(pod.uid) })
	case "runtime run":
		if !p.isPrepared(pod) {
			s.fail("kubelet made a sandbox of pod %s without preparing its claims, which it does here", pod.name)
		}
		p.request(line, r.process, func() error { return r.run(pod) })
	case "runtime start":
		i := slices.IndexFunc(pod.containers, func(c *container) bool { return c.name == words[3] })
		sb := newest()
		p.request(line, r.process, func() error { return r.start(sb, pod.containers[i]) })
	case "runtime stop":
		sb := newest()
		p.request(line, r.process, func() error { return r.stop(sb) })
	case "runtime remove":
		sb := newest()
		p.request(line, r.process, func() error { return r.forget(sb) })
	default:
		s.fail("recording: %q is not understood", line.what)
	}
}

// request compares the answer with the recorded one.
func (p *player) request(line recorded, process *process, work func() error) {
	s := p.sim
	go func() {
		err := work()
		s.do(&call{process: process, key: line.what + " is done", effect: func() {
			if wanted := line.answer == "" || line.answer == "ok"; wanted != (err == nil) {
				s.fail("%s: recorded is %q, here it is: %v", line.what, line.answer, err)
			}
		}})
	}()
}

// isPrepared says whether kubelet takes all claims of the pod for prepared.
func (p *player) isPrepared(pod *pod) bool {
	return !slices.ContainsFunc(pod.claims, func(c *claim) bool {
		info := p.sim.kubelet.claims[c.uid]
		return info == nil || !info.prepared
	})
}

// needsUnprepare returns a claim that kubelet unprepares with the pod.
func (p *player) needsUnprepare(pod *pod) *claimInfo {
	for _, info := range p.sim.kubelet.claims {
		if info.pods[pod.uid] && len(info.pods) == 1 {
			return info
		}
	}
	return nil
}
