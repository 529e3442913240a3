// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
)

// kubelet is one life of kubelet, with its rules of dynamic resource allocation (pkg/kubelet/cm/dra).
type kubelet struct {
	sim     *sim
	process *process
	client  client
	// claims is its checkpoint.
	claims map[kubetypes.UID]*claimInfo
	// workers are the pods that it looks after.
	workers map[kubetypes.UID]*pod
	// away is true while it is not running.
	away bool
}

// claimInfo is what it knows of a claim.
type claimInfo struct {
	name string
	uid  kubetypes.UID
	pods map[kubetypes.UID]bool
	// prepared is not in the checkpoint: after a restart a claim is prepared again for a new sandbox.
	prepared bool
}

const (
	callTimeout = 45 * time.Second // of a call to a DRA driver
)

var (
	// afterPrepare is the time to the next try after a claim could not be prepared, which other news of the pod shorten.
	afterPrepare = span{10 * time.Second, 90 * time.Second}
	afterFailure = span{2 * time.Second, 20 * time.Second}
)

// startKubelet starts kubelet with a checkpoint, which may be empty.
func (s *sim) startKubelet(checkpoint map[kubetypes.UID]*claimInfo) {
	k := &kubelet{sim: s, process: newProcess("kubelet"), claims: checkpoint, workers: map[kubetypes.UID]*pod{}}
	k.client = client{sim: s, process: k.process, node: nodeName}
	for _, info := range checkpoint {
		info.prepared = false
	}
	s.kubelet = k
	go k.run()
	go k.reconcile()
}

// run looks for pods to look after.
func (k *kubelet) run() {
	s := k.sim
	for {
		var found []*pod
		s.do(&call{process: k.process, key: "look for pods", poll: true, takes: span{200 * time.Millisecond, 2 * time.Second}, effect: func() {
			for _, p := range s.api.sortedPods() {
				if p.bound && !p.ended && k.workers[p.uid] == nil {
					k.workers[p.uid] = p
					found = append(found, p)
				}
			}
			// What runs without an object is ended.
			for _, sb := range s.runtime.sandboxes {
				if p := sb.pod; sb.listed && k.workers[p.uid] == nil && s.api.pods[p.uid] == nil {
					k.workers[p.uid] = p
					found = append(found, p)
				}
			}
		}})
		for _, p := range found {
			go k.work(p)
		}
	}
}

// work is a pod's worker.
func (k *kubelet) work(p *pod) {
	s := k.sim
	ending := func() bool { return p.ending || s.api.pods[p.uid] == nil }
	for !ending() {
		again, err := k.sync(p)
		if err != nil {
			s.do(&call{process: k.process, key: "pod " + p.name + " fails", effect: func() { s.note("  pod %s: %v", p.name, err) }})
		}
		s.sleep(k.process, "worker of "+p.name, again, func() bool { return ending() || err == nil && k.fallen(p) })
	}
	k.end(p)
}

// fallen says whether something of the pod does not run.
func (k *kubelet) fallen(p *pod) bool {
	sb := k.ready(p)
	return sb == nil || slices.ContainsFunc(p.containers, func(c *container) bool { return !c.started || c.sandbox != sb })
}

// starts says whether the pod has a sandbox, and containers that are still being started.
func (s *sim) starts(p *pod) bool { return s.kubelet.ready(p) != nil && s.kubelet.fallen(p) }

// ready returns the newest sandbox that runs.
func (k *kubelet) ready(p *pod) *sandbox {
	for _, sb := range slices.Backward(k.sim.runtime.of(p.uid)) {
		if sb.ready {
			return sb
		}
	}
	return nil
}

// sync brings the pod further, and returns when to try again at the latest.
func (k *kubelet) sync(p *pod) (again span, err error) {
	r := k.sim.runtime
	sb := k.ready(p)
	for _, old := range r.of(p.uid) {
		if old != sb {
			if err := k.remove(old); err != nil {
				return afterFailure, err
			}
		}
	}
	if sb == nil {
		if err := k.prepare(p); err != nil {
			return afterPrepare, err
		}
		err := r.serve(k.process, "run "+p.name, func() error { return r.run(p) })
		sb = k.ready(p)
		if err != nil || sb == nil {
			return afterFailure, errors.Join(err, errors.New("no sandbox"))
		}
	}
	for _, c := range p.containers {
		if c.started && c.sandbox == sb {
			continue
		}
		err = errors.Join(err, r.serve(k.process, "start "+p.name, func() error { return r.start(sb, c) }))
	}
	return afterFailure, err
}

