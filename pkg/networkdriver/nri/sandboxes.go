// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
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
	mu   sync.Mutex // guards byID
	byID map[string]attachments.Sandbox
}

func (l *sandboxes) add(s attachments.Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = map[string]attachments.Sandbox{}
	}
	l.byID[s.ID] = s
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

// replace takes the list over that a runtime gives at the beginning of a connection.
func (l *sandboxes) replace(all []attachments.Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byID = make(map[string]attachments.Sandbox, len(all))
	for _, s := range all {
		l.byID[s.ID] = s
	}
}
