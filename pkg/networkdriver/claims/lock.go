// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"sync"

	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
)

// claimLocks keep calls for one claim apart.
type claimLocks struct{ keylock.Locks[string] }

// lock waits until no other call for the claim is at work, or until the context ends.
func (l *claimLocks) lock(ctx context.Context, uid string) (unlock func(), err error) {
	if unlock, err = l.Lock(ctx, uid); err != nil {
		return nil, fmt.Errorf("wait for an earlier call for the same claim: %w", err)
	}
	return unlock, nil
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
