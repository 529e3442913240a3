// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	leaseName = "cilium-network-driver-operator"
	// burstTime is how long events are collected after the first one.
	burstTime = 20 * time.Millisecond
	// writers is how many node configs are written at the same time.
	writers = 8
	// A refused write is tried again after firstRetry, and then after twice the time each, up to lastRetry.
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
	// reportInterval is how often metrics are set, and progressLogInterval how often many pending writes are told of.
	reportInterval      = time.Second
	progressLogInterval = 10 * time.Second
	manyPending         = 100
	// pageSize is how many node configs a refresh reads in one request.
	pageSize = 500
)

// term is what lives from one synchronization with the API server to the loss of the lease.
type term struct {
	o       *operator
	log     *slog.Logger
	manager manager.Manager
	ledger  *ledger
	inbox   *inbox
	// definitions are as they were when the term began.
	definitions definitions
	// synced says that the informers have delivered all that there was at the start.
	synced []toolscache.InformerSynced
	// planned is closed when that has been taken in.
	planned chan struct{}

	mu sync.Mutex // guards the fields below
	// nodeQueue has the node configs to write, statusQueue the cluster configs; nil until the term leads.
	nodeQueue   workqueue.TypedRateLimitingInterface[string]
	statusQueue workqueue.TypedRateLimitingInterface[string]
	// ended is true when no write may begin any more; writes counts those under way.
	ended  bool
	writes sync.WaitGroup
}

func newTerm(o *operator, definitions definitions) (*term, error) {
	log := o.Logger
	ledger, err := newLedger(log, o.Tables, definitions)
	if err != nil {
		return nil, err
	}
	t := &term{o: o, log: log, ledger: ledger, inbox: newInbox(), definitions: definitions, planned: make(chan struct{})}
	c := o.Config
	t.manager, err = manager.New(o.client, manager.Options{
		Scheme: newScheme(),
		Logger: logr.FromSlogHandler(log.Handler()),
		Cache: cache.Options{
			ByObject: map[client.Object]cache.ByObject{
				&clusterConfig{}:     {Transform: transformClusterConfig},
				&nodeConfig{}:        {Transform: transformNodeConfig},
				ciliumNodeMetadata(): {Transform: transformCiliumNode},
			},
		},
		Metrics:                       server.Options{BindAddress: "0"},
		LeaderElection:                true,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       c.K8sNamespace,
		LeaderElectionReleaseOnCancel: true, // safe, since end waits for the writes
		LeaseDuration:                 &c.LeaderElectionLeaseDuration,
		RenewDeadline:                 &c.LeaderElectionRenewDeadline,
		RetryPeriod:                   &c.LeaderElectionRetryPeriod,
	})
	if err != nil {
		return nil, fmt.Errorf("manager: %w", err)
	}
	return t, nil
}

func ciliumNodeMetadata() *metav1.PartialObjectMetadata {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(v2alpha1.CiliumNodeGroupVersion.WithKind(v2alpha1.CiliumNodeKind))
	return object
}

// run returns when the lease is lost or the context ends. It calls ready when all there is has been taken in.
func (t *term) run(ctx context.Context, ready func()) error {
	if err := t.watch(ctx); err != nil {
		return err
	}
	gate := newGate(t.log, t.o.Config.NetworkDriverWriteQPS, t.o.Config.NetworkDriverWriteBurst)
	recorder := t.manager.GetEventRecorder("cilium-operator")
	nodes := &writer{
		log: t.log, ledger: t.ledger, gate: gate, client: t.manager.GetClient(), live: t.manager.GetAPIReader(),
		events: recorder, metrics: t.o.metrics, enqueue: t.enqueue,
	}
	statuses := &statusWriter{
		log: t.log, ledger: t.ledger, gate: gate, client: t.manager.GetClient().Status(),
		events: recorder, metrics: t.o.metrics, unsettled: map[string]time.Time{},
	}
	if err := t.control("node-configs", nodes, writers, &t.nodeQueue); err != nil {
		return err
	}
	if err := t.control("cluster-config-status", statuses, 2, &t.statusQueue); err != nil {
		return err
	}
	for _, add := range []manager.Runnable{
		everywhere(func(ctx context.Context) error { return t.plan(ctx, ready) }),
		everywhere(t.report),
		manager.RunnableFunc(t.refresh),
	} {
		if err := t.manager.Add(add); err != nil {
			return err
		}
	}
	return t.manager.Start(ctx)
}

// everywhere runs on each replica, not only on the one that leads.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }

// NeedLeaderElection implements [manager.LeaderElectionRunnable].
func (everywhere) NeedLeaderElection() bool { return false }

// watch lets the informers fill the inbox.
func (t *term) watch(ctx context.Context) error {
	for _, kind := range []struct {
		object  client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&clusterConfig{}, handler(t.inbox, func(b *batch) map[string]event[*clusterConfig] { return b.clusterConfigs }, always)},
		{&nodeConfig{}, handler(t.inbox, func(b *batch) map[string]event[*nodeConfig] { return b.nodeConfigs }, always)},
		{ciliumNodeMetadata(), handler(t.inbox, func(b *batch) map[string]event[*metav1.PartialObjectMetadata] { return b.nodes }, otherLabels)},
	} {
		informer, err := t.manager.GetCache().GetInformer(ctx, kind.object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("informer: %w", err)
		}
		registration, err := informer.AddEventHandler(kind.handler)
		if err != nil {
			return fmt.Errorf("informer: %w", err)
		}
		t.synced = append(t.synced, registration.HasSynced)
	}
	return nil
}

