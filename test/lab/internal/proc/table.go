// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package proc

import (
	"encoding/json"
	"maps"
	"sync"
)

// Table is running processes by name. Its JSON is an object of them.
type Table struct {
	mu        sync.Mutex // guards processes
	processes map[string]*Process
}

// Get returns the process of a name, or nil.
func (t *Table) Get(name string) *Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.processes[name]
}

// Alive reports whether a process of a name runs.
func (t *Table) Alive(name string) bool {
	p := t.Get(name)
	return p != nil && p.Alive()
}

// Set notes a process, or with nil that there is none of the name.
func (t *Table) Set(name string, p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p == nil {
		delete(t.processes, name)
		return
	}
	if t.processes == nil {
		t.processes = map[string]*Process{}
	}
	t.processes[name] = p
}

// All returns the processes there are.
func (t *Table) All() map[string]*Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.processes)
}

// MarshalJSON implements json.Marshaler.
func (t *Table) MarshalJSON() ([]byte, error) { return json.Marshal(t.All()) }

// UnmarshalJSON implements json.Unmarshaler.
func (t *Table) UnmarshalJSON(data []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return json.Unmarshal(data, &t.processes)
}
