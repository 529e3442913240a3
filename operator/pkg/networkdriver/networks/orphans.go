// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// stripNode leaves of a Node what is looked at here.
func stripNode(obj any) (any, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion},
		Spec:       corev1.NodeSpec{Taints: node.Spec.Taints},
	}, nil
}

// orphanReconciler gives back the addresses of nodes that have been gone for a while.
type orphanReconciler struct {
	log    *slog.Logger
	client client.Client
	ledger *ledger
	// live reads from the API server and not from what is cached.
	live client.Reader
	// after is how long a node has to be gone before its addresses are given to others: one that was deleted by
	// mistake comes back, and its kubelet ends the pods of one that was not.
	after time.Duration

	mu sync.Mutex // guards since
	// since is when a node was seen to be gone.
	since map[string]time.Time
}

// Reconcile implements [reconcile.Reconciler], for the name of a node.
func (r *orphanReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if !r.ledger.ready() {
		return reconcile.Result{RequeueAfter: countDelay}, nil
	}
	used := r.ledger.usedOn(request.Name)
	why, err := goneNode(ctx, r.client, request.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	if why == "" || len(used) == 0 {
		r.seen(request.Name, false)
		return reconcile.Result{}, nil
	}
	if left := r.after - time.Since(r.seen(request.Name, true)); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	// The cache may be behind: what is deleted here cannot be taken back.
	if why, err = goneNode(ctx, r.live, request.Name); err != nil || why == "" {
		r.seen(request.Name, false)
		return reconcile.Result{}, err
	}
	var errs []error
	for _, a := range used {
		if err := a.giveBack(ctx, r.client); err != nil {
			errs = append(errs, fmt.Errorf("give address %s of network %s back: %w", a.addr, a.network, err))
			continue
		}
		r.log.Info("Address of a node that is gone is given back", "network", a.network, "address", a.addr,
			"node", request.Name, "reason", why, "claim", a.namespace+"/"+a.claim)
	}
	return reconcile.Result{}, errors.Join(errs...)
}

// seen notes whether the node is gone, and returns since when.
func (r *orphanReconciler) seen(node string, gone bool) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !gone {
		delete(r.since, node)
		return time.Time{}
	}
	if _, ok := r.since[node]; !ok {
		r.since[node] = time.Now()
	}
	return r.since[node]
}

// goneNode says why nothing of the node can use an address any more; empty for a node that may.
func goneNode(ctx context.Context, reader client.Reader, name string) (string, error) {
	node := &corev1.Node{}
	err := reader.Get(ctx, client.ObjectKey{Name: name}, node)
	switch {
	case apierrors.IsNotFound(err):
		return "the Node is deleted", nil
	case err != nil:
		return "", err
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == corev1.TaintNodeOutOfService {
			return "the Node is tainted " + corev1.TaintNodeOutOfService, nil
		}
	}
	return "", nil
}
