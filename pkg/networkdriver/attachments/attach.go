// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// move is what is done about one device: its row as it was found, and as it is to be.
type move struct {
	row, now *tables.DRAAllocation
	// link is the index of the hardware's link on the host before the device was looked at, 0 if it was not there.
	link int
	// anew says that the device had to be set up again.
	anew bool
	// astray says that its frames go where the claim does not have them go, and nobody could put that right.
	astray bool
	err    error
}

func begin(row *tables.DRAAllocation) *move {
	return &move{row: row, now: row.With(func(r *tables.DRAAllocation) { r.Error = "" })}
}

// level is the level to log the move's error at: what the row said before is not said again with every try.
func (m *move) level(level slog.Level) slog.Level {
	if m.row.Error == m.err.Error() {
		return slog.LevelDebug
	}
	return level
}

// Attach puts all devices of the pod into the sandbox, or none. What is in place is not touched.
func (r *Room) Attach(ctx context.Context, s Sandbox) error {
	return r.AttachLate(ctx, s, func() bool { return true })
}

// AttachLate is [Room.Attach] for a sandbox that nobody waits with, and that may have ended. Whether it is still there is asked
// when no [Room.Detach] can be at work on it.
func (r *Room) AttachLate(ctx context.Context, s Sandbox, still func() bool) error {
	rows, unlock, err := r.lockPod(ctx, s.PodUID)
	if err != nil {
		return fmt.Errorf("pod %s: %w", s.Pod(), err)
	}
	defer unlock()
	if len(rows) == 0 || !still() {
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
	// A record says which pod a device is for, and whoever may write the claim's status may write records.
	if i := slices.IndexFunc(rows, func(row *tables.DRAAllocation) bool { return row.ClaimNamespace != s.PodNamespace }); i >= 0 {
		return fmt.Errorf("%s: the claim is not in the namespace of pod %s", describe(rows[i]), s.Pod())
	}
	var moves []*move
	for _, row := range rows {
		if !attachedTo(row, s.ID) {
			moves = append(moves, begin(row))
		}
	}
	r.secure(ctx, moves)
	for _, m := range moves {
		r.expel(ctx, m) // it may be in a former sandbox
	}
	for _, m := range moves {
		if row := m.row; r.attach(ctx, m, s) != nil {
			r.undo(ctx, moves, s)
			r.discard(ctx, r.commit(moves), s)
			r.log.Log(ctx, m.level(slog.LevelError), "Device could not be attached to its pod", "device", row.DeviceName, "claim", row.Claim(),
				"pod", s.Pod(), "sandbox", s.ID, "error", m.err)
			return fmt.Errorf("%s: %w", describe(row), m.err)
		}
	}
	err := r.describe(claimsOf(rows), moves)
	if err == nil {
		err = r.openGates(claimsOf(rows), moves, s.holds(&types.Attachment{}))
	}
	if err != nil {
		for _, m := range moves {
			m.err = err
		}
		r.undo(ctx, moves, s)
		r.discard(ctx, r.commit(moves), s)
		return err
	}
	if lost := r.commit(moves); len(lost) > 0 {
		r.discard(ctx, lost, s)
		return fmt.Errorf("%s: the claim was unprepared meanwhile", describe(lost[0].row))
	}
	for _, m := range moves {
		r.world.Announce(m.now.Attachment, m.now.Config)
		r.log.Info("Device attached to its pod", "device", m.row.DeviceName, "claim", m.row.Claim(), "pod", s.Pod(),
			"sandbox", s.ID, "interface", m.now.Attachment.IfName)
	}
	return nil
}

func releasing(row *tables.DRAAllocation) bool { return row.Releasing }

// attach moves one device into the namespace, and returns the move's error.
func (r *Room) attach(ctx context.Context, m *move, s Sandbox) error {
	if m.err == nil {
		r.moveIn(ctx, m, s)
	}
	return m.err
}

func (r *Room) moveIn(ctx context.Context, m *move, s Sandbox) {
	start := r.world.Now()
	defer func() { r.metrics.observe("attach", r.world.Now().Sub(start), m.err) }()

	if m.now.Attachment != nil {
		// The pod's sandbox was made anew and the old one has not been stopped yet.
		if err := r.detach(ctx, m.now.Attachment.NetNS, m.now); err != nil {
			m.err = stage.In("detach", fmt.Errorf("take the link out of the pod's former sandbox %s: %w", m.now.Attachment.SandboxID, err))
			return
		}
		m.now.Attachment = nil
		if r.secure(ctx, []*move{m}); m.err != nil {
			return
		}
	}
	if m.now.PreparedDevice.Link().IsZero() {
		m.now.Attachment = s.holds(&types.Attachment{})
		return
	}
	attachment, err := r.world.Attach(ctx, s.NetNS, m.now.PreparedDevice, m.link, m.row.Config)
	if errors.Is(err, podnet.ErrLinkGone) {
		if m.err = stage.In("fetch", r.recover(ctx, m)); m.err != nil {
			return
		}
	}
	if errors.Is(err, podnet.ErrLinkGone) || errors.Is(err, podnet.ErrAnotherLink) {
		if r.secure(ctx, []*move{m}); m.err != nil {
			return
		}
		attachment, err = r.world.Attach(ctx, s.NetNS, m.now.PreparedDevice, m.link, m.row.Config)
	}
	if err != nil {
		m.err = stage.In("move", err)
		return
	}
	m.now.Attachment = s.holds(attachment)
	m.now.Attachment.Again, m.now.LostFrom = m.now.LostFrom == s.ID, ""
}

// recover gets a link back that is neither on the host nor in the sandbox, as happens when the pod's former sandbox
// went away unnoticed. A PCI device's link is somewhere and is fetched; a virtual one ended and is made anew.
func (r *Room) recover(ctx context.Context, m *move) error {
	if m.now.PreparedDevice.Link().Physical() {
		if err := r.world.Detach(ctx, "", m.now.PreparedDevice); err != nil {
			return fmt.Errorf("fetch the link, which is not on the host: %w", err)
		}
		return nil
	}
	if err := r.setUpAgain(ctx, m); err != nil {
		return fmt.Errorf("set the device up again, since its link is gone: %w", err)
	}
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
func (r *Room) undo(ctx context.Context, moves []*move, s Sandbox) {
	ctx, cancel := r.world.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	for _, m := range moves {
		if m.now.Attachment == nil || m.now.Attachment.SandboxID != s.ID {
			continue
		}
		if err := r.detach(ctx, m.now.Attachment.NetNS, m.now); err != nil {
			m.err = errors.Join(m.err, fmt.Errorf("bring the link back to the host: %w", err))
			continue
		}
		m.now.Attachment = nil
	}
}

// discard takes back everything that was done for rows which are no longer there: nobody would free it otherwise.
func (r *Room) discard(ctx context.Context, lost []*move, s Sandbox) {
	r.undo(ctx, lost, s)
	for _, m := range lost {
		if !m.anew {
			continue
		}
		if err := r.freeInTime(ctx, m.now); err != nil {
			r.log.Error("Device that was set up anew for a claim that is gone could not be freed",
				"device", m.row.DeviceName, "claim", m.row.Claim(), "error", err)
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
		moves  []*move
		failed error
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
			if seen, err := r.world.Where(ctx, s.NetNS, row.PreparedDevice); err != nil || seen.Place != podnet.InPod {
				continue
			}
		}
		m := begin(row)
		moves = append(moves, m)
		if m.err = r.detach(ctx, from, row); m.err != nil {
			failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(row), m.err))
			continue
		}
		m.now.Attachment = nil
		r.log.Info("Device is back from its pod", "device", row.DeviceName, "claim", row.Claim(), "pod", s.Pod(),
			"sandbox", s.ID)
	}
	r.commit(moves)
	if slices.ContainsFunc(rows, releasing) {
		select {
		case r.sandboxEnded <- struct{}{}:
		default:
		}
	}
	return failed
}

