// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLocks(t *testing.T) {
	var l Locks[string]
	unlock, err := l.Lock(t.Context(), "a")
	require.NoError(t, err)
	other, err := l.Lock(t.Context(), "b")
	require.NoError(t, err, "another key is free")
	other()

	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	_, err = l.Lock(ctx, "a")
	require.ErrorIs(t, err, gone)

	unlock()
	unlock, err = l.Lock(t.Context(), "a")
	require.NoError(t, err, "who gave up holds nothing")
	unlock()
	require.Empty(t, l.locks, "keys that nobody holds must not pile up")
}

func TestLocksExclude(t *testing.T) {
	var (
		l       Locks[int]
		workers sync.WaitGroup
		count   [2]int // guarded by the lock of its index
	)
	for range 8 {
		workers.Go(func() {
			for i := range 200 {
				unlock, err := l.Lock(t.Context(), i%2)
				require.NoError(t, err)
				count[i%2]++
				unlock()
			}
		})
	}
	workers.Wait()
	require.Equal(t, [2]int{800, 800}, count)
	require.Empty(t, l.locks)
}
