// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// recordTimeout bounds how long a release waits for the claim's status to be written.
const recordTimeout = 2 * time.Second

// Claim is a claim whose lock is held: until [Claim.Unlock] nobody else changes its rows, its devices or their links.
type Claim struct {
	room *Room
	uid  kubetypes.UID
	// Unlock lets the next one at it.
	Unlock func()
}

// Lock waits until nobody is at work on the claim, or until the context ends. The claim need not have rows.
func (r *Room) Lock(ctx context.Context, claim kubetypes.UID) (*Claim, error) {
	unlock, err := r.locks.Lock(ctx, claim)
	if err != nil {
		return nil, fmt.Errorf("wait for an earlier call for the same claim: %w", err)
	}
	return &Claim{room: r, uid: claim, Unlock: unlock}, nil
}

// Rows returns the claim's rows in the order of their keys.
func (c *Claim) Rows() []*tables.DRAAllocation {
	return statedb.Collect(c.room.table.List(c.room.db.ReadTxn(), tables.AllocationsByClaim(c.uid)))
}

// Restore adds the row of a device that an earlier life of the agent prepared. If it is there, it learns no more than that the
// device is to be given back.
func (c *Claim) Restore(row *tables.DRAAllocation) error {
	return c.room.update(change{row, func(present *tables.DRAAllocation) *tables.DRAAllocation {
		if present == nil {
			return row
		}
		return present.With(func(r *tables.DRAAllocation) { r.Releasing = r.Releasing || row.Releasing })
	}})
}

// Drop removes the row, if it is there, of a device that is another claim's, and gives its addresses back. Nothing is done to the
// device.
func (c *Claim) Drop(ctx context.Context, row *tables.DRAAllocation) error {
	err := c.room.update(remove(row))
	if err == nil {
		c.room.world.Return(ctx, row)
	}
	return err
}

// Plan is what becomes of a claim's rows.
type Plan struct {
	Claim tables.ClaimRef
	// Stale are rows of the claim to give back first.
	Stale []*tables.DRAAllocation
	// Keep are rows of the claim whose devices stay as they are.
	Keep []*tables.DRAAllocation
	// SetUp are the rows to add or to replace. Their PreparedDevice is the device that is to be set up.
	SetUp []*tables.DRAAllocation
}

// Prepare follows the plan: it sets the devices up, records them in the claim's status and then adds their rows. When
// one of these fails, what this call has set up is freed again.
func (c *Claim) Prepare(ctx context.Context, plan Plan) error {
	err := c.giveBack(ctx, plan.Stale)
	if err == nil {
		err = c.setUp(ctx, plan)
	}
	if err != nil && len(plan.Stale) > 0 {
		c.room.world.Withdraw(plan.Claim) // what was freed must not come back at the next restart
	}
	return err
}

// giveBack frees what an earlier pod had through this claim.
func (c *Claim) giveBack(ctx context.Context, stale []*tables.DRAAllocation) error {
	for _, row := range stale {
		c.room.Owe(row.ClaimRef())
		if err := c.free(ctx, row); err != nil {
			return stage.In("give-back", fmt.Errorf("give back what pod %s (uid %s) had of this claim: %w", row.Pod(), row.PodUID, err))
		}
	}
	return nil
}

func (c *Claim) setUp(ctx context.Context, plan Plan) error {
	var rows, done []*tables.DRAAllocation
	for _, row := range plan.Keep {
		kept := row.With(func(r *tables.DRAAllocation) { r.Releasing = false })
		if row.Releasing {
			if err := c.room.world.Note(kept, true); err != nil {
				return stage.In("journal", err)
			}
		}
		rows = append(rows, kept)
	}
	for _, row := range plan.SetUp {
		prepared, err := c.room.setUp(ctx, row)
		if prepared != nil {
			done = append(done, prepared)
		}
		if err != nil {
			return c.rollBack(ctx, plan.Claim, done, fmt.Errorf("request %q: set up device %s: %w", row.Request, row.DeviceName, err))
		}
	}
	rows = append(rows, done...)
	crashpoint.Here(crashpoint.StatusBefore)
	err := c.room.world.Apply(ctx, plan.Claim, rows)
	crashpoint.Here(crashpoint.StatusAfter)
	if err != nil {
		err = stage.In("status", fmt.Errorf("record the devices in the claim's status: %w", err))
	} else {
		changes := make([]change, len(rows))
		for i, row := range rows {
			changes[i] = put(row)
		}
		crashpoint.Here(crashpoint.RowBefore)
		err = c.room.update(changes...)
		crashpoint.Here(crashpoint.RowAfter)
	}
	if err != nil {
		// The API server may have taken it although the answer says otherwise.
		defer c.room.world.Withdraw(plan.Claim)
		return c.rollBack(ctx, plan.Claim, done, err)
	}
	for _, row := range done {
		c.room.log.Info("Device prepared", "device", row.DeviceName, "claim", plan.Claim, "pod", row.Pod(),
			"podIfName", row.Config.PodIfName, "vlan", row.Config.VLAN())
	}
	return nil
}

