// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// oneNode is a ledger with node n, labelled a=1, and the config a for it, whose node config has to be made.
func oneNode(t *testing.T) *ledger {
	t.Helper()
	l := newTestLedger(t)
	b := newBatch()
	b.clusterConfigs["a"] = clusterConfigEvent("a", 0, map[string]v2alpha1.LabelValue{"a": "1"}, 1)
	b.nodes["n"] = labelled("n", "1")
	w := l.apply(b)
	require.Contains(t, w.nodes, "n")
	require.Equal(t, opCreate, l.plan("n").operation)
	return l
}

func labelled(name, value string) event[*metav1.PartialObjectMetadata] {
	return event[*metav1.PartialObjectMetadata]{object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{"a": value},
	}}}
}

// state is a node config as a watch tells of it.
func state(name, uid string, version int, digest digest) *nodeConfig {
	return &nodeConfig{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(uid), ResourceVersion: strconv.Itoa(version), Generation: int64(version),
			Labels:      map[string]string{v2alpha1.LabelManagedBy: v2alpha1.ManagedByOperator},
			Annotations: map[string]string{v2alpha1.AnnotationClusterConfig: "a"},
		},
		digest: digest,
	}
}

func told(l *ledger, object *nodeConfig, gone bool) work {
	b := newBatch()
	b.nodeConfigs[object.Name] = event[*nodeConfig]{object: object, gone: gone}
	return l.apply(b)
}

func listed(l *ledger, version int, items ...*nodeConfig) work {
	b := newBatch()
	b.listing = &listing{items: items, resourceVersion: strconv.Itoa(version), newestKnown: l.newest()}
	return l.apply(b)
}

// TestLateEvents: what the watch tells late, of a state before a write, is not taken for a change.
func TestLateEvents(t *testing.T) {
	l := oneNode(t)
	c := l.plan("n")
	l.wrote(c, state("n", "u", 10, c.digest))
	require.Equal(t, opNone, l.plan("n").operation)
	require.Empty(t, told(l, state("n", "u", 9, digest{1}), false).nodes, "an older state")
	require.Empty(t, told(l, state("n", "u", 10, c.digest), false).nodes, "the same state")
	require.Zero(t, l.totals().drifts)
	require.Contains(t, told(l, state("n", "u", 11, digest{1}), false).nodes, "n", "a newer state is a drift")
	require.EqualValues(t, 1, l.totals().drifts)
	require.Equal(t, opUpdate, l.plan("n").operation)

	// Of one that was deleted here, the watch tells again before it tells of the end.
	l = oneNode(t)
	c = l.plan("n")
	l.wrote(c, state("n", "u", 10, c.digest))
	b := newBatch()
	b.nodes["n"] = labelled("n", "2")
	require.Contains(t, l.apply(b).nodes, "n")
	c = l.plan("n")
	require.Equal(t, opDelete, c.operation)
	l.wrote(c, nil)
	require.Empty(t, told(l, state("n", "u", 12, c.digest), false).nodes)
	require.Empty(t, told(l, state("n", "u", 13, c.digest), true).nodes)
	require.Empty(t, l.deleted)
	require.Contains(t, told(l, state("n", "v", 14, c.digest), false).nodes, "n", "a successor is another object")
}

// TestListing: a listing tells of what no watch has told, and is not older than what was written before it began.
func TestListing(t *testing.T) {
	l := oneNode(t)
	c := l.plan("n")
	l.wrote(c, state("n", "u", 10, c.digest))
	require.Empty(t, listed(l, 12, state("n", "u", 10, c.digest)).nodes)
	require.Contains(t, listed(l, 12).nodes, "n", "it is gone")
	require.Equal(t, opCreate, l.plan("n").operation)

	// Written while the listing was read.
	b := newBatch()
	b.listing = &listing{resourceVersion: "14", newestKnown: ""}
	l.wrote(c, state("n", "v", 15, c.digest))
	require.Empty(t, l.apply(b).nodes)
	require.Equal(t, opNone, l.plan("n").operation)

	// The API server's data were restored from a backup: versions are lower than before.
	require.Contains(t, listed(l, 7, state("n", "u", 5, digest{1})).nodes, "n")
	require.Equal(t, opUpdate, l.plan("n").operation)
	l.wrote(l.plan("n"), state("n", "u", 8, c.digest))
	require.Equal(t, opNone, l.plan("n").operation)
}

