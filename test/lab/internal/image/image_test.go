// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func entries(t *testing.T, data []byte) (names []string, content map[string][]byte, headers map[string]*tar.Header) {
	t.Helper()
	content, headers = map[string][]byte{}, map[string]*tar.Header{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return names, content, headers
		}
		require.NoError(t, err)
		names = append(names, h.Name)
		headers[h.Name] = h
		content[h.Name], err = io.ReadAll(r)
		require.NoError(t, err)
	}
}

func TestWrite(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(program, []byte("code"), 0o644))
	var buf bytes.Buffer
	require.NoError(t, Image{
		Name:  "example.test/i:1",
		Files: map[string]string{"usr/bin/p": program},
		Links: map[string]string{"bin/sh": "/usr/bin/p"},
		Cmd:   []string{"/bin/sh"},
	}.Write(&buf))

	_, files, _ := entries(t, buf.Bytes())
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	require.NoError(t, json.Unmarshal(files["manifest.json"], &manifest))
	require.Len(t, manifest, 1)
	require.Equal(t, []string{"example.test/i:1"}, manifest[0].RepoTags)

	layer := files[manifest[0].Layers[0]]
	var config struct {
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
		Config struct{ Cmd []string }
	}
	require.NoError(t, json.Unmarshal(files[manifest[0].Config], &config))
	require.Equal(t, []string{"sha256:" + sum(layer)}, config.RootFS.DiffIDs)
	require.Equal(t, []string{"/bin/sh"}, config.Config.Cmd)

	names, content, headers := entries(t, layer)
	require.Equal(t, "code", string(content["usr/bin/p"]))
	require.Equal(t, int64(0o755), headers["usr/bin/p"].Mode)
	require.Equal(t, "/usr/bin/p", headers["bin/sh"].Linkname)
	seen := map[string]bool{".": true}
	for _, n := range names {
		require.True(t, seen[filepath.Dir(n)], "the directory of %s comes before it", n)
		require.False(t, seen[n], "%s is there once", n)
		seen[n] = true
	}

	var again bytes.Buffer
	require.NoError(t, Image{
		Name: "example.test/i:1", Files: map[string]string{"usr/bin/p": program},
		Links: map[string]string{"bin/sh": "/usr/bin/p"}, Cmd: []string{"/bin/sh"},
	}.Write(&again))
	require.Equal(t, buf.Bytes(), again.Bytes(), "the same content gives the same image")
}