// detach brings a row's link home, after the gate to it was closed. A virtual link that ended with its namespace has nothing
// left to bring.
func (r *Room) detach(ctx context.Context, netns string, row *tables.DRAAllocation) (err error) {
	r.world.CloseGate(row.ClaimUID)
	dev := row.PreparedDevice
	if dev.Link().IsZero() {
		return nil
	}
	start := r.world.Now()
	defer func() { r.metrics.observe("detach", r.world.Now().Sub(start), err) }()
	if err := r.world.Detach(ctx, netns, dev); err != nil && !errors.Is(err, podnet.ErrLinkGone) {
		return stage.In("move", err)
	}
	if err := r.world.Tidy(netns, row.Config); err != nil {
		// What is left leads nowhere, and does not keep the device from the next pod.
		r.log.Warn("Rules of a device are left in the pod that it has left", "device", row.DeviceName, "pod", row.Pod(), "error", err)
	}
	return nil
}

// commit writes the rows as they are to be. It returns those whose row is gone or belongs to another claim.
func (r *Room) commit(moves []*move) (lost []*move) {
	changes := make([]change, len(moves))
	for i, m := range moves {
		changes[i] = change{m.row, func(present *tables.DRAAllocation) *tables.DRAAllocation {
			switch {
			case present == nil:
				lost = append(lost, m)
				return nil
			case m.err != nil:
				m.now.Error = m.err.Error()
			}
			m.now.Held = m.now.Held || m.now.Attachment != nil
			return m.now
		}}
	}
	if err := r.update(changes...); err != nil {
		r.log.Error("Allocation row could not be written", "error", err)
	}
	return lost
}
