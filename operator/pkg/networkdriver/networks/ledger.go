// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"sync"
	"time"
	"unique"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
)

// countDelay is how long addresses are collected that come and go, before they are looked at again.
const countDelay = 2 * time.Second

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// address is what the operator keeps of a CiliumNetworkDriverAddress. It is immutable.
type address struct {
	name                            string
	uid                             types.UID
	version                         string
	addr                            netip.Addr
	network, pool, node             string
	vlan                            int32
	namespace, pod, claim, claimUID string
	// reserved says that the address is kept when its device is free, and released since when that is so; zero while it is in use.
	reserved bool
	released time.Time
}

// summary returns what is kept of an object. What many have in common is there once.
func summary(o *v2alpha1.CiliumNetworkDriverAddress) *address {
	common := func(s string) string { return unique.Make(s).Value() }
	spec := &o.Spec
	addr, _ := netip.ParseAddr(spec.Address) // the schema lets no other through; the zero value is in no subnet
	a := &address{
		name: o.Name, uid: o.UID, version: o.ResourceVersion, addr: addr, network: common(spec.Network), pool: common(spec.Pool), node: common(spec.Node),
		vlan: spec.Vlan, namespace: common(spec.Namespace), pod: spec.Pod.Name, claim: spec.Claim.Name, claimUID: common(spec.Claim.UID), reserved: spec.IsReserved(),
	}
	if spec.State == v2alpha1.AddressReleased {
		// A node's clock may be ahead.
		a.released = spec.ReleasedAt.Time
		if now := time.Now(); a.released.After(now) {
			a.released = now
		}
	}
	return a
}

// inUse says whether a device has the address.
func (a *address) inUse() bool { return a.released.IsZero() }

// ledger knows all addresses, by one list and one watch, and counts them. There may be a hundred thousand: it keeps a part of each,
// and whoever asks reads that in place.
type ledger struct {
	mu     sync.RWMutex // guards the fields below
	synced bool
	// byName are all addresses, byNetwork and byNode the same by the names of networks and nodes.
	byName            map[string]*address
	byNetwork, byNode map[string]map[string]*address
	// claims are the numbers of addresses in use of claims, by networks.
	claims map[string]map[string]int
	// subscribers are told of each address that comes, goes or changes.
	subscribers []func(*address)
}

var _ toolscache.ReflectorStore = (*ledger)(nil)

func newLedger() *ledger {
	l := &ledger{}
	l.clear()
	return l
}

func (l *ledger) clear() {
	l.byName, l.byNetwork, l.byNode, l.claims = map[string]*address{}, map[string]map[string]*address{}, map[string]map[string]*address{}, map[string]map[string]int{}
}

// run follows the addresses of the API server until the context ends.
func (l *ledger) run(ctx context.Context, log logr.Logger, config *rest.Config) error {
	custom, _, err := client.NewCustom(config)
	if err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	lw := toolscache.NewListWatchFromClient(custom, v2alpha1.AddressResource, metav1.NamespaceAll, fields.Everything())
	toolscache.NewReflectorWithOptions(lw, &v2alpha1.CiliumNetworkDriverAddress{}, l, toolscache.ReflectorOptions{Logger: &log, Name: "addresses"}).RunWithContext(ctx)
	return nil
}

// source has what an address belongs to looked at some time after the address came, went or changed: those that come and go together
// are one look.
func (l *ledger) source(nameOf func(*address) string) source.Source {
	return source.Func(func(ctx context.Context, q queue) error {
		tell := func(a *address) {
			if name := nameOf(a); name != "" && ctx.Err() == nil {
				q.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}, countDelay)
			}
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.subscribers = append(l.subscribers, tell)
		for _, a := range l.byName {
			tell(a)
		}
		return nil
	})
}

// ready says whether all addresses are known.
func (l *ledger) ready() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.synced
}

// ofNetwork returns the network's addresses. The ledger stands still meanwhile.
func (l *ledger) ofNetwork(network string) iter.Seq[*address] {
	return l.read(func(yield func(*address) bool) {
		for _, a := range l.byNetwork[network] {
			if !yield(a) {
				return
			}
		}
	})
}

