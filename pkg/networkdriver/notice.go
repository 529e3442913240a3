// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import "sync"

// notice is a sentence for the node config's status; empty when there is nothing to say.
type notice struct {
	mu      sync.Mutex // guards the fields below
	text    string
	changed chan struct{} // closed and made anew when text changes
}

func newNotice() *notice { return &notice{changed: make(chan struct{})} }

func (n *notice) set(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if text == n.text {
		return
	}
	n.text = text
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *notice) get() (text string, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text, n.changed
}
