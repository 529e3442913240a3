// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package attachments is the life of a prepared device's link, from Prepared to gone. It is told of a claim's devices
// by kubelet's side and of a pod's sandboxes by the runtime's, changes devices and links accordingly, and is the one
// owner of the allocation table: no row changes anywhere else, and here by one function.
//
// A device comes with [Claim.Prepare] or, after a restart, [Room.Restore], moves into its pod with [Room.Attach], home
// with [Room.Detach], and goes with [Claim.Release]; [Room.Synchronize] makes up for what was missed. Each of them has
// the locks of the claims that it is about, from its first look at a row to the last change. What is being released is
// not attached any more, also when the release fails half-way.
package attachments

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// undoTimeout bounds what goes on after the caller has given up: taking back what was attached or set up.
const undoTimeout = 10 * time.Second

// Room owns the allocations. What it does for different claims goes on at the same time.
type Room struct {
	log     *slog.Logger
	db      *statedb.DB
	table   statedb.RWTable[*tables.DRAAllocation]
	world   World
	metrics *Metrics

	// locks are of claims, by UID: whoever has a claim's lock may change its rows, devices and links. Who needs several
	// takes them in the order of the UIDs and takes no further one.
	locks keylock.Locks[kubetypes.UID]
	// pods are those with rows, from the table: a look into that would be most of what events of other pods cost.
	pods atomic.Pointer[map[kubetypes.UID]struct{}]
	// sandboxEnded tells [Room.Run] that a sandbox has ended which it may be waiting for.
	sandboxEnded chan struct{}
	// restored completes the table.
	restored func(statedb.WriteTxn)
}

// New returns the room over the table, which is complete after [Room.Restore].
func New(log *slog.Logger, db *statedb.DB, table statedb.RWTable[*tables.DRAAllocation], world World, metrics *Metrics) *Room {
	txn := db.WriteTxn(table)
	defer txn.Commit()
	r := &Room{log: log, db: db, table: table, world: world, metrics: metrics, sandboxEnded: make(chan struct{}, 1), restored: table.RegisterInitializer(txn, "restore")}
	r.notePods(txn)
	return r
}

// Restore adds the rows of devices that an earlier life of the agent prepared, and completes the table. Those that are
// releasing are given back by [Room.Run].
func (r *Room) Restore(rows []*tables.DRAAllocation) error {
	changes := make([]change, len(rows))
	for i, row := range rows {
		changes[i] = put(row)
	}
	if err := r.update(changes...); err != nil {
		return err
	}
	r.world.CloseOtherGates(claimsOf(rows))
	r.world.UndescribeOthers(r.OwedClaims()) // which kubelet has containers read about, once they have devices again
	txn := r.db.WriteTxn(r.table)
	defer txn.Commit()
	r.restored(txn)
	return nil
}

// Validate reports what about the configuration the device cannot do.
func (r *Room) Validate(dev types.Device, config types.DeviceConfig) error {
	return r.world.Validate(dev, config)
}

// HasDevices says whether the pod has a device. It is what every sandbox event of every pod on the node pays for: one
// map lookup.
func (r *Room) HasDevices(pod kubetypes.UID) bool {
	_, ok := (*r.pods.Load())[pod]
	return ok
}

// InPlace says whether every device of the pod is in this sandbox, to stay.
func (r *Room) InPlace(pod kubetypes.UID, sandboxID string) bool {
	for row := range r.table.List(r.db.ReadTxn(), tables.AllocationsByPod(pod)) {
		if row.Releasing || !attachedTo(row, sandboxID) {
			return false
		}
	}
	return true
}

// lockPod takes the locks of all claims of the pod, and returns the pod's rows as they are then, in the order of their
// keys.
func (r *Room) lockPod(ctx context.Context, pod kubetypes.UID) (rows []*tables.DRAAllocation, unlock func(), err error) {
	for {
		claims := claimsOf(r.rowsOfPod(pod))
		if unlock, err = r.lockAll(ctx, claims); err != nil {
			return nil, nil, fmt.Errorf("an earlier attach or detach is still going on: %w", err)
		}
		rows = r.rowsOfPod(pod)
		if !slices.ContainsFunc(rows, func(row *tables.DRAAllocation) bool { return !slices.Contains(claims, row.ClaimUID) }) {
			return rows, unlock, nil
		}
		unlock() // another claim of the pod was prepared meanwhile
	}
}

func (r *Room) rowsOfPod(pod kubetypes.UID) []*tables.DRAAllocation {
	return statedb.Collect(r.table.List(r.db.ReadTxn(), tables.AllocationsByPod(pod)))
}

func (r *Room) lockAll(ctx context.Context, claims []kubetypes.UID) (unlock func(), err error) {
	var held []func()
	unlock = func() {
		for _, unlock := range held {
			unlock()
		}
	}
	for _, claim := range claims {
		next, err := r.locks.Lock(ctx, claim)
		if err != nil {
			unlock()
			return nil, err
		}
		held = append(held, next)
	}
	return unlock, nil
}

// claimsOf returns the UIDs of the rows' claims, each once, in their order.
func claimsOf(rows []*tables.DRAAllocation) []kubetypes.UID {
	var claims []kubetypes.UID
	for _, row := range rows {
		claims = append(claims, row.ClaimUID)
	}
	slices.Sort(claims)
	return slices.Compact(claims)
}

func attachedTo(row *tables.DRAAllocation, sandboxID string) bool {
	return row.Attachment != nil && row.Attachment.SandboxID == sandboxID
}

// describe names the row's device the way errors and logs do.
func describe(row *tables.DRAAllocation) string {
	return fmt.Sprintf("device %s (claim %s, request %s)", row.DeviceName, row.Claim(), row.Request)
}
