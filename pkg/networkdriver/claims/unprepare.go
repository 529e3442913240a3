// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
)

// Unprepare gives back every device of the claim: the link comes home and the device is freed. It needs only the
// claim's UID, for the claim object may be gone; for a claim that has nothing prepared it succeeds. A device that
// cannot be freed keeps its row, which says why, and the call can be repeated.
//
// Kubelet asks when no pod that it knows of uses the claim. One that has lost its checkpoint does not know of the pods that ran
// before, one of which may have the claim's devices: they stay, and are released when that pod is gone. Once a minute it asks too for pods
// that the API server does not have any more, whose containers it still starts or stops: until their sandbox has ended that is an error,
// so that none starts without its device, and kubelet asks again when the sandbox has ended.
func (p *Preparer) Unprepare(ctx context.Context, claim kubetypes.UID) (err error) {
	start := time.Now()
	defer func() { p.Metrics.done("unprepare", start, err) }()

	crashpoint.Here(crashpoint.UnprepareBefore)
	defer crashpoint.Here(crashpoint.Unprepared)
	held, err := p.Room.Lock(ctx, claim)
	if err != nil {
		return fmt.Errorf("unprepare claim with uid %s: %w", claim, stage.In("lock", err))
	}
	defer held.Unlock()
	rows := held.Rows()
	if len(rows) > 0 {
		use, err := held.Use(ctx, p.Sandboxes.Sandboxes(rows[0].ClaimNamespace))
		switch {
		case err != nil:
			return fmt.Errorf("unprepare claim %s (uid %s): %w", rows[0].Claim(), claim, stage.In("claim", err))
		case use == attachments.UsedByHolder:
			p.Logger.Warn("Kubelet unprepares a claim whose devices are in a pod that it is reserved for and that runs; they stay there until that pod ends",
				"claim", rows[0].Claim(), "pod", rows[0].Pod())
			return nil
		case use == attachments.UsedByGone:
			return fmt.Errorf("unprepare claim %s (uid %s): its devices are in the sandbox of pod %s, which still runs; they are freed when it has ended",
				rows[0].Claim(), claim, rows[0].Pod())
		}
		p.Room.Owe(rows[0].ClaimRef()) // until kubelet has the answer it takes the claim for prepared
	}
	if err := held.Release(ctx); err != nil {
		return fmt.Errorf("unprepare claim %s (uid %s): %w", rows[0].Claim(), claim, err)
	}
	return nil
}

// Redescribe has containers of a claim read where its devices are, after kubelet's answer has been written down: a sandbox may have
// come in between.
func (p *Preparer) Redescribe(ctx context.Context, claim kubetypes.UID) error {
	return p.Room.Redescribe(ctx, claim)
}

// Unprepared says that kubelet is being told that the claims are unprepared: all of those that it asked for, or none, since it
// takes all of them for prepared when it is told otherwise of one.
func (p *Preparer) Unprepared(claims []kubetypes.UID) {
	for _, claim := range claims {
		p.unprepared.note(claim, time.Now())
	}
}
