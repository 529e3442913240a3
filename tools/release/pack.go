// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"

	"github.com/cilium/networkdriver/tools/chart"
)

const (
	plugin    = "kubectl-ndev"
	cniPlugin = "amd-host-device"
	sums      = "SHA256SUMS"
)

// pack writes all files of a release to a directory that has the images already.
func (s *source) pack(programs, dir string) error {
	if err := s.packChart(dir); err != nil {
		return err
	}
	if err := s.packPlugin(programs, dir); err != nil {
		return err
	}
	if _, err := s.packProgram(programs, dir, cniPlugin); err != nil {
		return err
	}
	if err := s.writeSBOM(programs, dir); err != nil {
		return err
	}
	if err := writeImages(dir); err != nil {
		return err
	}
	return writeSums(dir)
}

// packChart writes the chart as the version's, which is what its images are tagged with.
func (s *source) packChart(dir string) error {
	c, err := chart.Load()
	if err != nil {
		return err
	}
	c.Metadata.Version, c.Metadata.AppVersion = s.version, s.version
	c.ModTime, c.SchemaModTime = s.time, s.time
	for _, files := range [][]*common.File{c.Raw, c.Templates, c.Files} {
		for _, f := range files {
			f.ModTime = s.time
		}
	}
	if _, err := chartutil.Save(c, dir); err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	return nil
}

// packPlugin packs the kubectl plugin, and completes Krew's manifest of it.
func (s *source) packPlugin(programs, dir string) error {
	digests, err := s.packProgram(programs, dir, plugin)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(s.repository, "install", "krew", "ndev.yaml"))
	if err != nil {
		return err
	}
	// Krew's versions begin with a letter.
	manifest := strings.ReplaceAll(string(data), "VERSION", "v"+strings.TrimPrefix(s.version, "v"))
	for platform, digest := range digests {
		manifest = strings.ReplaceAll(manifest, "SHA256-"+platform, digest)
	}
	return os.WriteFile(filepath.Join(dir, "ndev.yaml"), []byte(manifest), 0o644)
}

// packProgram packs a program with the licence for each platform that there is, and returns the archives' digests by platform.
func (s *source) packProgram(programs, dir, program string) (map[string]string, error) {
	licence, err := os.ReadFile(filepath.Join(s.repository, "LICENSE"))
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(programs, "*", program))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s has no %s for any platform: build it first", programs, program)
	}
	digests := map[string]string{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		packed, err := archive(s.time, []entry{{"LICENSE", 0o644, licence}, {program, 0o755, data}})
		if err != nil {
			return nil, fmt.Errorf("pack %s: %w", file, err)
		}
		platform := filepath.Base(filepath.Dir(file))
		if err := os.WriteFile(filepath.Join(dir, program+"-"+platform+".tar.gz"), packed, 0o644); err != nil {
			return nil, err
		}
		digests[platform] = fmt.Sprintf("%x", sha256.Sum256(packed))
	}
	return digests, nil
}

// entry is a file of an archive.
type entry struct {
	name string
	mode int64
	data []byte
}

// archive packs files, whose owner is nobody in particular.
func archive(at time.Time, entries []entry) ([]byte, error) {
	var buf bytes.Buffer
	zip := gzip.NewWriter(&buf)
	out := tar.NewWriter(zip)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: tar.TypeReg, Mode: e.mode, Size: int64(len(e.data)), ModTime: at}
		if err := out.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := out.Write(e.data); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(out.Close(), zip.Close()); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// writeImages lists the images that the directory has with their digests, which are what a registry's users see and signatures are of.
func writeImages(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.tar"))
	if err != nil {
		return err
	}
	var list bytes.Buffer
	for _, file := range files {
		image, err := imageIn(file)
		if err != nil {
			return fmt.Errorf("image %s: %w", file, err)
		}
		// In the image it is the name in full, with a registry that nobody has to use.
		name, err := reference.ParseNormalizedNamed(image.Annotations["io.containerd.image.name"])
		if err != nil {
			return fmt.Errorf("name of image %s: %w", file, err)
		}
		fmt.Fprintf(&list, "%s  %s  %s\n", image.Digest, reference.FamiliarString(name), filepath.Base(file))
	}
	return os.WriteFile(filepath.Join(dir, "images.txt"), list.Bytes(), 0o644)
}

// imageIn returns the one image of an OCI layout in a tar file.
func imageIn(file string) (v1.Descriptor, error) {
	f, err := os.Open(file)
	if err != nil {
		return v1.Descriptor{}, err
	}
	defer f.Close()
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if err != nil {
			return v1.Descriptor{}, fmt.Errorf("find index.json: %w", err)
		}
		if h.Name != "index.json" {
			continue
		}
		var index v1.IndexManifest
		if err := json.NewDecoder(in).Decode(&index); err != nil {
			return v1.Descriptor{}, fmt.Errorf("read index.json: %w", err)
		}
		if len(index.Manifests) != 1 {
			return v1.Descriptor{}, fmt.Errorf("it has %d images", len(index.Manifests))
		}
		return index.Manifests[0], nil
	}
}

// writeSums writes the digests of all files in the directory in their names' order, as sha256sum -c reads them.
func writeSums(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var list bytes.Buffer
	for _, file := range files {
		if file.Name() == sums {
			continue
		}
		sum, err := digest(filepath.Join(dir, file.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&list, "%s  %s\n", sum, file.Name())
	}
	return os.WriteFile(filepath.Join(dir, sums), list.Bytes(), 0o644)
}

func digest(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sum.Sum(nil)), nil
}
