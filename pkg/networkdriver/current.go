// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import "sync"

// current is a value that others follow.
type current[T any] struct {
	mu      sync.Mutex // guards the fields below
	value   T
	changed chan struct{} // closed and made anew when there is another value
}

func newCurrent[T any]() *current[T] { return &current[T]{changed: make(chan struct{})} }

func (c *current[T]) set(value T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = value
	close(c.changed)
	c.changed = make(chan struct{})
}

// get returns the value, and a channel that is closed when there is another.
func (c *current[T]) get() (T, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.value, c.changed
}
