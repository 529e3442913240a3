// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// recordTimeout bounds how long Unprepare waits for the claim's status to be written.
const recordTimeout = 2 * time.Second

// Unprepare gives back every device of the claim: the link comes home and the device is freed. It needs only the
// claim's UID, for the claim object may be gone; for a claim that has nothing prepared it succeeds. A device that
// cannot be freed keeps its row, which says why, and the call can be repeated.
func (p *Preparer) Unprepare(ctx context.Context, claim kubetypes.UID) (err error) {
	start := time.Now()
	defer func() { p.Metrics.done("unprepare", start, err) }()

	unlock, err := p.claims.lock(ctx, string(claim))
	if err != nil {
		return fmt.Errorf("unprepare claim with uid %s: %w", claim, err)
	}
	defer unlock()

	var errs []error
	var ref Ref
	for row := range p.Allocations.List(p.DB.ReadTxn(), tables.AllocationsByClaim(claim)) {
		ref = refOfRow(row)
		if err := p.free(ctx, row); err != nil {
			errs = append(errs, err)
		}
	}
	if ref == (Ref{}) {
		return nil
	}
	p.record(ctx, ref)
	if len(errs) > 0 {
		return fmt.Errorf("unprepare claim %s (uid %s): %w", ref, claim, errors.Join(errs...))
	}
	return nil
}

// record makes the claim's status say what the claim still has. Kubelet does not call again after a success, so that a
// record which a restart of the agent finds in the status would keep the device from everyone.
func (p *Preparer) record(ctx context.Context, claim Ref) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	rows := statedb.Collect(p.Allocations.List(p.DB.ReadTxn(), tables.AllocationsByClaim(claim.UID)))
	if err := p.Status.Apply(ctx, claim, rows); err != nil {
		p.Status.Withdraw(claim) // the devices are free all the same
	}
}

// free brings the row's link home, frees the device and deletes the row. When that fails it notes the reason in the
// row. A device that another claim has a row for as well is left to that claim: nothing is done to it.
func (p *Preparer) free(ctx context.Context, row *tables.DRAAllocation) error {
	txn := p.DB.ReadTxn()
	for other := range p.Allocations.List(txn, tables.AllocationsByDevice(row.DeviceName)) {
		if other.ClaimUID != row.ClaimUID {
			p.Logger.Warn("Device is left as it is, since another claim has it too", "device", row.DeviceName,
				"claim", row.Claim(), "pod", podName(row), "otherClaim", other.Claim(), "otherPod", podName(other))
			return p.deleteRow(row)
		}
	}
	if err := p.Returner.Return(ctx, row); err != nil {
		return p.keepRow(row, false, fmt.Errorf("bring device %s back from pod %s: %w", row.DeviceName, podName(row), err))
	}
	// The row as it is now: bringing the link home may have changed it.
	present, _, found := p.Allocations.Get(p.DB.ReadTxn(), tables.AllocationByKey(tables.AllocationKey(row.Pool, row.DeviceName)))
	if !found || present.ClaimUID != row.ClaimUID {
		return nil
	}
	if err := present.PreparedDevice.Free(ctx, present.Config); err != nil {
		return p.keepRow(row, true, fmt.Errorf("free device %s: %w", row.DeviceName, err))
	}
	p.Logger.Info("Device freed", "device", row.DeviceName, "claim", row.Claim(), "pod", podName(row))
	return p.deleteRow(row)
}

// keepRow notes the failure in the row, as it is now, and returns it; home says that the link is on the host.
func (p *Preparer) keepRow(row *tables.DRAAllocation, home bool, failure error) error {
	txn := p.DB.WriteTxn(p.Allocations)
	defer txn.Abort()
	present, _, found := p.Allocations.Get(txn, tables.AllocationByKey(tables.AllocationKey(row.Pool, row.DeviceName)))
	if !found || present.ClaimUID != row.ClaimUID {
		return failure
	}
	noted := present.With(func(r *tables.DRAAllocation) {
		r.Error = failure.Error()
		if home {
			r.Attachment = nil
		}
	})
	if _, _, err := p.Allocations.Insert(txn, noted); err != nil {
		return errors.Join(failure, fmt.Errorf("note it in table %s: %w", p.Allocations.Name(), err))
	}
	txn.Commit()
	return failure
}

// deleteRow deletes the row if it is still the claim's.
func (p *Preparer) deleteRow(row *tables.DRAAllocation) error {
	txn := p.DB.WriteTxn(p.Allocations)
	defer txn.Abort()
	present, _, found := p.Allocations.Get(txn, tables.AllocationByKey(tables.AllocationKey(row.Pool, row.DeviceName)))
	if !found || present.ClaimUID != row.ClaimUID {
		return nil
	}
	if _, _, err := p.Allocations.Delete(txn, present); err != nil {
		return fmt.Errorf("delete the row of device %s: %w", row.DeviceName, err)
	}
	txn.Commit()
	return nil
}
