// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package keylock has a lock per key that may be held over I/O: who waits for it gives up when the context ends.
package keylock

import (
	"context"
	"sync"
)

// Locks are locks by key. Holders of different keys do not wait for each other, and a key that nobody holds costs
// nothing. The zero value is ready to use.
type Locks[K comparable] struct {
	mu    sync.Mutex // guards locks and the user counts in it
	locks map[K]*lock
}

type lock struct {
	held  chan struct{} // holds a token while the key is locked
	users int           // holder and waiters
}

// Lock waits until nobody holds the key, or until the context ends, whose cause is the error. Whoever comes with a context
// that has ended does not get the lock.
func (l *Locks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l.mu.Lock()
	if l.locks == nil {
		l.locks = map[K]*lock{}
	}
	k := l.locks[key]
	if k == nil {
		k = &lock{held: make(chan struct{}, 1)}
		l.locks[key] = k
	}
	k.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(l.locks, key)
		}
	}
	select {
	case k.held <- struct{}{}:
		return func() { <-k.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
