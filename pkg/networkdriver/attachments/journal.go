// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// giveBackTimeout bounds one attempt to give a claim's devices back.
	giveBackTimeout = 30 * time.Second
	// firstGiveBack and lastGiveBack bound the pause between attempts.
	firstGiveBack, lastGiveBack = time.Second, time.Minute
)

// Journal remembers on the node what was changed there, whatever becomes of the agent.
type Journal interface {
	// Note makes the entry of the row's device say what the row says, and returns when that is durable. What is not settled
	// is undone when the agent is started again.
	Note(row *tables.DRAAllocation, settled bool) error
	// Forget removes the entry of the row's device, if it is still for the row's claim.
	Forget(row *tables.DRAAllocation) error
	// OweClaim notes that a claim loses devices while kubelet takes it for prepared, and would not ask for it again when a pod
	// comes that uses it. SettleClaim ends that, and OwedClaims returns those of which it is so.
	OweClaim(claim tables.ClaimRef) error
	SettleClaim(claim kubetypes.UID) error
	OwedClaims() []tables.ClaimRef
}

// OwedClaims returns the claims that kubelet may take for prepared although their devices were given back.
func (r *Room) OwedClaims() []tables.ClaimRef { return r.world.OwedClaims() }

// Settle ends that for a claim: it is prepared, kubelet has unprepared it, or it is gone. Without devices it is not described any more.
func (r *Room) Settle(claim kubetypes.UID) {
	owed := slices.DeleteFunc(r.world.OwedClaims(), func(c tables.ClaimRef) bool { return c.UID != claim })
	err := r.world.SettleClaim(claim)
	if len(r.rowsOf(claim, nil)) == 0 {
		for _, c := range owed {
			r.world.Undescribe(c)
		}
	}
	if err != nil {
		r.log.Warn("A claim is settled, and the journal still has it as owed", "claimUID", claim, "error", err)
	}
}

// Owe is for before the claim loses devices, as long as kubelet takes it for prepared. A journal that cannot be written does
// not keep a device from being given back.
func (r *Room) Owe(claim tables.ClaimRef) {
	if err := r.world.OweClaim(claim); err != nil {
		r.log.Warn("The journal does not know that a claim loses its devices while kubelet takes it for prepared; if a pod comes that uses it "+
			"before kubelet has unprepared it or was restarted, the pod waits", "claim", claim, "error", err)
	}
}

// setUp sets the row's device up. Before it is changed the journal knows what it was found as. When that fails nothing
// is left behind, or the row is returned, for the device to be freed.
func (r *Room) setUp(ctx context.Context, row *tables.DRAAllocation) (*tables.DRAAllocation, error) {
	found, err := r.world.Remember(ctx, row.PreparedDevice, row.Config)
	if err != nil {
		return nil, stage.In("setup", err)
	}
	row = row.With(func(r *tables.DRAAllocation) { r.PreparedDevice = found })
	if err := r.world.Note(row, false); err != nil {
		return nil, stage.In("journal", err)
	}
	taken, err := r.world.Take(ctx, row, func(row *tables.DRAAllocation) error { return r.world.Note(row, false) })
	err = stage.In("addresses", err)
	var prepared types.Device
	if err == nil {
		row = taken
		crashpoint.Here(crashpoint.SetupBefore)
		prepared, err = r.world.Setup(ctx, row.PreparedDevice, row.Config)
		err = stage.In("setup", err)
		crashpoint.Here(crashpoint.SetupAfter)
	}
	if err != nil {
		switch {
		case r.has(row):
		case row.Config.Driver != "":
			return row, err // which driver it has now is for Free to look at
		default:
			r.world.Return(context.WithoutCancel(ctx), row)
			if failure := r.world.Forget(row); failure != nil {
				return row, errors.Join(err, failure) // the entry goes when the device is freed
			}
		}
		return nil, err
	}
	row = row.With(func(r *tables.DRAAllocation) { r.PreparedDevice = prepared })
	if err := r.world.Note(row, true); err != nil {
		return row, stage.In("journal", err)
	}
	return row, nil
}

// setUpAgain sets up a device that is prepared already. It may be another one afterwards, which the journal has before the
// row: a row that knew better would not be set up again, and the next life of the agent would know of the former device only.
func (r *Room) setUpAgain(ctx context.Context, m *move) error {
	dev, err := r.world.Setup(ctx, m.now.PreparedDevice, m.now.Config)
	if err != nil {
		return err
	}
	now := m.now.With(func(r *tables.DRAAllocation) { r.PreparedDevice = dev })
	m.anew = true
	if err := r.world.Note(now, true); err != nil {
		return err
	}
	m.now = now
	return nil
}

// has says whether the table has the row, in whatever state.
func (r *Room) has(row *tables.DRAAllocation) bool {
	return slices.ContainsFunc(r.rowsOfPod(row.PodUID), func(present *tables.DRAAllocation) bool {
		return present.ClaimUID == row.ClaimUID && present.Pool == row.Pool && present.DeviceName == row.DeviceName
	})
}

