// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package simulation runs the driver's rooms for claims and pods in one process against a simulated kernel, container
// runtime, API server and kubelet, in virtual time. Real are attachments, claims (with its restorer, writer and hand-over),
// the hooks of NRI, the journal and the CDI files; simulated is all that they call, and who calls them.
//
// Every call out of the driver waits until the simulation lets it go on, one at a time, in an order and after times that the
// seed chooses; its effect takes place while everything else stands still. So any two calls are seen in either order, a
// process can end between any two of them, and what a seed finds it finds again.
package simulation

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"
)

// sim is the world of one seed: a node and its control plane.
type sim struct {
	seed  uint64
	rng   *rand.Rand
	start time.Time

	mu      sync.Mutex // guards arrived and said, and gone of the calls
	arrived []*call    // since the last look
	said    []string   // what the driver has logged since then
	wake    chan struct{}
	waiting []*call

	steps   int
	trace   []string
	failure string

	faults  faults
	mutant  mutant
	kernel  *kernel
	api     *apiServer
	runtime *containerRuntime
	kubelet *kubelet
	agent   *agent
	world   *process // whoever never ends: control plane, chaos, kernel
	dir     string   // of the node's files
	bootID  string
	others  []*otherNode
	// killAfter is a part of the name of a call of the agent's after whose effect it is killed; empty for none.
	killAfter string
	names     int
	// heard, if it is not nil, gets what the driver logs.
	heard func(line string)
}

// process is something that can be killed: its goroutines have no effect any more then.
type process struct {
	name   string
	ctx    context.Context
	cancel context.CancelFunc
	dead   bool
	// kill is for a process that can be killed between its calls, and crashIn after how many more of them it is; 0 for not.
	kill    func()
	crashIn int
}

func newProcess(name string) *process {
	p := &process{name: name}
	p.ctx, p.cancel = context.WithCancel(withActor(context.Background(), name))
	return p
}

type actorKey struct{}

// withActor names whoever makes calls with the context, by which calls of the same moment are put in order.
func withActor(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, actorKey{}, name)
}

func actorOf(ctx context.Context) string {
	name, _ := ctx.Value(actorKey{}).(string)
	return name
}

// call is a step that waits for its turn.
type call struct {
	process *process
	key     string
	takes   span
	// effect is what the step does to the world; nil for nothing.
	effect func()
	// poll is a look whether there is anything to do, which is not counted as a step.
	poll bool
	// ready, if it is not nil, has to be true; early, if it is not nil, ends the wait before its time.
	ready, early func() bool

	due      time.Time
	gone     bool
	released chan struct{}
}

// span is a time to be chosen by the seed.
type span struct{ from, to time.Duration }

func (s *sim) between(t span) time.Duration {
	if t.to <= t.from {
		return t.from
	}
	return t.from + time.Duration(s.rng.Int64N(int64(t.to-t.from)))
}

func (s *sim) chance(p float64) bool { return p > 0 && s.rng.Float64() < p }

// do has the step done when it is its turn, and returns then. It does not return to a process that was killed.
func (s *sim) do(c *call) {
	_ = s.doUntil(context.Background(), c)
}

// doUntil gives up when the context ends: then the effect does not take place.
func (s *sim) doUntil(ctx context.Context, c *call) error {
	if c.process.dead {
		runtime.Goexit()
	}
	c.released = make(chan struct{})
	s.mu.Lock()
	s.arrived = append(s.arrived, c)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
	select {
	case <-c.released:
	case <-ctx.Done():
		s.mu.Lock()
		c.gone = true
		s.mu.Unlock()
		if !c.process.dead {
			return context.Cause(ctx)
		}
	}
	if c.process.dead {
		runtime.Goexit()
	}
	return nil
}

// sleep passes time. It ends early when wake, which may be nil, returns true.
func (s *sim) sleep(p *process, actor string, t span, wake func() bool) {
	s.do(&call{process: p, key: actor + " sleeps", takes: t, early: wake})
}

// run does steps until the condition holds or an invariant does not.
func (s *sim) run(until func() bool) {
	for s.failure == "" && !until() {
		synctest.Wait()
		s.admit()
		if c := s.pick(); c != nil {
			s.step(c)
		} else {
			s.idle()
		}
	}
	synctest.Wait()
}

