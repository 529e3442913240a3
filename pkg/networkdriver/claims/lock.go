// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"sync"
)

// keyedLock is a lock per key: holders of different keys do not wait for each other.
type keyedLock struct {
	mu    sync.Mutex // guards locks and the user counts in it
	locks map[string]*keyLock
}

type keyLock struct {
	held  chan struct{} // holds an element while the key is locked
	users int           // holder and waiters
}

// lock waits until the key is free or the context ends.
func (k *keyedLock) lock(ctx context.Context, key string) (unlock func(), err error) {
	k.mu.Lock()
	if k.locks == nil {
		k.locks = map[string]*keyLock{}
	}
	l := k.locks[key]
	if l == nil {
		l = &keyLock{held: make(chan struct{}, 1)}
		k.locks[key] = l
	}
	l.users++
	k.mu.Unlock()

	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.locks, key)
		}
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("wait for an earlier call for the same claim: %w", context.Cause(ctx))
	}
}

// reservations keeps two concurrent Prepares from taking the same thing before the allocation table shows it: a
// device, or an interface name in a pod.
type reservations struct {
	mu   sync.Mutex // guards held
	held map[string]Ref
}

// take reserves all of the things or, if another claim holds one of them, none, and then says which and who.
func (r *reservations) take(claim Ref, things []string) (release func(), taken string, holder Ref) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held == nil {
		r.held = map[string]Ref{}
	}
	for _, thing := range things {
		if holder, ok := r.held[thing]; ok && holder != claim {
			return nil, thing, holder
		}
	}
	for _, thing := range things {
		r.held[thing] = claim
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, thing := range things {
			delete(r.held, thing)
		}
	}, "", Ref{}
}
