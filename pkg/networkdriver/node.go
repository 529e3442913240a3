// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/logonce"
)

// ownNode follows the Node that the agent runs on, for the addresses that the cluster knows it by: a device that has one
// must never be given away. An external cloud provider sets them some time after the Node was made.
type ownNode struct {
	client.Follower[*corev1.Node]

	// missing and unreadable are what is wrong with the Node; they belong to Run.
	missing    logonce.Problems[string]
	unreadable logonce.Problems[string]

	mu      sync.Mutex // guards the fields below
	known   bool
	ips     []netip.Addr
	set     labels.Set
	changed chan struct{} // closed and made anew when one of them changes
}

func newOwnNode(log *slog.Logger, nodes corev1client.NodeInterface, name string) *ownNode {
	n := &ownNode{changed: make(chan struct{})}
	n.Follower = client.Follower[*corev1.Node]{
		Logger: log.With("node", name), What: "the Node", Resource: corev1.Resource("nodes"), Name: name,
		ListWatcher: client.ListWatcher{
			List:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return nodes.List(ctx, o) },
			Watch: nodes.Watch,
		},
		Changed: n.update,
	}
	return n
}

// update takes the Node's addresses. Those of a Node that is gone stay, since the node itself has them still.
func (n *ownNode) update(node *corev1.Node) {
	if node == nil {
		level := n.missing.Level(n.Name, slog.LevelWarn)
		n.Logger.Log(context.Background(), level, "There is no Node of this name, waiting for it; is --node-name right?")
		return
	}
	n.missing.Solved()
	var ips []netip.Addr
	var unreadable []string
	for _, a := range node.Status.Addresses {
		if a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			ips = append(ips, ip)
		} else {
			unreadable = append(unreadable, a.Address)
		}
	}
	for _, address := range n.unreadable.Replace(unreadable...) {
		n.Logger.Warn("An address in the Node's status is no IP address, a device that has it is not protected", "address", address)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.set = node.Labels
	if n.known && slices.Equal(n.ips, ips) {
		return
	}
	n.known, n.ips = true, ips
	close(n.changed)
	n.changed = make(chan struct{})
}

// addresses returns the Node's present addresses, and a channel that is closed when there are others.
func (n *ownNode) addresses() ([]netip.Addr, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ips, n.changed
}

// assume takes the addresses that were the Node's at another time, until it is known.
func (n *ownNode) assume(ips []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.known {
		n.ips = ips
	}
}

// labels returns the Node's present labels.
func (n *ownNode) labels() labels.Set {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.set
}

// wait returns once the Node is known, or the context has ended.
func (n *ownNode) wait(ctx context.Context) {
	n.mu.Lock()
	known, changed := n.known, n.changed
	n.mu.Unlock()
	if !known {
		wait(ctx, changed)
	}
}
