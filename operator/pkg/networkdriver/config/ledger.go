// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"

	"github.com/cilium/statedb"
	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config/assignment"
)

// ledger knows what is desired and what exists, and so what has to be written. It takes in what the API server reports
// and the outcome of each write, and keeps the tables.
type ledger struct {
	log    *slog.Logger
	tables *tables

	// mu guards the fields below and orders the transactions of the tables.
	mu         sync.Mutex
	assignment *assignment.Assignment
	configs    map[string]*governor
	// actual are the node configs that exist, trimmed.
	actual map[string]*nodeConfig
	// deleted are node configs that the operator has deleted and whose deletion the watch has not reported yet.
	deleted map[string]types.UID
	// definitions say when they were made. What is older may be of a node that had a CiliumNode before, or of a cluster
	// config that was there before.
	definitions definitions
	// left are the nodes whose CiliumNode was here and went, and leftConfigs the cluster configs.
	left, leftConfigs map[string]struct{}
	// pending is the number of node configs that are to be written, frozen of those that stay as they are.
	pending, frozen int
	// drifts counts node configs that were as desired and then changed by someone else.
	drifts uint64
}

// governor is a cluster config as far as the ledger needs it.
type governor struct {
	object *clusterConfig
	// invalid is what is wrong with the config, nil for nothing.
	invalid error
	// selector is the last one that was valid, nil for not known.
	selector labels.Selector
	digest   digest
	inSync   int
	// failed are the nodes whose node config was refused, frozen those whose node config stays as it is.
	failed, frozen *btree.BTreeG[string]
}

// newLedger returns an empty ledger. It empties the tables.
func newLedger(log *slog.Logger, tables *tables, definitions definitions) (*ledger, error) {
	if err := tables.clear(); err != nil {
		return nil, fmt.Errorf("clear the tables: %w", err)
	}
	return &ledger{
		log: log, tables: tables, assignment: assignment.New(), definitions: definitions,
		left: map[string]struct{}{}, leftConfigs: map[string]struct{}{},
		configs: map[string]*governor{}, actual: map[string]*nodeConfig{}, deleted: map[string]types.UID{},
	}, nil
}

// work is what may have to be written: node configs and statuses of cluster configs, by name.
type work struct {
	nodes, configs map[string]struct{}
}

func newWork() work { return work{map[string]struct{}{}, map[string]struct{}{}} }

// apply takes in a batch of events. All that has changed is in the work that it returns.
func (l *ledger) apply(b *batch) work {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := newWork()
	// Nodes to look at; the value says that a difference is a drift, if there was none before.
	look := map[string]bool{}
	for name, event := range b.nodeConfigs {
		if l.observe(name, event.object, event.gone) {
			look[name] = true
		}
	}
	if b.listing != nil {
		for _, name := range l.observeListing(b.listing) {
			look[name] = true
		}
	}
	changed := map[string]struct{}{}
	for name, event := range b.clusterConfigs {
		w.configs[name] = struct{}{}
		if l.observeConfig(name, event.object, event.gone) {
			changed[name] = struct{}{}
			l.assignment.Nodes(name, func(node string) { look[node] = false })
		}
	}
	if len(changed) > 0 {
		// What they have made may be frozen, or not any more.
		for node, actual := range l.actual {
			if _, ok := changed[actual.clusterConfig()]; ok {
				look[node] = false
			}
		}
	}
	for name, event := range b.nodes {
		if event.gone {
			if _, ok := l.assignment.Labels(name); ok {
				l.left[name] = struct{}{}
			}
			l.assignment.DeleteNode(name)
		} else {
			delete(l.left, name)
			l.assignment.SetNode(name, event.object.Labels)
		}
		look[name] = false
	}
	changes := l.assignment.Resolve()
	for _, name := range changes.Nodes {
		look[name] = false
	}
	for _, name := range changes.Configs {
		w.configs[name] = struct{}{}
	}
	txn := l.tables.db.WriteTxn(l.tables.nodeConfigs, l.tables.clusterConfigs)
	for node, drift := range look {
		l.settle(txn, node, drift, &w)
	}
	l.settleConfigs(txn, w)
	txn.Commit()
	return w
}

// older says whether a resource version is older than another. It is false for versions that cannot be compared.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order < 0
}