// rollBack frees in reverse order what this call has set up, and returns the error to answer with. A device that
// cannot be freed gets, or keeps, a row that says so: it is not given to anybody else, and the next Prepare or Release
// of the claim deals with it.
func (c *Claim) rollBack(ctx context.Context, claim tables.ClaimRef, done []*tables.DRAAllocation, cause error) error {
	var changes []change
	withdraw := false
	for _, row := range slices.Backward(done) {
		if err := c.room.freeInTime(ctx, row); err != nil {
			c.room.log.Error("Device could not be freed after its claim failed to prepare; it stays with the claim until kubelet unprepares it",
				"device", row.DeviceName, "claim", claim, "pod", row.Pod(), "error", err)
			changes = append(changes, put(row.With(func(r *tables.DRAAllocation) {
				r.Error, r.Releasing = "roll back a failed prepare: "+err.Error(), true
			})))
			cause = fmt.Errorf("%w; and device %s could not be freed again: %w", cause, row.DeviceName, err)
			continue
		}
		changes = append(changes, change{row, func(present *tables.DRAAllocation) *tables.DRAAllocation {
			withdraw = withdraw || present != nil
			return nil
		}})
	}
	if err := c.room.update(changes...); err != nil {
		cause = fmt.Errorf("%w; and %w", cause, err)
	}
	if withdraw {
		c.room.world.Withdraw(claim)
	}
	return cause
}

// freeInTime frees the device also when the call's context has ended, which may be why it failed.
func (r *Room) freeInTime(ctx context.Context, row *tables.DRAAllocation) error {
	ctx, cancel := r.world.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	r.unsettle(row)
	return r.freeAndForget(ctx, row)
}

// Release gives back every device of the claim, and makes the claim's status say what it still has. A device that
// cannot be freed keeps its row, which says why, and the call can be repeated.
func (c *Claim) Release(ctx context.Context) error {
	c.room.world.ReturnLeft(c.uid)
	rows := c.Rows()
	if len(rows) == 0 {
		return nil
	}
	var errs []error
	for _, row := range rows {
		errs = append(errs, c.free(ctx, row))
	}
	// Kubelet does not call again after a success, so that a record which a restart of the agent finds in the status
	// would keep the device from everyone.
	ctx, cancel := c.room.world.WithTimeout(ctx, recordTimeout)
	defer cancel()
	claim := rows[0].ClaimRef()
	if err := c.room.world.Apply(ctx, claim, c.Rows()); err != nil {
		c.room.world.Withdraw(claim) // the devices are free all the same
	}
	return errors.Join(errs...)
}

// free is the walk from wherever the device is to gone: its link comes home, the device is freed, the row is deleted.
// When that fails the row says why, and the device stays out of its pod. A device that another claim has a row for as
// well is left to that claim: nothing is done to it.
func (c *Claim) free(ctx context.Context, row *tables.DRAAllocation) error {
	for other := range c.room.table.List(c.room.db.ReadTxn(), tables.AllocationsByDevice(row.DeviceName)) {
		if other.ClaimUID != row.ClaimUID {
			c.room.log.Warn("Device is left as it is, since another claim has it too", "device", row.DeviceName,
				"claim", row.Claim(), "pod", row.Pod(), "otherClaim", other.Claim(), "otherPod", other.Pod())
			if err := c.room.world.Note(other, !other.Releasing); err != nil {
				return err
			}
			return c.Drop(ctx, row)
		}
	}
	row, err := c.room.edit(row, func(r *tables.DRAAllocation) { r.Releasing = true })
	if row == nil || err != nil {
		return err
	}
	c.room.unsettle(row)
	netns := ""
	if row.Attachment != nil {
		netns = row.Attachment.NetNS
	}
	if err := c.room.detach(ctx, netns, row); err != nil {
		return c.fail(row, stage.In("detach", fmt.Errorf("bring device %s back from pod %s: %w", row.DeviceName, row.Pod(), err)))
	}
	row, err = c.room.edit(row, func(r *tables.DRAAllocation) { r.Attachment = nil })
	if row == nil || err != nil {
		return err
	}
	if err := c.room.freeAndForget(ctx, row); err != nil {
		return c.fail(row, stage.In("free", fmt.Errorf("free device %s: %w", row.DeviceName, err)))
	}
	c.room.log.Info("Device freed", "device", row.DeviceName, "claim", row.Claim(), "pod", row.Pod())
	return c.room.update(remove(row))
}

// fail notes the failure in the row and returns it.
func (c *Claim) fail(row *tables.DRAAllocation, failure error) error {
	_, err := c.room.edit(row, func(r *tables.DRAAllocation) { r.Error = failure.Error() })
	return errors.Join(failure, err)
}