// TestAnswerThatDiffers: an API server that makes something else of a spec is not asked again and again.
func TestAnswerThatDiffers(t *testing.T) {
	l := oneNode(t)
	c := l.plan("n")
	require.Empty(t, l.wrote(c, state("n", "u", 10, digest{1})).nodes)
	require.Equal(t, opNone, l.plan("n").operation)
	require.Empty(t, told(l, state("n", "u", 10, digest{1}), false).nodes)
	drifted := state("n", "u", 11, digest{2})
	require.Contains(t, told(l, drifted, false).nodes, "n")
	// Here the watch is faster than the answer.
	c = l.plan("n")
	require.Contains(t, told(l, state("n", "u", 12, digest{1}), false).nodes, "n")
	require.Empty(t, l.wrote(c, state("n", "u", 12, digest{1})).nodes)
}

// TestTerminating: a node config that something holds back from its end is made anew when it is gone, and a cluster
// config that is being deleted governs no more.
func TestTerminating(t *testing.T) {
	l := oneNode(t)
	c := l.plan("n")
	l.wrote(c, state("n", "u", 10, c.digest))
	now := metav1.Now()
	ending := state("n", "u", 11, c.digest)
	ending.DeletionTimestamp = &now
	require.Empty(t, told(l, ending, false).nodes)
	require.Equal(t, 1, l.totals().pending, "it is not as desired")
	require.Contains(t, told(l, ending, true).nodes, "n")
	require.Equal(t, opCreate, l.plan("n").operation)
	l.wrote(l.plan("n"), state("n", "v", 12, c.digest))

	// The node is selected again while its node config, deleted here, is held back. The watch tells of that before or
	// after the API server has answered.
	for i, watchFirst := range []bool{true, false} {
		uid := l.plan("n").actual.UID
		b := newBatch()
		b.nodes["n"] = labelled("n", "2")
		require.Contains(t, l.apply(b).nodes, "n")
		c = l.plan("n")
		require.Equal(t, opDelete, c.operation)
		ending := state("n", string(uid), 13+10*i, digest{1})
		ending.DeletionTimestamp = &now
		if watchFirst {
			told(l, ending, false)
			l.wrote(c, nil)
		} else {
			l.wrote(c, nil)
			told(l, ending, false)
		}
		b = newBatch()
		b.nodes["n"] = labelled("n", "1")
		require.Empty(t, l.apply(b).nodes, "watch first: %t", watchFirst)
		require.Contains(t, told(l, ending, true).nodes, "n")
		c = l.plan("n")
		require.Equal(t, opCreate, c.operation)
		l.wrote(c, state("n", "w"+strconv.Itoa(i), 14+10*i, c.digest))
	}

	config := clusterConfigEvent("a", 0, map[string]v2alpha1.LabelValue{"a": "1"}, 1)
	config.object.DeletionTimestamp = &now
	b := newBatch()
	b.clusterConfigs["a"] = config
	require.Contains(t, l.apply(b).nodes, "n")
	require.Equal(t, opDelete, l.plan("n").operation)
	require.Nil(t, l.verdict("a"))
}

// TestRefused: a node config that the API server refuses does not hold up the others, and the status names it.
func TestRefused(t *testing.T) {
	l := oneNode(t)
	b := newBatch()
	b.nodes["m"] = labelled("m", "1")
	l.apply(b)
	c := l.plan("n")
	require.Contains(t, l.failed(c, errors.New("metadata.name: too long")).configs, "a")
	require.False(t, l.verdict("a").settled())
	c = l.plan("m")
	l.wrote(c, state("m", "u", 10, c.digest))
	v := l.verdict("a")
	require.True(t, v.settled())
	ready := v.status().Conditions[0]
	require.Equal(t, reasonWriteFailed, ready.Reason)
	require.Equal(t, "1 of 2 node configs cannot be written, trying again; n: metadata.name: too long", ready.Message)
	require.EqualValues(t, 1, v.status().ConfiguredNodes)
	c = l.plan("n")
	l.wrote(c, state("n", "v", 11, c.digest))
	require.Equal(t, reasonConfigured, l.verdict("a").status().Conditions[0].Reason)
	require.Zero(t, l.totals().pending)
}