// observe takes in the state of a node config, and says whether that is news: the watch also tells of what was written
// here, and may do so late.
func (l *ledger) observe(name string, object *nodeConfig, gone bool) bool {
	known := l.actual[name]
	if object != nil && known != nil && older(object.ResourceVersion, known.ResourceVersion) {
		return false
	}
	if object != nil && object.UID == l.deleted[name] {
		// Somebody else's finalizer may hold it back. It exists until the watch reports that it is gone.
		held := !gone && object.DeletionTimestamp != nil
		if gone || held {
			delete(l.deleted, name)
		}
		if !held {
			return false
		}
	}
	if gone {
		delete(l.actual, name)
		return true
	}
	if known != nil && known.UID == object.UID && known.Generation == object.Generation {
		object.answers = known.answers
	}
	l.actual[name] = object
	return true
}

// observeListing takes in all node configs, and returns the names of those that are new, other or gone.
func (l *ledger) observeListing(list *listing) []string {
	var changed []string
	// After a restore of the API server's data, versions begin again at an older one.
	rewound := older(list.resourceVersion, list.newestKnown)
	seen := make(map[string]struct{}, len(list.items))
	for _, object := range list.items {
		seen[object.Name] = struct{}{}
		if rewound {
			delete(l.actual, object.Name)
			delete(l.deleted, object.Name)
		}
		if l.observe(object.Name, object, false) {
			changed = append(changed, object.Name)
		}
	}
	for name, known := range l.actual {
		if _, ok := seen[name]; ok || !rewound && older(list.resourceVersion, known.ResourceVersion) {
			continue
		}
		delete(l.actual, name)
		changed = append(changed, name)
	}
	for name := range l.deleted {
		if _, ok := seen[name]; !ok {
			delete(l.deleted, name)
		}
	}
	return changed
}

// newest returns the newest version of a node config that is known.
func (l *ledger) newest() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	newest := ""
	for _, known := range l.actual {
		if newest == "" || older(newest, known.ResourceVersion) {
			newest = known.ResourceVersion
		}
	}
	return newest
}

// observeConfig takes in the state of a cluster config, and says whether the nodes that it governs, or has made a node
// config for, have to be looked at. A config that is being deleted counts as gone.
func (l *ledger) observeConfig(name string, object *clusterConfig, gone bool) bool {
	known := l.configs[name]
	if gone || object.DeletionTimestamp != nil {
		if known != nil {
			l.leftConfigs[name] = struct{}{}
		}
		delete(l.configs, name)
		l.assignment.DeleteConfig(name)
		return known != nil
	}
	if known != nil && known.object.UID == object.UID && known.object.Generation == object.Generation {
		if !older(object.ResourceVersion, known.object.ResourceVersion) {
			known.object = object // its status
		}
		return false
	}
	delete(l.leftConfigs, name)
	g := &governor{object: object, failed: btree.NewOrderedG[string](8), frozen: btree.NewOrderedG[string](8)}
	if known != nil {
		g.inSync, g.failed, g.frozen = known.inSync, known.failed, known.frozen
	}
	l.configs[name] = g
	selector, err := object.selector()
	switch {
	case err == nil:
		g.selector = selector
	case known != nil && known.object.UID == object.UID:
		g.selector = known.selector
	default:
		g.selector = object.lastValidSelector()
	}
	if invalid := object.validate(); invalid != nil {
		err = invalid
	}
	if err == nil {
		g.digest, err = digestOf(object.Spec.Spec)
	}
	if err != nil {
		l.log.Error("Cluster config is invalid, what it has configured stays as it is", "clusterConfig", name, "error", err)
		g.invalid = err
		l.assignment.DeleteConfig(name)
		return true
	}
	l.assignment.SetConfig(assignment.Config{Name: name, Created: object.CreationTimestamp.Time, Selector: selector})
	return true
}

// operation is what to do with a node config.
type operation string

const (
	opNone   operation = ""
	opCreate operation = "create"
	opUpdate operation = "update"
	opDelete operation = "delete"
)

// change is one write.
type change struct {
	operation
	node             string
	clusterConfig    string
	clusterConfigUID types.UID
	// frozenBy is the cluster config that has made what stays as it is, instead of one that governs the node.
	frozenBy string
	spec     json.RawMessage
	digest   digest
	// actual is what is changed or deleted.
	actual *nodeConfig
}

// plan returns what has to be done with a node's config now.
func (l *ledger) plan(node string) change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.diff(node)
}

