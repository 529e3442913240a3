// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

const (
	// lockTimeout is how long another call for the same NIC is waited for: longer than an attachment takes on a busy
	// node, and shorter than the runtime's patience.
	lockTimeout  = 30 * time.Second
	lockInterval = 5 * time.Millisecond
)

// lock waits until no other process works on the NIC with the key. The lock ends when the file is closed everywhere:
// a sub-plugin inherits it, so that one whose parent was killed is waited for as well. Files of locks stay, one for each
// NIC, because removing one that another process has just opened would give the lock twice.
func (s *store) lock(ctx context.Context, key string) (*os.File, error) {
	name := strings.Map(func(r rune) rune {
		if r == '/' || r == 0 {
			return '_'
		}
		return r
	}, key)
	f, err := os.OpenFile(filepath.Join(s.locks(), name+".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock NIC %s: %w", key, err)
	}
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	tick := time.NewTicker(lockInterval)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock NIC %s: %w", key, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			_ = f.Close()
			return nil, errorf(types.ErrTryAgainLater, "lock NIC %s: another call for it has not ended: %w", key, ctx.Err())
		}
	}
}
