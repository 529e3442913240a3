// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cpio

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWriter(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	w.Dir("d")
	w.File("d/file", []byte("hello"))
	require.NoError(t, w.Close())
	require.Zero(t, buf.Len()%4)

	// The format's first header, field by field.
	require.Equal(t, "070701"+"00000001"+"000041ed"+"00000000"+"00000000"+"00000001"+"00000000"+"00000000"+
		"00000000"+"00000000"+"00000000"+"00000000"+"00000002"+"00000000"+"d\x00", buf.String()[:112])

	program, err := exec.LookPath("cpio")
	if err != nil {
		t.Skip("cpio is not installed: its reading of the archive is not tested")
	}
	dir := t.TempDir()
	cmd := exec.Command(program, "-i", "--quiet")
	cmd.Dir, cmd.Stdin = dir, &buf
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(filepath.Join(dir, "d", "file"))
	require.NoError(t, err)
	require.Equal(t, "hello", string(data))
}