func (l *ledger) diff(node string) change {
	c := change{node: node, clusterConfig: l.assignment.Owner(node), actual: l.actual[node]}
	if c.clusterConfig == "" {
		if c.actual != nil && c.actual.generated() && c.actual.DeletionTimestamp == nil {
			if c.frozenBy = l.frozenBy(node, c.actual); c.frozenBy == "" {
				c.operation = opDelete
			}
		}
		return c
	}
	g := l.configs[c.clusterConfig]
	c.spec, c.digest, c.clusterConfigUID = g.object.Spec.Spec, g.digest, g.object.UID
	switch {
	case c.actual == nil:
		c.operation = opCreate
	case c.actual.DeletionTimestamp != nil:
		// It can be made anew when it is gone.
	case !c.actual.is(c.clusterConfig, g.digest):
		c.operation = opUpdate
	}
	return c
}

// frozenBy returns the cluster config that has made a node config which stays as it is, though nothing governs its node;
// "" for none. A cluster config that has come into conflict, or has become invalid by a slip in an edit, does not take
// away what it gave to nodes that it still selects. It governs no such node, else there would be a governor. One that went with
// the definition of cluster configs takes away nothing.
func (l *ledger) frozenBy(node string, actual *nodeConfig) string {
	maker := actual.clusterConfig()
	g := l.configs[maker]
	if g == nil {
		if _, left := l.leftConfigs[maker]; !left && !actual.CreationTimestamp.After(l.definitions.clusterConfigs.born) {
			return maker
		}
		return ""
	}
	set, exists := l.assignment.Labels(node)
	if exists {
		if g.selector == nil || g.selector.Matches(set) {
			return maker
		}
		return ""
	}
	// The definition of CiliumNodes was made anew, and this node's has not come back.
	if _, left := l.left[node]; !left && !actual.CreationTimestamp.After(l.definitions.nodes.born) {
		return maker
	}
	return ""
}

// wrote takes in the outcome of a change: the object that the API server answered with, or nil for a deleted one.
func (l *ledger) wrote(c change, answer *nodeConfig) work {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.operation == opDelete {
		// One that the watch has reported as held back exists until the watch reports that it is gone.
		if known := l.actual[c.node]; known != nil && known.UID == c.actual.UID && known.DeletionTimestamp == nil {
			delete(l.actual, c.node)
			l.deleted[c.node] = c.actual.UID
		}
	} else {
		answer.answers = c.digest
		// The watch may have reported this or a later state before.
		known := l.actual[c.node]
		if known == nil || older(known.ResourceVersion, answer.ResourceVersion) {
			l.actual[c.node] = answer
		} else if known.UID == answer.UID && known.Generation == answer.Generation {
			known.answers = answer.answers
		}
	}
	return l.look(c.node)
}

// reread takes in what a read has found, nil for nothing.
func (l *ledger) reread(node string, object *nodeConfig) work {
	l.mu.Lock()
	defer l.mu.Unlock()
	if object == nil {
		delete(l.actual, node)
	} else {
		l.observe(node, object, false)
	}
	return l.look(node)
}

func (l *ledger) look(node string) work {
	w := newWork()
	txn := l.tables.db.WriteTxn(l.tables.nodeConfigs, l.tables.clusterConfigs)
	l.settle(txn, node, false, &w)
	l.settleConfigs(txn, w)
	txn.Commit()
	return w
}

// failed takes in that the API server has refused a change.
func (l *ledger) failed(c change, err error) work {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := newWork()
	txn := l.tables.db.WriteTxn(l.tables.nodeConfigs, l.tables.clusterConfigs)
	if row, _, ok := l.tables.nodeConfigs.Get(txn, NodeConfigByNode(c.node)); ok && row.ClusterConfig == c.clusterConfig && (row.State == StatePending || row.State == StateFailed) {
		failed := *row
		failed.State, failed.Error = StateFailed, err.Error()
		l.put(txn, row, &failed, &w)
	}
	l.settleConfigs(txn, w)
	txn.Commit()
	return w
}

