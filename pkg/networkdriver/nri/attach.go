// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/containerd/nri/pkg/api"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// outcome is what became of one device; the table learns of it when the work on the pod is done.
type outcome struct {
	row *tables.DRAAllocation
	// device is set when the device had to be set up anew.
	device types.Device
	// attachment says where the link is now, nil for the host.
	attachment *types.Attachment
	err        error
}

// dev is the device as it is now.
func (o *outcome) dev() types.Device {
	if o.device != nil {
		return o.device
	}
	return o.row.PreparedDevice
}

// attachPod puts all devices of the pod into the sandbox, or none.
func (h *Hooks) attachPod(ctx context.Context, pod *api.PodSandbox) error {
	uid := kubetypes.UID(pod.GetUid())
	unlock, err := h.locks.Lock(ctx, uid)
	if err != nil {
		return fmt.Errorf("pod %s: an earlier attach or detach is still going on: %w", podName(pod), err)
	}
	defer unlock()

	rows := h.rows(uid)
	if len(rows) == 0 {
		return nil
	}
	netns, err := h.namespaces.ofPod(pod)
	if err != nil {
		return fmt.Errorf("pod %s: %s: %w", podName(pod), describe(rows[0]), err)
	}
	return h.attachRows(ctx, rows, pod, netns)
}

// attachRows needs the pod's lock.
func (h *Hooks) attachRows(ctx context.Context, rows []*tables.DRAAllocation, pod *api.PodSandbox, netns string) error {
	var outcomes []*outcome
	for _, row := range rows {
		if attachedTo(row, pod.GetId()) {
			continue
		}
		o := &outcome{row: row, attachment: row.Attachment}
		outcomes = append(outcomes, o)
		h.attach(ctx, o, pod.GetId(), netns)
		if o.err != nil {
			h.undo(ctx, outcomes, pod.GetId())
			h.discard(ctx, h.commit(outcomes), pod.GetId())
			h.log.Error("Device could not be attached to its pod", "device", row.DeviceName, "claim", row.Claim(),
				"pod", podName(pod), "sandbox", pod.GetId(), "error", o.err)
			return fmt.Errorf("%s: %w", describe(row), o.err)
		}
	}
	if lost := h.commit(outcomes); len(lost) > 0 {
		h.discard(ctx, lost, pod.GetId())
		return fmt.Errorf("%s: the claim was unprepared meanwhile", describe(lost[0].row))
	}
	for _, o := range outcomes {
		h.log.Info("Device attached to its pod", "device", o.row.DeviceName, "claim", o.row.Claim(), "pod", podName(pod),
			"sandbox", pod.GetId(), "interface", o.attachment.IfName)
	}
	return nil
}

// attach moves one device into the namespace.
func (h *Hooks) attach(ctx context.Context, o *outcome, sandboxID, netns string) {
	start := time.Now()
	defer func() { h.metrics.observe("attach", start, o.err) }()

	if o.attachment != nil {
		// The pod's sandbox was made anew and the old one has not been stopped yet.
		if err := h.detach(ctx, o.attachment.NetNS, o.dev()); err != nil {
			o.err = fmt.Errorf("take the link out of the pod's former sandbox %s: %w", o.attachment.SandboxID, err)
			return
		}
		o.attachment = nil
	}
	if o.dev().Link().IsZero() {
		o.attachment = &types.Attachment{SandboxID: sandboxID, NetNS: netns}
		return
	}
	attachment, err := h.linker.Attach(ctx, netns, o.dev(), o.row.Config.PodIfName)
	if errors.Is(err, podnet.ErrLinkGone) {
		if o.err = h.recover(ctx, o); o.err != nil {
			return
		}
		attachment, err = h.linker.Attach(ctx, netns, o.dev(), o.row.Config.PodIfName)
	}
	if err != nil {
		o.err = err
		return
	}
	o.attachment = in(sandboxID, netns, attachment)
	if ctx.Err() != nil {
		// The runtime has been told that it failed.
		o.err = fmt.Errorf("attached too late: %w", context.Cause(ctx))
	}
}

// recover gets a link back that is neither on the host nor in the sandbox, as happens when the pod's former sandbox
// went away unnoticed. A PCI device's link is somewhere and is fetched; a virtual one ended and is made anew.
func (h *Hooks) recover(ctx context.Context, o *outcome) error {
	if o.dev().Link().Physical() {
		if err := h.linker.Detach(ctx, "", o.dev()); err != nil {
			return fmt.Errorf("fetch the link, which is not on the host: %w", err)
		}
		return nil
	}
	dev, err := o.dev().Setup(ctx, o.row.Config)
	if err != nil {
		return fmt.Errorf("set the device up again, since its link is gone: %w", err)
	}
	o.device = dev
	return nil
}

// in completes what a linker reports by the place the driver knows.
func in(sandboxID, netns string, found *types.Attachment) *types.Attachment {
	a := *found
	a.SandboxID, a.NetNS = sandboxID, netns
	return &a
}

// undo takes back what was attached to the sandbox, whether or not there is time left. What does not come home keeps
// its attachment, so that it is tried again.
func (h *Hooks) undo(ctx context.Context, outcomes []*outcome, sandboxID string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for _, o := range outcomes {
		if o.attachment == nil || o.attachment.SandboxID != sandboxID {
			continue
		}
		if err := h.detach(ctx, o.attachment.NetNS, o.dev()); err != nil {
			o.err = errors.Join(o.err, fmt.Errorf("bring the link back to the host: %w", err))
			continue
		}
		o.attachment = nil
	}
}

