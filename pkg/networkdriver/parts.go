// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/hive/cell"

	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// minPartDelay and maxPartDelay bound the wait before a part that ended is started again.
	minPartDelay = time.Second
	maxPartDelay = time.Minute
	// soundAfter is how long a part has to run until its last failure counts as over.
	soundAfter = 30 * time.Second
	// hopelessAfter is how long a part may go on failing until the agent is restarted, where that may help.
	hopelessAfter = 5 * time.Minute
)

// errEnded is for a part that ended without an error, which none has reason to.
var errEnded = errors.New("it has ended without an error")

// parts keeps the parts of the driver running, and knows which of them do not run as they should.
type parts struct {
	log *slog.Logger

	mu       sync.Mutex // guards the fields below
	failures map[string]*failure
	changed  chan struct{} // closed and made anew when failures change
}

// failure is that of a part which has ended before its time, and has not run soundly since.
type failure struct {
	part string
	err  error
	// since is when the part failed first.
	since time.Time
}

func newParts(log *slog.Logger) *parts {
	return &parts{log: log, failures: map[string]*failure{}, changed: make(chan struct{})}
}

// keep runs a part until the context ends. Whenever the part ends before that, it is started again after a delay that
// grows with every failure. The failure is visible until a run has lasted.
func (p *parts) keep(ctx context.Context, health cell.Health, part string, run func(context.Context) error) {
	delay := minPartDelay
	for {
		before := p.failure(part)
		sound := time.AfterFunc(soundAfter, func() {
			if p.over(before) {
				health.OK("Running again")
			}
		})
		started := time.Now()
		err := cmp.Or(run(ctx), errEnded)
		sound.Stop()
		if ctx.Err() != nil {
			p.over(p.failure(part))
			return
		}
		if time.Since(started) >= soundAfter {
			delay = minPartDelay
		}
		p.failed(part, err)
		health.Degraded(fmt.Sprintf("Ended, started again in %s", delay), err)
		p.log.Error("A part of the network driver has ended, it is started again", "part", part, "delay", delay, "error", err)
		if !pause.For(ctx, delay) {
			p.over(p.failure(part))
			return
		}
		delay = min(2*delay, maxPartDelay)
	}
}

func (p *parts) failure(part string) *failure {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failures[part]
}

func (p *parts) failed(part string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := &failure{part: part, err: err, since: time.Now()}
	if before := p.failures[part]; before != nil {
		f.since = before.since
	}
	p.failures[part] = f
	p.notify()
}

// over forgets a failure, and returns whether it was its part's last one.
func (p *parts) over(f *failure) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f == nil || p.failures[f.part] != f {
		return false
	}
	delete(p.failures, f.part)
	p.notify()
	return true
}

// notify is called with the lock held.
func (p *parts) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// state returns the failures in the order of the parts' names, and a channel that is closed when there are others.
func (p *parts) state() ([]*failure, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var failures []*failure
	for _, f := range p.failures {
		failures = append(failures, f)
	}
	slices.SortFunc(failures, func(a, b *failure) int { return cmp.Compare(a.part, b.part) })
	return failures, p.changed
}

// hopeless returns an error that names a part which goes on failing although it was started again and again, and for
// which a restart of the agent may do more than that.
func (p *parts) hopeless() error {
	failures, _ := p.state()
	for _, f := range failures {
		if lasted := time.Since(f.since); lasted >= hopelessAfter && restartHelps(f.part) {
			return fmt.Errorf("the part %s has been failing for %s, only a restart of the agent may help: %w",
				f.part, lasted.Round(time.Second), f.err)
		}
	}
	return nil
}
