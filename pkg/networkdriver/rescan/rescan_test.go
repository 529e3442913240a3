// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rescan

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// script is a subscription that does what the test says: nil is an event, an error ends it.
func script(steps <-chan error) func(context.Context, func()) error {
	return func(ctx context.Context, notify func()) error {
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case err := <-steps:
				if err != nil {
					return err
				}
				notify()
			}
		}
	}
}

func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		steps, done := make(chan error), make(chan error)
		scans := make(chan time.Duration, 10)
		start := time.Now()
		// came asserts when scans came, since it was asked last.
		came := func(at ...time.Duration) {
			t.Helper()
			synctest.Wait()
			for _, want := range at {
				require.NotEmpty(t, scans)
				require.Equal(t, want, <-scans)
			}
			require.Empty(t, scans)
		}
		go func() {
			done <- Run(ctx, slog.New(slog.DiscardHandler), script(steps), func() error {
				scans <- time.Since(start)
				return nil
			})
		}()
		came(0)

		// Events in a burst are one scan when it is over.
		time.Sleep(time.Second)
		steps <- nil
		time.Sleep(QuietPeriod / 2)
		steps <- nil
		time.Sleep(2 * QuietPeriod)
		came(time.Second + QuietPeriod*3/2)

		// Without events there is a scan now and then.
		time.Sleep(PollInterval)
		came(PollInterval)

		// A lost subscription is made again, after a while.
		steps <- errors.New("events were lost")
		lost := time.Now()
		steps <- nil
		require.Equal(t, ResubscribeDelay, time.Since(lost))

		cancel()
		require.NoError(t, <-done)
	})
}

func TestRunEndsWithTheScansError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		require.ErrorIs(t, Run(t.Context(), slog.New(slog.DiscardHandler), script(nil), func() error { return boom }), boom)
	})
}
