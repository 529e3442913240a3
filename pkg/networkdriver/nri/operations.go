// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"fmt"
	"sync"
	"time"
)

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