// TestInvalidSpec: the schema refuses such a spec today, but an older one may have let it pass.
func TestInvalidSpec(t *testing.T) {
	l := newTestLedger(t)
	b := newBatch()
	bad := clusterConfigEvent("a", 0, map[string]v2alpha1.LabelValue{"a": "1"}, 5000)
	odd := clusterConfigEvent("odd", 0, map[string]v2alpha1.LabelValue{"a": "2"}, 1)
	odd.object.Spec.Spec = json.RawMessage(`{"pools":"all"}`)
	b.clusterConfigs["a"], b.clusterConfigs["odd"] = bad, odd
	b.clusterConfigs["b"] = clusterConfigEvent("b", 1, nil, 1)
	b.nodes["n"] = labelled("n", "1")
	l.apply(b)
	require.Equal(t, "b", l.plan("n").clusterConfig)
	ready := l.verdict("a").status().Conditions[0]
	require.Equal(t, reasonInvalid, ready.Reason)
	require.Contains(t, ready.Message, "spec.spec.deviceManagerConfigs.dummy.count: Invalid value: 5000: must be 0 to 1024")
	require.Contains(t, l.verdict("odd").status().Conditions[0].Message, "spec.spec")
	totals := l.totals()
	require.Equal(t, []int{1, 0, 2}, []int{totals.active, totals.conflicts, totals.invalid})
}

// TestVerbatim: fields that this version does not know are mirrored too.
func TestVerbatim(t *testing.T) {
	l := newTestLedger(t)
	b := newBatch()
	config := clusterConfigEvent("a", 0, nil, 1)
	config.object.Spec.Spec = json.RawMessage(`{"future": {"big": 12345678901234567890, "half": 0.5}, "driverName": "x"}`)
	b.clusterConfigs["a"] = config
	b.nodes["n"] = labelled("n", "1")
	l.apply(b)
	require.JSONEq(t, string(config.object.Spec.Spec), string(l.plan("n").spec))
	same, err := digestOf(json.RawMessage(`{"driverName":"x","future":{"half":0.5,"big":12345678901234567890}}`))
	require.NoError(t, err)
	require.Equal(t, same, l.plan("n").digest, "the order of fields does not matter")
	other, err := digestOf(json.RawMessage(`{"driverName":"x","future":{"half":0.5,"big":12345678901234567891}}`))
	require.NoError(t, err)
	require.NotEqual(t, other, same)
}

// TestConditions: the time of a transition stays while the status does, and conditions of others stay.
func TestConditions(t *testing.T) {
	l := oneNode(t)
	c := l.plan("n")
	l.wrote(c, state("n", "u", 10, c.digest))
	first := l.verdict("a").status()
	hour := metav1.NewTime(time.Now().Add(-time.Hour))
	for i := range first.Conditions {
		first.Conditions[i].LastTransitionTime = hour
	}
	first.Conditions = append(first.Conditions, metav1.Condition{Type: "Theirs", Status: metav1.ConditionTrue})
	written := *l.verdict("a").object
	written.Status, written.ResourceVersion = first, "2"
	l.wroteStatus(&written)
	require.Equal(t, first, l.verdict("a").status())
	require.Equal(t, 5, len(shorten(strings.Repeat("ä", 10), 5)))
}

// settledByAB is a ledger in which config b governs n2 and n3, and a governs n1 and comes first.
func settledByAB(t *testing.T) *ledger {
	t.Helper()
	l := newTestLedger(t)
	b := newBatch()
	b.clusterConfigs["a"] = clusterConfigEvent("a", 0, map[string]v2alpha1.LabelValue{"a": "1"}, 1)
	b.clusterConfigs["b"] = clusterConfigEvent("b", 1, map[string]v2alpha1.LabelValue{"b": "1"}, 2)
	b.nodes["n1"], b.nodes["n2"], b.nodes["n3"] = withLabels("n1", "a"), withLabels("n2", "b"), withLabels("n3", "b")
	version := 10
	for node := range l.apply(b).nodes {
		serve(l, l.plan(node), version)
		version++
	}
	require.Zero(t, l.totals().pending)
	return l
}

// withLabels is a node with these labels, of the value 1.
func withLabels(name string, keys ...string) event[*metav1.PartialObjectMetadata] {
	labels := map[string]string{}
	for _, key := range keys {
		labels[key] = "1"
	}
	return event[*metav1.PartialObjectMetadata]{object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}}
}

func relabelled(l *ledger, name string, keys ...string) work {
	b := newBatch()
	b.nodes[name] = withLabels(name, keys...)
	return l.apply(b)
}

