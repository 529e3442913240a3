// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// reports are what Lock tells, each once.
type reports chan string

func (r reports) add(text string) { r <- text }

func TestLock(t *testing.T) {
	j := open(t, t.TempDir(), "boot", slog.New(slog.DiscardHandler))
	told := make(reports, 10)
	unlock, err := j.Lock(t.Context(), told.add)
	require.NoError(t, err)
	require.Empty(t, <-told)

	type result struct {
		unlock func()
		err    error
	}
	second := make(chan result)
	lock := func(ctx context.Context) {
		unlock, err := j.Lock(ctx, told.add)
		second <- result{unlock, err}
	}
	go lock(t.Context())
	require.Contains(t, <-told, fmt.Sprintf("held by process %d", os.Getpid()), "the kernel tells who it is")
	unlock()
	require.Empty(t, <-told)
	got := <-second
	require.NoError(t, got.err)

	ctx, cancel := context.WithCancel(t.Context())
	go lock(ctx)
	require.Contains(t, <-told, "another agent is at work")
	cancel()
	require.ErrorIs(t, (<-second).err, context.Canceled)
	got.unlock()
}

// A process that was killed and cannot end does not keep the node without an agent.
func TestLockOfStuckProcess(t *testing.T) {
	dir, proc := t.TempDir(), t.TempDir()
	first := open(t, dir, "boot", slog.New(slog.DiscardHandler))
	unlock, err := first.Lock(t.Context(), func(string) {})
	require.NoError(t, err)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(filepath.Join(dir, lockFile), &st))
	require.NoError(t, os.WriteFile(filepath.Join(proc, "locks"), fmt.Appendf(nil,
		"1: POSIX  ADVISORY  WRITE 7 00:01:%[3]d 0 EOF\n2: FLOCK  ADVISORY  WRITE 4711 %02[1]x:%02[2]x:%[3]d 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 7 %02[1]x:%02[2]x:%[3]d 0 EOF\n",
		unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino), 0o600))
	task := filepath.Join(proc, "4711", "task")
	status := func(thread, pending, shared string) {
		require.NoError(t, os.MkdirAll(filepath.Join(task, thread), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(task, thread, "status"),
			[]byte("Name:\tx\nSigQ:\t0/7\nSigPnd:\t"+pending+"\nShdPnd:\t"+shared+"\nSigBlk:\tffffffffffffffff\n"), 0o600))
	}
	const none, kill, term = "0000000000000000", "0000000000000100", "0000000000004000"
	for _, tt := range []struct {
		pending, shared string
		want            bool
	}{{none, none, false}, {none, term, false}, {kill, none, true}, {none, kill, true}, {"x", "", false}} {
		status("4711", none, none)
		status("4712", tt.pending, tt.shared)
		require.Equal(t, tt.want, isKilled(proc, 4711), tt)
	}
	require.False(t, isKilled(proc, 1))

	synctest.Test(t, func(t *testing.T) {
		second := open(t, dir, "boot", slog.New(slog.DiscardHandler))
		second.Proc = proc
		status("4712", none, kill)
		told := make(reports, 10)
		start := time.Now()
		got, err := second.Lock(t.Context(), told.add)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(start), stuckAfter)
		require.Contains(t, <-told, "another agent is at work")
		require.Contains(t, <-told, "process 4711, was killed and cannot end")
		require.Empty(t, told)
		unlock()
		require.Empty(t, <-told, "it has ended, and the lock is taken after all")
		got()
	})
}
