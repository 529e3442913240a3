// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
)

// TooOldError says that the cluster's Kubernetes is older than what is needed. Trying again does not help until the
// cluster is upgraded.
type TooOldError struct {
	Found, Needed *version.Version
}

func (e *TooOldError) Error() string {
	return fmt.Sprintf("Kubernetes %s is too old: at least %d.%d is needed", e.Found, e.Needed.Major(), e.Needed.Minor())
}

// WaitForVersion asks the API server for its version until it answers, and returns it when it is at least needed. It
// returns a [*TooOldError] otherwise, or the context's error.
func WaitForVersion(ctx context.Context, server discovery.ServerVersionInterface, needed string, log *slog.Logger) (*version.Version, error) {
	least, err := version.ParseGeneric(needed)
	if err != nil {
		return nil, fmt.Errorf("needed version: %w", err)
	}
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Steps: 1 << 10, Cap: 30 * time.Second, Jitter: 0.1}
	for {
		info, err := server.ServerVersion()
		if err == nil {
			found, err := version.ParseGeneric(info.GitVersion)
			if err != nil {
				return nil, fmt.Errorf("version %q of the API server: %w", info.GitVersion, err)
			}
			if !found.AtLeast(least) {
				return nil, &TooOldError{Found: found, Needed: least}
			}
			return found, nil
		}
		delay := backoff.Step()
		log.Warn("Kubernetes API does not answer yet", "error", err, "retryAfter", delay.Round(time.Second))
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("ask the API server for its version: %w", ctx.Err())
		}
	}
}
