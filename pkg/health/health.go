// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package health collects what the parts of a program say about themselves, for probes.
package health

import (
	"slices"
	"strings"
	"sync"

	"github.com/cilium/hive/cell"
)

// Cell provides [*Checks].
var Cell = cell.Module(
	"health-checks",
	"Liveness and readiness checks",

	cell.Provide(func() *Checks { return &Checks{} }),
)

// Check returns nil when all is well, else an error that says what is not and what to do.
type Check func() error

// Checks are the checks of a program.
type Checks struct {
	mu     sync.Mutex // guards checks
	checks []named
}

type named struct {
	name     string
	liveness bool
	check    Check
}

// AddLiveness adds a check that fails when only a restart of the program helps.
func (c *Checks) AddLiveness(name string, check Check) { c.add(named{name, true, check}) }

// AddReadiness adds a check that fails while the program cannot serve.
func (c *Checks) AddReadiness(name string, check Check) { c.add(named{name, false, check}) }

func (c *Checks) add(n named) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checks = append(c.checks, n)
}

// Status is the result of all checks.
type Status struct {
	Live     bool      `json:"live"`
	Ready    bool      `json:"ready"`
	Failures []Failure `json:"failures"`
}

// Failure is a check that failed.
type Failure struct {
	Check  string `json:"check"`
	Reason string `json:"reason"`
}

// Status runs the checks. What is not live is not ready.
func (c *Checks) Status() Status {
	c.mu.Lock()
	checks := slices.Clone(c.checks)
	c.mu.Unlock()

	status := Status{Live: true, Ready: true, Failures: []Failure{}}
	for _, n := range checks {
		if err := n.check(); err != nil {
			status.Live = status.Live && !n.liveness
			status.Ready = false
			status.Failures = append(status.Failures, Failure{n.name, err.Error()})
		}
	}
	slices.SortStableFunc(status.Failures, func(a, b Failure) int { return strings.Compare(a.Check, b.Check) })
	return status
}
