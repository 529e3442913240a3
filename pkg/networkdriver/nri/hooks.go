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

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
)

// HookTimeout is how long a hook may keep a runtime waiting that gives a plugin two seconds, as they do by default.
// A plugin that overruns them may be dropped while the pod goes on without its device.
const HookTimeout = 1500 * time.Millisecond

// hookShare of the time that the runtime gives a plugin is the hook's; the rest is for the way there and back.
const hookShare = 0.75

// releaseTimeout bounds bringing devices home, which goes on when the hook has given up.
const releaseTimeout = 10 * time.Second

// memlock is the limit of what a process may lock of its memory. What a pod may have at all is limited otherwise.
const memlock = "RLIMIT_MEMLOCK"

// Pods are the pods' devices, as far as the runtime's events are about them; [attachments.Room] is the one.
type Pods interface {
	// HasDevices says whether the pod has a device.
	HasDevices(pod kubetypes.UID) bool
	// InPlace says whether every device of the pod is in this sandbox.
	InPlace(pod kubetypes.UID, sandboxID string) bool
	// Admit says why a container with this environment and these CDI devices must not start in the sandbox.
	Admit(s attachments.Sandbox, environment, devices []string) error
	// LocksMemory says whether a program of a container with this environment needs to lock all the memory that it has.
	LocksMemory(environment []string) bool
	// Attach puts all devices of the pod into the sandbox, or none.
	Attach(ctx context.Context, s attachments.Sandbox) error
	// Detach brings home what is in this sandbox.
	Detach(ctx context.Context, s attachments.Sandbox) error
	// Synchronize makes up for the events that were missed.
	Synchronize(ctx context.Context, sandboxes []attachments.Sandbox)
	// Ensure puts back what somebody else has changed, in the sandboxes that a pod has.
	Ensure(ctx context.Context, sandboxesOf func(kubetypes.UID) []attachments.Sandbox)
}

// Hooks are the driver's side of the runtime's pod events.
type Hooks struct {
	pods    Pods
	log     *slog.Logger
	timeout atomic.Int64 // of a hook, in nanoseconds

	running   operations
	sandboxes sandboxes
}

