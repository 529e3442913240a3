// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package proc

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func start(t *testing.T, script string) *Process {
	t.Helper()
	s, err := NewSpawner("", false)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	p, err := s.Start(Command{
		Name: "test", Args: []string{"/bin/sh", "-c", script}, Env: []string{"WORD=hello"},
		Log: filepath.Join(t.TempDir(), "log", "test.log"),
	})
	require.NoError(t, err)
	return p
}

func TestStop(t *testing.T) {
	p := start(t, "echo $WORD; exec sleep 1000")
	require.Eventually(t, func() bool { return p.Tail(1) == "hello" }, 10*time.Second, 10*time.Millisecond)
	require.True(t, p.Alive())
	require.NoError(t, p.Stop(10*time.Second))
	require.False(t, p.Alive())
	require.NoError(t, p.Stop(10*time.Second), "of one that ended")
}

func TestStopKillsOneThatDoesNotEnd(t *testing.T) {
	p := start(t, "trap '' TERM; echo ready; while :; do sleep 1000; done")
	require.Eventually(t, func() bool { return p.Tail(1) == "ready" }, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, p.Stop(50*time.Millisecond))
	require.False(t, p.Alive())
}

// A process that has our child's pid but is another must not be touched.
func TestReusedPID(t *testing.T) {
	p := start(t, "exec sleep 1000")
	other := *p
	other.StartTime++
	require.False(t, other.Alive())
	require.NoError(t, other.Signal(unix.SIGKILL))
	require.NoError(t, other.Stop(0))
	require.True(t, p.Alive())
	require.NoError(t, p.Stop(0))
}

func TestCloseEndsChildren(t *testing.T) {
	s, err := NewSpawner("", false)
	require.NoError(t, err)
	p, err := s.Start(Command{Name: "test", Args: []string{"/bin/sleep", "1000"}, Log: filepath.Join(t.TempDir(), "log")})
	require.NoError(t, err)
	s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, p.Wait(ctx))
}

func TestStartThatFails(t *testing.T) {
	s, err := NewSpawner("", false)
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Start(Command{Name: "nothing", Args: []string{"/no/such/program"}, Log: filepath.Join(t.TempDir(), "log")})
	require.ErrorContains(t, err, "nothing")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = NewSpawner("/no/such/namespace", false)
	require.Error(t, err)
}

func TestParseStartTime(t *testing.T) {
	got, err := parseStartTime("17 (a ) b) S 1 17 17 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2")
	require.NoError(t, err)
	require.Equal(t, uint64(4711), got)
	_, err = parseStartTime("17 (a) Z 1 17 17 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2")
	require.ErrorIs(t, err, os.ErrProcessDone)
	_, err = parseStartTime("17 (a) S 1")
	require.Error(t, err)
}
