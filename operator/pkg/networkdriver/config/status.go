// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config/assignment"
	k8sclient "github.com/cilium/networkdriver/pkg/client"
)

// Reasons of the condition Ready of a cluster config, beside configurationConflict.
const (
	reasonConfigured  = "Configured"
	reasonNoNodes     = "NoMatchingNodes"
	reasonConfiguring = "Configuring"
	reasonWriteFailed = "WriteFailed"
	reasonInvalid     = "InvalidConfig"
	reasonNoConflict  = "NoConflict"
)

// reasonTakenOver is the reason of the events about a node config that the operator did not make and now keeps.
const reasonTakenOver = "TakenOver"

// Limits of the API for texts, in bytes.
const (
	maxConditionLength = 32768
	maxEventLength     = 1024
)

// frozenSampleSize is how many frozen node configs a message names.
const frozenSampleSize = 3

// progressInterval is how often the status of a cluster config is written while its node configs are being written.
const progressInterval = 30 * time.Second

// verdict is all that the status of a cluster config is made of.
type verdict struct {
	assignment.Verdict
	object  *clusterConfig
	invalid error
	// selector is the last valid one, nil for not known.
	selector labels.Selector
	inSync   int
	failed   int
	// frozen is the number of node configs that stay as they are, frozenSample the first of them by name.
	frozen       int
	frozenSample []string
	// failure is an example of a node config that was refused.
	failure string
}

// verdict returns how a cluster config fares, nil for one that does not exist.
func (l *ledger) verdict(name string) *verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.configs[name]
	if g == nil {
		return nil
	}
	v := &verdict{
		Verdict: l.assignment.Verdict(name), object: g.object, invalid: g.invalid, selector: g.selector,
		inSync: g.inSync, failed: g.failed.Len(), frozen: g.frozen.Len(),
	}
	g.frozen.Ascend(func(node string) bool {
		v.frozenSample = append(v.frozenSample, node)
		return len(v.frozenSample) < frozenSampleSize
	})
	if node, ok := g.failed.Min(); ok {
		if row, _, ok := l.tables.nodeConfigs.Get(l.tables.db.ReadTxn(), NodeConfigByNode(node)); ok {
			v.failure = node + ": " + row.Error
		}
	}
	return v
}

// wroteStatus takes in the answer to a write of a status.
func (l *ledger) wroteStatus(object *clusterConfig) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g := l.configs[object.Name]; g != nil && g.object.UID == object.UID && older(g.object.ResourceVersion, object.ResourceVersion) {
		status := *g.object
		status.Status, status.ResourceVersion = object.Status, object.ResourceVersion
		g.object = &status
	}
}

// settled says whether the status will not change by itself.
func (v *verdict) settled() bool {
	return v.invalid != nil || v.Winner != "" || v.inSync+v.failed == v.Matched
}

