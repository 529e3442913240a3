// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// countDelay is how long addresses are collected that come and go, before they are counted again.
const countDelay = 2 * time.Second

// conflictDelay is how often a network in conflict is looked at again.
const conflictDelay = 15 * time.Second

// Reasons of the conditions.
const (
	reasonReady       = "Ready"
	reasonInvalid     = "Invalid"
	reasonConflicting = "Conflicting"
	reasonNoVLAN      = "NoVLAN"
	reasonVLAN        = "VLAN"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// later has an object looked at some time after an address of it came or went.
func later(nameOf func(*v2alpha1.CiliumNetworkDriverAddress) string) handler.EventHandler {
	add := func(o client.Object, q queue) {
		if address, ok := o.(*v2alpha1.CiliumNetworkDriverAddress); ok {
			q.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{Name: nameOf(address)}}, countDelay)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { add(e.Object, q) },
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { add(e.Object, q) },
	}
}

// statusReconciler writes the status of networks.
type statusReconciler struct {
	log     *slog.Logger
	client  client.Client
	metrics *metrics
}

// all has all networks looked at, since a conflict is one of two.
func (r *statusReconciler) all(ctx context.Context, _ client.Object) []reconcile.Request {
	list := &v2alpha1.CiliumNetworkDriverNetworkList{}
	if err := r.client.List(ctx, list); err != nil {
		r.log.Error("Networks cannot be listed", "error", err)
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: list.Items[i].Name}})
	}
	return requests
}

// Reconcile implements [reconcile.Reconciler].
func (r *statusReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	networks := &v2alpha1.CiliumNetworkDriverNetworkList{}
	if err := r.client.List(ctx, networks); err != nil {
		return reconcile.Result{}, err
	}
	i := slices.IndexFunc(networks.Items, func(n v2alpha1.CiliumNetworkDriverNetwork) bool { return n.Name == request.Name })
	if i < 0 {
		r.metrics.forget(request.Name)
		return reconcile.Result{}, nil
	}
	network := &networks.Items[i]
	all := &v2alpha1.CiliumNetworkDriverAddressList{}
	// What is listed is only read: a copy of each of many addresses would cost more than all else.
	if err := r.client.List(ctx, all, client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, err
	}
	var own []v2alpha1.CiliumNetworkDriverAddress
	var others []v2alpha1.CiliumNetworkDriverAddress
	for _, address := range all.Items {
		switch {
		case address.Spec.Network == network.Name:
			own = append(own, address)
		case !slices.ContainsFunc(networks.Items, func(n v2alpha1.CiliumNetworkDriverNetwork) bool {
			return n.Name == address.Spec.Network && network.OlderThan(&n)
		}):
			others = append(others, address) // one of a younger network is that one's fault
		}
	}
	before := network.DeepCopy()
	network.Status.ObservedGeneration = network.Generation
	count(network, own)
	judge(network, networks.Items, others)
	r.metrics.set(network)
	var result reconcile.Result
	if meta.IsStatusConditionTrue(network.Status.Conditions, v2alpha1.ConditionNetworkConflicting) {
		result.RequeueAfter = conflictDelay // nobody tells when another network's address is given back
	}
	if reflect.DeepEqual(before.Status, network.Status) {
		return result, nil
	}
	if err := r.client.Status().Patch(ctx, network, client.MergeFrom(before)); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	was, is := readyOf(before), readyOf(network)
	if was != is {
		r.log.Info("Network's state has changed", "network", network.Name, "before", was, "now", is)
	}
	return result, nil
}

func readyOf(n *v2alpha1.CiliumNetworkDriverNetwork) string {
	if c := meta.FindStatusCondition(n.Status.Conditions, v2alpha1.ConditionReady); c != nil {
		return c.Reason
	}
	return ""
}

