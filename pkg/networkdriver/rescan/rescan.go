// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package rescan tells a device manager when to look at the host again.
package rescan

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// PollInterval bounds how long a change goes unnoticed that makes no link event, such as a VF bound to vfio-pci or a
	// name that a rename set free.
	PollInterval = 10 * time.Second
	// QuietPeriod is how long no link must have changed before names count as settled: udev renames an interface some
	// time after the kernel made it.
	QuietPeriod = 200 * time.Millisecond
	// MaxSettle bounds the wait for a quiet period on a node where links never stop changing.
	MaxSettle = 2 * time.Second
	// ResubscribeDelay is the pause before a lost subscription to link events is made again.
	ResubscribeDelay = time.Second
)

// Run scans at once, again when links have changed and are quiet, and every [PollInterval], until the context ends, when
// it returns nil, or a scan returns an error.
//
// watch calls notify once it receives link events and for every event that matters, and returns when the context ends
// or events were lost. Then it is called again.
func Run(ctx context.Context, log *slog.Logger, watch func(ctx context.Context, notify func()) error, scan func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	changed := make(chan struct{}, 1)
	var watcher sync.WaitGroup
	defer watcher.Wait()
	defer cancel()
	watcher.Go(func() { Follow(ctx, log, watch, changed) })

	poll := time.NewTicker(PollInterval)
	defer poll.Stop()
	if err := scan(); err != nil {
		return err
	}
	var (
		// quiet is nil while no change waits to be scanned.
		quiet    <-chan time.Time
		settleBy time.Time
	)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			if quiet == nil {
				settleBy = time.Now().Add(MaxSettle)
			}
			quiet = time.After(min(QuietPeriod, time.Until(settleBy)))
			continue
		case <-quiet:
			quiet = nil
		case <-poll.C:
			if quiet != nil {
				continue
			}
		}
		if err := scan(); err != nil {
			return err
		}
	}
}

// Follow signals changed for every notification until the context ends. What is not taken from the channel yet stands for those that
// follow. watch is as in [Run].
func Follow(ctx context.Context, log *slog.Logger, watch func(context.Context, func()) error, changed chan<- struct{}) {
	notify := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	for {
		err := watch(ctx, notify)
		if ctx.Err() != nil {
			return
		}
		log.Warn("Lost the subscription to link events, subscribing again", "error", err)
		if !pause.For(ctx, ResubscribeDelay) {
			return
		}
	}
}
