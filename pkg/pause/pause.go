// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package pause lets loops wait between two rounds, and end without finishing the wait.
package pause

import (
	"context"
	"time"
)

// For waits for the duration and returns true, or returns false as soon as the context has ended.
func For(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
