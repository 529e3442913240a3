// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"slices"

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

// Attach puts all devices of the pod into the sandbox, or none. What is in place is not touched.
func (r *Room) Attach(ctx context.Context, s Sandbox) error {
	rows, unlock, err := r.lockPod(ctx, s.PodUID)
	if err != nil {
		return fmt.Errorf("pod %s: %w", s.Pod(), err)
	}
	defer unlock()
	if len(rows) == 0 {
		return nil
	}
	if err := r.world.CheckNetNS(s.NetNS); err != nil {
		return fmt.Errorf("pod %s: %s: %w", s.Pod(), describe(rows[0]), err)
	}
	return r.attachRows(ctx, rows, s)
}

// attachRows needs the locks of the rows' claims.
func (r *Room) attachRows(ctx context.Context, rows []*tables.DRAAllocation, s Sandbox) error {
	if i := slices.IndexFunc(rows, releasing); i >= 0 {
		return fmt.Errorf("%s: the claim is being unprepared, its devices stay out of the pod", describe(rows[i]))
	}
	var outcomes []*outcome
	for _, row := range rows {
		if attachedTo(row, s.ID) {
			continue
		}
		o := &outcome{row: row, attachment: row.Attachment}
		outcomes = append(outcomes, o)
		r.attach(ctx, o, s)
		if o.err != nil {
			r.undo(ctx, outcomes, s)
			r.discard(ctx, r.commit(outcomes), s)
			r.log.Error("Device could not be attached to its pod", "device", row.DeviceName, "claim", row.Claim(),
				"pod", s.Pod(), "sandbox", s.ID, "error", o.err)
			return fmt.Errorf("%s: %w", describe(row), o.err)
		}
	}
	if lost := r.commit(outcomes); len(lost) > 0 {
		r.discard(ctx, lost, s)
		return fmt.Errorf("%s: the claim was unprepared meanwhile", describe(lost[0].row))
	}
	for _, o := range outcomes {
		r.log.Info("Device attached to its pod", "device", o.row.DeviceName, "claim", o.row.Claim(), "pod", s.Pod(),
			"sandbox", s.ID, "interface", o.attachment.IfName)
	}
	return nil
}

func releasing(row *tables.DRAAllocation) bool { return row.Releasing }

// attach moves one device into the namespace.
func (r *Room) attach(ctx context.Context, o *outcome, s Sandbox) {
	start := r.world.Now()
	defer func() { r.metrics.observe("attach", r.world.Now().Sub(start), o.err) }()

	if o.attachment != nil {
		// The pod's sandbox was made anew and the old one has not been stopped yet.
		if err := r.detach(ctx, o.attachment.NetNS, o.dev()); err != nil {
			o.err = fmt.Errorf("take the link out of the pod's former sandbox %s: %w", o.attachment.SandboxID, err)
			return
		}
		o.attachment = nil
	}
	if o.dev().Link().IsZero() {
		o.attachment = s.holds(&types.Attachment{})
		return
	}
	attachment, err := r.world.Attach(ctx, s.NetNS, o.dev(), o.row.Config.PodIfName)
	if errors.Is(err, podnet.ErrLinkGone) {
		if o.err = r.recover(ctx, o); o.err != nil {
			return
		}
		attachment, err = r.world.Attach(ctx, s.NetNS, o.dev(), o.row.Config.PodIfName)
	}
	if err != nil {
		o.err = err
		return
	}
	o.attachment = s.holds(attachment)
	if ctx.Err() != nil {
		// The runtime has been told that it failed.
		o.err = fmt.Errorf("attached too late: %w", context.Cause(ctx))
	}
}

// recover gets a link back that is neither on the host nor in the sandbox, as happens when the pod's former sandbox
// went away unnoticed. A PCI device's link is somewhere and is fetched; a virtual one ended and is made anew.
func (r *Room) recover(ctx context.Context, o *outcome) error {
	if o.dev().Link().Physical() {
		if err := r.world.Detach(ctx, "", o.dev()); err != nil {
			return fmt.Errorf("fetch the link, which is not on the host: %w", err)
		}
		return nil
	}
	dev, err := r.world.Setup(ctx, o.dev(), o.row.Config)
	if err != nil {
		return fmt.Errorf("set the device up again, since its link is gone: %w", err)
	}
	o.device = dev
	return nil
}

