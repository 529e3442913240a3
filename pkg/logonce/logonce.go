// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package logonce tells which of the problems that a loop meets are worth a line in the log. A problem is logged when it
// begins and when it becomes another one, not with every round while it lasts.
package logonce

import (
	"log/slog"
	"sync"
)

// Problems are those that a loop met in its last round, told apart by their keys. The zero value has none.
type Problems[K comparable] struct {
	mu    sync.Mutex // guards known
	known map[K]struct{}
}

// Replace notes the problems of a round in place of those of the round before, and returns those that are new, in their
// order.
func (p *Problems[K]) Replace(keys ...K) (fresh []K) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := make(map[K]struct{}, len(keys))
	for _, key := range keys {
		_, before := p.known[key]
		_, twice := known[key]
		if !before && !twice {
			fresh = append(fresh, key)
		}
		known[key] = struct{}{}
	}
	p.known = known
	return fresh
}

// Level notes a round with one problem, and returns the level to log it at: the given one when it is new, else
// [slog.LevelDebug].
func (p *Problems[K]) Level(key K, level slog.Level) slog.Level {
	if len(p.Replace(key)) == 0 {
		return slog.LevelDebug
	}
	return level
}

// Solved notes a round without problems, and returns whether the round before had any.
func (p *Problems[K]) Solved() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	had := len(p.known) > 0
	p.known = nil
	return had
}
