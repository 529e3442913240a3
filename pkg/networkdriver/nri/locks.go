// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"fmt"
	"sync"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"
)

// podLocks is one lock per pod that something is being done for. It is held over I/O and so taken with a context.
type podLocks struct {
	mu   sync.Mutex // guards pods and users
	pods map[kubetypes.UID]*podLock
}

type podLock struct {
	held  chan struct{} // holds a token while the lock is taken
	users int           // holder and those who wait
}

func (l *podLocks) lock(ctx context.Context, pod kubetypes.UID) (unlock func(), err error) {
	l.mu.Lock()
	if l.pods == nil {
		l.pods = map[kubetypes.UID]*podLock{}
	}
	p := l.pods[pod]
	if p == nil {
		p = &podLock{held: make(chan struct{}, 1)}
		l.pods[pod] = p
	}
	p.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if p.users--; p.users == 0 {
			delete(l.pods, pod)
		}
	}
	select {
	case p.held <- struct{}{}:
		return func() { <-p.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// operations are the pieces of work going on, to wait for them and to find one that never ends.
type operations struct {
	mu      sync.Mutex // guards the fields below
	next    int
	current map[int]operation
	idle    chan struct{} // closed when the last one ends; nil when nobody waits
}

type operation struct {
	what  string
	start time.Time
}

func (o *operations) begin(what string) (end func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.current == nil {
		o.current = map[int]operation{}
	}
	id := o.next
	o.next++
	o.current[id] = operation{what, time.Now()}
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.current, id)
		if len(o.current) == 0 && o.idle != nil {
			close(o.idle)
			o.idle = nil
		}
	}
}

// wait returns when nothing is going on.
func (o *operations) wait() {
	o.mu.Lock()
	if len(o.current) == 0 {
		o.mu.Unlock()
		return
	}
	if o.idle == nil {
		o.idle = make(chan struct{})
	}
	idle := o.idle
	o.mu.Unlock()
	<-idle
}

func (o *operations) olderThan(limit time.Duration) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, op := range o.current {
		if age := time.Since(op.start); age > limit {
			return fmt.Sprintf("%s has been going on for %s", op.what, age.Round(time.Second))
		}
	}
	return ""
}
