// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

const (
	// syncParallel is how many pods are looked at side by side.
	syncParallel = 4
	// syncPodTimeout bounds the work on one pod, which may go on after Synchronize has returned.
	syncPodTimeout = 10 * time.Second
)

// sandbox is one sandbox of a pod, as the runtime lists it.
type sandbox struct {
	pod *api.PodSandbox
	// netns is empty for one without a network namespace of its own: stopped, or on the host network.
	netns string
	// populated says that it has containers, which a sandbox left over does not.
	populated bool
}

// Synchronize makes the table and the kernel agree with the sandboxes that the runtime has, and makes up for the
// events that came while the driver was away: what is inside a sandbox is noted, what should be is attached, what is
// left in a sandbox that is gone is brought home. Prepared devices whose pod has no sandbox yet stay as they are.
//
// It returns within the hook's time, the rest goes on behind it; the containers of those pods wait in CreateContainer.
func (h *Hooks) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	waiting := map[kubetypes.UID][]sandbox{}
	for row := range h.allocations.All(h.db.ReadTxn()) {
		waiting[row.PodUID] = nil
	}
	if len(waiting) == 0 {
		return nil, nil
	}
	populated := map[string]bool{}
	for _, c := range containers {
		populated[c.GetPodSandboxId()] = true
	}
	for _, pod := range pods {
		uid := kubetypes.UID(pod.GetUid())
		if _, ok := waiting[uid]; !ok {
			continue
		}
		// Runtimes list stopped sandboxes too, without a namespace. It is not the place to refuse a pod.
		netns, _ := h.namespaces.ofPod(pod)
		waiting[uid] = append(waiting[uid], sandbox{pod, netns, populated[pod.GetId()]})
	}

	done := make(chan struct{})
	background := context.WithoutCancel(ctx)
	end := h.running.begin("synchronize with the runtime")
	go func() {
		defer end()
		defer close(done)
		var group errgroup.Group
		group.SetLimit(syncParallel)
		for uid, sandboxes := range waiting {
			group.Go(func() error {
				ctx, cancel := context.WithTimeout(background, syncPodTimeout)
				defer cancel()
				if err := h.syncPod(ctx, uid, sandboxes); err != nil {
					h.log.Error("Pod could not be synchronized with the runtime", "podUID", uid, "error", err)
				}
				return nil
			})
		}
		_ = group.Wait()
	}()
	timer := time.NewTimer(h.hookTimeout())
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		h.log.Warn("Synchronizing with the runtime takes long and goes on in the background", "pods", len(waiting))
	case <-ctx.Done():
	}
	return nil, nil
}

func (h *Hooks) syncPod(ctx context.Context, uid kubetypes.UID, sandboxes []sandbox) error {
	unlock, err := h.locks.Lock(ctx, uid)
	if err != nil {
		return fmt.Errorf("an earlier attach or detach is still going on: %w", err)
	}
	defer unlock()

	var (
		outcomes []*outcome
		missing  []*tables.DRAAllocation
		failed   error
	)
	for _, row := range h.rows(uid) {
		o := &outcome{row: row, attachment: row.Attachment}
		inside, err := h.locate(ctx, o, sandboxes)
		switch {
		case err != nil:
			o.err = err
			failed = errors.Join(failed, fmt.Errorf("%s: %w", describe(row), err))
		case inside:
		default:
			missing = append(missing, row)
			if row.Attachment == nil {
				continue
			}
			if o.err = h.detach(ctx, row.Attachment.NetNS, o.dev()); o.err != nil {
				failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(row), o.err))
				break
			}
			o.attachment = nil
		}
		outcomes = append(outcomes, o)
	}
	h.commit(outcomes)

	target, ok := lateTarget(sandboxes)
	if !ok || len(missing) == 0 || failed != nil {
		return failed
	}
	for i, row := range missing {
		current, ok := h.current(row)
		if !ok {
			return nil
		}
		missing[i] = current
	}
	return h.attachRows(ctx, missing, target.pod, target.netns)
}

// locate looks for the row's device in the pod's sandboxes and notes where it is.
func (h *Hooks) locate(ctx context.Context, o *outcome, sandboxes []sandbox) (inside bool, err error) {
	for _, s := range sandboxes {
		if s.netns == "" {
			continue
		}
		if o.dev().Link().IsZero() {
			if attachedTo(o.row, s.pod.GetId()) {
				return true, nil
			}
			continue
		}
		found, ok, err := h.linker.Find(ctx, s.netns, o.dev())
		if err != nil {
			return false, fmt.Errorf("look for the link in %s: %w", s.netns, err)
		}
		if ok {
			o.attachment = in(s.pod.GetId(), s.netns, found)
			return true, nil
		}
	}
	return false, nil
}

// lateTarget is the sandbox that the pod's devices belong into: the one with containers, or the only one. When it is
// not plain which, CreateContainer will tell.
func lateTarget(sandboxes []sandbox) (sandbox, bool) {
	var candidates []sandbox
	for _, s := range sandboxes {
		switch {
		case s.netns == "":
		case s.populated:
			return s, true
		default:
			candidates = append(candidates, s)
		}
	}
	if len(candidates) != 1 {
		return sandbox{}, false
	}
	return candidates[0], true
}
