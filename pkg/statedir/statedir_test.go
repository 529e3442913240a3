// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package statedir

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	require.NoError(t, Make(dir))
	require.NoError(t, Make(dir))
	info, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o700), info.Mode().Perm())

	path := filepath.Join(dir, "x")
	_, err = Read(path, 10)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, Remove(path))
	require.NoError(t, Write(path, []byte("first")))
	require.NoError(t, Write(path, []byte("second")))
	data, err := Read(path, 3)
	require.NoError(t, err)
	require.Equal(t, "sec", string(data), "no more than the limit")
	require.NoError(t, os.WriteFile(Temp(path), nil, 0o600))
	require.NoError(t, Remove(path))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

// A write that fails leaves what was there.
func TestFailedWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	require.NoError(t, Write(path, []byte("first")))
	require.NoError(t, os.Mkdir(Temp(path), 0o700))
	require.Error(t, Write(path, []byte("second")))
	data, err := Read(path, 10)
	require.NoError(t, err)
	require.Equal(t, "first", string(data))
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o770))
	require.ErrorContains(t, Make(dir), "that nobody else may write to")
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(t.TempDir(), link))
	require.ErrorContains(t, Make(link), "needed is a directory")

	dir = t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	link = filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("/etc/passwd", link))
	for _, path := range []string{fifo, link} {
		_, err := Read(path, 10)
		require.ErrorIs(t, err, ErrNotFile)
	}
}