// control makes a controller that works off a queue of names while the term leads.
func (t *term) control(name string, reconciler reconcile.TypedReconciler[string], workers int, queue *workqueue.TypedRateLimitingInterface[string]) error {
	// The library wants each name once in a process, for its metrics, which are not served; a process has many terms.
	skip := true
	c, err := controller.NewTyped(name, t.manager, controller.TypedOptions[string]{
		SkipNameValidation:      &skip,
		MaxConcurrentReconciles: workers,
		Reconciler:              &guarded{t, reconciler},
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry),
		LogConstructor: func(name *string) logr.Logger {
			log := t.manager.GetLogger()
			if name != nil {
				log = log.WithValues("name", *name)
			}
			return log
		},
	})
	if err != nil {
		return fmt.Errorf("controller %s: %w", name, err)
	}
	return c.Watch(source.TypedFunc[string](func(ctx context.Context, q workqueue.TypedRateLimitingInterface[string]) error {
		select {
		case <-t.planned:
		case <-ctx.Done():
			return ctx.Err()
		}
		t.mu.Lock()
		*queue = q
		lead := t.nodeQueue != nil && t.statusQueue != nil
		t.mu.Unlock()
		if lead {
			t.o.metrics.leader.Set(1)
			t.log.Info("This replica leads and writes")
			t.enqueue(t.ledger.unsettled())
		}
		return nil
	}))
}

// guarded lets no write begin after the end of the term.
type guarded struct {
	term *term
	next reconcile.TypedReconciler[string]
}

// Reconcile implements [reconcile.TypedReconciler].
func (g *guarded) Reconcile(ctx context.Context, name string) (reconcile.Result, error) {
	g.term.mu.Lock()
	if g.term.ended {
		g.term.mu.Unlock()
		return reconcile.Result{}, nil
	}
	g.term.writes.Add(1)
	g.term.mu.Unlock()
	defer g.term.writes.Done()
	return g.next.Reconcile(ctx, name)
}

// end returns when nothing is written any more. The manager does not wait for that when the lease is lost.
func (t *term) end() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.writes.Wait()
}

// enqueue hands work to the writers. While another replica leads there are none; the ledger remembers the work.
func (t *term) enqueue(w work) {
	t.mu.Lock()
	nodes, statuses := t.nodeQueue, t.statusQueue
	t.mu.Unlock()
	if nodes == nil || statuses == nil {
		return
	}
	for name := range w.nodes {
		nodes.Add(name)
	}
	for name := range w.configs {
		statuses.Add(name)
	}
}

// plan takes in batches of events, one after the other.
func (t *term) plan(ctx context.Context, ready func()) error {
	if !toolscache.WaitForCacheSync(ctx.Done(), t.synced...) {
		return nil
	}
	for first := true; ; first = false {
		start := time.Now()
		b := t.inbox.take()
		if first || b.losesAny() {
			if err := t.confirm(ctx); err != nil {
				return err
			}
		}
		w := t.ledger.apply(b)
		if first {
			t.log.Info("Synchronized", "duration", time.Since(start), "nodeConfigsToWrite", len(w.nodes), "frozen", t.ledger.totals().frozen)
			close(t.planned)
			ready()
		}
		t.enqueue(w)
		select {
		case <-t.inbox.wake:
		case <-ctx.Done():
			return nil
		}
		if !pause.For(ctx, burstTime) {
			return nil
		}
	}
}

// confirm returns an error when the objects that were seen, or seen to go, are not of the definitions with which the
// term began. What is asked after an event has happened cannot be older than the event.
func (t *term) confirm(ctx context.Context) error {
	now, err := readDefinitions(ctx, t.o.client)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	case now.nodes.uid != t.definitions.nodes.uid:
		return errors.New("the CustomResourceDefinition of CiliumNodes was made anew")
	case now.clusterConfigs.uid != t.definitions.clusterConfigs.uid:
		return errors.New("the CustomResourceDefinition of cluster configs was made anew")
	}
	return nil
}

// report sets the metrics, and logs how a large number of writes goes on.
func (t *term) report(ctx context.Context) error {
	var logged time.Time
	many := false
	for pause.For(ctx, reportInterval) {
		totals := t.ledger.totals()
		t.o.metrics.set(totals)
		switch {
		case totals.pending >= manyPending && time.Since(logged) >= progressLogInterval:
			t.log.Info("Node configs are being written", "pending", totals.pending, "nodes", totals.nodes)
			logged, many = time.Now(), true
		case totals.pending == 0 && many:
			t.log.Info("All node configs are written", "nodes", totals.nodes)
			many = false
		}
	}
	return nil
}

// refresh reads all node configs now and then, since a watch may miss something.
func (t *term) refresh(ctx context.Context) error {
	interval := t.o.Config.NetworkDriverRefreshInterval
	for pause.For(ctx, interval-rand.N(interval/10)) {
		list, err := t.list(ctx)
		if err != nil {
			t.log.Warn("Node configs cannot be read, trying again", "error", err, "retryAfter", interval)
			continue
		}
		t.inbox.add(func(b *batch) { b.listing = list })
	}
	return nil
}

// list reads all node configs from the API server, in pages of one state.
func (t *term) list(ctx context.Context) (*listing, error) {
	list := &listing{newestKnown: t.ledger.newest()}
	next := ""
	for {
		page := &nodeConfigList{}
		if err := t.manager.GetAPIReader().List(ctx, page, client.Limit(pageSize), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("list %s: %w", v2alpha1.NodeConfigResource, err)
		}
		for i := range page.Items {
			if err := page.Items[i].trim(); err != nil {
				return nil, err
			}
			list.items = append(list.items, &page.Items[i])
		}
		list.resourceVersion, next = page.ResourceVersion, page.Continue
		if next == "" {
			return list, nil
		}
	}
}
