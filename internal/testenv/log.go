// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package testenv

import (
	"bytes"
	"strings"
	"sync"
)

// LogBuffer is a log that can be read while it is written.
type LogBuffer struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

// Write implements [io.Writer].
func (l *LogBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *LogBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Count returns the number of lines that have all of the parts.
func (l *LogBuffer) Count(parts ...string) int {
	n := 0
	for line := range strings.Lines(l.String()) {
		has := true
		for _, part := range parts {
			has = has && strings.Contains(line, part)
		}
		if has {
			n++
		}
	}
	return n
}
