// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package ciliumnode makes the CiliumNode of the agent's own node and keeps its labels like those of the Node, for
// clusters in which no Cilium does that. The operator selects nodes by these labels.
//
// It watches the two objects of the node's name and no other, metadata only. A change is one server-side apply, which
// makes an object that is missing, removes labels that were set here before, and leaves those of others alone. With the
// Node the CiliumNode goes, since it is owned by it.
package ciliumnode

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cilium/hive/cell"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// fieldManager is on record for the fields that are set here.
const fieldManager = "cilium-network-driver-agent"

// retry is the delay after a write that failed.
var retry = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 1 << 10, Cap: time.Minute}

var (
	nodes       = corev1.SchemeGroupVersion.WithResource("nodes")
	ciliumNodes = v2alpha1.CiliumNodeGroupVersion.WithResource(v2alpha1.CiliumNodeResource)
)

// Publisher keeps the CiliumNode of one node.
type Publisher struct {
	log    *slog.Logger
	client metadata.Interface
	name   string
	// applied is what was applied last; it belongs to Run.
	applied *metav1.PartialObjectMetadata

	mu     sync.Mutex // guards the fields below
	events uint64     // what the watch of the CiliumNode has told so far
	// answer is the object as the API server gave it back, if the watch has told nothing since the request was sent.
	answer *metav1.PartialObjectMetadata
}

// NewPublisher returns a publisher for the node of a name that does nothing until Run.
func NewPublisher(log *slog.Logger, config *rest.Config, name string) (*Publisher, error) {
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("metadata client: %w", err)
	}
	return &Publisher{log: log.With("ciliumNode", name), client: client, name: name}, nil
}

// Run publishes until ctx ends. It is a job for Hive.
func (p *Publisher) Run(ctx context.Context, health cell.Health) error {
	changed := make(chan struct{}, 1)
	tell := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	node, err := p.follow(ctx, nodes, tell)
	if err != nil {
		return err
	}
	published, err := p.follow(ctx, ciliumNodes, func() {
		p.mu.Lock()
		p.events++
		p.answer = nil
		p.mu.Unlock()
		tell()
	})
	if err != nil {
		return err
	}
	if !cache.WaitForCacheSync(ctx.Done(), node.HasSynced, published.HasSynced) {
		return nil
	}
	backoff := retry
	for {
		var again <-chan time.Time
		if err := p.publish(ctx, object(node.GetStore()), p.current(published.GetStore())); err != nil && ctx.Err() == nil {
			delay := backoff.Step()
			again = time.After(delay)
			p.log.Warn("CiliumNode cannot be written, trying again", "error", err, "retryAfter", delay.Round(time.Second))
			health.Degraded("CiliumNode cannot be written", err)
		} else {
			backoff = retry
			health.OK("Published")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again:
		}
	}
}

// follow starts to watch the object of the node's name, and tells of changes when the store has them.
func (p *Publisher) follow(ctx context.Context, resource schema.GroupVersionResource, tell func()) (cache.SharedIndexInformer, error) {
	informer := metadatainformer.NewFilteredMetadataInformer(p.client, resource, metav1.NamespaceAll, 0, cache.Indexers{},
		func(options *metav1.ListOptions) {
			options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, p.name).String()
		}).Informer()
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { tell() }, UpdateFunc: func(any, any) { tell() }, DeleteFunc: func(any) { tell() },
	})
	if err != nil {
		return nil, fmt.Errorf("watch %s %s: %w", resource.Resource, p.name, err)
	}
	var logged metav1.StatusReason
	err = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		level := slog.LevelDebug
		reason := apierrors.ReasonForError(err)
		if reason == "" {
			reason = metav1.StatusReasonUnknown
		}
		if reason != logged && ctx.Err() == nil {
			logged, level = reason, slog.LevelWarn
		}
		message := "Cannot watch the node's object, trying again"
		if apierrors.IsNotFound(err) {
			message = fmt.Sprintf("Waiting for the CustomResourceDefinition %s to be installed", resource.GroupResource())
		}
		p.log.Log(ctx, level, message, "resource", resource.Resource, "error", err)
	})
	if err != nil {
		return nil, fmt.Errorf("watch %s %s: %w", resource.Resource, p.name, err)
	}
	go informer.RunWithContext(ctx)
	return informer, nil
}

// object returns the one object of a store, or nil.
func object(store cache.Store) *metav1.PartialObjectMetadata {
	for _, item := range store.List() {
		if o, ok := item.(*metav1.PartialObjectMetadata); ok {
			return o
		}
	}
	return nil
}

// current returns the CiliumNode as far as it is known, or nil.
func (p *Publisher) current(store cache.Store) *metav1.PartialObjectMetadata {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answer != nil {
		return p.answer
	}
	return object(store)
}

// publish applies what the CiliumNode should be, unless it is so.
func (p *Publisher) publish(ctx context.Context, node, published *metav1.PartialObjectMetadata) error {
	if node == nil {
		return nil // the CiliumNode goes with the Node
	}
	want := &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: v2alpha1.CiliumNodeGroupVersion.String(), Kind: v2alpha1.CiliumNodeKind},
		ObjectMeta: metav1.ObjectMeta{
			Name: p.name, Labels: node.Labels,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		},
	}
	if p.isPublished(want, published) {
		return nil
	}
	body, err := json.Marshal(struct {
		*metav1.PartialObjectMetadata
		Spec struct{} `json:"spec"`
	}{PartialObjectMetadata: want})
	if err != nil {
		return err
	}
	p.mu.Lock()
	events := p.events
	p.mu.Unlock()
	force := true
	answer, err := p.client.Resource(ciliumNodes).Patch(ctx, p.name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force})
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", v2alpha1.CiliumNodeKind, p.name, err)
	}
	p.log.Info("CiliumNode has the labels of the node", "labels", len(want.Labels))
	p.applied = want
	p.mu.Lock()
	if p.events == events {
		p.answer = answer
	}
	p.mu.Unlock()
	return nil
}

// isPublished says whether the CiliumNode is as wanted. Labels that it has beside these may be left from an earlier run
// or be someone else's; only an apply can tell, and one is enough.
func (p *Publisher) isPublished(want, published *metav1.PartialObjectMetadata) bool {
	if published == nil {
		return false
	}
	for key, value := range want.Labels {
		if have, ok := published.Labels[key]; !ok || have != value {
			return false
		}
	}
	owner := want.OwnerReferences[0]
	if !slices.ContainsFunc(published.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == owner.Kind && o.UID == owner.UID }) {
		return false
	}
	if len(published.Labels) == len(want.Labels) {
		return true
	}
	return p.applied != nil && maps.Equal(p.applied.Labels, want.Labels) && p.applied.OwnerReferences[0].UID == owner.UID
}
