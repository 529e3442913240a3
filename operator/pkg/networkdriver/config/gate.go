// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
)

// gate is passed by every write. It keeps to the rate, and while the API server does not answer it lets only one attempt
// through now and then.
type gate struct {
	log     *slog.Logger
	limiter *rate.Limiter

	mu sync.Mutex // guards the fields below
	// backoff gives the delay after the next failure. Nothing passes before closed.
	backoff wait.Backoff
	closed  time.Time
	away    bool
}

// outageBackoff has a cap that is short enough for an API server that is back to be noticed soon.
var outageBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 1 << 10, Cap: 10 * time.Second}

func newGate(log *slog.Logger, qps float64, burst int) *gate {
	return &gate{log: log, limiter: rate.NewLimiter(rate.Limit(qps), burst), backoff: outageBackoff}
}

// pass returns when a write may be made, or the context's error.
func (g *gate) pass(ctx context.Context) error {
	for {
		g.mu.Lock()
		delay := time.Until(g.closed)
		g.mu.Unlock()
		if delay <= 0 {
			break
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
	return g.limiter.Wait(ctx)
}

// report takes in the outcome of a write.
func (g *gate) report(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !unavailable(err) {
		if g.away {
			g.log.Info("Kubernetes API answers again")
		}
		g.away, g.backoff, g.closed = false, outageBackoff, time.Time{}
		return
	}
	if time.Now().Before(g.closed) {
		return // another write has noticed the same
	}
	delay := g.backoff.Step()
	g.closed = time.Now().Add(delay)
	if !g.away {
		g.log.Warn("Kubernetes API does not answer, trying again", "error", err, "retryAfter", delay.Round(time.Millisecond))
	}
	g.away = true
}

// unavailable says whether an error means that the API server is away, and not that it refuses the request.
func unavailable(err error) bool {
	if err == nil {
		return false
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true // there was no answer
	}
	return apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsTooManyRequests(err) || apierrors.IsInternalError(err)
}