// NewHooks returns the hooks for the pods' devices.
func NewHooks(pods Pods, log *slog.Logger) *Hooks {
	h := &Hooks{pods: pods, log: log}
	h.timeout.Store(int64(HookTimeout))
	return h
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
	s := sandboxOf(pod)
	order := h.sandboxes.add(s)
	if !h.pods.HasDevices(s.PodUID) {
		return nil
	}
	err := h.bounded(ctx, "attach", s, func(ctx context.Context) error {
		crashpoint.Here(crashpoint.SandboxRun)
		return h.pods.Attach(ctx, s)
	}, func() {
		// The runtime takes it down, and says no more of it. Something may have been attached after the answer, or by others.
		if !h.sandboxes.refuse(s.ID, order) {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		h.logNotHome(s, h.pods.Detach(ctx, s))
	})
	if err != nil {
		h.sandboxes.refuse(s.ID, order)
	}
	return err
}

// Sandboxes returns the sandboxes of the namespace's pods on this node in the order in which they came. Those that have
// ended are among them, until the runtime says so.
func (h *Hooks) Sandboxes(namespace string) []attachments.Sandbox { return h.sandboxes.in(namespace) }

// SandboxesOf returns those of the pod.
func (h *Hooks) SandboxesOf(pod kubetypes.UID) []attachments.Sandbox { return h.sandboxes.of(pod) }

// CreateContainer refuses a container whose pod misses a device, after one more attempt to attach it, and one that uses
// the claim of another pod. Programs that drive a device may lock their memory. It is what keeps a pod from running bare when its sandbox started while the driver was away.
func (h *Hooks) CreateContainer(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	s := sandboxOf(pod)
	var err error
	if !h.pods.InPlace(s.PodUID, s.ID) {
		// The sandbox goes on: what comes too late for this container is there for the next.
		err = h.bounded(ctx, "late attach", s, func(ctx context.Context) error {
			return h.pods.Attach(ctx, s)
		}, nil)
	}
	if err == nil {
		var devices []string
		for _, device := range ctr.GetCDIDevices() {
			devices = append(devices, device.GetName())
		}
		err = h.pods.Admit(s, ctr.GetEnv(), devices)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("container %s is not started without its pod's devices: %w", ctr.GetName(), err)
	}
	if !h.pods.LocksMemory(ctr.GetEnv()) {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	adjustment.AddRlimit(memlock, unix.RLIM_INFINITY, unix.RLIM_INFINITY)
	return adjustment, nil, nil
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
	s := h.sandboxes.remove(sandboxOf(pod))
	if !h.pods.HasDevices(s.PodUID) {
		return
	}
	err := h.bounded(ctx, "detach", s, func(ctx context.Context) error {
		// The sandbox goes away whether or not its runtime still waits.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		defer crashpoint.Here(crashpoint.SandboxStopped)
		return h.pods.Detach(ctx, s)
	}, nil)
	h.logNotHome(s, err)
}

func (h *Hooks) logNotHome(s attachments.Sandbox, err error) {
	if err != nil {
		h.log.Error("A device did not come home from a pod; it is tried again when its claim is unprepared",
			"pod", s.Pod(), "sandbox", s.ID, "error", err)
	}
}

// Synchronize makes up for the events that came while the driver was away. It returns within the hook's time, the rest
// goes on behind it; the containers of those pods wait in CreateContainer.
func (h *Hooks) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	populated := map[string]bool{}
	for _, c := range containers {
		populated[c.GetPodSandboxId()] = true
	}
	all := make([]attachments.Sandbox, len(pods))
	for i, pod := range pods {
		all[i] = sandboxOf(pod)
		all[i].Populated = populated[pod.GetId()]
	}
	h.sandboxes.replace(all)

	done := make(chan struct{})
	background := context.WithoutCancel(ctx)
	end := h.running.begin("synchronize with the runtime")
	go func() {
		defer end()
		defer close(done)
		h.pods.Synchronize(background, all)
	}()
	timer := time.NewTimer(h.hookTimeout())
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		h.log.Warn("Synchronizing with the runtime takes long and goes on in the background", "sandboxes", len(all))
	case <-ctx.Done():
	}
	return nil, nil
}

// Ensure has the pods' devices put back as they should be. It is to be called every few seconds.
func (h *Hooks) Ensure(ctx context.Context) { h.pods.Ensure(ctx, h.SandboxesOf) }

// bounded runs work and stops waiting for it after the hook's time: a netlink call to a busy PF cannot be cancelled.
// The work then goes on with its context cancelled. When it has ended, and the answer was an error, undo is called, if there is one.
func (h *Hooks) bounded(ctx context.Context, what string, s attachments.Sandbox, work func(context.Context) error, undo func()) error {
	limit := h.hookTimeout()
	ctx, cancel := context.WithTimeout(ctx, limit)
	result, gaveUp := make(chan error), make(chan struct{})
	end := h.running.begin(what + " for pod " + s.Pod())
	go func() {
		defer end()
		defer cancel()
		err := work(ctx)
		failed := err != nil
		select {
		case result <- err:
		case <-gaveUp:
			failed = true
		}
		if failed && undo != nil {
			undo()
		}
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
		close(gaveUp)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%s for pod %s takes longer than %s", what, s.Pod(), limit)
	}
	return fmt.Errorf("%s for pod %s: %w", what, s.Pod(), ctx.Err())
}

// Wait returns when no hook's work is going on.
func (h *Hooks) Wait() { h.running.wait() }

// Stuck names the work that has been going on for longer than limit, empty for none. The kernel does not answer then,
// and only a restart of the agent helps.
func (h *Hooks) Stuck(limit time.Duration) string { return h.running.olderThan(limit) }
