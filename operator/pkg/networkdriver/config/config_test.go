// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cilium/networkdriver/internal/testenv"
)

func TestConfigMistakes(t *testing.T) {
	require.NoError(t, defaultConfig.validate())
	for flag, change := range map[string]func(*Config){
		"--network-driver-write-qps":            func(c *Config) { c.NetworkDriverWriteQPS = 0 },
		"--network-driver-write-burst":          func(c *Config) { c.NetworkDriverWriteBurst = 0 },
		"--network-driver-refresh-interval":     func(c *Config) { c.NetworkDriverRefreshInterval = time.Millisecond },
		"--network-driver-address-grace-period": func(c *Config) { c.NetworkDriverAddressGracePeriod = 0 },
		"--leader-election-retry-period":        func(c *Config) { c.LeaderElectionRetryPeriod = 0 },
		"--leader-election-renew-deadline":      func(c *Config) { c.LeaderElectionRenewDeadline = c.LeaderElectionRetryPeriod },
		"--leader-election-lease-duration":      func(c *Config) { c.LeaderElectionLeaseDuration = c.LeaderElectionRenewDeadline },
		"--k8s-namespace":                       func(c *Config) { c.K8sNamespace = "" },
	} {
		config := defaultConfig
		change(&config)
		require.ErrorContains(t, config.validate(), flag+":")
	}
	require.False(t, defaultConfig.Enabled())
	require.True(t, Config{EnableNetworkDriver: true}.Enabled())
	require.True(t, Config{EnableCiliumNetworkDriver: true}.Enabled())
}

// TestGate: an API server that is away closes the gate, for longer each time, and an answer of any kind opens it.
func TestGate(t *testing.T) {
	ctx := t.Context()
	away := errors.New("connection refused")
	refused := apierrors.NewForbidden(nodeConfigResource.GroupResource(), "n", errors.New("no"))
	require.True(t, unavailable(fmt.Errorf("write: %w", away)))
	require.True(t, unavailable(apierrors.NewServiceUnavailable("starting")))
	require.True(t, unavailable(apierrors.NewTooManyRequests("slow down", 1)))
	require.False(t, unavailable(refused))
	require.False(t, unavailable(nil))

	log := &testenv.LogBuffer{}
	g := newGate(slog.New(slog.NewTextHandler(log, nil)), 1000, 1000)
	require.NoError(t, g.pass(ctx))
	g.report(ctx, away)
	first := time.Until(g.closed)
	require.Positive(t, first)
	g.report(ctx, away)
	require.LessOrEqual(t, time.Until(g.closed), first, "many writes that fail together count once")
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, g.pass(stopped), context.Canceled)
	for range 10 {
		g.closed = time.Time{}
		g.report(ctx, away)
	}
	require.Greater(t, time.Until(g.closed), 8*time.Second)
	require.Less(t, time.Until(g.closed), 13*time.Second)
	g.report(ctx, refused)
	require.NoError(t, g.pass(ctx))
	require.Equal(t, 1, strings.Count(log.String(), "does not answer"), "%s", log)
	require.Equal(t, 1, strings.Count(log.String(), "answers again"), "%s", log)
}
