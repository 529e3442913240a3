// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package assignment decides which cluster config governs which node. It is plain Go without Kubernetes clients.
//
// Configs have an order: the one created first comes first, then the one whose name comes first. In that order each
// config either gets all nodes that its selector matches or, when an earlier config got one of them already, none: it is
// in conflict. A config in conflict occupies nothing, so it hides nothing from those that come after it.
//
// Nodes that are matched by the same configs make up a class. Conflicts are a matter of classes alone, and there are as
// many of them as there are different overlaps of configs, however many nodes there are. The costs:
//
//   - a node event: one evaluation of each selector, and a move between two classes. Only when that makes the first
//     node of a class or takes the last one are owners computed anew, in the number of configs and classes.
//   - a config event: one evaluation of its selector for each node.
package assignment

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/labels"
)

// Config is what counts of a cluster config.
type Config struct {
	Name     string
	Created  time.Time
	Selector labels.Selector
}

// before is the order of configs.
func (c Config) before(other Config) int {
	return cmp.Or(c.Created.Compare(other.Created), strings.Compare(c.Name, other.Name))
}

// Assignment assigns nodes to configs. Its methods must not be called concurrently. What they change takes effect with
// Resolve.
type Assignment struct {
	nodes   map[string]*node
	configs map[string]*config
	order   []*config
	// slots are the configs by their bit in a class's key; nil for a free bit.
	slots   []*config
	classes map[string]*class
	// stale says that owners have to be computed again.
	stale bool
	// moved and touched are the nodes and configs that may have changed since Resolve.
	moved   map[string]struct{}
	touched map[string]struct{}
	scratch []byte
}

type node struct {
	labels labels.Set
	// class is nil for a node that was removed after the last Resolve.
	class *class
	// owner is the config that Resolve last told of, "" for none.
	owner string
}

type config struct {
	Config
	slot    int
	matched int
	classes map[*class]struct{}
	// winner is the first config that occupies one of the nodes; nil without a conflict.
	winner *config
}

type class struct {
	key     string
	members []*config
	nodes   *btree.BTreeG[string]
	// owner is the config that governs the nodes; nil for none. next is the owner to be, while it is computed.
	owner, next *config
}

// New returns an assignment without nodes and configs.
func New() *Assignment {
	return &Assignment{
		nodes: map[string]*node{}, configs: map[string]*config{}, classes: map[string]*class{},
		moved: map[string]struct{}{}, touched: map[string]struct{}{},
	}
}

// SetNode adds a node or changes its labels, which must not be changed afterwards.
func (a *Assignment) SetNode(name string, set map[string]string) {
	n := a.nodes[name]
	if n == nil {
		n = &node{}
		a.nodes[name] = n
	}
	n.labels = set
	key := a.key()
	for _, c := range a.order {
		if c.Selector.Matches(n.labels) {
			key[c.slot/8] |= 1 << (c.slot % 8)
		}
	}
	a.move(name, n, a.class(key))
}

// DeleteNode removes a node.
func (a *Assignment) DeleteNode(name string) {
	if n := a.nodes[name]; n != nil {
		a.move(name, n, nil)
	}
}

// SetConfig adds a config or changes it.
func (a *Assignment) SetConfig(new Config) {
	c := a.configs[new.Name]
	switch {
	case c == nil:
		c = &config{Config: new, slot: a.freeSlot(), classes: map[*class]struct{}{}}
		a.slots[c.slot] = c
		a.configs[new.Name] = c
		a.insert(c)
	case !c.Created.Equal(new.Created):
		a.remove(c)
		c.Config = new
		a.insert(c)
	case c.Selector.String() == new.Selector.String():
		return
	default:
		c.Selector = new.Selector
	}
	a.rematch(c, new.Selector.Matches)
}

// DeleteConfig removes a config.
func (a *Assignment) DeleteConfig(name string) {
	c := a.configs[name]
	if c == nil {
		return
	}
	a.rematch(c, func(labels.Labels) bool { return false })
	a.remove(c)
	delete(a.configs, name)
	a.slots[c.slot] = nil
}

func (a *Assignment) insert(c *config) {
	at, _ := slices.BinarySearchFunc(a.order, c, func(x, y *config) int { return x.before(y.Config) })
	a.order = slices.Insert(a.order, at, c)
	a.stale = true
	a.touched[c.Name] = struct{}{}
}

func (a *Assignment) remove(c *config) {
	a.order = slices.DeleteFunc(a.order, func(x *config) bool { return x == c })
	a.stale = true
	a.touched[c.Name] = struct{}{}
}

func (a *Assignment) freeSlot() int {
	if slot := slices.Index(a.slots, nil); slot >= 0 {
		return slot
	}
	a.slots = append(a.slots, nil)
	return len(a.slots) - 1
}

// rematch brings each node to the class that it is in according to matches.
func (a *Assignment) rematch(c *config, matches func(labels.Labels) bool) {
	// Many nodes make the same move.
	moves := map[*class]*class{}
	for name, n := range a.nodes {
		if n.class == nil || matches(n.labels) == n.class.has(c.slot) {
			continue
		}
		from := n.class
		to := moves[from]
		if to == nil || to.nodes.Len() == 0 {
			key := a.key()
			copy(key, from.key)
			key[c.slot/8] ^= 1 << (c.slot % 8)
			to = a.class(key)
			moves[from] = to
		}
		a.move(name, n, to)
	}
}

// keyWord is what the length of a key is a multiple of, so that it seldom changes.
const keyWord = 8

// key returns a key without a bit. It is valid until the next call.
func (a *Assignment) key() []byte {
	size := (len(a.slots) + 8*keyWord - 1) / (8 * keyWord) * keyWord
	a.scratch = slices.Grow(a.scratch[:0], size)[:size]
	clear(a.scratch)
	return a.scratch
}