// status returns the status that the cluster config should have.
func (v *verdict) status() v2alpha1.CiliumNetworkDriverClusterConfigStatus {
	status := v2alpha1.CiliumNetworkDriverClusterConfigStatus{
		ObservedGeneration: v.object.Generation,
		Conditions:         append([]metav1.Condition(nil), v.object.Status.Conditions...),
		MatchedNodes:       int32(v.Matched),
		ConfiguredNodes:    int32(v.inSync),
		FrozenNodes:        int32(v.frozen),
	}
	if v.selector != nil {
		selector := v.selector.String()
		status.LastValidSelector = &selector
	}
	set := func(kind string, ok bool, reason, message string) {
		condition := metav1.Condition{
			Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: shorten(message, maxConditionLength), ObservedGeneration: v.object.Generation,
		}
		if ok {
			condition.Status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&status.Conditions, condition)
	}
	conflict, frozen := v.conflict(), v.frozenMessage()
	switch {
	case v.invalid != nil:
		set(v2alpha1.ConditionReady, false, reasonInvalid, v.invalid.Error()+". It configures no node until that is corrected."+frozen)
	case v.Winner != "":
		set(v2alpha1.ConditionReady, false, v2alpha1.ReasonConfigurationConflict, conflict)
	case v.failed > 0:
		set(v2alpha1.ConditionReady, false, reasonWriteFailed, fmt.Sprintf("%d of %d node configs cannot be written, trying again; %s", v.failed, v.Matched, v.failure))
	case v.inSync < v.Matched:
		set(v2alpha1.ConditionReady, false, reasonConfiguring, fmt.Sprintf("%d of %d nodes are configured", v.inSync, v.Matched))
	case v.Matched == 0:
		set(v2alpha1.ConditionReady, true, reasonNoNodes, "The selector matches no node"+v.missing())
	default:
		set(v2alpha1.ConditionReady, true, reasonConfigured, "All nodes that the selector matches are configured"+v.missing())
	}
	switch {
	case v.invalid != nil:
		set(v2alpha1.ConditionConflicting, false, reasonInvalid, "")
	case conflict != "":
		set(v2alpha1.ConditionConflicting, true, v2alpha1.ReasonConfigurationConflict, conflict)
	default:
		set(v2alpha1.ConditionConflicting, false, reasonNoConflict, "")
	}
	return status
}

// conflict names the winner of a conflict and the nodes that it is about, and says what stays and what to do. It is empty
// without a conflict.
func (v *verdict) conflict() string {
	if v.Winner == "" {
		return ""
	}
	message := fmt.Sprintf("Cluster config %s comes first and governs nodes that this one also selects: %s. This one configures no node.",
		v.Winner, sample(v.Sample, v.Contested))
	if v.frozen > 0 {
		message += v.frozenMessage() + fmt.Sprintf(" To end the conflict, change a selector or label so that no node is selected by both, or delete %s.", v.Winner)
	}
	return message
}

// frozenMessage says which node configs stay as they are. It is empty when there are none.
func (v *verdict) frozenMessage() string {
	if v.frozen == 0 {
		return ""
	}
	return fmt.Sprintf(" What it has made before stays as it is. Frozen node configs: %d (%s).", v.frozen, sample(v.frozenSample, v.frozen))
}

// missing says which node configs stay though their node is missing. It is empty when there are none.
func (v *verdict) missing() string {
	if v.frozen == 0 {
		return ""
	}
	return fmt.Sprintf(". Frozen node configs: %d (%s). Their CiliumNodes have not come back after the definition of these was made anew; delete those whose node is gone for good.",
		v.frozen, sample(v.frozenSample, v.frozen))
}

// sample lists the first of so many nodes.
func sample(first []string, all int) string {
	list := strings.Join(first, ", ")
	if more := all - len(first); more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return list
}

// shorten cuts a text to a length.
func shorten(text string, length int) string {
	if len(text) <= length {
		return text
	}
	cut := length - len("...")
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + "..."
}

// statusWriter writes the status of cluster configs when it has changed.
type statusWriter struct {
	log     *slog.Logger
	ledger  *ledger
	gate    *gate
	client  client.SubResourceWriter
	events  events.EventRecorder
	metrics *metrics

	mu sync.Mutex // guards unsettled
	// unsettled has the time from which on a status has waited for its node configs to be written.
	unsettled map[string]time.Time
}

