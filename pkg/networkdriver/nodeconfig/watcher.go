// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"context"
	"log/slog"

	"github.com/cilium/hive/cell"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
)

// Event is the state of the node's configuration.
type Event struct {
	// Config is the node config, or nil when there is none. It is as the API
	// server gave it and has not been validated; it must not be changed.
	Config *v2alpha1.CiliumNetworkDriverNodeConfig
}

// Watcher follows the node config of one node.
type Watcher struct {
	// Seen, if set, is told of each change of the object, of its status too, before Run delivers it.
	Seen     func(*v2alpha1.CiliumNetworkDriverNodeConfig)
	follower client.Follower[*v2alpha1.CiliumNetworkDriverNodeConfig]
	events   chan Event

	// The fields below belong to Run.
	synced    bool // an event has been delivered
	delivered identity
}

// identity tells whether a node config asks for something else than before.
// Changes of the status and of labels leave it as it is.
type identity struct {
	uid        types.UID
	generation int64
}

// NewWatcher returns a watcher that does nothing until Run.
func NewWatcher(log *slog.Logger, c *Client, node string) *Watcher {
	w := &Watcher{events: make(chan Event, 1)}
	w.follower = client.Follower[*v2alpha1.CiliumNetworkDriverNodeConfig]{
		Logger:      log.With("nodeConfig", node),
		What:        "the node config",
		Resource:    v2alpha1.Resource(v2alpha1.NodeConfigResource),
		Name:        node,
		ListWatcher: client.ListWatcher{List: c.list, Watch: c.watch},
		Changed:     w.deliver,
	}
	return w
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
	return w.follower.Run(ctx, health)
}

// deliver puts the state in the channel in place of one that nobody has taken.
func (w *Watcher) deliver(config *v2alpha1.CiliumNetworkDriverNodeConfig) {
	if w.Seen != nil {
		w.Seen(config)
	}
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
