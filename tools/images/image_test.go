// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/require"
)

func programs(t *testing.T, names ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	bin := filepath.Join(dir, "linux-amd64")
	require.NoError(t, os.Mkdir(bin, 0o755))
	for _, name := range names {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("program "+name), 0o700))
	}
	return dir
}

func entries(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	found := map[string]string{}
	for in := tar.NewReader(r); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		data, err := io.ReadAll(in)
		require.NoError(t, err)
		require.NotContains(t, found, header.Name)
		found[header.Name] = string(data)
		if header.Typeflag == tar.TypeSymlink {
			found[header.Name] = "-> " + header.Linkname
		}
		require.Zero(t, header.ModTime.Unix(), header.Name)
	}
}

func TestImage(t *testing.T) {
	dir := programs(t, "cilium-agent", "cilium-dbg", "unrelated")
	var out bytes.Buffer
	require.NoError(t, run(&out, dir, "v1", "0123abc", []string{"amd64"}))
	file := filepath.Join(dir, "cilium-agent-linux-amd64.tar")
	require.Equal(t, 1, strings.Count(out.String(), "\n"), "there is no operator: %s", &out)

	// As docker load reads it.
	built, err := tarball.ImageFromPath(file, nil)
	require.NoError(t, err)
	require.NoError(t, validate.Image(built))
	config, err := built.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "linux/amd64", config.OS+"/"+config.Architecture)
	require.Equal(t, []string{"/usr/bin/cilium-agent"}, config.Config.Entrypoint)
	require.Equal(t, "0123abc", config.Config.Labels["org.opencontainers.image.revision"])
	layers, err := built.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	content, err := layers[0].Uncompressed()
	require.NoError(t, err)
	found := entries(t, content)
	require.Equal(t, "program cilium-agent", found["usr/bin/cilium-agent"])
	require.Equal(t, "program cilium-dbg", found["usr/bin/cilium-dbg"])
	require.Equal(t, "-> /run", found["var/run"])
	require.Contains(t, found, "tmp/")
	require.NotContains(t, found, "usr/bin/unrelated")

	// As a runtime's importer reads it: the index leads to a manifest whose blobs are there.
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	archive := entries(t, f)
	var index v1.IndexManifest
	require.NoError(t, json.Unmarshal([]byte(archive["index.json"]), &index))
	require.Len(t, index.Manifests, 1)
	require.True(t, strings.HasSuffix(index.Manifests[0].Annotations["io.containerd.image.name"], "/cilium/network-driver-agent:v1"))
	require.Contains(t, out.String(), index.Manifests[0].Digest.String())
	var manifest v1.Manifest
	require.NoError(t, json.Unmarshal([]byte(archive[blobName(index.Manifests[0].Digest)]), &manifest))
	for _, b := range append(manifest.Layers, manifest.Config) {
		require.Len(t, archive[blobName(b.Digest)], int(b.Size))
	}
}

func TestSameProgramsSameImage(t *testing.T) {
	pack := func() []byte {
		dir := programs(t, "cilium-operator")
		program := filepath.Join(dir, "linux-amd64", "cilium-operator")
		when := time.Now().Add(time.Duration(len(dir)) * time.Hour)
		require.NoError(t, os.Chtimes(program, when, when))
		require.NoError(t, run(io.Discard, dir, "v1", "", []string{"amd64"}))
		data, err := os.ReadFile(filepath.Join(dir, "cilium-operator-linux-amd64.tar"))
		require.NoError(t, err)
		return data
	}
	require.Equal(t, pack(), pack())
}

func TestNothingBuilt(t *testing.T) {
	err := run(io.Discard, programs(t, "cilium-dbg"), "v1", "", []string{"amd64"})
	require.ErrorContains(t, err, "linux-amd64 has none of the programs: build them first")
	require.ErrorContains(t, run(io.Discard, programs(t, "cilium-agent"), "v1", "", []string{"arm64"}), "linux-arm64")
	require.ErrorContains(t, run(io.Discard, programs(t, "cilium-agent"), "not a tag", "", []string{"amd64"}), "cilium/network-driver-agent:not a tag")
}