// Reconcile implements [reconcile.TypedReconciler] for the status of a cluster config.
func (s *statusWriter) Reconcile(ctx context.Context, name string) (reconcile.Result, error) {
	v := s.ledger.verdict(name)
	if v == nil || equality.Semantic.DeepEqual(v.status(), v.object.Status) {
		s.forget(name)
		return reconcile.Result{}, nil
	}
	if delay := s.delay(name, v); delay > 0 {
		return reconcile.Result{RequeueAfter: delay}, nil
	}
	if err := s.gate.pass(ctx); err != nil {
		return reconcile.Result{}, nil // the operator stops
	}
	if v = s.ledger.verdict(name); v == nil {
		return reconcile.Result{}, nil
	}
	status := v.status()
	if equality.Semantic.DeepEqual(status, v.object.Status) {
		return reconcile.Result{}, nil
	}
	answer, err := s.write(ctx, v.object, status)
	s.gate.report(ctx, err)
	s.metrics.wrote("clusterconfig", "status", err)
	switch {
	case ctx.Err() != nil:
		return reconcile.Result{}, nil
	case apierrors.IsNotFound(err), k8sclient.IsPatchTestFailed(err):
		return reconcile.Result{}, nil // it is gone, and the watch will tell so
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("status of %s %s: %w", v2alpha1.ClusterConfigKind, name, err)
	}
	s.forget(name)
	s.ledger.wroteStatus(answer)
	s.tell(v, status)
	return reconcile.Result{}, nil
}

// delay returns how long the status has to wait until its node configs are written.
func (s *statusWriter) delay(name string, v *verdict) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.settled() {
		delete(s.unsettled, name)
		return 0
	}
	since, ok := s.unsettled[name]
	if !ok {
		since = time.Now()
		s.unsettled[name] = since
	}
	return time.Until(since.Add(progressInterval))
}

func (s *statusWriter) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unsettled, name)
}

// write replaces the status of this object, not of a successor by the same name.
func (s *statusWriter) write(ctx context.Context, object *clusterConfig, status v2alpha1.CiliumNetworkDriverClusterConfigStatus) (*clusterConfig, error) {
	patch, err := json.Marshal([]patchOperation{
		{"test", "/metadata/uid", object.UID},
		{"add", "/status", status},
	})
	if err != nil {
		return nil, err
	}
	answer := &clusterConfig{ObjectMeta: metav1.ObjectMeta{Name: object.Name}}
	return answer, s.client.Patch(ctx, answer, client.RawPatch(types.JSONPatchType, patch), &client.SubResourcePatchOptions{
		PatchOptions: client.PatchOptions{FieldManager: fieldManager},
	})
}

// tell reports by events and in the log which conflict or fault has begun or ended with a status.
func (s *statusWriter) tell(v *verdict, status v2alpha1.CiliumNetworkDriverClusterConfigStatus) {
	regarding := &corev1.ObjectReference{
		APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.ClusterConfigKind, Name: v.object.Name, UID: v.object.UID,
	}
	log := s.log.With("clusterConfig", v.object.Name)
	before := meta.FindStatusCondition(v.object.Status.Conditions, v2alpha1.ConditionConflicting)
	wasConflict := before != nil && before.Status == metav1.ConditionTrue
	conflict := meta.FindStatusCondition(status.Conditions, v2alpha1.ConditionConflicting)
	switch {
	case conflict.Status == metav1.ConditionTrue && !wasConflict:
		log.Warn("Cluster config is in conflict", "winner", v.Winner, "nodes", v.Contested)
		s.events.Eventf(regarding, nil, corev1.EventTypeWarning, "ConfigurationConflict", "Assign", "%s", shorten(conflict.Message, maxEventLength))
	case conflict.Status != metav1.ConditionTrue && wasConflict && v.invalid == nil:
		log.Info("Cluster config is no longer in conflict")
		s.events.Eventf(regarding, nil, corev1.EventTypeNormal, "ConflictResolved", "Assign", "The conflict is resolved: this cluster config governs the %d nodes that it matches", v.Matched)
	}
	was := meta.FindStatusCondition(v.object.Status.Conditions, v2alpha1.ConditionReady)
	if v.invalid != nil && (was == nil || was.Reason != reasonInvalid) {
		s.events.Eventf(regarding, nil, corev1.EventTypeWarning, reasonInvalid, "Validate", "%s", shorten(v.invalid.Error(), maxEventLength))
	}
}
