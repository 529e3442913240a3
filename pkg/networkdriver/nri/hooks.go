// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cilium/statedb"
	"github.com/containerd/nri/pkg/api"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// HookTimeout is how long a hook may keep a runtime waiting that gives a plugin two seconds, as they do by default.
// A plugin that overruns them may be dropped while the pod goes on without its device.
const HookTimeout = 1500 * time.Millisecond

// hookShare of the time that the runtime gives a plugin is the hook's; the rest is for the way there and back.
const hookShare = 0.75

// undoTimeout bounds what goes on after a hook has given up: taking back what it had attached.
const undoTimeout = 10 * time.Second

// Linker moves the link of a device between the host's and a pod's network namespace; podnet.Mover is the one for
// the kernel. An error that wraps podnet.ErrLinkGone says that the link is neither on the host nor in the pod.
type Linker interface {
	// Attach moves the link from the host into the namespace, names it podIfName (its host name when empty) and
	// brings it up. A link that is inside already is no error. When it fails the link is on the host.
	Attach(ctx context.Context, netnsPath string, dev types.Device, podIfName string) (*types.Attachment, error)
	// Detach brings the link home, from the namespace or from wherever the kernel left it. A link that is at home is
	// no error, neither is an empty path or a namespace that is gone.
	Detach(ctx context.Context, netnsPath string, dev types.Device) error
	// Find looks for the link inside the namespace.
	Find(ctx context.Context, netnsPath string, dev types.Device) (*types.Attachment, bool, error)
}

// Hooks are the driver's side of the runtime's pod events. Events of one pod wait for each other, events of
// different pods do not.
type Hooks struct {
	db          *statedb.DB
	allocations statedb.RWTable[*tables.DRAAllocation]
	linker      Linker
	namespaces  namespaces
	log         *slog.Logger
	metrics     *Metrics
	timeout     atomic.Int64 // of a hook, in nanoseconds

	locks   keylock.Locks[kubetypes.UID] // of pods that something is being done for
	running operations
}

// NewHooks returns the hooks over the allocation table.
func NewHooks(db *statedb.DB, allocations statedb.RWTable[*tables.DRAAllocation], linker Linker, metrics *Metrics, log *slog.Logger) (*Hooks, error) {
	ns, err := hostNamespaces()
	if err != nil {
		return nil, err
	}
	h := &Hooks{db: db, allocations: allocations, linker: linker, namespaces: ns, log: log, metrics: metrics}
	h.timeout.Store(int64(HookTimeout))
	return h, nil
}

// setRequestTimeout takes over how long the runtime waits for a plugin, zero if it did not say so.
func (h *Hooks) setRequestTimeout(limit time.Duration) {
	if limit > 0 {
		h.timeout.Store(int64(hookShare * float64(limit)))
	}
}

// hookTimeout is how long a hook may keep the runtime waiting.
func (h *Hooks) hookTimeout() time.Duration { return time.Duration(h.timeout.Load()) }

// RunPodSandbox attaches the devices of the pod. On failure none is left inside, the sandbox is refused, and kubelet
// makes a new one.
func (h *Hooks) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	if !h.hasDevices(pod) {
		return nil
	}
	return h.bounded(ctx, "attach", pod, func(ctx context.Context) error {
		return h.attachPod(ctx, pod)
	})
}

// CreateContainer refuses a container whose pod misses a device, after one more attempt to attach it. It is what
// keeps a pod from running bare when its sandbox started while the driver was away.
func (h *Hooks) CreateContainer(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if h.inPlace(pod) {
		return nil, nil, nil
	}
	err := h.bounded(ctx, "late attach", pod, func(ctx context.Context) error {
		return h.attachPod(ctx, pod)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("container %s is not started without its pod's devices: %w", ctr.GetName(), err)
	}
	return nil, nil, nil
}

// StopPodSandbox brings home the devices that are in this sandbox, not those that a newer sandbox of the same pod
// has. It never fails: a device that does not come home stays in the table with its error, is tried again when the
// sandbox is removed and when the claim is unprepared, and does not block the pod's deletion.
func (h *Hooks) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	h.release(ctx, pod)
	return nil
}

// RemovePodSandbox is the last chance for what [Hooks.StopPodSandbox] left: runtimes remove a sandbox that failed to
// start without stopping it first.
func (h *Hooks) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	h.release(ctx, pod)
	return nil
}

func (h *Hooks) release(ctx context.Context, pod *api.PodSandbox) {
	if !h.hasDevices(pod) {
		return
	}
	err := h.bounded(ctx, "detach", pod, func(ctx context.Context) error {
		// The sandbox goes away whether or not its runtime still waits.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return h.detachPod(ctx, pod)
	})
	if err != nil {
		h.log.Error("A device did not come home from a pod; it is tried again when its claim is unprepared",
			"pod", podName(pod), "sandbox", pod.GetId(), "error", err)
	}
}

// hasDevices is what every sandbox event of every pod on the node pays for: one index lookup.
func (h *Hooks) hasDevices(pod *api.PodSandbox) bool {
	_, _, ok := h.allocations.Get(h.db.ReadTxn(), tables.AllocationsByPod(kubetypes.UID(pod.GetUid())))
	return ok
}

// inPlace says whether every device of the pod is in this sandbox.
func (h *Hooks) inPlace(pod *api.PodSandbox) bool {
	for row := range h.allocations.List(h.db.ReadTxn(), tables.AllocationsByPod(kubetypes.UID(pod.GetUid()))) {
		if !attachedTo(row, pod.GetId()) {
			return false
		}
	}
	return true
}

// rows returns the pod's rows in the order of their keys.
func (h *Hooks) rows(podUID kubetypes.UID) []*tables.DRAAllocation {
	return statedb.Collect(h.allocations.List(h.db.ReadTxn(), tables.AllocationsByPod(podUID)))
}

// bounded runs work and stops waiting for it after the hook's time: a netlink call to a busy PF cannot be cancelled.
// The work then goes on with its context cancelled, and undoes what it did.
func (h *Hooks) bounded(ctx context.Context, what string, pod *api.PodSandbox, work func(context.Context) error) error {
	limit := h.hookTimeout()
	ctx, cancel := context.WithTimeout(ctx, limit)
	result := make(chan error, 1)
	end := h.running.begin(what + " for pod " + podName(pod))
	go func() {
		defer end()
		defer cancel()
		result <- work(ctx)
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-result:
		return err
	default:
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%s for pod %s takes longer than %s", what, podName(pod), limit)
	}
	return fmt.Errorf("%s for pod %s: %w", what, podName(pod), ctx.Err())
}

// Wait returns when no hook's work is going on.
func (h *Hooks) Wait() { h.running.wait() }

// Stuck names the work that has been going on for longer than limit, empty for none. The kernel does not answer then,
// and only a restart of the agent helps.
func (h *Hooks) Stuck(limit time.Duration) string { return h.running.olderThan(limit) }

func attachedTo(row *tables.DRAAllocation, sandboxID string) bool {
	return row.Attachment != nil && row.Attachment.SandboxID == sandboxID
}

func podName(pod *api.PodSandbox) string { return pod.GetNamespace() + "/" + pod.GetName() }

// describe names the row's device the way errors and logs do.
func describe(row *tables.DRAAllocation) string {
	return fmt.Sprintf("device %s (claim %s, request %s)", row.DeviceName, row.Claim(), row.Request)
}
