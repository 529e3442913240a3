// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"math"
	"math/big"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/wires"
)

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

// statusReconciler writes the status of networks.
type statusReconciler struct {
	log     *slog.Logger
	client  client.Client
	ledger  *ledger
	wires   *wires.Table
	metrics *metrics
	events  events.EventRecorder
}

// stripNodeConfig leaves of a node config what is looked at here and in package agents.
func stripNodeConfig(obj any) (any, error) {
	c, ok := obj.(*v2alpha1.CiliumNetworkDriverNodeConfig)
	if !ok {
		return obj, nil
	}
	return &v2alpha1.CiliumNetworkDriverNodeConfig{
		ObjectMeta: metav1.ObjectMeta{Name: c.Name, UID: c.UID, ResourceVersion: c.ResourceVersion},
		Status:     v2alpha1.CiliumNetworkDriverNodeConfigStatus{Conditions: c.Status.Conditions, Pools: c.Status.Pools},
	}, nil
}

// nodeConfigs follows which pools share PFs, and has all networks looked at when that is something else. Of the many other writes to
// node configs nothing follows.
func (r *statusReconciler) nodeConfigs() handler.EventHandler {
	set := func(ctx context.Context, node client.Object, pools []v2alpha1.DevicePoolStatus, q queue) {
		pfs := map[string][]string{}
		for i := range pools {
			pfs[pools[i].Name] = pools[i].PFs
		}
		if !r.wires.Set(node.GetName(), pfs) {
			return
		}
		for _, request := range r.all(ctx, node) {
			q.Add(request)
		}
	}
	present := func(ctx context.Context, o client.Object, q queue) {
		if c, ok := o.(*v2alpha1.CiliumNetworkDriverNodeConfig); ok {
			set(ctx, c, c.Status.Pools, q)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { present(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { present(ctx, e.ObjectNew, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { set(ctx, e.Object, nil, q) },
	}
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
	if !r.ledger.ready() {
		return reconcile.Result{RequeueAfter: countDelay}, nil
	}
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
	before := network.DeepCopy()
	network.Status.ObservedGeneration = network.Generation
	count(network, r.ledger.ofNetwork(network.Name), r.ledger.claimsOf(network.Name))
	judge(network, networks.Items, r.ledger.ofNetworks(func(name string) bool { return name != network.Name }), r.wires.Between)
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
		kind := corev1.EventTypeWarning
		if is == reasonReady {
			kind = corev1.EventTypeNormal
		}
		regarding := &corev1.ObjectReference{
			APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NetworkKind, Name: network.Name, UID: network.UID,
		}
		message := meta.FindStatusCondition(network.Status.Conditions, v2alpha1.ConditionReady).Message
		r.events.Eventf(regarding, nil, kind, is, "Judge", "%s", truncated(message))
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
func count(network *v2alpha1.CiliumNetworkDriverNetwork, addresses iter.Seq[*address], claims int) {
	status := &network.Status
	status.UsedAddresses, status.ReservedAddresses, status.FreeAddresses, status.Subnets = 0, 0, 0, nil
	status.Claims = int32(min(claims, math.MaxInt32))
	prefixes := prefixesOf(network)
	used, reserved := map[netip.Prefix]int64{}, map[netip.Prefix]int64{}
	left := map[string]*big.Int{} // by family
	for a := range addresses {
		of := used
		if a.inUse() {
			status.UsedAddresses++
		} else {
			status.ReservedAddresses++
			of = reserved
		}
		if i := slices.IndexFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a.addr) }); i >= 0 {
			of[prefixes[i]]++
		}
	}
	for i := range network.Spec.Subnets {
		s := &network.Spec.Subnets[i]
		set, err := network.Spec.Addresses(i)
		if err != nil {
			continue // the condition says so
		}
		prefix, err := netip.ParsePrefix(s.CIDR)
		if err != nil {
			continue
		}
		// An address that is no longer given out may still be used.
		free := max(v2alpha1.CountAddresses(set)-used[prefix]-reserved[prefix], 0)
		status.Subnets = append(status.Subnets, v2alpha1.NetworkSubnetStatus{CIDR: s.CIDR, Used: used[prefix], Reserved: reserved[prefix], Free: free})
		if free > math.MaxInt64-status.FreeAddresses {
			status.FreeAddresses = math.MaxInt64
		} else {
			status.FreeAddresses += free
		}
		family := "IPv4"
		if prefix.Addr().Is6() {
			family = "IPv6"
		}
		if left[family] == nil {
			left[family] = new(big.Int)
		}
		if exact := new(big.Int).Sub(v2alpha1.SizeOfSet(set), big.NewInt(used[prefix]+reserved[prefix])); exact.Sign() > 0 {
			left[family].Add(left[family], exact)
		}
	}
	var words []string
	for _, family := range slices.Sorted(maps.Keys(left)) {
		words = append(words, rounded(left[family])+" "+family)
	}
	status.Free = strings.Join(words, ", ")
}

// large is the first number of which the nearest power of two says enough.
const large = 1_000_000

// rounded is the number, or if it is large the power of two that is nearest.
func rounded(n *big.Int) string {
	if n.Cmp(big.NewInt(large)) < 0 {
		return n.String()
	}
	power := n.BitLen() - 1
	if n.Bit(power-1) == 1 {
		power++
	}
	return fmt.Sprintf("2^%d", power)
}

// prefixesOf returns the network's subnets.
func prefixesOf(network *v2alpha1.CiliumNetworkDriverNetwork) (prefixes []netip.Prefix) {
	for _, s := range network.Spec.Subnets {
		if prefix, err := netip.ParsePrefix(s.CIDR); err == nil {
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes
}

// judge sets the network's conditions. The addresses are those of other networks, of younger ones too: those came by them before the
// network was changed to what it is.
func judge(network *v2alpha1.CiliumNetworkDriverNetwork, all []v2alpha1.CiliumNetworkDriverNetwork, addresses iter.Seq[*address],
	wires v2alpha1.Wires) {
	ready := metav1.Condition{Type: v2alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: reasonReady, Message: "claims can join"}
	conflicting := metav1.Condition{Type: v2alpha1.ConditionNetworkConflicting, Status: metav1.ConditionFalse, Reason: reasonReady}
	if err := network.Validate(); err != nil {
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, reasonInvalid, truncated(err.Error())
	} else if message := cmp.Or(network.Conflict(all, wires), stillUsed(network, addresses, wires)); message != "" {
		message = truncated(message)
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
func stillUsed(network *v2alpha1.CiliumNetworkDriverNetwork, addresses iter.Seq[*address], wires v2alpha1.Wires) string {
	prefixes := prefixesOf(network)
	reaches := map[string]string{} // by pool
	for a := range addresses {
		if !a.inUse() || a.vlan != network.Spec.Vlan || !slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a.addr) }) {
			continue
		}
		how, known := reaches[a.pool]
		if !known {
			how = network.Spec.Reaches(a.vlan, []string{a.pool}, wires)
			reaches[a.pool] = how
		}
		if how != "" {
			return fmt.Sprintf("pod %s/%s still has address %s, from network %s, %s", a.namespace, a.pod, a.addr, a.network, how)
		}
	}
	return ""
}

// truncated cuts what a condition's message may not hold.
func truncated(message string) string { return message[:min(len(message), 1024)] }
