// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// servedInterval is how often the API server is asked for the resources while it does not have them.
	servedInterval = time.Second
	// againDelay is the pause before a new term.
	againDelay = time.Second
)

// operator lives from term to term: a term ends when the lease is lost, or with the program.
type operator struct {
	Params
	metrics *metrics
	// client is the configuration of the API client. Its own limit is off, since the gate limits what is written.
	client *rest.Config
	// waits is what the operator waits for, nil when it is at work; for the readiness check.
	waits atomic.Pointer[string]
}

func newOperator(p Params) (*operator, error) {
	m, err := newMetrics(p.Metrics)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	o := &operator{Params: p, metrics: m, client: rest.CopyConfig(p.RESTConfig)}
	o.client.QPS = -1
	o.wait("waiting for the Kubernetes API")
	p.Health.AddReadiness("network-driver-config", func() error {
		if reason := o.waits.Load(); reason != nil {
			return errors.New(*reason)
		}
		return nil
	})
	return o, nil
}

func (o *operator) wait(reason string) { o.waits.Store(&reason) }

// run is a job for Hive.
func (o *operator) run(ctx context.Context, health cell.Health) error {
	// The library's own logger, for what it does outside of a manager.
	ctrllog.SetLogger(logr.FromSlogHandler(o.Logger.Handler()))
	for {
		definitions, err := o.waitServed(ctx, health)
		if err != nil {
			return nil // the program ends
		}
		err = o.term(ctx, definitions, health)
		o.metrics.leader.Set(0)
		if ctx.Err() != nil {
			return nil
		}
		o.Logger.Warn("Starting over", "error", err)
		health.Degraded("Starting over", err)
		o.wait(fmt.Sprintf("starting over: %v", err))
		if !pause.For(ctx, againDelay) {
			return nil
		}
	}
}

// term runs one term.
func (o *operator) term(ctx context.Context, definitions definitions, health cell.Health) error {
	t, err := newTerm(o, definitions)
	if err != nil {
		return err
	}
	defer t.end()
	return t.run(ctx, func() {
		o.waits.Store(nil)
		health.OK("Synchronized")
	})
}

// waitServed returns when the API server has all resources that the operator works with, or with the context's error.
func (o *operator) waitServed(ctx context.Context, health cell.Health) (definitions, error) {
	client, err := discovery.NewDiscoveryClientForConfig(o.client)
	if err != nil {
		return definitions{}, fmt.Errorf("discovery client: %w", err)
	}
	logged := ""
	for {
		var found definitions
		err := served(client)
		if err == nil {
			found, err = readDefinitions(ctx, o.client)
		}
		if err == nil {
			if logged != "" {
				o.Logger.Info("Kubernetes API has all resources")
			}
			return found, nil
		}
		if ctx.Err() != nil {
			return definitions{}, ctx.Err()
		}
		health.Degraded("Waiting for the Kubernetes API", err)
		o.wait(err.Error())
		level := slog.LevelDebug
		if logged != err.Error() {
			logged, level = err.Error(), slog.LevelWarn
		}
		o.Logger.Log(ctx, level, "Waiting for the Kubernetes API", "error", err)
		if !pause.For(ctx, servedInterval) {
			return definitions{}, ctx.Err()
		}
	}
}

// definition is a CustomResourceDefinition. With it go all of its objects, which says nothing of what they stood for.
type definition struct {
	uid  types.UID
	born time.Time
}

// definitions are those of the objects that node configs are made from.
type definitions struct{ nodes, clusterConfigs definition }

var definitionResource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// readDefinitions asks the API server for the definitions. One that is being deleted is an error.
func readDefinitions(ctx context.Context, config *rest.Config) (found definitions, err error) {
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return definitions{}, fmt.Errorf("metadata client: %w", err)
	}
	if found.nodes, err = readDefinition(ctx, client, v2alpha1.CiliumNodeResource); err != nil {
		return definitions{}, err
	}
	found.clusterConfigs, err = readDefinition(ctx, client, v2alpha1.ClusterConfigResource)
	return found, err
}

func readDefinition(ctx context.Context, client metadata.Interface, resource string) (definition, error) {
	name := resource + "." + v2alpha1.GroupName
	object, err := client.Resource(definitionResource).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return definition{}, notInstalled(resource)
	case err != nil:
		return definition{}, fmt.Errorf("read the CustomResourceDefinition %s: %w", name, err)
	case object.DeletionTimestamp != nil:
		return definition{}, fmt.Errorf("the CustomResourceDefinition %s is being deleted; node configs stay as they are until it is installed again", name)
	}
	return definition{uid: object.UID, born: object.CreationTimestamp.Time}, nil
}

func notInstalled(resource string) error {
	return fmt.Errorf("waiting for the CustomResourceDefinition %s.%s to be installed", resource, v2alpha1.GroupName)
}

// served returns an error that names a missing resource, nil if none is missing.
func served(client discovery.ServerResourcesInterface) error {
	for _, want := range []struct{ version, resource string }{
		{v2alpha1.SchemeGroupVersion.String(), v2alpha1.ClusterConfigResource},
		{v2alpha1.SchemeGroupVersion.String(), v2alpha1.NodeConfigResource},
		{v2alpha1.CiliumNodeGroupVersion.String(), v2alpha1.CiliumNodeResource},
	} {
		list, err := client.ServerResourcesForGroupVersion(want.version)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("ask for the resources of %s: %w", want.version, err)
		}
		found := false
		if err == nil {
			for _, resource := range list.APIResources {
				found = found || resource.Name == want.resource
			}
		}
		if !found {
			return notInstalled(want.resource)
		}
	}
	return nil
}
