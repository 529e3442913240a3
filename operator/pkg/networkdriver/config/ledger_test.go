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
