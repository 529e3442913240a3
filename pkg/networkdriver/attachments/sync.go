// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// syncParallel is how many pods are looked at side by side.
	syncParallel = 4
	// syncPodTimeout bounds the work on one pod, which may go on after Synchronize has returned.
	syncPodTimeout = 10 * time.Second
)

// Synchronize makes the table and the kernel agree with the sandboxes that the runtime has, and makes up for the
// events that came while the driver was away: what is inside a sandbox, or was moved on by its pod, is noted, what should be
// inside is attached, what is left in a sandbox that is gone is brought home. Prepared devices whose pod has no sandbox yet stay as they are. What
// fails is logged and stands in the rows.
func (r *Room) Synchronize(ctx context.Context, sandboxes []Sandbox) {
	pods := map[kubetypes.UID][]Sandbox{}
	for row := range r.table.All(r.db.ReadTxn()) {
		pods[row.PodUID] = nil
	}
	for _, s := range sandboxes {
		if _, ok := pods[s.PodUID]; !ok {
			continue
		}
		if r.world.CheckNetNS(s.NetNS) != nil {
			s.NetNS = "" // runtimes list stopped sandboxes too; and this is not the place to refuse a pod
		}
		pods[s.PodUID] = append(pods[s.PodUID], s)
	}
	var group errgroup.Group
	group.SetLimit(syncParallel)
	for _, uid := range slices.Sorted(maps.Keys(pods)) {
		group.Go(func() error {
			ctx, cancel := r.world.WithTimeout(ctx, syncPodTimeout)
			defer cancel()
			if err := r.syncPod(ctx, uid, pods[uid]); err != nil {
				r.log.Error("Pod could not be synchronized with the runtime", "podUID", uid, "error", err)
			}
			return nil
		})
	}
	_ = group.Wait()
}

func (r *Room) syncPod(ctx context.Context, uid kubetypes.UID, sandboxes []Sandbox) error {
	rows, unlock, err := r.lockPod(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	return r.settle(ctx, rows, sandboxes)
}

// settle makes the rows of a pod and the kernel agree with the pod's sandboxes. It needs the locks of the rows' claims.
func (r *Room) settle(ctx context.Context, rows []*tables.DRAAllocation, sandboxes []Sandbox) error {
	var moves []*move
	for _, row := range rows {
		moves = append(moves, begin(row))
	}
	r.ensure(ctx, moves)
	var (
		changed []*move
		missing []*tables.DRAAllocation
		failed  error
	)
	for _, m := range moves {
		inPlace, err := r.locate(ctx, m, sandboxes)
		r.expel(ctx, m)
		switch {
		case err != nil || m.err != nil:
			m.err = errors.Join(m.err, err)
			r.log.Log(ctx, m.level(slog.LevelError), "Device is not as its claim has it", "device", m.row.DeviceName,
				"claim", m.row.Claim(), "pod", m.row.Pod(), "error", m.err)
			failed = errors.Join(failed, fmt.Errorf("%s: %w", describe(m.row), m.err))
		case inPlace:
		case m.row.Attachment == nil:
			m.now.Error = m.row.Error
			missing = append(missing, m.now)
			if !m.anew {
				continue
			}
		default:
			if m.err = r.detach(ctx, m.row.Attachment.NetNS, m.now); m.err != nil {
				failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(m.row), m.err))
				break
			}
			m.now.Attachment = nil
			missing = append(missing, m.now)
		}
		changed = append(changed, m)
	}
	r.commit(changed)
	if failed == nil && len(rows) > 0 {
		r.syncGates(rows[0].PodUID)
	}

	target, ok := lateTarget(sandboxes)
	if !ok || len(missing) == 0 || failed != nil || slices.ContainsFunc(rows, releasing) {
		return failed
	}
	return r.attachRows(ctx, missing, target)
}

// locate looks for the row's device, notes where it is and says whether that is its place: in one of the sandboxes, or
// where the pod has moved it from there. One that is lost is an error.
func (r *Room) locate(ctx context.Context, m *move, sandboxes []Sandbox) (inPlace bool, err error) {
	dev := m.now.PreparedDevice
	var seen podnet.Sighting
	looked := false
	for _, s := range sandboxes {
		switch {
		case s.NetNS == "":
			continue
		case dev.Link().IsZero():
			if attachedTo(m.row, s.ID) {
				return true, nil
			}
			continue
		}
		if seen, err = r.world.Where(ctx, s.NetNS, dev); err != nil {
			return false, err
		}
		if seen.Place == podnet.InPod && m.row.Attachment == nil && r.mayLack(m.row, s) {
			looked = true
			continue
		}
		if seen.Place == podnet.InPod {
			again := attachedTo(m.row, s.ID) && m.row.Attachment.Again
			m.now.Attachment = s.holds(seen.Attachment)
			m.now.Attachment.Again = again
			return true, nil
		}
		looked = true
	}
	switch {
	case seen.Place == podnet.Elsewhere:
		if i := slices.IndexFunc(sandboxes, func(s Sandbox) bool { return s.handsOn(m.row) }); i >= 0 {
			m.now.Attachment = sandboxes[i].handedOn(m.row)
			return true, nil
		}
	case slices.ContainsFunc(sandboxes, func(s Sandbox) bool { return s.NetNS != "" && attachedTo(m.row, s.ID) }):
		// It was in the pod, which still runs.
		m.now.Attachment, m.now.LostFrom = nil, m.row.Attachment.SandboxID
	}
	if looked {
		r.world.CloseGate(m.row.ClaimUID) // also if nothing can be done about it
	}
	if looked && seen.Place == podnet.Gone && dev.Link().Physical() {
		return false, fmt.Errorf("the device is lost: %s", seen.Why)
	}
	return false, nil
}

// mayLack says whether the agent may have ended before a link that is in the sandbox had what its network gives it. Where the sandbox has
// containers the gate tells, which is opened afterwards: containers that do not list the claim start without it. From then on the
// link is the pod's, which may have made something else of it.
func (r *Room) mayLack(row *tables.DRAAllocation, s Sandbox) bool {
	return row.Config.InPod() != nil && !(s.Populated && r.world.WasOpened(row.ClaimUID, s.ID))
}

// handsOn says whether a link that is in a third namespace was moved there from this sandbox, by the pod. It is the sandbox
// that had the link, or, where an agent that was started again does not know that, one with containers: the link would be
// on the host if it had never been in it.
func (s Sandbox) handsOn(row *tables.DRAAllocation) bool {
	return s.NetNS != "" && (attachedTo(row, s.ID) || row.Attachment == nil && s.Populated)
}

// handedOn is the attachment of such a link.
func (s Sandbox) handedOn(row *tables.DRAAllocation) *types.Attachment {
	a := &types.Attachment{}
	if row.Attachment != nil {
		a = row.Attachment
	}
	a = s.holds(a)
	a.Moved = true
	return a
}

// lateTarget is the sandbox that the pod's devices belong into: the one with containers, or the only one. When it is
// not plain which, CreateContainer will tell.
func lateTarget(sandboxes []Sandbox) (Sandbox, bool) {
	var candidates []Sandbox
	for _, s := range sandboxes {
		switch {
		case s.NetNS == "":
		case s.Populated:
			return s, true
		default:
			candidates = append(candidates, s)
		}
	}
	if len(candidates) != 1 {
		return Sandbox{}, false
	}
	return candidates[0], true
}
