// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
)

// fakePods are pods with devices, which are in one sandbox or in none.
type fakePods struct {
	mu    sync.Mutex               // guards the fields below
	place map[kubetypes.UID]string // sandbox by pod
	calls []string                 // "attach s1"
	seen  []attachments.Sandbox    // of the last call
	fail  map[string]error         // by call
	admit error                    // of a container that has something to tell
	block map[string]chan struct{} // calls that wait, whatever their context
	deaf  bool                     // such calls succeed all the same
}

func newFakePods() *fakePods {
	return &fakePods{place: map[kubetypes.UID]string{}, fail: map[string]error{}, block: map[string]chan struct{}{}}
}

// enter notes the call, waits if it is to wait, and returns what it is to fail with.
func (p *fakePods) enter(ctx context.Context, call string, seen ...attachments.Sandbox) error {
	p.mu.Lock()
	p.calls = append(p.calls, call)
	p.seen = seen
	block, err := p.block[call], p.fail[call]
	p.mu.Unlock()
	if block == nil {
		return err
	}
	<-block
	if p.deaf {
		return err
	}
	return ctx.Err()
}

func (p *fakePods) prepare(pod kubetypes.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.place[pod] = ""
}

func (p *fakePods) where(pod kubetypes.UID) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.place[pod]
}

func (p *fakePods) takeCalls() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := p.calls
	p.calls = nil
	return calls
}

func (p *fakePods) failWith(call string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail[call] = err
}

// hold makes the call wait until the returned function is called.
func (p *fakePods) hold(call string) (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := make(chan struct{})
	p.block[call] = c
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.block, call)
		close(c)
	}
}

func (p *fakePods) HasDevices(pod kubetypes.UID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.place[pod]
	return ok
}

func (p *fakePods) InPlace(pod kubetypes.UID, sandboxID string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, ok := p.place[pod]
	return !ok || at == sandboxID
}

func (p *fakePods) Admit(s attachments.Sandbox, environment, devices []string) error {
	if len(environment) == 0 {
		return nil
	}
	_ = p.enter(context.Background(), strings.Join(slices.Concat([]string{"admit", s.ID}, environment, devices), " "))
	return p.admit
}

func (p *fakePods) LocksMemory(environment []string) bool {
	return slices.Contains(environment, "DPDK=yes")
}

func (p *fakePods) Attach(ctx context.Context, s attachments.Sandbox) error {
	if err := p.enter(ctx, "attach "+s.ID, s); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.place[s.PodUID] = s.ID
	return nil
}

func (p *fakePods) Detach(ctx context.Context, s attachments.Sandbox) error {
	if err := p.enter(ctx, "detach "+s.ID, s); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.place[s.PodUID] = ""
	return nil
}

func (p *fakePods) Synchronize(ctx context.Context, sandboxes []attachments.Sandbox) {
	if p.enter(ctx, "synchronize", sandboxes...) != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range sandboxes {
		if _, ok := p.place[s.PodUID]; ok {
			p.place[s.PodUID] = s.ID
		}
	}
}

func (p *fakePods) Ensure(ctx context.Context, sandboxesOf func(kubetypes.UID) []attachments.Sandbox) {
	_ = p.enter(ctx, "ensure", sandboxesOf("pod")...)
}

type fixture struct {
	pods    *fakePods
	hooks   *Hooks
	metrics *Metrics
}

func newFixture(tb testing.TB) *fixture {
	metrics, err := NewMetrics(prometheus.NewRegistry())
	require.NoError(tb, err)
	pods := newFakePods()
	hooks := NewHooks(pods, slog.New(slog.DiscardHandler))
	tb.Cleanup(hooks.Wait)
	return &fixture{pods, hooks, metrics}
}

// known are the IDs of the sandboxes that the hooks know of.
func (h *Hooks) known() []string {
	h.sandboxes.mu.Lock()
	defer h.sandboxes.mu.Unlock()
	var ids []string
	for id := range h.sandboxes.byID {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func newSandbox(pod, id string) *api.PodSandbox {
	return &api.PodSandbox{
		Id: id, Uid: pod, Name: pod, Namespace: "default",
		Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "ipc", Path: "/ipc"}, {Type: "network", Path: "/run/netns/" + id}}},
	}
}