// discard takes back everything that was done for rows which are no longer there: nobody would free it otherwise.
func (h *Hooks) discard(ctx context.Context, lost []*outcome, sandboxID string) {
	h.undo(ctx, lost, sandboxID)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for _, o := range lost {
		if o.device == nil {
			continue
		}
		if err := o.device.Free(ctx, o.row.Config); err != nil {
			h.log.Error("Device that was set up anew for a claim that is gone could not be freed",
				"device", o.row.DeviceName, "claim", o.row.Claim(), "error", err)
		}
	}
}

// detachPod brings home what is in the sandbox.
func (h *Hooks) detachPod(ctx context.Context, pod *api.PodSandbox) error {
	uid := kubetypes.UID(pod.GetUid())
	unlock, err := h.locks.Lock(ctx, uid)
	if err != nil {
		return fmt.Errorf("an earlier attach or detach is still going on: %w", err)
	}
	defer unlock()

	// An error means that there is no namespace to look into; the ones remembered count.
	netns, _ := h.namespaces.ofPod(pod)

	var (
		outcomes []*outcome
		failed   error
	)
	for _, row := range h.rows(uid) {
		from := netns
		switch {
		case attachedTo(row, pod.GetId()):
			from = row.Attachment.NetNS
		case row.Attachment != nil || netns == "" || row.PreparedDevice.Link().IsZero():
			continue
		default:
			// The table does not know of an attachment, which does not mean that there is none.
			if _, found, err := h.linker.Find(ctx, netns, row.PreparedDevice); err != nil || !found {
				continue
			}
		}
		o := &outcome{row: row, attachment: row.Attachment}
		outcomes = append(outcomes, o)
		if o.err = h.detach(ctx, from, row.PreparedDevice); o.err != nil {
			failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(row), o.err))
			continue
		}
		o.attachment = nil
		h.log.Info("Device is back from its pod", "device", row.DeviceName, "claim", row.Claim(), "pod", podName(pod),
			"sandbox", pod.GetId())
	}
	h.commit(outcomes)
	return failed
}

// detach brings a link home. A virtual link that ended with its namespace has nothing left to bring.
func (h *Hooks) detach(ctx context.Context, netns string, dev types.Device) (err error) {
	if dev.Link().IsZero() {
		return nil
	}
	start := time.Now()
	defer func() { h.metrics.observe("detach", start, err) }()
	if err := h.linker.Detach(ctx, netns, dev); err != nil && !errors.Is(err, podnet.ErrLinkGone) {
		return err
	}
	return nil
}

// Return brings the row's device home, wherever its link is, before the device is freed. The row in the table may
// have a newer PreparedDevice afterwards than the one given.
func (h *Hooks) Return(ctx context.Context, row *tables.DRAAllocation) error {
	unlock, err := h.locks.Lock(ctx, row.PodUID)
	if err != nil {
		return fmt.Errorf("return %s: an attach or detach is still going on: %w", describe(row), err)
	}
	defer unlock()

	if current, ok := h.current(row); ok {
		row = current
	}
	o := &outcome{row: row, attachment: row.Attachment}
	netns := ""
	if row.Attachment != nil {
		netns = row.Attachment.NetNS
	}
	if o.err = h.detach(ctx, netns, row.PreparedDevice); o.err == nil {
		o.attachment = nil
	}
	h.commit([]*outcome{o})
	if o.err != nil {
		return fmt.Errorf("return %s to the host: %w", describe(row), o.err)
	}
	return nil
}

func (h *Hooks) current(row *tables.DRAAllocation) (*tables.DRAAllocation, bool) {
	current, _, ok := h.allocations.Get(h.db.ReadTxn(), tables.AllocationByKey(tables.AllocationKey(row.Pool, row.DeviceName)))
	return current, ok && sameClaim(current, row)
}

// commit writes the outcomes to their rows. It returns those whose row is gone or belongs to another claim.
func (h *Hooks) commit(outcomes []*outcome) (lost []*outcome) {
	if len(outcomes) == 0 {
		return nil
	}
	txn := h.db.WriteTxn(h.allocations)
	defer txn.Abort()
	changed := false
	for _, o := range outcomes {
		row, _, ok := h.allocations.Get(txn, tables.AllocationByKey(tables.AllocationKey(o.row.Pool, o.row.DeviceName)))
		if !ok || !sameClaim(row, o.row) {
			lost = append(lost, o)
			continue
		}
		next := row.With(o.apply)
		if next.Error == row.Error && o.device == nil && reflect.DeepEqual(next.Attachment, row.Attachment) {
			continue
		}
		if _, _, err := h.allocations.Insert(txn, next); err != nil {
			h.log.Error("Allocation row could not be written", "device", row.DeviceName, "claim", row.Claim(), "error", err)
			continue
		}
		changed = true
	}
	if changed {
		txn.Commit()
	}
	return lost
}

func (o *outcome) apply(row *tables.DRAAllocation) {
	row.Attachment, row.Error = o.attachment, ""
	if o.device != nil {
		row.PreparedDevice = o.device
	}
	if o.err != nil {
		row.Error = o.err.Error()
	}
}

func sameClaim(a, b *tables.DRAAllocation) bool {
	return a.ClaimUID == b.ClaimUID && a.PodUID == b.PodUID
}
