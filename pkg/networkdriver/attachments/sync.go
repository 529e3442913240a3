// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
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
	for uid, sandboxes := range pods {
		group.Go(func() error {
			ctx, cancel := r.world.WithTimeout(ctx, syncPodTimeout)
			defer cancel()
			if err := r.syncPod(ctx, uid, sandboxes); err != nil {
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

	var (
		moves   []*move
		missing []*tables.DRAAllocation
		failed  error
	)
	for _, row := range rows {
		m := begin(row)
		inPlace, err := r.locate(ctx, m, sandboxes)
		switch {
		case err != nil:
			m.err = err
			failed = errors.Join(failed, fmt.Errorf("%s: %w", describe(row), err))
		case inPlace:
		default:
			if row.Attachment == nil {
				missing = append(missing, row)
				continue
			}
			if m.err = r.detach(ctx, row.Attachment.NetNS, m.now); m.err != nil {
				failed = errors.Join(failed, fmt.Errorf("detach %s: %w", describe(row), m.err))
				break
			}
			m.now.Attachment = nil
			missing = append(missing, m.now)
		}
		moves = append(moves, m)
	}
	r.commit(moves)
	if failed == nil {
		r.syncGates(uid)
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
		if seen.Place == podnet.InPod {
			m.now.Attachment = s.holds(seen.Attachment)
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
	case looked && seen.Place == podnet.Gone && dev.Link().Physical():
		m.now.Attachment = nil
		return false, fmt.Errorf("the device is lost: %s", seen.Why)
	}
	return false, nil
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