// holds completes what is reported of a link by the sandbox that it is in.
func (s Sandbox) holds(found *types.Attachment) *types.Attachment {
	a := *found
	a.SandboxID, a.NetNS = s.ID, s.NetNS
	return &a
}

// undo takes back what was attached to the sandbox, whether or not there is time left. What does not come home keeps
// its attachment, so that it is tried again.
func (r *Room) undo(ctx context.Context, outcomes []*outcome, s Sandbox) {
	ctx, cancel := r.world.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for _, o := range outcomes {
		if o.attachment == nil || o.attachment.SandboxID != s.ID {
			continue
		}
		if err := r.detach(ctx, o.attachment.NetNS, o.dev()); err != nil {
			o.err = errors.Join(o.err, fmt.Errorf("bring the link back to the host: %w", err))
			continue
		}
		o.attachment = nil
	}
}

// discard takes back everything that was done for rows which are no longer there: nobody would free it otherwise.
func (r *Room) discard(ctx context.Context, lost []*outcome, s Sandbox) {
	r.undo(ctx, lost, s)
	for _, o := range lost {
		if o.device == nil {
			continue
		}
		if err := r.freeInTime(ctx, o.row.With(o.apply)); err != nil {
			r.log.Error("Device that was set up anew for a claim that is gone could not be freed",
				"device", o.row.DeviceName, "claim", o.row.Claim(), "error", err)
		}
	}
}

// Detach brings home what is in the sandbox, not what a newer sandbox of the pod has. A device that does not come home
// keeps its attachment and has the error in its row.
func (r *Room) Detach(ctx context.Context, s Sandbox) error {
	rows, unlock, err := r.lockPod(ctx, s.PodUID)
	if err != nil {
		return err
	}
	defer unlock()
	if r.world.CheckNetNS(s.NetNS) != nil {
		s.NetNS = "" // there is none to look into; the ones remembered count
	}

	var (
		outcomes []*outcome
		failed   error
	)
	for _, row := range rows {
		from := s.NetNS
		switch {
		case attachedTo(row, s.ID):
			from = row.Attachment.NetNS
		case row.Attachment != nil || s.NetNS == "" || row.PreparedDevice.Link().IsZero():
			continue
		default:
			// The table does not know of an attachment, which does not mean that there is none.
			if _, found, err := r.world.Find(ctx, s.NetNS, row.PreparedDevice); err != nil || !found {
				continue
			}
		}
		o := &outcome{row: row, attachment: row.Attachment}
		outcomes = append(outcomes, o)
		if o.err = r.detach(ctx, from, row.PreparedDevice); o.err != nil {
			failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(row), o.err))
			continue
		}
		o.attachment = nil
		r.log.Info("Device is back from its pod", "device", row.DeviceName, "claim", row.Claim(), "pod", s.Pod(),
			"sandbox", s.ID)
	}
	r.commit(outcomes)
	return failed
}

// detach brings a link home. A virtual link that ended with its namespace has nothing left to bring.
func (r *Room) detach(ctx context.Context, netns string, dev types.Device) (err error) {
	if dev.Link().IsZero() {
		return nil
	}
	start := r.world.Now()
	defer func() { r.metrics.observe("detach", r.world.Now().Sub(start), err) }()
	if err := r.world.Detach(ctx, netns, dev); err != nil && !errors.Is(err, podnet.ErrLinkGone) {
		return err
	}
	return nil
}

// commit writes the outcomes to their rows. It returns those whose row is gone or belongs to another claim.
func (r *Room) commit(outcomes []*outcome) (lost []*outcome) {
	changes := make([]change, len(outcomes))
	for i, o := range outcomes {
		changes[i] = change{o.row, func(present *tables.DRAAllocation) *tables.DRAAllocation {
			if present == nil {
				lost = append(lost, o)
				return nil
			}
			return present.With(o.apply)
		}}
	}
	if err := r.update(changes...); err != nil {
		r.log.Error("Allocation row could not be written", "error", err)
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
