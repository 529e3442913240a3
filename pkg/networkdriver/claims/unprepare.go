// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/crashpoint"
)

// Unprepare gives back every device of the claim: the link comes home and the device is freed. It needs only the
// claim's UID, for the claim object may be gone; for a claim that has nothing prepared it succeeds. A device that
// cannot be freed keeps its row, which says why, and the call can be repeated.
func (p *Preparer) Unprepare(ctx context.Context, claim kubetypes.UID) (err error) {
	start := time.Now()
	defer func() { p.Metrics.done("unprepare", start, err) }()

	crashpoint.Here(crashpoint.UnprepareBefore)
	defer crashpoint.Here(crashpoint.Unprepared)
	held, err := p.Room.Lock(ctx, claim)
	if err != nil {
		return fmt.Errorf("unprepare claim with uid %s: %w", claim, err)
	}
	defer held.Unlock()
	rows := held.Rows()
	if err := held.Release(ctx); err != nil {
		return fmt.Errorf("unprepare claim %s (uid %s): %w", rows[0].Claim(), claim, err)
	}
	return nil
}
