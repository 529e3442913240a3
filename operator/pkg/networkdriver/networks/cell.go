// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package networks keeps the status of CiliumNetworkDriverNetworks, and gives back the addresses of nodes that are gone.
//
// Addresses are taken and given back by the agents. While a node exists nobody else knows whether a pod of it still sends from
// an address, so that this package frees those of nodes only that have been deleted, or that somebody has declared out of
// service, for a while. One that is kept for its pod is released then, which is when its node's agent would have deleted it, and
// deleted when the network keeps it no longer.
package networks

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/agents"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/wires"
)

const (
	leaseName = "cilium-network-driver-networks"
	// firstRetry and lastRetry bound the pause before a new term, when the lease was lost or the API server does not have the
	// resources.
	firstRetry, lastRetry = time.Second, time.Minute
)

// Cell is the part of the operator that is about networks.
var Cell = cell.Module(
	"network-driver-networks",
	"Looks after networks and the addresses of nodes that are gone",

	cell.Invoke(register),
)

// Params are what the cell takes from the application.
type Params struct {
	cell.In

	Config     config.Config
	Logger     *slog.Logger
	Jobs       job.Group
	RESTConfig *rest.Config
	Metrics    prometheus.Registerer
}

func register(p Params) error {
	if !p.Config.Enabled() {
		return nil
	}
	m, err := newMetrics(p.Metrics)
	if err != nil {
		return fmt.Errorf("networks: register metrics: %w", err)
	}
	o := &operator{Params: p, metrics: m}
	p.Jobs.Add(job.OneShot("networks", o.run))
	return nil
}

// operator lives from term to term: a term ends when the lease is lost, or with the program.
type operator struct {
	Params
	metrics *metrics
}

func (o *operator) run(ctx context.Context, health cell.Health) error {
	for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
		start := time.Now()
		health.OK("Running")
		err := o.term(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(start) > lastRetry {
			delay = firstRetry
		}
		o.Logger.Warn("Networks are not looked after, starting over", "after", delay, "error", err)
		health.Degraded("Starting over", err)
		if !pause.For(ctx, delay) {
			return nil
		}
	}
}

// term runs the reconcilers for as long as this replica leads.
func (o *operator) term(ctx context.Context) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v2alpha1.AddToScheme, corev1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	c := o.Config
	agentPods, err := labels.Parse(c.NetworkDriverAgentSelector)
	if err != nil {
		return fmt.Errorf("--network-driver-agent-selector: %w", err)
	}
	mgr, err := manager.New(o.RESTConfig, manager.Options{
		Scheme: scheme,
		Logger: logr.FromSlogHandler(o.Logger.Handler()),
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{
				&corev1.Node{}: {Transform: stripNode},
				&v2alpha1.CiliumNetworkDriverNodeConfig{}: {Transform: stripNodeConfig},
				&corev1.Pod{}: {Namespaces: map[string]cache.Config{c.K8sNamespace: {LabelSelector: agentPods}}, Transform: agents.StripPod},
			},
		},
		Metrics:                       server.Options{BindAddress: "0"},
		LeaderElection:                true,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       c.K8sNamespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &c.LeaderElectionLeaseDuration,
		RenewDeadline:                 &c.LeaderElectionRenewDeadline,
		RetryPeriod:                   &c.LeaderElectionRetryPeriod,
		// Names are those of metrics, and the controllers of the next term have the same.
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
	})
	if err != nil {
		return fmt.Errorf("manager: %w", err)
	}
	// Only the replica that leads follows the addresses.
	addresses := newLedger()
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { return addresses.run(ctx, mgr.GetLogger(), o.RESTConfig) })); err != nil {
		return err
	}
	network := func(a *address) string { return a.network }
	statuses := &statusReconciler{log: o.Logger, client: mgr.GetClient(), ledger: addresses, wires: wires.NewTable(), metrics: o.metrics,
		events: mgr.GetEventRecorder("cilium-operator")}
	err = builder.ControllerManagedBy(mgr).Named("network-status").
		Watches(&v2alpha1.CiliumNetworkDriverNetwork{}, handler.EnqueueRequestsFromMapFunc(statuses.all)).
		Watches(&v2alpha1.CiliumNetworkDriverNodeConfig{}, statuses.nodeConfigs()).
		WatchesRawSource(addresses.source(network)).
		Complete(statuses)
	if err != nil {
		return err
	}
	err = builder.ControllerManagedBy(mgr).Named("kept-addresses").
		For(&v2alpha1.CiliumNetworkDriverNetwork{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		WatchesRawSource(addresses.source(func(a *address) string {
			if a.inUse() {
				return ""
			}
			return a.network
		})).
		Complete(&keptReconciler{log: o.Logger, client: mgr.GetClient(), ledger: addresses})
	if err != nil {
		return err
	}
	orphans := &orphanReconciler{log: o.Logger, client: mgr.GetClient(), ledger: addresses, live: mgr.GetAPIReader(),
		after: c.NetworkDriverAddressGracePeriod, since: map[string]time.Time{}}
	err = builder.ControllerManagedBy(mgr).Named("orphaned-addresses").
		For(&corev1.Node{}).
		WatchesRawSource(addresses.source(func(a *address) string { return a.node })).
		Complete(orphans)
	if err != nil {
		return err
	}
	if !agentPods.Empty() {
		if err := agents.Add(ctx, mgr, o.Logger); err != nil {
			return err
		}
	}
	return mgr.Start(ctx)
}