// admit takes the calls that have arrived, in an order that does not depend on how goroutines are scheduled.
func (s *sim) admit() {
	s.mu.Lock()
	arrived, said := s.arrived, s.said
	s.arrived, s.said = nil, nil
	s.mu.Unlock()
	slices.Sort(said)
	for _, line := range said {
		if s.heard != nil {
			s.heard(line)
		}
		s.note("    %s", line)
	}
	slices.SortStableFunc(arrived, func(a, b *call) int {
		return cmp.Or(strings.Compare(a.process.name, b.process.name), strings.Compare(a.key, b.key))
	})
	for _, c := range arrived {
		c.due = time.Now().Add(s.between(c.takes))
	}
	s.waiting = append(s.waiting, arrived...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = slices.DeleteFunc(s.waiting, func(c *call) bool {
		if c.process.dead && !c.gone {
			close(c.released)
		}
		return c.gone || c.process.dead
	})
}

// pick takes one of the calls whose time has come.
func (s *sim) pick() *call {
	now := time.Now()
	var due []int
	for i, c := range s.waiting {
		if (!c.due.After(now) || c.early != nil && c.early()) && (c.ready == nil || c.ready()) {
			due = append(due, i)
		}
	}
	if len(due) == 0 {
		return nil
	}
	i := due[s.rng.IntN(len(due))]
	c := s.waiting[i]
	s.waiting = slices.Delete(s.waiting, i, i+1)
	return c
}

// idle lets time pass until a call is due or another one arrives.
func (s *sim) idle() {
	now := time.Now()
	next := now.Add(time.Hour)
	for _, c := range s.waiting {
		if c.due.After(now) && c.due.Before(next) {
			next = c.due
		}
	}
	timer := time.NewTimer(next.Sub(now))
	defer timer.Stop()
	select {
	case <-s.wake:
	case <-timer.C:
	}
}

func (s *sim) step(c *call) {
	if p := c.process; p.crashIn > 0 {
		if p.crashIn--; p.crashIn == 0 {
			s.note("%s is killed before: %s", p.name, c.key)
			s.waiting = append(s.waiting, c)
			p.kill()
			return
		}
	}
	if !c.poll {
		s.steps++
	}
	if c.effect != nil {
		if !c.poll {
			s.note("%s: %s", c.process.name, c.key)
		}
		c.effect()
	}
	s.check()
	if a := s.agent; a != nil && c.process == a.process && s.killAfter != "" && strings.Contains(c.key, s.killAfter) {
		s.note("the agent is killed after: %s", c.key)
		s.killAgent()
	}
	close(c.released)
}

// note adds a line to the trace.
func (s *sim) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf("%6d %10.4f ", s.steps, time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

// fail notes that an invariant does not hold.
func (s *sim) fail(format string, args ...any) {
	if s.failure == "" {
		s.failure = fmt.Sprintf(format, args...)
		s.note("BROKEN: %s", s.failure)
	}
}

// after has the effect take place some time later.
func (s *sim) after(what string, t span, effect func()) {
	go s.do(&call{process: s.world, key: what, takes: t, effect: effect})
}

// name makes a new name.
func (s *sim) name(prefix string) string {
	s.names++
	return fmt.Sprintf("%s-%d", prefix, s.names)
}

// ask has the agent work on a request of the process, which waits for the answer no longer than limit. The agent's work goes
// on with its context ended then, as it does behind a connection.
func (s *sim) ask(p *process, a *agent, what string, limit time.Duration, work func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(withActor(a.ctx, what), limit)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	done := make(chan error, 1)
	go func() { done <- work(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = fmt.Errorf("no answer: %w", ctx.Err())
	}
	answer := "ok"
	s.do(&call{process: p, key: what + " is answered", takes: span{0, 2 * time.Millisecond}, effect: func() {
		if a.dead {
			err = fmt.Errorf("the agent is gone")
		}
		if err != nil {
			answer = err.Error()
		}
		s.note("  %s: %s", what, answer)
	}})
	return err
}
