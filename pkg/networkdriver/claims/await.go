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

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// defaultHolderPatience is well below the 45 seconds that kubelet gives a Prepare.
const defaultHolderPatience = 10 * time.Second

// AwaitDevices waits until no other claim holds a device that the claim was allotted, or some seconds at most. A pod that
// is deleted by force gives its claim back to the scheduler at once, before kubelet has ended the pod and unprepared the
// claim. Refused, kubelet would try the next claim on the device again only after a minute or more.
func (p *Preparer) AwaitDevices(ctx context.Context, claim *resourceapi.ResourceClaim) {
	ctx, cancel := context.WithTimeout(ctx, p.HolderPatience)
	defer cancel()
	for _, result := range resultsOf(claim, p.DriverName) {
		if ptr.Deref(result.AdminAccess, false) {
			return // Prepare refuses it, whoever holds the device
		}
		for waited := false; ; waited = true {
			rows, changed := p.Allocations.ListWatch(p.DB.ReadTxn(), tables.AllocationsByDevice(result.Device))
			holder := otherHolder(rows, claim.UID)
			if holder == nil {
				break
			}
			if !waited {
				p.Logger.Info("Waiting for a device that another claim still holds", "device", result.Device,
					"claim", RefOf(claim), "holder", holder.Claim(), "holderPod", holder.Pod())
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}
}

// otherHolder returns the first row of a claim other than the given one, or nil.
func otherHolder(rows iter.Seq2[*tables.DRAAllocation, statedb.Revision], claim kubetypes.UID) *tables.DRAAllocation {
	for row := range rows {
		if row.ClaimUID != claim {
			return row
		}
	}
	return nil
}