// prepare has the pod's claims prepared, those that are not.
func (k *kubelet) prepare(p *pod) error {
	s := k.sim
	var batch []*claim
	for _, c := range p.claims {
		object, err := k.client.GetClaim(withActor(k.process.ctx, "worker of "+p.name), podsNamespace, c.name)
		if err != nil {
			return err
		}
		if object.UID != c.uid || !slices.ContainsFunc(object.Status.ReservedFor,
			func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == p.uid }) {
			return fmt.Errorf("claim %s is not reserved for pod %s", c.name, p.name)
		}
		s.do(&call{process: k.process, key: "claim " + c.name + " is used by " + p.name, effect: func() {
			info := k.claims[c.uid]
			if info == nil {
				info = &claimInfo{name: c.name, uid: c.uid, pods: map[kubetypes.UID]bool{}}
				k.claims[c.uid] = info
			}
			info.pods[p.uid] = true
			if !info.prepared {
				batch = append(batch, c)
			}
		}})
	}
	if len(batch) == 0 {
		return nil
	}
	a := s.agent
	if a == nil || !a.serving {
		return errors.New("the driver is not registered")
	}
	results := map[kubetypes.UID]error{}
	err := s.ask(k.process, a, "Prepare for "+p.name, callTimeout, func(ctx context.Context) error {
		return a.prepareClaims(ctx, batch, results)
	})
	s.do(&call{process: k.process, key: "prepared for " + p.name, effect: func() {
		for _, c := range batch {
			if err == nil {
				err = results[c.uid]
			}
		}
		for _, c := range batch {
			if err == nil && k.claims[c.uid] != nil {
				k.claims[c.uid].prepared = true
				s.checkPrepared(c, p)
			}
		}
	}})
	return err
}

// end ends the pod and tells the API server.
func (k *kubelet) end(p *pod) {
	s, r := k.sim, k.sim.runtime
	for {
		var err error
		for _, sb := range r.of(p.uid) {
			err = errors.Join(err, r.serve(k.process, "stop "+sb.id, func() error { return r.stop(sb) }))
		}
		if err == nil {
			err = k.unprepare(p.uid)
		}
		if err == nil {
			break
		}
		s.do(&call{process: k.process, key: "pod " + p.name + " cannot be ended", effect: func() { s.note("  pod %s: %v", p.name, err) }})
		s.sleep(k.process, "end of "+p.name, span{3 * time.Second, 15 * time.Second}, nil)
	}
	for _, sb := range r.of(p.uid) {
		_ = k.remove(sb)
	}
	s.do(&call{process: k.process, key: "pod " + p.name + " has ended", takes: span{10 * time.Millisecond, time.Second}, effect: func() {
		delete(k.workers, p.uid)
		if len(r.of(p.uid)) > 0 {
			return // an earlier life of kubelet had asked for one more
		}
		p.ended = true
		delete(s.api.pods, p.uid)
	}})
}

// remove stops and removes a sandbox.
func (k *kubelet) remove(sb *sandbox) error {
	r := k.sim.runtime
	err := r.serve(k.process, "stop "+sb.id, func() error { return r.stop(sb) })
	if err == nil {
		err = r.serve(k.process, "remove "+sb.id, func() error { return r.forget(sb) })
	}
	return err
}

// unprepare gives back what no other pod of the node uses. What is not in the checkpoint is not given back.
func (k *kubelet) unprepare(pod kubetypes.UID) error {
	s := k.sim
	var batch []*claimInfo
	s.do(&call{process: k.process, key: "unprepare for " + string(pod), effect: func() {
		for _, uid := range slices.Sorted(maps.Keys(k.claims)) {
			switch info := k.claims[uid]; {
			case !info.pods[pod]:
			case len(info.pods) > 1:
				delete(info.pods, pod)
			default:
				batch = append(batch, info)
			}
		}
	}})
	if len(batch) == 0 {
		return nil
	}
	a := s.agent
	if a == nil || !a.serving {
		return errors.New("the driver is not registered")
	}
	results := map[kubetypes.UID]error{}
	err := s.ask(k.process, a, "Unprepare for "+string(pod), callTimeout, func(ctx context.Context) error {
		return a.unprepareClaims(ctx, batch, results)
	})
	s.do(&call{process: k.process, key: "unprepared for " + string(pod), effect: func() {
		if err == nil {
			for _, info := range batch {
				err = errors.Join(err, results[info.uid])
			}
		}
		for _, info := range batch {
			switch {
			case err != nil: // of all, if one cannot be unprepared
			case len(info.pods) > 1: // a pod came meanwhile
				delete(info.pods, pod)
				info.prepared = false
			default:
				delete(k.claims, info.uid)
			}
		}
	}})
	return err
}

// reconcile gives back what is for pods only that the API does not have any more: also for those whose containers are still being
// started or stopped.
func (k *kubelet) reconcile() {
	s := k.sim
	for {
		var gone []kubetypes.UID
		s.do(&call{process: k.process, key: "reconcile claims", poll: true, takes: span{60 * time.Second, 61 * time.Second}, effect: func() {
			for _, uid := range slices.Sorted(maps.Keys(k.claims)) {
				for pod := range k.claims[uid].pods {
					if s.api.pods[pod] == nil {
						gone = append(gone, pod)
					}
				}
			}
			slices.Sort(gone)
			gone = slices.Compact(gone)
		}})
		for _, pod := range gone {
			_ = k.unprepare(pod)
		}
	}
}
