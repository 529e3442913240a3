// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package wires knows which pools are one wire, as they have devices of one physical function (PF) on some node: frames of these
// leave by one port, or are switched within the NIC.
package wires

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// port is a PF of a node.
type port struct{ node, pf string }

func (p port) compare(other port) int {
	return cmp.Or(cmp.Compare(p.node, other.node), cmp.Compare(p.pf, other.pf))
}

// Table has the pools of nodes by the PFs that they have devices of. A pool is one wire on all nodes: so is what pools share anywhere.
type Table struct {
	mu sync.RWMutex // guards the fields below
	// ofNode are the ports that several pools share, with the names of those, joined.
	ofNode map[string]map[port]string
	// sharing are the same ports by the pools. All nodes of a kind have the same, so that there are few of these.
	sharing map[string]map[port]struct{}
	// links are the keys of sharing in order, each with the first of its ports.
	links []link
}

// link is what makes pools one wire.
type link struct {
	key   string
	pools []string
	port  port
}

// NewTable returns a table of no nodes.
func NewTable() *Table {
	return &Table{ofNode: map[string]map[port]string{}, sharing: map[string]map[port]struct{}{}}
}

// Set replaces what is known of a node: the PFs of each of its pools' devices, none for a node that is gone. It returns whether
// [Table.Between] answers otherwise than before.
func (t *Table) Set(node string, pfs map[string][]string) (changed bool) {
	now := shared(node, pfs)
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.ofNode[node]
	if maps.Equal(before, now) {
		return false
	}
	for p, key := range before {
		if delete(t.sharing[key], p); len(t.sharing[key]) == 0 {
			delete(t.sharing, key)
		}
		changed = t.relink(key, p) || changed
	}
	for p, key := range now {
		if t.sharing[key] == nil {
			t.sharing[key] = map[port]struct{}{}
		}
		t.sharing[key][p] = struct{}{}
		changed = t.relink(key, p) || changed
	}
	if t.ofNode[node] = now; len(now) == 0 {
		delete(t.ofNode, node)
	}
	return changed
}

// shared returns the node's ports that have devices of several pools, with those.
func shared(node string, pfs map[string][]string) map[port]string {
	pools := map[port][]string{}
	for _, pool := range slices.Sorted(maps.Keys(pfs)) {
		for _, pf := range pfs[pool] {
			p := port{node, pf}
			pools[p] = append(pools[p], pool)
		}
	}
	ports := map[port]string{}
	for p, names := range pools {
		if len(names) > 1 {
			ports[p] = strings.Join(names, ",") // which no name has
		}
	}
	return ports
}

// relink brings the link of the pools up to date after the port was put into their ports or taken out, and returns whether it is
// another. The lock is held.
func (t *Table) relink(key string, touched port) bool {
	i, found := slices.BinarySearchFunc(t.links, key, func(l link, key string) int { return cmp.Compare(l.key, key) })
	ports := t.sharing[key]
	_, has := ports[touched]
	switch {
	case len(ports) == 0:
		t.links = slices.Delete(t.links, i, i+1)
	case !found:
		t.links = slices.Insert(t.links, i, link{key, strings.Split(key, ","), touched})
	case has && touched.compare(t.links[i].port) < 0:
		t.links[i].port = touched
	case !has && touched == t.links[i].port:
		t.links[i].port = slices.MinFunc(slices.Collect(maps.Keys(ports)), port.compare)
	default:
		return false
	}
	return true
}

// hop is how a pool was reached: from another one, by a port.
type hop struct {
	from string
	by   port
}

// Between says in words how devices of one of the pools reach one of the others, by the ports that pools share; empty where they do
// not. It is a [v2alpha1.Wires].
func (t *Table) Between(pools, others []string) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	reached := map[string]hop{}
	next := slices.Sorted(slices.Values(pools))
	for _, pool := range next {
		reached[pool] = hop{}
	}
	for len(next) > 0 {
		pool := next[0]
		next = next[1:]
		if slices.Contains(others, pool) {
			return describe(reached, pool)
		}
		for _, l := range t.links {
			if !slices.Contains(l.pools, pool) {
				continue
			}
			for _, other := range l.pools {
				if _, known := reached[other]; !known {
					reached[other] = hop{pool, l.port}
					next = append(next, other)
				}
			}
		}
	}
	return ""
}

// describe tells the way to the pool.
func describe(reached map[string]hop, pool string) string {
	var words []string
	for h := reached[pool]; h.from != ""; h = reached[pool] {
		words = append(words, fmt.Sprintf("pools %s and %s have devices of PF %s on node %s", h.from, pool, h.by.pf, h.by.node))
		pool = h.from
	}
	slices.Reverse(words)
	return strings.Join(words, ", ")
}
