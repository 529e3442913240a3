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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/logonce"
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

	mu        sync.Mutex    // guards the fields below
	changed   chan struct{} // closed and made anew when one of them changes
	node      followed
	published followed
}

// followed is an object as far as it is known.
type followed struct {
	object *metav1.PartialObjectMetadata // nil for none
	events uint64                        // what the watch has told so far
}

// NewPublisher returns a publisher for the node of a name that does nothing until Run.
func NewPublisher(log *slog.Logger, config *rest.Config, name string) (*Publisher, error) {
	api, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("metadata client: %w", err)
	}
	return &Publisher{log: log.With("ciliumNode", name), client: api, name: name, changed: make(chan struct{})}, nil
}

// Run publishes until ctx ends. It is a job for Hive.
func (p *Publisher) Run(ctx context.Context, health cell.Health) error {
	var following sync.WaitGroup
	defer following.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	following.Go(func() { p.follow(ctx, health.NewScope("node"), "the Node", nodes, &p.node) })
	following.Go(func() { p.follow(ctx, health.NewScope("cilium-node"), "the CiliumNode", ciliumNodes, &p.published) })

	backoff := retry
	var failing logonce.Problems[metav1.StatusReason]
	for {
		p.mu.Lock()
		node, published, changed := p.node, p.published, p.changed
		p.mu.Unlock()
		var again <-chan time.Time
		if node.events > 0 && published.events > 0 {
			if err := p.publish(ctx, node.object, published); err != nil && ctx.Err() == nil {
				delay := backoff.Step()
				again = time.After(delay)
				level := failing.Level(apierrors.ReasonForError(err), slog.LevelWarn)
				p.log.Log(ctx, level, "CiliumNode cannot be written, trying again", "error", err, "retryAfter", delay.Round(time.Second))
				health.Degraded("CiliumNode cannot be written", err)
			} else {
				backoff = retry
				failing.Solved()
				health.OK("Published")
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again:
		}
	}
}

// follow keeps what is known of the object of the node's name until the context ends.
func (p *Publisher) follow(ctx context.Context, health cell.Health, what string, resource schema.GroupVersionResource, known *followed) {
	defer health.Close()
	c := p.client.Resource(resource)
	follower := &client.Follower[*metav1.PartialObjectMetadata]{
		Logger: p.log, What: what, Resource: resource.GroupResource(), Name: p.name,
		ListWatcher: client.ListWatcher{
			List:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, o) },
			Watch: c.Watch,
		},
		Changed: func(object *metav1.PartialObjectMetadata) {
			p.mu.Lock()
			defer p.mu.Unlock()
			*known = followed{object: object, events: known.events + 1}
			close(p.changed)
			p.changed = make(chan struct{})
		},
	}
	_ = follower.Run(ctx, health)
}

// publish applies what the CiliumNode should be, unless it is so.
func (p *Publisher) publish(ctx context.Context, node *metav1.PartialObjectMetadata, published followed) error {
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
	if p.isPublished(want, published.object) {
		return nil
	}
	body, err := json.Marshal(struct {
		*metav1.PartialObjectMetadata
		Spec struct{} `json:"spec"`
	}{PartialObjectMetadata: want})
	if err != nil {
		return err
	}
	force := true
	answer, err := p.client.Resource(ciliumNodes).Patch(ctx, p.name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force})
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", v2alpha1.CiliumNodeKind, p.name, err)
	}
	p.log.Info("CiliumNode has the labels of the node", "labels", len(want.Labels))
	p.applied = want
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.published.events == published.events {
		p.published.object = answer // which is newer than what the watch has told so far
	}
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
