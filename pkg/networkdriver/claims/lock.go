// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

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

// times are of claims.
type times struct {
	mu sync.Mutex // guards at
	at map[kubetypes.UID]time.Time
}

func (t *times) note(claim kubetypes.UID, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.at == nil {
		t.at = map[kubetypes.UID]time.Time{}
	}
	t.at[claim] = now
}

func (t *times) forget(claim kubetypes.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.at, claim)
}

func (t *times) all() map[kubetypes.UID]time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.at)
}

// reservations keeps two concurrent Prepares from taking the same thing before the allocation table shows it: a
// device, or an interface name in a pod.
type reservations struct {
	mu   sync.Mutex // guards held
	held map[string]holder
}

// holder is who has reserved a thing.
type holder struct {
	claim   Ref
	request string
}

// take reserves all of the things, which come with the requests that they are for, or none if another claim holds one of
// them, and then says which and who.
func (r *reservations) take(claim Ref, things map[string]string) (release func(), taken string, by holder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held == nil {
		r.held = map[string]holder{}
	}
	for _, thing := range slices.Sorted(maps.Keys(things)) {
		if by, ok := r.held[thing]; ok && by.claim != claim {
			return nil, thing, by
		}
	}
	for thing, request := range things {
		r.held[thing] = holder{claim, request}
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for thing := range things {
			delete(r.held, thing)
		}
	}, "", holder{}
}