// count counts the network's addresses.
func count(network *v2alpha1.CiliumNetworkDriverNetwork, addresses []v2alpha1.CiliumNetworkDriverAddress) {
	status := &network.Status
	status.UsedAddresses, status.FreeAddresses, status.Claims, status.Subnets = 0, 0, 0, nil
	claims := map[string]bool{}
	used := map[string]int64{}
	prefixes := map[string]netip.Prefix{}
	for _, s := range network.Spec.Subnets {
		if prefix, err := netip.ParsePrefix(s.CIDR); err == nil {
			prefixes[s.CIDR] = prefix
		}
	}
	for i := range addresses {
		spec := &addresses[i].Spec
		claims[spec.Claim.UID] = true
		status.UsedAddresses++
		addr, err := netip.ParseAddr(spec.Address)
		if err != nil {
			continue
		}
		for cidr, prefix := range prefixes {
			if prefix.Contains(addr) {
				used[cidr]++
			}
		}
	}
	status.Claims = int32(min(len(claims), math.MaxInt32))
	for i := range network.Spec.Subnets {
		s := &network.Spec.Subnets[i]
		set, err := network.Spec.Addresses(i)
		if err != nil {
			continue // the condition says so
		}
		// An address that is no longer given out may still be used.
		free := max(v2alpha1.CountAddresses(set)-used[s.CIDR], 0)
		status.Subnets = append(status.Subnets, v2alpha1.NetworkSubnetStatus{CIDR: s.CIDR, Used: used[s.CIDR], Free: free})
		if free > math.MaxInt64-status.FreeAddresses {
			status.FreeAddresses = math.MaxInt64
		} else {
			status.FreeAddresses += free
		}
	}
}

// judge sets the network's conditions.
func judge(network *v2alpha1.CiliumNetworkDriverNetwork, all []v2alpha1.CiliumNetworkDriverNetwork, addresses []v2alpha1.CiliumNetworkDriverAddress) {
	ready := metav1.Condition{Type: v2alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: reasonReady, Message: "claims can join"}
	conflicting := metav1.Condition{Type: v2alpha1.ConditionNetworkConflicting, Status: metav1.ConditionFalse, Reason: reasonReady}
	if err := network.Validate(); err != nil {
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, reasonInvalid, truncated(err.Error())
	} else if message := cmp.Or(network.Conflict(all), stillUsed(network, addresses)); message != "" {
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, reasonConflicting, message
		conflicting.Status, conflicting.Reason, conflicting.Message = metav1.ConditionTrue, reasonConflicting, message
	}
	untagged := metav1.Condition{Type: v2alpha1.ConditionNetworkUntagged, Status: metav1.ConditionFalse, Reason: reasonVLAN}
	if network.Spec.Vlan == 0 {
		untagged.Status, untagged.Reason = metav1.ConditionTrue, reasonNoVLAN
		untagged.Message = "a VF's frames go out as its pod makes them: the pod may tag them itself, and reach every VLAN that the PF's port on the switch carries"
	}
	for _, c := range []metav1.Condition{ready, conflicting, untagged} {
		c.ObservedGeneration = network.Generation
		meta.SetStatusCondition(&network.Status.Conditions, c)
	}
}

// stillUsed says which address of the network, on its wire, a device has from another network, which may be gone or have been
// changed since.
func stillUsed(network *v2alpha1.CiliumNetworkDriverNetwork, addresses []v2alpha1.CiliumNetworkDriverAddress) string {
	var prefixes []netip.Prefix
	for _, s := range network.Spec.Subnets {
		if prefix, err := netip.ParsePrefix(s.CIDR); err == nil {
			prefixes = append(prefixes, prefix)
		}
	}
	for i := range addresses {
		spec := &addresses[i].Spec
		if spec.Network == network.Name || spec.Vlan != network.Spec.Vlan || len(network.Spec.Pools) > 0 && !slices.Contains(network.Spec.Pools, spec.Pool) {
			continue
		}
		if addr, err := netip.ParseAddr(spec.Address); err == nil && slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			return fmt.Sprintf("pod %s/%s still has address %s, from network %s, in the same VLAN and of a pool in common",
				spec.Namespace, spec.Pod.Name, spec.Address, spec.Network)
		}
	}
	return ""
}

// truncated cuts what a condition's message may not hold.
func truncated(message string) string { return message[:min(len(message), 1024)] }
