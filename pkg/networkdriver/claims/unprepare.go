// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"
)

// Unprepare gives back every device of the claim: the link comes home and the device is freed. It needs only the
// claim's UID, for the claim object may be gone; for a claim that has nothing prepared it succeeds. A device that
// cannot be freed keeps its row, which says why, and the call can be repeated.
func (p *Preparer) Unprepare(ctx context.Context, claim kubetypes.UID) (err error) {
	start := time.Now()
	defer func() { p.Metrics.done("unprepare", start, err) }()

	held, err := p.Room.Lock(ctx, claim)
	if err != nil {
		return fmt.Errorf("unprepare claim with uid %s: %w", claim, err)
	}
	defer held.Unlock()
	rows := held.Rows()
	if len(rows) > 0 {
		p.Room.Owe(rows[0].ClaimRef()) // until kubelet has the answer it takes the claim for prepared
	}
	if err := held.Release(ctx); err != nil {
		return fmt.Errorf("unprepare claim %s (uid %s): %w", rows[0].Claim(), claim, err)
	}
	if ctx.Err() == nil {
		p.unprepared.note(claim, time.Now())
	}
	return nil
}
