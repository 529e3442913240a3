// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Journal is what the node remembers of the devices that are set up.
type Journal interface {
	// ID is what records name the journal by.
	ID() string
	// Entries are those of this boot.
	Entries() []*journal.Entry
	// Note makes the entry of the row's device, Forget removes it, and Quarantine says why it cannot be undone.
	Note(row *tables.DRAAllocation, settled bool) error
	Forget(row *tables.DRAAllocation) error
	Quarantine(device, reason string) error
	// Reread reads the entry of a quarantined device again, nil if it is gone and the quarantine over; Readmit ends that.
	Reread(device string) (*journal.Entry, error)
	Readmit(e *journal.Entry) error
}

// journaled are the rows of the journal's entries by device. A row that is releasing is to be given back: its claim does not hold
// it, since it is gone, not for that device any more or nobody's, or the device's Setup was never answered.
func (r *Restorer) journaled(isHeld func(*journal.Entry) bool) (map[string]*tables.DRAAllocation, error) {
	rows := map[string]*tables.DRAAllocation{}
	for _, e := range r.Journal.Entries() {
		if e.Quarantine != "" {
			continue
		}
		row, err := r.rowOf(e)
		if err != nil {
			reason := err.Error()
			r.Logger.Error("Device is quarantined", "device", e.Name, "claim", e.Claim(), "reason", reason)
			if err := r.Journal.Quarantine(e.Name, reason); err != nil {
				return nil, err
			}
			continue
		}
		holds := isHeld(e)
		row.Releasing = !e.Settled || !holds
		if row.Releasing {
			r.Logger.Warn("Device is left over and is given back", "device", e.Name, "claim", e.Claim(), "pod", row.Pod(),
				"setUp", e.Settled, "allocated", holds)
		}
		rows[e.Name] = row
	}
	return rows, nil
}

// Judge looks again at a quarantined device. If its entry can be undone by now, the device goes on as if it had been restored when
// the agent was started: it is its claim's, or given back. If the entry is gone, somebody has seen to the device.
func (r *Restorer) Judge(ctx context.Context, device string) error {
	e, err := r.Journal.Reread(device)
	if err == nil && e == nil {
		r.Logger.Info("Device is not quarantined any more, since its journal entry is gone", "device", device)
		return nil
	}
	var row *tables.DRAAllocation
	if err == nil {
		row, err = r.rowOf(e)
	}
	if err != nil {
		return r.Journal.Quarantine(device, err.Error())
	}
	claim, err := r.Claims.GetClaim(ctx, e.ClaimNamespace, e.ClaimName)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	row.Releasing = !e.Settled || err != nil || !r.isHolders(claim, e)
	row.Held = !row.Releasing // whether it was in the pod is not known

	lock, err := r.Room.Lock(ctx, e.ClaimUID)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if err := lock.Restore(row); err != nil {
		return r.Journal.Quarantine(device, err.Error())
	}
	r.Logger.Info("Device is not quarantined any more", "device", device, "claim", row.Claim(), "pod", row.Pod(), "givenBack", row.Releasing)
	return r.Journal.Readmit(e)
}

// rowOf restores the entry's device. The error is why it is quarantined.
func (r *Restorer) rowOf(e *journal.Entry) (row *tables.DRAAllocation, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("what the journal has of it cannot be undone: %w", err)
		}
	}()
	if e.Driver != r.DriverName {
		return nil, fmt.Errorf("it is of driver %s, and this is %s; restart the agent under the former driverName until the pods that have its devices are gone",
			e.Driver, r.DriverName)
	}
	manager := r.managers[e.Manager]
	if manager == nil {
		return nil, fmt.Errorf("it names device manager %.64q, which this agent does not have", e.Manager)
	}
	device, err := manager.RestoreDevice(e.Device)
	if u, ok := manager.(types.Unfinished); ok && err != nil && !e.Settled {
		device, err = u.RestoreUnfinished(e.Device)
	}
	if n, ok := device.(types.Noted); ok && err == nil {
		device, err = n.RestoreNote(e.Device)
	}
	if err != nil {
		return nil, err
	}
	if name := device.IfName(); name != e.Name {
		return nil, fmt.Errorf("it has device %.64q", name)
	}
	return e.Row(device), nil
}

// isHeld says whether the claim, which may be nil, is the one of that UID, allotted the device here and reserved for a
// pod. A claim that has gone over to another pod is held: its devices are handed over with it.
func isHeld(claim *resourceapi.ResourceClaim, uid kubetypes.UID, owner Owner, pool, device string) bool {
	if claim == nil || claim.UID != uid {
		return false
	}
	allotted := slices.ContainsFunc(resultsOf(claim, owner.Driver), func(result resourceapi.DeviceRequestAllocationResult) bool {
		configured, ours := pools.Configured(owner.Node, result.Pool)
		return ours && configured == pool && result.Device == device
	})
	return allotted && slices.ContainsFunc(claim.Status.ReservedFor, IsPod)
}

// isHolders says whether the claim, which may be nil, is held, and by the pod that the entry names. A former holder's device is given back,
// and passed on from there: that pod must not get it again.
func (r *Restorer) isHolders(claim *resourceapi.ResourceClaim, e *journal.Entry) bool {
	return isHeld(claim, e.ClaimUID, Owner{Driver: r.DriverName, Node: r.NodeName}, e.Pool, e.Name) &&
		slices.ContainsFunc(claim.Status.ReservedFor, func(c resourceapi.ResourceClaimConsumerReference) bool { return c.UID == e.PodUID })
}

// IsHeld implements [attachments.ClaimReader].
func (w *Writer) IsHeld(ctx context.Context, row *tables.DRAAllocation) (bool, error) {
	claim, err := w.Background.GetClaim(ctx, row.ClaimNamespace, row.ClaimName)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil && isHeld(claim, row.ClaimUID, w.owner(), row.Pool, row.DeviceName), err
}

// withClaimsOf adds the claims of the journal's entries to those of pods.
func withClaimsOf(entries []*journal.Entry, claims []*podClaim) []*podClaim {
	for _, e := range entries {
		known := slices.ContainsFunc(claims, func(c *podClaim) bool {
			return c.namespace == e.ClaimNamespace && c.name == e.ClaimName
		})
		if !known && e.Quarantine == "" {
			claims = append(claims, &podClaim{namespace: e.ClaimNamespace, name: e.ClaimName})
		}
	}
	return claims
}

// isQuarantined says whether the journal has an entry of the device that cannot be read.
func (r *Restorer) isQuarantined(device string) bool {
	return slices.ContainsFunc(r.Journal.Entries(), func(e *journal.Entry) bool { return e.Name == device && e.Quarantine != "" })
}
