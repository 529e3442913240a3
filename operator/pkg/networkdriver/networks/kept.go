// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// maxDeletes is how many addresses are deleted at once, so that one network keeps no other one waiting.
const maxDeletes = 100

// keptReconciler deletes addresses that were kept for as long as their network says: for no time, if it is gone.
type keptReconciler struct {
	log    *slog.Logger
	client client.Client
	ledger *ledger
}

// Reconcile implements [reconcile.Reconciler], for the name of a network.
func (r *keptReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if !r.ledger.ready() {
		return reconcile.Result{RequeueAfter: countDelay}, nil
	}
	network := &v2alpha1.CiliumNetworkDriverNetwork{}
	keep, why := time.Duration(0), "the network is gone"
	switch err := r.client.Get(ctx, request.NamespacedName, network); {
	case err == nil:
		keep = network.Spec.KeepFor()
		why = fmt.Sprintf("the network keeps it for %s", keep)
	case !apierrors.IsNotFound(err):
		return reconcile.Result{}, err
	}
	now := time.Now()
	var over []*address
	next := time.Duration(0)
	for a := range r.ledger.ofNetwork(request.Name) {
		if a.inUse() {
			continue
		}
		left := a.released.Add(keep).Sub(now)
		switch {
		case left > 0 && (next == 0 || left < next):
			next = left
		case left <= 0:
			over = append(over, a)
		}
	}
	if len(over) > maxDeletes {
		over, next = over[:maxDeletes], time.Millisecond
	}
	for _, a := range over {
		// Not one that was taken over meanwhile.
		err := r.client.Delete(ctx, a.object(), client.Preconditions{UID: &a.uid, ResourceVersion: &a.version})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return reconcile.Result{}, fmt.Errorf("delete address %s of network %s, which was kept: %w", a.addr, a.network, err)
		}
		if err == nil {
			r.log.Info("Address is kept no longer", "network", a.network, "address", a.addr, "pod", a.namespace+"/"+a.pod, "reason", why)
		}
	}
	return reconcile.Result{RequeueAfter: next}, nil
}

// object names the address's object.
func (a *address) object() *v2alpha1.CiliumNetworkDriverAddress {
	return &v2alpha1.CiliumNetworkDriverAddress{ObjectMeta: metav1.ObjectMeta{Name: a.name}}
}

// giveBack gives an address back that no device has any more: it is deleted, or released if it is reserved. One that was changed
// or deleted meanwhile is no error.
func (a *address) giveBack(ctx context.Context, c client.Client) error {
	var err error
	if !a.reserved {
		err = c.Delete(ctx, a.object(), client.Preconditions{UID: &a.uid})
	} else {
		var patch []byte
		patch, err = json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": a.uid, "resourceVersion": a.version},
			"spec":     map[string]any{"state": v2alpha1.AddressReleased, "releasedAt": metav1.Now()},
		})
		if err == nil {
			err = c.Patch(ctx, a.object(), client.RawPatch("application/merge-patch+json", patch))
		}
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
