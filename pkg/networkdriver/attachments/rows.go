// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"fmt"
	"reflect"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// change is what becomes of one row.
type change struct {
	// row says which: by pool, device, claim and pod.
	row *tables.DRAAllocation
	// next makes of the row as it is the row that is to be; nil is no row, on either side.
	next func(present *tables.DRAAllocation) *tables.DRAAllocation
}

// put makes the row what it is given as.
func put(row *tables.DRAAllocation) change {
	return change{row, func(*tables.DRAAllocation) *tables.DRAAllocation { return row }}
}

// remove deletes the row if it is there.
func remove(row *tables.DRAAllocation) change {
	return change{row, func(*tables.DRAAllocation) *tables.DRAAllocation { return nil }}
}

// update is the only function that changes rows: it makes all of the changes at once, or none on an error. A row that
// is another claim's by now, or another pod's, counts as none and is never changed.
func (r *Room) update(changes ...change) error {
	txn := r.db.WriteTxn(r.table)
	defer txn.Abort()
	changed := false
	for _, c := range changes {
		var present *tables.DRAAllocation
		holder, _, found := r.table.Get(txn, tables.AllocationByKey(tables.AllocationKey(c.row.Pool, c.row.DeviceName)))
		if found && holder.ClaimUID == c.row.ClaimUID && holder.PodUID == c.row.PodUID {
			present = holder
		}
		next := c.next(present)
		var err error
		switch {
		case reflect.DeepEqual(next, present):
			continue
		case next == nil:
			_, _, err = r.table.Delete(txn, present)
		case found && present == nil:
			return fmt.Errorf("device %s is still held by claim %s (uid %s) of pod %s (uid %s)",
				holder.DeviceName, holder.Claim(), holder.ClaimUID, holder.Pod(), holder.PodUID)
		default:
			_, _, err = r.table.Insert(txn, next)
		}
		if err != nil {
			return fmt.Errorf("row of device %s in table %s: %w", c.row.DeviceName, r.table.Name(), err)
		}
		changed = true
	}
	if changed {
		r.notePods(txn)
		txn.Commit()
	}
	return nil
}

// notePods notes which pods have rows, within the transaction that makes it so.
func (r *Room) notePods(txn statedb.ReadTxn) {
	pods := map[kubetypes.UID]struct{}{}
	for row := range r.table.All(txn) {
		pods[row.PodUID] = struct{}{}
	}
	r.pods.Store(&pods)
}

// edit changes the row if it is there, and returns it as it is then, nil if it is not.
func (r *Room) edit(row *tables.DRAAllocation, edit func(*tables.DRAAllocation)) (now *tables.DRAAllocation, err error) {
	err = r.update(change{row, func(present *tables.DRAAllocation) *tables.DRAAllocation {
		if present != nil {
			now = present.With(edit)
		}
		return now
	}})
	return now, err
}