// ofNetworks returns the addresses of those networks whose names are asked for, which need not exist. The ledger stands still meanwhile.
func (l *ledger) ofNetworks(asked func(network string) bool) iter.Seq[*address] {
	return l.read(func(yield func(*address) bool) {
		for network, addresses := range l.byNetwork {
			if !asked(network) {
				continue
			}
			for _, a := range addresses {
				if !yield(a) {
					return
				}
			}
		}
	})
}

func (l *ledger) read(seq iter.Seq[*address]) iter.Seq[*address] {
	return func(yield func(*address) bool) {
		l.mu.RLock()
		defer l.mu.RUnlock()
		seq(yield)
	}
}

// claimsOf returns the number of claims that use addresses of the network.
func (l *ledger) claimsOf(network string) int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.claims[network])
}

// usedOn returns the addresses that devices of the node have.
func (l *ledger) usedOn(node string) (used []*address) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, a := range l.byNode[node] {
		if a.inUse() {
			used = append(used, a)
		}
	}
	return used
}

// put replaces the address of a name; nil removes it. The lock is held.
func (l *ledger) put(name string, a *address) {
	if before := l.byName[name]; before != nil {
		delete(l.byName, name)
		drop(l.byNetwork, before.network, name)
		drop(l.byNode, before.node, name)
		if claims := l.claims[before.network]; before.inUse() {
			if claims[before.claimUID]--; claims[before.claimUID] == 0 {
				drop(l.claims, before.network, before.claimUID)
			}
		}
		l.tell(before)
	}
	if a == nil {
		return
	}
	l.byName[name] = a
	into(l.byNetwork, a.network)[name] = a
	into(l.byNode, a.node)[name] = a
	if a.inUse() {
		into(l.claims, a.network)[a.claimUID]++
	}
	l.tell(a)
}

func (l *ledger) tell(a *address) {
	for _, subscriber := range l.subscribers {
		subscriber(a)
	}
}

func into[V any](index map[string]map[string]V, key string) map[string]V {
	if index[key] == nil {
		index[key] = map[string]V{}
	}
	return index[key]
}

func drop[V any](index map[string]map[string]V, key, name string) {
	if delete(index[key], name); len(index[key]) == 0 {
		delete(index, key)
	}
}

// Add implements [toolscache.ReflectorStore].
func (l *ledger) Add(obj any) error { return l.Update(obj) }

// Update implements [toolscache.ReflectorStore].
func (l *ledger) Update(obj any) error {
	o, ok := obj.(*v2alpha1.CiliumNetworkDriverAddress)
	if !ok {
		return fmt.Errorf("addresses: %T is none", obj)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.put(o.Name, summary(o))
	return nil
}

// Delete implements [toolscache.ReflectorStore].
func (l *ledger) Delete(obj any) error {
	o, ok := obj.(*v2alpha1.CiliumNetworkDriverAddress)
	if !ok {
		return fmt.Errorf("addresses: %T is none", obj)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.put(o.Name, nil)
	return nil
}

// Replace implements [toolscache.ReflectorStore].
func (l *ledger) Replace(list []any, _ string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.byName {
		l.tell(a) // it may be gone
	}
	l.clear()
	for _, obj := range list {
		o, ok := obj.(*v2alpha1.CiliumNetworkDriverAddress)
		if !ok {
			return fmt.Errorf("addresses: %T is none", obj)
		}
		l.put(o.Name, summary(o))
	}
	l.synced = true
	return nil
}

// Resync implements [toolscache.ReflectorStore].
func (l *ledger) Resync() error { return nil }

// Transformer has the reflector keep no more than that of what it collects for Replace.
func (l *ledger) Transformer() toolscache.TransformFunc {
	return func(obj any) (any, error) {
		if o, ok := obj.(*v2alpha1.CiliumNetworkDriverAddress); ok {
			o.ManagedFields, o.Labels, o.Annotations = nil, nil, nil
		}
		return obj, nil
	}
}
