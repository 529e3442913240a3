// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package agents says in the status of a node config that nobody stands behind it any more. An agent that ends says so itself; one
// that was killed for good, or whose node is gone, cannot.
package agents

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

const (
	// patience is how long an agent's pod has to be gone, or not ready, until its word counts for nothing: an upgrade takes less.
	patience = time.Minute
	// reasonAgentGone is that of Ready then, and reasonAgentStopped what an agent says that ends.
	reasonAgentGone, reasonAgentStopped = "AgentGone", "AgentStopped"
	// nodeField is the index of pods by the name of their node.
	nodeField = "spec.nodeName"
)

// StripPod leaves of a pod what is looked at here.
func StripPod(obj any) (any, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	stripped := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, Labels: pod.Labels},
		Spec:       corev1.PodSpec{NodeName: pod.Spec.NodeName},
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			stripped.Status.Conditions = append(stripped.Status.Conditions, c)
		}
	}
	return stripped, nil
}

// Add has the manager look after the node configs' Ready. Of pods its cache has to have the agents', and no others.
func Add(ctx context.Context, mgr manager.Manager, log *slog.Logger) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, nodeField, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} })
	if err != nil {
		return fmt.Errorf("index pods by node: %w", err)
	}
	return builder.ControllerManagedBy(mgr).Named("agents").
		For(&v2alpha1.CiliumNetworkDriverNodeConfig{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: o.(*corev1.Pod).Spec.NodeName}}}
		})).
		Complete(newReconciler(log, mgr.GetClient(), time.Now))
}

type reconciler struct {
	log    *slog.Logger
	client client.Client
	now    func() time.Time

	mu sync.Mutex // guards since
	// since is from when on a node has no agent that is ready, or was last said to have none.
	since map[string]time.Time
}

func newReconciler(log *slog.Logger, c client.Client, now func() time.Time) *reconciler {
	return &reconciler{log: log, client: c, now: now, since: map[string]time.Time{}}
}

// Reconcile implements [reconcile.Reconciler], for the name of a node, which is that of its config.
func (r *reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := request.Name
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	if err := r.client.Get(ctx, request.NamespacedName, config); err != nil {
		r.forget(node)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	pods := &corev1.PodList{}
	if err := r.client.List(ctx, pods, client.MatchingFields{nodeField: node}); err != nil {
		return reconcile.Result{}, fmt.Errorf("list the agent's pods on node %s: %w", node, err)
	}
	ready := meta.FindStatusCondition(config.Status.Conditions, v2alpha1.ConditionReady)
	// What else an agent says is bad news, which its pod is not ready for either.
	if isReady(pods.Items) || ready == nil || ready.Status != metav1.ConditionTrue && ready.Reason != reasonAgentStopped {
		r.forget(node)
		return reconcile.Result{}, nil
	}
	if wait := r.wait(node); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	before := config.DeepCopy()
	meta.SetStatusCondition(&config.Status.Conditions, metav1.Condition{
		Type: v2alpha1.ConditionReady, Status: metav1.ConditionUnknown, Reason: reasonAgentGone, ObservedGeneration: ready.ObservedGeneration,
		Message: fmt.Sprintf("no agent's pod on the node has been ready for %v: what else the status says is what it was then", patience),
	})
	if err := r.client.Status().Patch(ctx, config, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.log.Warn("A node has no agent that is ready, its node config is not ready any more", "node", node, "podsOnNode", len(pods.Items))
	r.forget(node) // an agent that lives after all corrects it, and has as long again
	return reconcile.Result{}, nil
}

func isReady(pods []corev1.Pod) bool {
	for _, pod := range pods {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return true
			}
		}
	}
	return false
}

// wait returns how much longer to wait for the node's agent, which begins now if it has not begun.
func (r *reconciler) wait(node string) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since[node].IsZero() {
		r.since[node] = r.now()
	}
	return patience - r.now().Sub(r.since[node])
}

func (r *reconciler) forget(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.since, node)
}
