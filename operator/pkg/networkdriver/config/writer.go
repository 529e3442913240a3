// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
	k8sclient "github.com/cilium/networkdriver/pkg/client"
)

// fieldManager is on record for what the operator writes.
const fieldManager = "cilium-network-driver-operator"

// writer brings node configs to what is desired, one API write for each change and no read before it.
type writer struct {
	log     *slog.Logger
	ledger  *ledger
	gate    *gate
	client  client.Writer
	live    client.Reader // asks the API server, not the cache
	events  events.EventRecorder
	metrics *metrics
	// enqueue takes the work that follows from a write.
	enqueue func(work)
}

// Reconcile implements [reconcile.TypedReconciler] for the node config of a node. An error makes it try again later.
func (w *writer) Reconcile(ctx context.Context, node string) (reconcile.Result, error) {
	if w.ledger.plan(node).operation == opNone {
		return reconcile.Result{}, nil
	}
	if err := w.gate.pass(ctx); err != nil {
		return reconcile.Result{}, nil // the operator stops
	}
	c := w.ledger.plan(node)
	if c.operation == opNone {
		return reconcile.Result{}, nil
	}
	answer, err := w.write(ctx, c)
	w.gate.report(ctx, err)
	w.metrics.wrote("nodeconfig", string(c.operation), err)
	switch {
	case ctx.Err() != nil:
		return reconcile.Result{}, nil
	case err == nil, c.operation == opDelete && apierrors.IsNotFound(err):
		w.log.Debug("Node config is written", "nodeConfig", node, "operation", c.operation, "clusterConfig", c.clusterConfig)
		if c.operation == opUpdate && !c.actual.generated() {
			w.tellTakenOver(c)
		}
		w.enqueue(w.ledger.wrote(c, answer))
		return reconcile.Result{}, nil
	case unavailable(err):
		return reconcile.Result{}, fmt.Errorf("%s %s %s: %w", c.operation, v2alpha1.NodeConfigKind, node, err)
	case surprised(c, err):
		return reconcile.Result{}, w.reread(ctx, c, err)
	}
	w.enqueue(w.ledger.failed(c, err))
	return reconcile.Result{}, fmt.Errorf("%s %s %s: %w", c.operation, v2alpha1.NodeConfigKind, node, err)
}

// surprised says whether the API server has something else than what the change was made for.
func surprised(c change, err error) bool {
	switch c.operation {
	case opCreate:
		return apierrors.IsAlreadyExists(err)
	case opUpdate:
		return apierrors.IsNotFound(err) || apierrors.IsConflict(err) || k8sclient.IsPatchTestFailed(err)
	case opDelete:
		return apierrors.IsConflict(err)
	}
	return false
}

// reread asks for what there is, since the watch may be late or broken. The change is then planned anew.
func (w *writer) reread(ctx context.Context, c change, cause error) error {
	object := &nodeConfig{}
	err := w.live.Get(ctx, client.ObjectKey{Name: c.node}, object)
	switch {
	case apierrors.IsNotFound(err):
		object = nil
	case err != nil:
		w.gate.report(ctx, err)
		return fmt.Errorf("read %s %s after %q: %w", v2alpha1.NodeConfigKind, c.node, cause, err)
	default:
		if err := object.trim(); err != nil {
			return err
		}
	}
	w.enqueue(w.ledger.reread(c.node, object))
	return nil
}

// write makes the change, and returns what the API server answers.
func (w *writer) write(ctx context.Context, c change) (*nodeConfig, error) {
	object := &nodeConfig{ObjectMeta: metav1.ObjectMeta{Name: c.node}}
	var err error
	switch c.operation {
	case opCreate:
		object.Labels = map[string]string{v2alpha1.LabelManagedBy: v2alpha1.ManagedByOperator}
		object.Annotations = map[string]string{v2alpha1.AnnotationClusterConfig: c.clusterConfig}
		object.Spec = c.spec
		err = w.client.Create(ctx, object, client.FieldOwner(fieldManager))
	case opUpdate:
		var patch []byte
		if patch, err = updatePatch(c); err == nil {
			err = w.client.Patch(ctx, object, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(fieldManager))
		}
	case opDelete:
		return nil, w.client.Delete(ctx, object, client.Preconditions{UID: &c.actual.UID})
	}
	if err != nil {
		return nil, err
	}
	return object, object.trim()
}

// tellTakenOver reports on both objects that a node config which the operator did not make is a cluster config's now. The
// recorder makes one event of those that differ in the text alone, so names without UID keep a loop from making many.
func (w *writer) tellTakenOver(c change) {
	w.log.Warn("Node config made by hand is taken over", "nodeConfig", c.node, "clusterConfig", c.clusterConfig)
	reference := func(kind, name string, uid types.UID) *corev1.ObjectReference {
		return &corev1.ObjectReference{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: kind, Name: name, UID: uid}
	}
	w.events.Eventf(reference(v2alpha1.NodeConfigKind, c.node, c.actual.UID), reference(v2alpha1.ClusterConfigKind, c.clusterConfig, ""),
		corev1.EventTypeWarning, reasonTakenOver, "TakeOver",
		"Cluster config %s selects this node and has taken over this node config, which was made by hand: the operator has replaced its spec", c.clusterConfig)
	w.events.Eventf(reference(v2alpha1.ClusterConfigKind, c.clusterConfig, c.clusterConfigUID), reference(v2alpha1.NodeConfigKind, c.node, ""),
		corev1.EventTypeWarning, reasonTakenOver, "TakeOver",
		"Node config %s was made by hand; as this cluster config selects its node, the operator has taken it over and replaced its spec", c.node)
}

// patchOperation is an operation of a JSON patch.
type patchOperation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// updatePatch replaces the spec and sets the marks; other labels and annotations stay. It holds for the object and the
// generation that the change was made for.
func updatePatch(c change) ([]byte, error) {
	patch := []patchOperation{
		{"test", "/metadata/uid", c.actual.UID},
		{"test", "/metadata/generation", c.actual.Generation},
	}
	if c.actual.Labels == nil || c.actual.Annotations == nil {
		// A map that is made here must not replace one that has come since, which the generation does not tell.
		patch = append(patch, patchOperation{"test", "/metadata/resourceVersion", c.actual.ResourceVersion})
	}
	return json.Marshal(append(patch,
		patchOperation{"add", "/spec", c.spec},
		setKey("/metadata/labels", c.actual.Labels, v2alpha1.LabelManagedBy, v2alpha1.ManagedByOperator),
		setKey("/metadata/annotations", c.actual.Annotations, v2alpha1.AnnotationClusterConfig, c.clusterConfig),
	))
}

// setKey sets a key of a map, which has to be made if there is none.
func setKey(path string, existing map[string]string, key, value string) patchOperation {
	if existing == nil {
		return patchOperation{"add", path, map[string]string{key: value}}
	}
	escaped := strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
	return patchOperation{"add", path + "/" + escaped, value}
}
