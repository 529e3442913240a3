// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package netnamespace

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
)

func idOf(t *testing.T, path string) ID {
	t.Helper()
	ns, err := Open(path)
	require.NoError(t, err)
	defer ns.Close()
	return ns.ID
}

func openFDs(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(fds)
}

func TestOpen(t *testing.T) {
	path := testenv.NetNS(t)
	require.Equal(t, idOf(t, path), idOf(t, path))
	require.NotEqual(t, idOf(t, "/proc/thread-self/ns/net"), idOf(t, path))

	require.NoError(t, unix.Unmount(path, unix.MNT_DETACH))
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	before := openFDs(t)
	for name, path := range map[string]string{
		"the file it was mounted on": path,
		"missing":                    filepath.Join(t.TempDir(), "missing"),
		"an ended process":           "/proc/4194304/ns/net",
		"another kind":               "/proc/thread-self/ns/mnt",
		"a pipe":                     pipe,
	} {
		_, err := Open(path)
		require.ErrorIs(t, err, ErrNone, name)
	}
	require.Equal(t, before, openFDs(t))
}

func TestReachable(t *testing.T) {
	held, named := testenv.NetNS(t), testenv.NetNS(t)
	ids := map[string]ID{"held": idOf(t, held), "named": idOf(t, named)}
	// One that nothing leads to but a descriptor of a process, after it was unmounted.
	fd, err := unix.Open(held, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Unmount(held, unix.MNT_DETACH))
	// One in the runtimes' directory.
	require.NoError(t, os.MkdirAll("/run/netns", 0o755))
	name := filepath.Join("/run/netns", "netnamespace-test-"+filepath.Base(filepath.Dir(t.TempDir())))
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	defer os.Remove(name)
	require.NoError(t, unix.Mount(named, name, "", unix.MS_BIND, ""))
	defer func() { _ = unix.Unmount(name, unix.MNT_DETACH) }()

	skip := idOf(t, "/proc/thread-self/ns/net")
	seen := map[ID]int{}
	before := openFDs(t)
	for ns := range Reachable(t.Context(), skip) {
		seen[ns.ID]++
	}
	require.Equal(t, before, openFDs(t))
	for what, id := range ids {
		require.Equal(t, 1, seen[id], what)
	}
	require.Zero(t, seen[skip])
}
