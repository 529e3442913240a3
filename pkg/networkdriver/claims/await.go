// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"iter"
	"time"

	"github.com/cilium/statedb"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// defaultHolderPatience is well below the 45 seconds that kubelet gives a Prepare.
const defaultHolderPatience = 10 * time.Second

// AwaitDevices waits until the devices that the claim was allotted are in their pools and no other claim holds one, or some seconds at
// most. After a boot VFs are made, and get their names, while kubelet starts pods already. A pod that is deleted by force gives its claim back to the scheduler at
// once, before kubelet has ended the pod and unprepared the claim. Refused, kubelet would try again only after a minute or more.
func (p *Preparer) AwaitDevices(ctx context.Context, claim *resourceapi.ResourceClaim) {
	ctx, cancel := context.WithTimeout(ctx, p.HolderPatience)
	defer cancel()
	for _, result := range resultsOf(claim, p.DriverName) {
		pool, ours := pools.Configured(p.NodeName, result.Pool)
		if !ours || ptr.Deref(result.AdminAccess, false) {
			return // Prepare refuses it
		}
		for waited := false; ; waited = true {
			txn := p.DB.ReadTxn()
			rows, released := p.Allocations.ListWatch(txn, tables.AllocationsByDevice(result.Device))
			prepared, holder := holdersOf(rows, claim.UID)
			device, _, changed, found := p.Devices.GetWatch(txn, tables.DeviceByName(result.Device))
			if holder == nil && (prepared || found && p.poolOf(txn, device) == pool) {
				break
			}
			if log := p.Logger.With("device", result.Device, "claim", RefOf(claim)); !waited && holder != nil {
				log.Info("Waiting for a device that another claim still holds", "holder", holder.Claim(), "holderPod", holder.Pod())
			} else if !waited {
				log.Info("Waiting for a device that is not in its pool yet")
			}
			select {
			case <-released:
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// holdersOf says whether the given claim has a row among these, and returns the first one of another claim, or nil.
func holdersOf(rows iter.Seq2[*tables.DRAAllocation, statedb.Revision], claim kubetypes.UID) (own bool, other *tables.DRAAllocation) {
	for row := range rows {
		switch {
		case row.ClaimUID == claim:
			own = true
		case other == nil:
			other = row
		}
	}
	return own, other
}
