// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// unclaimedInterval is how often rows without a sandbox are looked for, and firstClaimCheck and lastClaimCheck bound how
	// long such a row has been there when its claim is read, and the time to the next look.
	unclaimedInterval               = 5 * time.Second
	firstClaimCheck, lastClaimCheck = 30 * time.Second, 10 * time.Minute
	claimCheckTimeout               = 10 * time.Second
)

// ClaimReader reads claims.
type ClaimReader interface {
	// IsHeld says whether the row's claim is still there, is allotted the row's device on this node, and is reserved for a pod.
	IsHeld(ctx context.Context, row *tables.DRAAllocation) (bool, error)
}

// claimCheck is when a claim is read, and how long after that it is read again.
type claimCheck struct {
	due   time.Time
	delay time.Duration
}

// ReleaseUnclaimed releases, until the context ends, claims whose devices are in no sandbox and which are no pod's any
// more: kubelet may have lost its checkpoint and never unprepare them. A claim that is prepared and waits for its pod's
// sandbox is reserved for that pod.
func (r *Room) ReleaseUnclaimed(ctx context.Context) error {
	checks := map[kubetypes.UID]claimCheck{}
	for pause.For(ctx, unclaimedInterval) {
		r.releaseUnclaimed(ctx, checks)
	}
	return nil
}

// releaseUnclaimed looks once. It keeps in checks when to read which claim.
func (r *Room) releaseUnclaimed(ctx context.Context, checks map[kubetypes.UID]claimCheck) {
	now := r.world.Now()
	idle := r.idleClaims()
	for uid := range checks {
		if _, ok := idle[uid]; !ok {
			delete(checks, uid)
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(idle)) {
		rows := idle[uid]
		check, known := checks[uid]
		switch {
		case !known:
			checks[uid] = claimCheck{now.Add(firstClaimCheck), firstClaimCheck}
			continue
		case now.Before(check.due):
			continue
		}
		if err := r.releaseIfUnclaimed(ctx, rows); err != nil {
			r.log.Warn("Claim of devices that are in no pod could not be checked or released, trying again", "claim", rows[0].Claim(), "error", err)
		}
		delay := min(2*check.delay, lastClaimCheck)
		checks[uid] = claimCheck{now.Add(delay), delay}
	}
}

// idleClaims returns the rows of the claims none of whose devices is in a sandbox or being released.
func (r *Room) idleClaims() map[kubetypes.UID][]*tables.DRAAllocation {
	claims := map[kubetypes.UID][]*tables.DRAAllocation{}
	for row := range r.table.All(r.db.ReadTxn()) {
		claims[row.ClaimUID] = append(claims[row.ClaimUID], row)
	}
	for uid, rows := range claims {
		if slices.ContainsFunc(rows, func(row *tables.DRAAllocation) bool { return row.Releasing || row.Attachment != nil }) {
			delete(claims, uid)
		}
	}
	return claims
}

func (r *Room) releaseIfUnclaimed(ctx context.Context, rows []*tables.DRAAllocation) error {
	ctx, cancel := r.world.WithTimeout(ctx, claimCheckTimeout)
	defer cancel()
	for _, row := range rows {
		held, err := r.world.IsHeld(ctx, row)
		if err != nil {
			return fmt.Errorf("read the claim: %w", err)
		}
		if held {
			return nil
		}
	}
	claim, err := r.Lock(ctx, rows[0].ClaimUID)
	if err != nil {
		return err
	}
	defer claim.Unlock()
	if !slices.Equal(claim.Rows(), rows) {
		return nil // something has happened to the claim meanwhile
	}
	r.log.Warn("Devices of a claim that is no pod's any more are given back, without kubelet having asked for it",
		"claim", rows[0].Claim(), "pod", rows[0].Pod())
	r.Owe(rows[0].ClaimRef())
	return claim.Release(ctx)
}

// Use is what a claim's devices are used for.
type Use int

const (
	// Unused: no device is in a sandbox that runs.
	Unused Use = iota
	// UsedByHolder: a device is in the sandbox of a pod that the claim is reserved for.
	UsedByHolder
	// UsedByGone: a device is in a sandbox that runs, and the claim is no pod's any more. Its pod was deleted by force; a container of it
	// may be about to start.
	UsedByGone
)

// Use says whether a device of the claim is in one of the sandboxes, which still runs.
func (c *Claim) Use(ctx context.Context, sandboxes []Sandbox) (Use, error) {
	for _, row := range c.Rows() {
		i := slices.IndexFunc(sandboxes, func(s Sandbox) bool { return attachedTo(row, s.ID) })
		if i < 0 || row.Releasing || !c.room.Alive(sandboxes[i]) {
			continue
		}
		switch held, err := c.room.world.IsHeld(ctx, row); {
		case err != nil:
			return Unused, fmt.Errorf("read the claim, whose device %s is in pod %s, which runs: %w", row.DeviceName, row.Pod(), err)
		case held:
			return UsedByHolder, nil
		default:
			return UsedByGone, nil
		}
	}
	return Unused, nil
}