// TestFrozen: one label of one node takes away nothing from the others, and a fresh ledger sees the same.
func TestFrozen(t *testing.T) {
	l := settledByAB(t)
	w := relabelled(l, "n2", "a", "b")
	require.Equal(t, map[string]struct{}{"n2": {}}, w.nodes)
	require.Equal(t, opNone, l.plan("n3").operation)
	require.Equal(t, 1, l.totals().frozen)
	require.Equal(t, 1, l.totals().pending)
	v := l.verdict("b")
	require.Equal(t, []string{"n3"}, v.frozenSample)
	require.EqualValues(t, 1, v.status().FrozenNodes)
	require.Zero(t, v.status().ConfiguredNodes)
	require.True(t, v.settled())
	serve(l, l.plan("n2"), 20)
	require.Empty(t, l.unsettled().nodes, "a replica that begins to lead does not write it")

	// A restart.
	b := newBatch()
	for name, g := range l.configs {
		b.clusterConfigs[name] = event[*clusterConfig]{object: g.object}
	}
	for name, actual := range l.actual {
		b.nodeConfigs[name] = event[*nodeConfig]{object: actual}
	}
	b.nodes["n1"], b.nodes["n2"], b.nodes["n3"] = withLabels("n1", "a"), withLabels("n2", "a", "b"), withLabels("n3", "b")
	fresh := newTestLedger(t)
	require.Empty(t, fresh.apply(b).nodes)
	require.Equal(t, v.status().Conditions[0].Message, fresh.verdict("b").status().Conditions[0].Message)

	// A write that was under way when the conflict came does not make it fail.
	c := change{operation: opUpdate, node: "n3", clusterConfig: "b"}
	l.failed(c, errors.New("refused"))
	require.Equal(t, 1, l.totals().frozen)

	require.Contains(t, relabelled(l, "n3").nodes, "n3", "it does not select the node any more")
	require.Equal(t, opDelete, l.plan("n3").operation)
	require.Zero(t, l.totals().frozen)
	relabelled(l, "n3", "b")
	require.Equal(t, 1, l.totals().frozen)
	require.Empty(t, relabelled(l, "n2", "a").nodes, "the conflict is over, and all is as it was")
	require.Zero(t, l.totals().frozen)
	require.EqualValues(t, 1, l.verdict("b").status().ConfiguredNodes)
}

// TestFrozenEnds: what is frozen goes with its node and with its cluster config.
func TestFrozenEnds(t *testing.T) {
	for what, end := range map[string]func(*batch){
		"node":           func(b *batch) { b.nodes["n3"] = event[*metav1.PartialObjectMetadata]{gone: true} },
		"cluster config": func(b *batch) { b.clusterConfigs["b"] = event[*clusterConfig]{gone: true} },
		"selector": func(b *batch) {
			b.clusterConfigs["b"] = clusterConfigEvent("b", 1, map[string]v2alpha1.LabelValue{"b": "1", "a": "1"}, 2)
			b.clusterConfigs["b"].object.Generation = 2
		},
	} {
		l := settledByAB(t)
		relabelled(l, "n2", "a", "b")
		require.Equal(t, opNone, l.plan("n3").operation)
		b := newBatch()
		end(b)
		require.Contains(t, l.apply(b).nodes, "n3", what)
		require.Equal(t, opDelete, l.plan("n3").operation, what)
		require.Zero(t, l.totals().frozen, what)
	}
}

