// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"cmp"
	"slices"
	"sync"

	"github.com/containerd/nri/pkg/api"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
)

// sandboxOf returns what the event says, without a look at the namespace: most pods have no device.
func sandboxOf(pod *api.PodSandbox) attachments.Sandbox {
	s := attachments.Sandbox{
		ID: pod.GetId(), PodUID: kubetypes.UID(pod.GetUid()), PodNamespace: pod.GetNamespace(), PodName: pod.GetName(),
	}
	for _, ns := range pod.GetLinux().GetNamespaces() {
		if ns.GetType() == "network" {
			s.NetNS = ns.GetPath()
		}
	}
	return s
}

// sandboxes are those of all pods of the node, with a claim or without.
type sandboxes struct {
	mu   sync.Mutex // guards the fields below
	byID map[string]known
	next int
}

// known is a sandbox, with the order in which it came.
type known struct {
	attachments.Sandbox
	order int
}

// add takes in a sandbox and returns the order in which it came.
func (l *sandboxes) add(s attachments.Sandbox) (order int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = map[string]known{}
	}
	l.next++
	l.byID[s.ID] = known{s, l.next}
	return l.next
}

// refuse forgets a sandbox that came in this order and was refused. It returns false for one that the runtime has listed since: it
// goes on, since the runtime did not get the answer.
func (l *sandboxes) refuse(id string, order int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k, ok := l.byID[id]; ok && k.order != order {
		return false
	}
	delete(l.byID, id)
	return true
}

// remove forgets the sandbox, and returns it with the namespace that it had: runtimes leave that out at a stop.
func (l *sandboxes) remove(s attachments.Sandbox) attachments.Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.NetNS == "" {
		s.NetNS = l.byID[s.ID].NetNS
	}
	delete(l.byID, s.ID)
	return s
}

// of returns the sandboxes of a pod.
func (l *sandboxes) of(pod kubetypes.UID) []attachments.Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []attachments.Sandbox
	for _, s := range l.byID {
		if s.PodUID == pod {
			list = append(list, s.Sandbox)
		}
	}
	return list
}

// replace takes the list over that a runtime gives at the beginning of a connection.
func (l *sandboxes) replace(all []attachments.Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byID = make(map[string]known, len(all))
	for _, s := range all {
		l.next++
		l.byID[s.ID] = known{s, l.next}
	}
}

// in returns the sandboxes of a namespace's pods in the order in which they came.
func (l *sandboxes) in(namespace string) []attachments.Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []known
	for _, s := range l.byID {
		if s.PodNamespace == namespace {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b known) int { return cmp.Compare(a.order, b.order) })
	var list []attachments.Sandbox
	for _, s := range all {
		list = append(list, s.Sandbox)
	}
	return list
}