// class returns the class of a key. Keys are compared without the zeros at their end, as the number of configs grows.
func (a *Assignment) class(key []byte) *class {
	for len(key) > 0 && binary.LittleEndian.Uint64(key[len(key)-keyWord:]) == 0 {
		key = key[:len(key)-keyWord]
	}
	if c := a.classes[string(key)]; c != nil {
		return c
	}
	c := &class{key: string(key), nodes: btree.NewOrderedG[string](16)}
	for slot, member := range a.slots {
		if member != nil && c.has(slot) {
			c.members = append(c.members, member)
		}
	}
	return c
}

func (c *class) has(slot int) bool {
	return slot/8 < len(c.key) && c.key[slot/8]&(1<<(slot%8)) != 0
}

// move takes a node from its class to another, each of which may be nil.
func (a *Assignment) move(name string, n *node, to *class) {
	from := n.class
	if from == to {
		return
	}
	a.moved[name] = struct{}{}
	n.class = to
	if from != nil {
		from.nodes.Delete(name)
		for _, c := range from.members {
			c.matched--
			a.touched[c.Name] = struct{}{}
		}
		if from.nodes.Len() == 0 {
			a.stale = true
			delete(a.classes, from.key)
			for _, c := range from.members {
				delete(c.classes, from)
			}
		}
	}
	if to != nil {
		if to.nodes.Len() == 0 {
			a.stale = true
			a.classes[to.key] = to
			for _, c := range to.members {
				c.classes[to] = struct{}{}
			}
		}
		to.nodes.ReplaceOrInsert(name)
		for _, c := range to.members {
			c.matched++
			a.touched[c.Name] = struct{}{}
		}
	}
}

// Changes are what Resolve has changed.
type Changes struct {
	// Nodes have another owner than before, or none any more.
	Nodes []string
	// Configs may have another [Verdict] than before.
	Configs []string
}

// Resolve makes all changes since the last call effective, and returns them.
func (a *Assignment) Resolve() Changes {
	var changes Changes
	if a.stale {
		a.stale = false
		for _, c := range a.order {
			a.occupy(c)
		}
		for _, class := range a.classes {
			if class.owner != class.next {
				class.owner = class.next
				class.nodes.Ascend(func(name string) bool {
					a.moved[name] = struct{}{}
					return true
				})
				for _, c := range class.members {
					a.touched[c.Name] = struct{}{}
				}
			}
			class.next = nil
		}
	}
	for name := range a.moved {
		n := a.nodes[name]
		owner := ""
		if n.class == nil {
			delete(a.nodes, name)
		} else if n.class.owner != nil {
			owner = n.class.owner.Name
		}
		if owner != n.owner {
			n.owner = owner
			changes.Nodes = append(changes.Nodes, name)
		}
	}
	changes.Configs = slices.Collect(maps.Keys(a.touched))
	// Clearing a map costs what it once held.
	a.moved, a.touched = map[string]struct{}{}, map[string]struct{}{}
	return changes
}

// occupy gives all classes of a config to it, or none when one of them is taken.
func (a *Assignment) occupy(c *config) {
	var winner *config
	for class := range c.classes {
		if o := class.next; o != nil && (winner == nil || o.before(winner.Config) < 0) {
			winner = o
		}
	}
	if winner != c.winner {
		c.winner = winner
		a.touched[c.Name] = struct{}{}
	}
	if winner != nil {
		return
	}
	for class := range c.classes {
		class.next = c
	}
}

// Labels returns the labels of a node, and whether the node exists.
func (a *Assignment) Labels(name string) (labels.Set, bool) {
	n := a.nodes[name]
	if n == nil || n.class == nil {
		return nil, false
	}
	return n.labels, true
}

// Len returns the number of nodes.
func (a *Assignment) Len() int { return len(a.nodes) }

// Owner returns the config that governs a node, or "".
func (a *Assignment) Owner(name string) string {
	if n := a.nodes[name]; n != nil {
		return n.owner
	}
	return ""
}

// Nodes calls yield with the nodes that a config governs, class by class.
func (a *Assignment) Nodes(configName string, yield func(name string)) {
	c := a.configs[configName]
	if c == nil || c.winner != nil {
		return
	}
	for class := range c.classes {
		class.nodes.Ascend(func(name string) bool {
			yield(name)
			return true
		})
	}
}

// Verdict says how a config fares.
type Verdict struct {
	// Matched is the number of nodes that its selector matches. It governs all of them, or none in a conflict.
	Matched int
	// Winner is the first of the configs that occupy one of its nodes; empty when there is no conflict.
	Winner string
	// Contested is the number of its nodes that the winner governs, and Sample the first of them by name.
	Contested int
	Sample    []string
}

// sampleSize is the number of nodes in a sample.
const sampleSize = 3

// Verdict returns how a config fares, the zero value for one that does not exist.
func (a *Assignment) Verdict(name string) Verdict {
	c := a.configs[name]
	if c == nil {
		return Verdict{}
	}
	v := Verdict{Matched: c.matched}
	if c.winner == nil {
		return v
	}
	v.Winner = c.winner.Name
	for class := range c.classes {
		if class.owner != c.winner {
			continue
		}
		v.Contested += class.nodes.Len()
		left := sampleSize
		class.nodes.Ascend(func(name string) bool {
			v.Sample = append(v.Sample, name)
			left--
			return left > 0
		})
	}
	slices.Sort(v.Sample)
	v.Sample = v.Sample[:min(sampleSize, len(v.Sample))]
	return v
}
