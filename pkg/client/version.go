// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"

	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/pause"
)

// WaitForVersion asks the API server for its version until it answers, and returns it when it is at least needed, which is
// written like 1.34. The error is the context's, or says that the cluster has to be upgraded.
func WaitForVersion(ctx context.Context, server discovery.ServerVersionInterface, needed string, log *slog.Logger) (*version.Version, error) {
	least, err := version.ParseGeneric(needed)
	if err != nil {
		return nil, fmt.Errorf("needed version: %w", err)
	}
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Steps: 1 << 10, Cap: 30 * time.Second, Jitter: 0.1}
	var failing logonce.Problems[metav1.StatusReason]
	for {
		info, err := server.ServerVersion()
		if err == nil {
			found, err := version.ParseGeneric(info.GitVersion)
			if err != nil {
				return nil, fmt.Errorf("version %q of the API server: %w", info.GitVersion, err)
			}
			if !found.AtLeast(least) {
				return nil, fmt.Errorf("the API server runs Kubernetes %s, which is too old: at least %s is needed", found, needed)
			}
			return found, nil
		}
		delay := backoff.Step()
		log.Log(ctx, failing.Level(apierrors.ReasonForError(err), slog.LevelWarn), "Kubernetes API does not answer yet",
			"error", err, "retryAfter", delay.Round(time.Second))
		if !pause.For(ctx, delay) {
			return nil, fmt.Errorf("ask the API server for its version: %w", ctx.Err())
		}
	}
}
