// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package lastlog keeps the last lines of a program's log in memory, for those who ask the program itself.
package lastlog

import (
	"bytes"
	"sync"
)

const (
	// Size is how many bytes of lines are kept.
	Size = 512 << 10
	// maxLine is how many bytes of one line are kept.
	maxLine = 8 << 10
)

// Ring is the last lines, of a bounded size. Loggers write to it as they do to the log itself.
type Ring struct {
	mu   sync.Mutex // guards the fields below
	data []byte     // grows to its size and is then written over from the oldest byte on
	next int        // where the next byte goes once data has its size
	size int
}

// New returns an empty ring of [Size].
func New() *Ring { return &Ring{size: Size} }

// Write implements [io.Writer]: it keeps a line, which ends in a line end. It never fails.
func (r *Ring) Write(line []byte) (int, error) {
	kept := line
	if len(kept) > maxLine {
		kept = append(bytes.Clone(kept[:maxLine]), " [cut]\n"...)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if room := r.size - len(r.data); room > 0 {
		n := min(room, len(kept))
		r.data = append(r.data, kept[:n]...)
		kept = kept[n:]
	}
	for len(kept) > 0 {
		n := copy(r.data[r.next:], kept)
		r.next = (r.next + n) % r.size
		kept = kept[n:]
	}
	return len(line), nil
}

// Lines returns the lines that are still there as a whole, the oldest first.
func (r *Ring) Lines() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.data) < r.size {
		return bytes.Clone(r.data)
	}
	all := append(bytes.Clone(r.data[r.next:]), r.data[:r.next]...)
	_, whole, _ := bytes.Cut(all, []byte("\n")) // the first one has lost its beginning, or a byte before it had its end
	return whole
}
