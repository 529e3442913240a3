// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// images are the project's images. An image has its main program, and those of the others that there are.
var images = []image{
	{
		name: "cilium/network-driver-agent", program: "cilium-agent",
		others:      []string{"cilium-dbg", "amd-host-device", "install-cni", "networkdriver-hook"},
		description: "Cilium Network Driver: the agent",
	},
	{
		name: "cilium/network-driver-operator", program: "cilium-operator",
		others: []string{"cilium-dbg"}, user: "65532:65532",
		description: "Cilium Network Driver: the operator",
	},
}

// binDir is where programs are in an image.
const binDir = "usr/bin"

// links are the symbolic links in an image. Runtimes name a pod's network namespace by either of the paths.
var links = map[string]string{"var/run": "/run"}

// directories are those that are mounted over or written to, parents first.
var directories = []string{"etc", "run", "tmp", "usr", binDir, "var"}

// epoch is the time of all files, so that the digest depends on nothing but the content.
var epoch = time.Unix(0, 0).UTC()

// image is what goes into an image for one architecture.
type image struct {
	name        string // without tag
	program     string // that the image runs
	others      []string
	user        string // empty: root
	description string

	dir                 string // with the programs
	arch, tag, revision string
}

func (i image) ref() string { return i.name + ":" + i.tag }

func (i image) has(program string) bool {
	info, err := os.Stat(filepath.Join(i.dir, program))
	return err == nil && info.Mode().IsRegular()
}

// build returns the image with one layer.
func (i image) build() (v1.Image, error) {
	raw, err := i.layer()
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	built := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if built, err = mutate.Append(built, mutate.Addendum{Layer: layer, MediaType: types.OCILayer}); err != nil {
		return nil, err
	}
	config, err := built.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", i.arch
	config.Created, config.History = v1.Time{Time: epoch}, nil
	config.Config = v1.Config{
		User: i.user, Entrypoint: []string{"/" + path.Join(binDir, i.program)}, Env: []string{"PATH=/" + binDir},
		Labels: map[string]string{
			"org.opencontainers.image.title":       i.program,
			"org.opencontainers.image.description": i.description,
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.version":     i.tag,
		},
	}
	if i.revision != "" {
		config.Config.Labels["org.opencontainers.image.revision"] = i.revision
	}
	return mutate.ConfigFile(built, config)
}

// layer returns the root file system.
func (i image) layer() ([]byte, error) {
	var buf bytes.Buffer
	out := tar.NewWriter(&buf)
	for _, dir := range directories {
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		if err := out.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: mode, ModTime: epoch}); err != nil {
			return nil, err
		}
	}
	for name, target := range links {
		if err := out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777, ModTime: epoch}); err != nil {
			return nil, err
		}
	}
	for _, program := range append([]string{i.program}, i.others...) {
		if !i.has(program) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(i.dir, program))
		if err != nil {
			return nil, err
		}
		if err := writeEntry(out, path.Join(binDir, program), 0o755, data); err != nil {
			return nil, err
		}
	}
	if err := out.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// writeFile writes the image in place of what is there, and returns its digest.
func (i image) writeFile(file string) (v1.Hash, error) {
	built, err := i.build()
	if err != nil {
		return v1.Hash{}, err
	}
	digest, err := built.Digest()
	if err != nil {
		return v1.Hash{}, err
	}
	f, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*")
	if err != nil {
		return v1.Hash{}, err
	}
	defer os.Remove(f.Name())
	if err := errors.Join(writeArchive(f, built, i.ref()), f.Chmod(0o644), f.Close()); err != nil {
		return v1.Hash{}, err
	}
	return digest, os.Rename(f.Name(), file)
}

// writeArchive writes an OCI image layout with the file that Docker's own format has besides, manifest.json: the
// runtimes' importers read the one, docker load the other.
func writeArchive(w io.Writer, built v1.Image, ref string) error {
	// The runtime's importer takes the name as it is, and the kubelet asks for it in full.
	full, err := reference.ParseDockerRef(ref)
	if err != nil {
		return err
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add:        built,
		Descriptor: v1.Descriptor{Annotations: map[string]string{"io.containerd.image.name": full.String()}},
	})
	rawIndex, err := index.RawManifest()
	if err != nil {
		return err
	}
	rawManifest, err := built.RawManifest()
	if err != nil {
		return err
	}
	rawConfig, err := built.RawConfigFile()
	if err != nil {
		return err
	}
	manifest, err := built.Manifest()
	if err != nil {
		return err
	}
	manifestDigest, err := built.Digest()
	if err != nil {
		return err
	}
	blobs := []blob{{manifestDigest, rawManifest}, {manifest.Config.Digest, rawConfig}}
	legacy := tarball.Descriptor{Config: blobName(manifest.Config.Digest), RepoTags: []string{ref}}
	layers, err := built.Layers()
	if err != nil {
		return err
	}
	for n, layer := range layers {
		data, err := compressed(layer)
		if err != nil {
			return err
		}
		digest := manifest.Layers[n].Digest
		blobs = append(blobs, blob{digest, data})
		legacy.Layers = append(legacy.Layers, blobName(digest))
	}
	rawLegacy, err := json.Marshal(tarball.Manifest{legacy})
	if err != nil {
		return err
	}

	out := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		data []byte
	}{{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", rawIndex}, {"manifest.json", rawLegacy}} {
		if err := writeEntry(out, f.name, 0o644, f.data); err != nil {
			return err
		}
	}
	for _, b := range blobs {
		if err := writeEntry(out, blobName(b.digest), 0o644, b.data); err != nil {
			return err
		}
	}
	return out.Close()
}

type blob struct {
	digest v1.Hash
	data   []byte
}

func blobName(digest v1.Hash) string { return path.Join("blobs", digest.Algorithm, digest.Hex) }

func compressed(layer v1.Layer) ([]byte, error) {
	r, err := layer.Compressed()
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	return data, errors.Join(err, r.Close())
}

func writeEntry(out *tar.Writer, name string, mode int64, data []byte) error {
	if err := out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data)), ModTime: epoch}); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if _, err := out.Write(data); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