// TestInvalidKeepsWhatItSelected: an invalid cluster config keeps the nodes that its last valid selector matches. After a
// restart its status tells which these are; when that does not tell either, it keeps all.
func TestInvalidKeepsWhatItSelected(t *testing.T) {
	l := settledByAB(t)
	status := l.verdict("b").status()
	require.Equal(t, "b=1", *status.LastValidSelector)
	bad := clusterConfigEvent("b", 1, nil, 2)
	bad.object.Generation, bad.object.Status = 2, status
	bad.object.Spec.NodeSelector.MatchExpressions = []v2alpha1.LabelSelectorRequirement{{Key: "b", Operator: "?"}}
	b := newBatch()
	b.clusterConfigs["b"] = bad
	require.Empty(t, l.apply(b).nodes)
	require.Equal(t, 2, l.totals().frozen)
	require.Equal(t, "b=1", *l.verdict("b").status().LastValidSelector)

	for what, restart := range map[string]bool{"running": false, "restarted": true} {
		if restart {
			b = newBatch()
			b.clusterConfigs["b"] = bad
			for name, actual := range l.actual {
				b.nodeConfigs[name] = event[*nodeConfig]{object: actual}
			}
			b.nodes["n2"], b.nodes["n3"] = withLabels("n2", "b"), withLabels("n3", "b")
			l = newTestLedger(t)
			l.apply(b)
		}
		require.Contains(t, relabelled(l, "n3").nodes, "n3", what)
		require.Equal(t, opDelete, l.plan("n3").operation, what)
		require.Equal(t, opNone, l.plan("n2").operation, what)
		relabelled(l, "n3", "b")
		require.Equal(t, opNone, l.plan("n3").operation, what)
	}

	unknown := clusterConfigEvent("b", 1, nil, 2)
	unknown.object.UID, unknown.object.Generation = "other", 3
	unknown.object.Spec.NodeSelector = bad.object.Spec.NodeSelector
	b = newBatch()
	b.clusterConfigs["b"] = unknown
	l.apply(b)
	require.Nil(t, l.verdict("b").status().LastValidSelector)
	require.Empty(t, relabelled(l, "n3").nodes)
	require.Equal(t, opNone, l.plan("n3").operation)
}

// TestClusterConfigsMadeAnew: what is older than the definition of cluster configs stays, with a CiliumNode or without, until its
// cluster config is back. From then on it goes with that.
func TestClusterConfigsMadeAnew(t *testing.T) {
	born := time.Unix(1000, 0)
	old, young := state("old", "u", 10, digest{1}), state("young", "v", 11, digest{1})
	old.CreationTimestamp, young.CreationTimestamp = metav1.NewTime(born.Add(-time.Hour)), metav1.NewTime(born.Add(time.Second))
	l := newTestLedger(t)
	l.definitions.clusterConfigs.born = born
	b := newBatch()
	b.nodes["old"], b.nodes["young"] = labelled("old", "1"), labelled("young", "1")
	b.nodeConfigs["old"], b.nodeConfigs["young"] = event[*nodeConfig]{object: old}, event[*nodeConfig]{object: young}
	require.Equal(t, map[string]struct{}{"young": {}}, l.apply(b).nodes)
	require.Equal(t, opDelete, l.plan("young").operation)
	require.Equal(t, opNone, l.plan("old").operation)
	require.Equal(t, 1, l.totals().frozen)

	b = newBatch()
	b.clusterConfigs["a"] = clusterConfigEvent("a", 0, map[string]v2alpha1.LabelValue{"a": "1"}, 1)
	require.Contains(t, l.apply(b).nodes, "old", "it is back, and the spec is put right")
	serve(l, l.plan("old"), 20)
	b = newBatch()
	b.clusterConfigs["a"] = event[*clusterConfig]{gone: true}
	require.Contains(t, l.apply(b).nodes, "old")
	require.Equal(t, opDelete, l.plan("old").operation)
}

// TestDefinitionMadeAnew: what is older than the definition of CiliumNodes stays until its CiliumNode is back. From then
// on it goes with that.
func TestDefinitionMadeAnew(t *testing.T) {
	born := time.Unix(1000, 0)
	old, young := state("old", "u", 10, digest{1}), state("young", "v", 11, digest{1})
	old.CreationTimestamp, young.CreationTimestamp = metav1.NewTime(born.Add(-time.Hour)), metav1.NewTime(born.Add(time.Second))
	l := newTestLedger(t)
	l.definitions.nodes.born = born
	b := newBatch()
	b.clusterConfigs["a"] = clusterConfigEvent("a", 0, nil, 1)
	b.nodeConfigs["old"], b.nodeConfigs["young"] = event[*nodeConfig]{object: old}, event[*nodeConfig]{object: young}
	require.Equal(t, map[string]struct{}{"young": {}}, l.apply(b).nodes)
	require.Equal(t, opDelete, l.plan("young").operation)
	require.Equal(t, 1, l.totals().frozen)
	ready := l.verdict("a").status().Conditions[0]
	require.Contains(t, ready.Message, "Frozen node configs: 1 (old). Their CiliumNodes have not come back")

	require.Contains(t, relabelled(l, "old").nodes, "old", "it is back, and the spec is put right")
	serve(l, l.plan("old"), 20)
	b = newBatch()
	b.nodes["old"] = event[*metav1.PartialObjectMetadata]{gone: true}
	require.Contains(t, l.apply(b).nodes, "old")
	require.Equal(t, opDelete, l.plan("old").operation)
}
