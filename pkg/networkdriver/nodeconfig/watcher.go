// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/cilium/hive/cell"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// minWatchTime and maxWatchTime bound how long one watch lasts. The spread
	// keeps the agents of a cluster from coming back at the same time.
	minWatchTime = 5 * time.Minute
	maxWatchTime = 10 * time.Minute

	// stableTime is how long a watch has to last until the delay before the
	// next one starts again at its shortest.
	stableTime = time.Minute
)

// Event is the state of the node's configuration.
type Event struct {
	// Config is the node config, or nil when there is none. It is as the API
	// server gave it and has not been validated; it must not be changed.
	Config *v2alpha1.CiliumNetworkDriverNodeConfig
}

// Watcher follows the node config of one node.
type Watcher struct {
	log    *slog.Logger
	client *Client
	node   string
	events chan Event

	// backoff is the delay between two attempts to list and watch.
	backoff wait.Backoff

	// The fields below belong to Run.
	synced    bool // an event has been delivered
	delivered identity
	failing   *metav1.StatusReason // of the failure that was logged last, nil while all is well
}

// identity tells whether a node config asks for something else than before.
// Changes of the status and of labels leave it as it is.
type identity struct {
	uid        types.UID
	generation int64
}

// NewWatcher returns a watcher that does nothing until Run.
func NewWatcher(log *slog.Logger, client *Client, node string) *Watcher {
	return &Watcher{
		log:     log.With("nodeConfig", node),
		client:  client,
		node:    node,
		events:  make(chan Event, 1),
		backoff: wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 15 * time.Second},
	}
}

// Events delivers the configuration as soon as it is known, also when there is
// none, and then each time it has changed. A slow receiver gets the newest
// state only. The channel is never closed.
//
// While the API server cannot be asked, or does not know the resource, there
// are no events: not knowing is not a reason to drop a configuration.
func (w *Watcher) Events() <-chan Event { return w.events }

// Run watches until ctx ends. It is a job for Hive and tells health what it
// waits for.
func (w *Watcher) Run(ctx context.Context, health cell.Health) error {
	backoff := w.backoff
	for {
		start := time.Now()
		err := w.follow(ctx, health)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			w.failed(ctx, err, health)
		}
		if time.Since(start) > stableTime {
			backoff = w.backoff
		}
		if !pause.For(ctx, backoff.Step()) {
			return nil
		}
	}
}

// follow lists and watches until the watch ends. Coming back with a new list
// costs the API server no more than resuming would: it has one object at most.
func (w *Watcher) follow(ctx context.Context, health cell.Health) error {
	list, err := w.client.list(ctx, w.node)
	if err != nil {
		return fmt.Errorf("reading %s %s: %w", v2alpha1.NodeConfigKind, w.node, err)
	}
	var config *v2alpha1.CiliumNetworkDriverNodeConfig
	if len(list.Items) > 0 {
		config = &list.Items[0]
	}
	w.deliver(config)

	timeout := minWatchTime + rand.N(maxWatchTime-minWatchTime)
	watcher, err := w.client.watch(ctx, w.node, list.ResourceVersion, int64(timeout.Seconds()))
	if err != nil {
		return fmt.Errorf("watching %s %s: %w", v2alpha1.NodeConfigKind, w.node, err)
	}
	defer watcher.Stop()
	w.succeeded(health)
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, open := <-watcher.ResultChan():
			if !open {
				return nil
			}
			if event.Type == watch.Error {
				return watchError(w.node, event)
			}
			w.handle(event)
		}
	}
}

func watchError(node string, event watch.Event) error {
	err := apierrors.FromObject(event.Object)
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return nil // a new list cures it
	}
	return fmt.Errorf("watching %s %s: %w", v2alpha1.NodeConfigKind, node, err)
}

func (w *Watcher) handle(event watch.Event) {
	config, ok := event.Object.(*v2alpha1.CiliumNetworkDriverNodeConfig)
	if !ok {
		return
	}
	switch event.Type {
	case watch.Added, watch.Modified:
		w.deliver(config)
	case watch.Deleted:
		w.deliver(nil)
	}
}

// deliver puts the state in the channel in place of one that nobody has taken.
func (w *Watcher) deliver(config *v2alpha1.CiliumNetworkDriverNodeConfig) {
	var id identity
	if config != nil {
		id = identity{uid: config.UID, generation: config.Generation}
	}
	if w.synced && id == w.delivered {
		return
	}
	w.synced, w.delivered = true, id
	select {
	case <-w.events:
	default:
	}
	w.events <- Event{Config: config} // does not block: Run is the only sender
}

// failed logs the first failure and each of another kind.
func (w *Watcher) failed(ctx context.Context, err error, health cell.Health) {
	message := "Cannot read the node config, trying again"
	if apierrors.IsNotFound(err) {
		message = fmt.Sprintf("Waiting for the CustomResourceDefinition %s.%s to be installed", v2alpha1.NodeConfigResource, v2alpha1.GroupName)
	}
	health.Degraded(message, err)
	reason := apierrors.ReasonForError(err)
	level := slog.LevelDebug
	if w.failing == nil || *w.failing != reason {
		level = slog.LevelWarn
	}
	w.failing = &reason
	w.log.Log(ctx, level, message, "error", err)
}

func (w *Watcher) succeeded(health cell.Health) {
	health.OK("Watching")
	if w.failing != nil {
		w.log.Info("Watching the node config again")
		w.failing = nil
	}
}