// settle brings the row of a node up to date, and adds to the work what follows from that.
func (l *ledger) settle(txn statedb.WriteTxn, node string, drift bool, w *work) {
	c := l.diff(node)
	old, _, had := l.tables.nodeConfigs.Get(txn, NodeConfigByNode(node))
	if !had {
		old = nil
	}
	if c.frozenBy != "" {
		if row := (NodeConfig{Node: node, ClusterConfig: c.frozenBy, Spec: c.actual.digest.String(), State: StateFrozen}); !had || *old != row {
			l.put(txn, old, &row, w)
		}
		return
	}
	if c.operation == opNone && c.clusterConfig == "" {
		l.put(txn, old, nil, w)
		return
	}
	row := &NodeConfig{Node: node, ClusterConfig: c.clusterConfig, State: StateInSync}
	if c.clusterConfig != "" {
		row.Spec = c.digest.String()
	}
	if c.operation != opNone || c.actual.DeletionTimestamp != nil {
		row.State = StatePending
		if c.operation != opNone {
			w.nodes[node] = struct{}{}
		}
		if had && old.State == StateFailed && old.ClusterConfig == row.ClusterConfig && old.Spec == row.Spec {
			row.State, row.Error = old.State, old.Error
		}
	}
	if drift && had && old.State == StateInSync && row.State != StateInSync && old.ClusterConfig == row.ClusterConfig {
		l.drifts++
		l.log.Warn("Node config was changed by someone else, it is put right", "nodeConfig", node, "clusterConfig", row.ClusterConfig)
	}
	if had && *old == *row {
		return
	}
	l.put(txn, old, row, w)
}

// put replaces a row by another, each of which may be nil, and keeps the counts.
func (l *ledger) put(txn statedb.WriteTxn, old, row *NodeConfig, w *work) {
	for _, side := range []struct {
		row *NodeConfig
		by  int
	}{{old, -1}, {row, 1}} {
		if side.row == nil {
			continue
		}
		switch side.row.State {
		case StateFrozen:
			l.frozen += side.by
		case StatePending, StateFailed:
			l.pending += side.by
		}
		g := l.configs[side.row.ClusterConfig]
		if g == nil {
			continue
		}
		w.configs[side.row.ClusterConfig] = struct{}{}
		switch {
		case side.row.State == StateInSync:
			g.inSync += side.by
		case side.row.State == StateFailed:
			mark(g.failed, side.row.Node, side.by)
		case side.row.State == StateFrozen:
			mark(g.frozen, side.row.Node, side.by)
		}
	}
	var err error
	switch {
	case row != nil:
		_, _, err = l.tables.nodeConfigs.Insert(txn, row)
	case old != nil:
		_, _, err = l.tables.nodeConfigs.Delete(txn, old)
	}
	if err != nil {
		l.log.Error("Table cannot be written", "table", NodeConfigTableName, "error", err)
	}
}

// mark puts a node into a set, or takes it out.
func mark(set *btree.BTreeG[string], node string, by int) {
	if by > 0 {
		set.ReplaceOrInsert(node)
	} else {
		set.Delete(node)
	}
}

// settleConfigs brings the rows of the work's cluster configs up to date.
func (l *ledger) settleConfigs(txn statedb.WriteTxn, w work) {
	for name := range w.configs {
		old, _, had := l.tables.clusterConfigs.Get(txn, ClusterConfigByName(name))
		g := l.configs[name]
		var err error
		if g == nil {
			if had {
				_, _, err = l.tables.clusterConfigs.Delete(txn, old)
			}
		} else if row := l.row(name, g); !had || *old != *row {
			_, _, err = l.tables.clusterConfigs.Insert(txn, row)
		}
		if err != nil {
			l.log.Error("Table cannot be written", "table", ClusterConfigTableName, "error", err)
		}
	}
}

func (l *ledger) row(name string, g *governor) *ClusterConfig {
	verdict := l.assignment.Verdict(name)
	row := &ClusterConfig{
		Name: name, Created: g.object.CreationTimestamp.Time, Generation: g.object.Generation, Spec: g.digest.String(),
		Matched: verdict.Matched, InSync: g.inSync, Failed: g.failed.Len(), Frozen: g.frozen.Len(), Winner: verdict.Winner,
	}
	if g.invalid != nil {
		row.Invalid = g.invalid.Error()
		return row
	}
	if selector, err := g.object.selector(); err == nil {
		row.Selector = selector.String()
	}
	if verdict.Winner == "" {
		row.Governed = verdict.Matched
	}
	return row
}

// unsettled returns what has to be written, for a replica that begins to lead.
func (l *ledger) unsettled() work {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := newWork()
	for row := range l.tables.nodeConfigs.All(l.tables.db.ReadTxn()) {
		if row.State == StatePending || row.State == StateFailed {
			w.nodes[row.Node] = struct{}{}
		}
	}
	for name := range l.configs {
		w.configs[name] = struct{}{}
	}
	return w
}
