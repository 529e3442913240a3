// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	bin := filepath.Join(dir, "bin")
	require.NoError(t, os.Mkdir(bin, 0o755))
	program := filepath.Join(dir, "plugin")
	require.NoError(t, os.WriteFile(program, []byte("new"), 0o600))
	target := filepath.Join(bin, "plugin")
	require.NoError(t, os.WriteFile(target, []byte("old"), 0o755))
	running, err := os.Open(target)
	require.NoError(t, err)
	defer running.Close()

	run := func(args ...string) error {
		cmd := command()
		cmd.SetArgs(args)
		return cmd.Execute()
	}
	require.NoError(t, run("--to", bin, program))
	data, err := os.ReadFile(target)
	require.NoError(t, err)
	require.Equal(t, "new", string(data))
	info, err := os.Stat(target)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), info.Mode())
	old := make([]byte, 3)
	_, err = running.ReadAt(old, 0)
	require.NoError(t, err)
	require.Equal(t, "old", string(old), "what runs is not written to")
	files, err := os.ReadDir(bin)
	require.NoError(t, err)
	require.Len(t, files, 1, "nothing else is left")

	require.ErrorContains(t, run("--to", filepath.Join(dir, "missing"), program), filepath.Join(dir, "missing"))
	require.Error(t, run("--to", bin))
}
