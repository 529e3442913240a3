// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package image writes container images of one layer, as a tar file that
// `ctr images import` reads.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
)

// Image is an image's content.
type Image struct {
	Name  string            // with tag
	Files map[string]string // path in the image to file on this machine
	Links map[string]string // path in the image to a link's target
	Cmd   []string
}

// Write writes the image.
func (i Image) Write(w io.Writer) error {
	layer, err := i.layer()
	if err != nil {
		return fmt.Errorf("image %s: %w", i.Name, err)
	}
	layerSum := sum(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"config":       map[string]any{"Cmd": i.Cmd, "Env": []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerSum}},
	})
	if err != nil {
		return err
	}
	configName := sum(config) + ".json"
	layerName := layerSum + "/layer.tar"
	manifest, err := json.Marshal([]map[string]any{{
		"Config": configName, "RepoTags": []string{i.Name}, "Layers": []string{layerName},
	}})
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		data []byte
	}{{configName, config}, {layerName, layer}, {"manifest.json", manifest}} {
		if err := file(out, f.name, f.data); err != nil {
			return err
		}
	}
	return out.Close()
}

func (i Image) layer() ([]byte, error) {
	var buf bytes.Buffer
	t := &layerWriter{out: tar.NewWriter(&buf), made: map[string]bool{}}
	for _, d := range []string{"dev", "proc", "sys", "etc", "tmp", "var", "run"} {
		t.dir(d)
	}
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		data, err := os.ReadFile(i.Files[name])
		if err != nil {
			return nil, err
		}
		t.dir(path.Dir(name))
		t.do(file(t.out, name, data))
	}
	for _, name := range slices.Sorted(maps.Keys(i.Links)) {
		t.dir(path.Dir(name))
		t.do(t.out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: i.Links[name], Mode: 0o777}))
	}
	t.do(t.out.Close())
	return buf.Bytes(), t.err
}

// layerWriter makes directories once and keeps the first error.
type layerWriter struct {
	out  *tar.Writer
	made map[string]bool
	err  error
}

func (t *layerWriter) do(err error) {
	if t.err == nil {
		t.err = err
	}
}

func (t *layerWriter) dir(name string) {
	if name == "." || t.made[name] {
		return
	}
	t.dir(path.Dir(name))
	t.made[name] = true
	mode := int64(0o755)
	if name == "tmp" {
		mode = 0o1777
	}
	t.do(t.out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode}))
}

func file(out *tar.Writer, name string, data []byte) error {
	if err := out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := out.Write(data)
	return err
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

// Libraries returns the shared libraries, the loader among them, that programs
// below a root file system need, as paths relative to that root.
func Libraries(root string, programs ...string) ([]string, error) {
	seen := map[string]bool{}
	var out []string
	var visit func(program string) error
	visit = func(program string) error {
		f, err := elf.Open(filepath.Join(root, program))
		if err != nil {
			return err
		}
		defer f.Close()
		needed, err := f.ImportedLibraries()
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
		for _, lib := range needed {
			if seen[lib] {
				continue
			}
			seen[lib] = true
			where, err := findLibrary(root, lib)
			if err != nil {
				return fmt.Errorf("%s: %w", program, err)
			}
			out = append(out, where)
			if err := visit(where); err != nil {
				return err
			}
		}
		return nil
	}
	for _, p := range programs {
		if err := visit(p); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Loader is the path that programs have for the loader of shared libraries,
// and where it is.
const (
	Loader       = "lib64/ld-linux-x86-64.so.2"
	LoaderTarget = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
)

func findLibrary(root, name string) (string, error) {
	where := path.Join("usr/lib/x86_64-linux-gnu", name)
	if _, err := os.Stat(filepath.Join(root, where)); err != nil {
		return "", fmt.Errorf("library %s: %w", name, err)
	}
	return where, nil
}