// unsettle has the device undone if the agent ends before that is done. A journal that cannot be written does not keep a
// device from being given back.
func (r *Room) unsettle(row *tables.DRAAllocation) {
	if err := r.world.Note(row, false); err != nil {
		r.log.Warn("The journal does not know that a device is being given back; if the agent ends before that is done, its claim decides",
			"device", row.DeviceName, "claim", row.Claim(), "error", err)
	}
}

// freeAndForget frees the device, whose link is home. The entry goes last: until then a restart of the agent does it again.
func (r *Room) freeAndForget(ctx context.Context, row *tables.DRAAllocation) (err error) {
	start := r.world.Now()
	defer func() { r.metrics.observe("free", r.world.Now().Sub(start), err) }()
	crashpoint.Here(crashpoint.FreeBefore)
	if err := r.world.Free(ctx, row.PreparedDevice, row.Config); err != nil {
		return stage.In("free", err)
	}
	crashpoint.Here(crashpoint.FreeAfter)
	r.world.Return(ctx, row)
	err = stage.In("journal", r.world.Forget(row))
	crashpoint.Here(crashpoint.Forgotten)
	return err
}

// Run gives back, until the context ends, what is being released and could not be: kubelet need not ask again, and does
// not ask at all for what an earlier life of the agent left. sandboxesOf returns the pod's sandboxes that run, or an error as long as that
// is not known: a device that is in one, whose pod was deleted by force, stays until that has ended, since a container may be about to
// start there.
func (r *Room) Run(ctx context.Context, sandboxesOf func(kubetypes.UID) ([]Sandbox, error)) error {
	delay := firstGiveBack
	for {
		_, changed := r.table.AllWatch(r.db.ReadTxn())
		if r.giveBackReleasing(ctx, sandboxesOf) == 0 {
			delay = firstGiveBack
			select {
			case <-changed:
			case <-ctx.Done():
				return nil
			}
			continue
		}
		select {
		case <-time.After(delay):
		case <-r.sandboxEnded:
		case <-ctx.Done():
			return nil
		}
		delay = min(2*delay, lastGiveBack)
	}
}

// giveBackReleasing tries once for every claim, and returns for how many of them it failed.
func (r *Room) giveBackReleasing(ctx context.Context, sandboxesOf func(kubetypes.UID) ([]Sandbox, error)) (failed int) {
	var rows []*tables.DRAAllocation
	for row := range r.table.All(r.db.ReadTxn()) {
		if row.Releasing {
			rows = append(rows, row)
		}
	}
	for _, uid := range claimsOf(rows) {
		if err := r.giveBackClaim(ctx, uid, sandboxesOf); err != nil {
			failed++
			r.log.Warn("Devices could not be given back, trying again", "claimUID", uid, "error", err)
		}
	}
	return failed
}

func (r *Room) giveBackClaim(ctx context.Context, uid kubetypes.UID, sandboxesOf func(kubetypes.UID) ([]Sandbox, error)) error {
	ctx, cancel := r.world.WithTimeout(ctx, giveBackTimeout)
	defer cancel()
	claim, err := r.Lock(ctx, uid)
	if err != nil {
		return err
	}
	defer claim.Unlock()
	var errs []error
	for _, row := range claim.Rows() {
		if !row.Releasing {
			continue
		}
		if err := r.mayLeave(ctx, row, sandboxesOf); err != nil {
			errs = append(errs, fmt.Errorf("claim %s: device %s of pod %s: %w", row.Claim(), row.DeviceName, row.Pod(), err))
			continue
		}
		r.Owe(row.ClaimRef())
		if err := claim.free(ctx, row); err != nil {
			errs = append(errs, fmt.Errorf("claim %s: %w", row.Claim(), err))
			continue
		}
		r.world.Withdraw(row.ClaimRef())
	}
	return errors.Join(errs...)
}

// mayLeave returns why the row's device has to stay where it is: in a sandbox that runs. Of a device without a link nothing tells which
// sandbox had it before the agent was started again, so that it stays for as long as its pod has one.
func (r *Room) mayLeave(ctx context.Context, row *tables.DRAAllocation, sandboxesOf func(kubetypes.UID) ([]Sandbox, error)) error {
	linkless := row.PreparedDevice.Link().IsZero()
	sandboxes, err := sandboxesOf(row.PodUID)
	if err != nil {
		if linkless {
			return err
		}
		if seen, failure := r.world.Where(ctx, "", row.PreparedDevice); failure == nil && seen.Place != podnet.Elsewhere {
			return nil
		}
		return err
	}
	for _, s := range sandboxes {
		if !r.Alive(s) {
			continue
		}
		if linkless {
			return errors.New("a program in the pod's sandbox, which still runs, may have it: it is freed when that has ended")
		}
		seen, err := r.world.Where(ctx, s.NetNS, row.PreparedDevice)
		if err != nil {
			return fmt.Errorf("look whether it is in the pod's sandbox, which still runs: %w", err)
		}
		if seen.Place == podnet.InPod {
			return errors.New("it is in the pod's sandbox, which still runs, and is freed when that has ended")
		}
	}
	return nil
}
