// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/distribution/reference"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

const repository = "../.."

var (
	committed = time.Date(2026, 12, 1, 10, 20, 30, 0, time.UTC)
	released  = source{repository: repository, version: "1.2.3-rc.1", revision: strings.Repeat("ab", 20), time: committed}
)

// makeRelease builds one of the programs, has it stand for the others, and packs all that, in new directories.
func makeRelease(t *testing.T) (programs, dir string) {
	programs, dir = t.TempDir(), t.TempDir()
	built := filepath.Join(t.TempDir(), "program")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", built, "./cmd/amd-host-device")
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	program, err := os.ReadFile(built)
	require.NoError(t, err)
	for _, platform := range []string{"linux-amd64", "linux-arm64"} {
		require.NoError(t, os.Mkdir(filepath.Join(programs, platform), 0o700))
		for _, name := range []string{"amd-host-device", "kubectl-ndev"} {
			require.NoError(t, os.WriteFile(filepath.Join(programs, platform, name), program, 0o700))
		}
	}
	name, err := reference.ParseDockerRef("cilium/agent:1.2.3-rc.1")
	require.NoError(t, err)
	writeImage(t, filepath.Join(dir, "cilium-agent-linux-amd64.tar"),
		`{"manifests":[{"digest":"sha256:`+strings.Repeat("0a", 32)+`","annotations":{"io.containerd.image.name":"`+name.String()+`"}}]}`)
	require.NoError(t, released.pack(programs, dir))
	return programs, dir
}

func writeImage(t *testing.T, file, index string) {
	var buf bytes.Buffer
	out := tar.NewWriter(&buf)
	for name, data := range map[string]string{"oci-layout": "{}", "index.json": index} {
		require.NoError(t, out.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}))
		_, err := out.Write([]byte(data))
		require.NoError(t, err)
	}
	require.NoError(t, out.Close())
	require.NoError(t, os.WriteFile(file, buf.Bytes(), 0o644))
}

// What is packed does not depend on when, where and by whom.
func TestPackIsReproducible(t *testing.T) {
	_, first := makeRelease(t)
	_, second := makeRelease(t)
	files := func(dir string) map[string]string {
		found := map[string]string{}
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".tar") {
				continue // not made here
			}
			found[e.Name()], err = digest(filepath.Join(dir, e.Name()))
			require.NoError(t, err)
		}
		return found
	}
	was := files(first)
	require.Len(t, was, 9)
	sumsOf := was[sums]
	delete(was, sums)
	is := files(second)
	delete(is, sums)
	require.Equal(t, was, is)
	require.NotEmpty(t, sumsOf)
}

func TestPack(t *testing.T) {
	programs, dir := makeRelease(t)
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err, name)
		return string(data)
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names, checked []string
	for _, e := range entries {
		if e.Name() != sums {
			names = append(names, e.Name())
		}
	}
	require.Equal(t, []string{
		"amd-host-device-linux-amd64.tar.gz", "amd-host-device-linux-arm64.tar.gz", "cilium-agent-linux-amd64.tar",
		"cilium-network-driver-1.2.3-rc.1.spdx.json", "cilium-network-driver-1.2.3-rc.1.tgz", "images.txt",
		"kubectl-ndev-linux-amd64.tar.gz", "kubectl-ndev-linux-arm64.tar.gz", "ndev.yaml",
	}, names)
	for line := range strings.Lines(read(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		checked = append(checked, name)
		is, err := digest(filepath.Join(dir, name))
		require.NoError(t, err)
		require.Equal(t, is, sum, name)
	}
	require.Equal(t, names, checked, "each file has its checksum")
	require.Equal(t, "sha256:"+strings.Repeat("0a", 32)+"  cilium/agent:1.2.3-rc.1  cilium-agent-linux-amd64.tar\n", read("images.txt"))

	// The chart is the version's, and asks for its images.
	c, err := loader.Load(filepath.Join(dir, "cilium-network-driver-1.2.3-rc.1.tgz"))
	require.NoError(t, err)
	require.NoError(t, c.Validate())
	require.Equal(t, "1.2.3-rc.1", c.Metadata.Version)
	require.Equal(t, "1.2.3-rc.1", c.Metadata.AppVersion)
	require.NotEmpty(t, c.Templates)
	require.NotEmpty(t, c.Files)
	require.NotEmpty(t, c.Schema)
	require.NotEmpty(t, requireArchive(t, filepath.Join(dir, "cilium-network-driver-1.2.3-rc.1.tgz")))

	for _, name := range []string{"amd-host-device", "kubectl-ndev"} {
		for _, platform := range []string{"linux-amd64", "linux-arm64"} {
			packed := requireArchive(t, filepath.Join(dir, name+"-"+platform+".tar.gz"))
			require.ElementsMatch(t, []string{"LICENSE 644", name + " 755"}, packed)
			sum, err := digest(filepath.Join(dir, name+"-"+platform+".tar.gz"))
			require.NoError(t, err)
			if name == plugin {
				require.Contains(t, read("ndev.yaml"), "download/v1.2.3-rc.1/kubectl-ndev-"+platform+".tar.gz\n    sha256: "+sum)
			}
		}
	}
	require.NotRegexp(t, `VERSION|SHA256-`, read("ndev.yaml"))

	// The bill has each program with its checksum, and the modules that are in it.
	doc, err := spdxjson.Read(strings.NewReader(read("cilium-network-driver-1.2.3-rc.1.spdx.json")))
	require.NoError(t, err)
	require.Equal(t, "SPDX-2.3", doc.SPDXVersion)
	require.Equal(t, "2026-12-01T10:20:30Z", doc.CreationInfo.Created)
	sum, err := digest(filepath.Join(programs, "linux-amd64", "kubectl-ndev"))
	require.NoError(t, err)
	var found []string
	ids := map[string]bool{}
	for _, p := range doc.Packages {
		require.Regexp(t, `^[A-Za-z0-9.-]+$`, string(p.PackageSPDXIdentifier))
		require.False(t, ids[string(p.PackageSPDXIdentifier)], p.PackageSPDXIdentifier)
		ids[string(p.PackageSPDXIdentifier)] = true
		found = append(found, p.PackageName)
		if p.PackageName == "linux-amd64/kubectl-ndev" {
			require.Equal(t, sum, p.PackageChecksums[0].Value)
		}
		if p.PackageName == "github.com/containernetworking/cni" {
			require.Equal(t, "pkg:golang/github.com/containernetworking/cni@"+p.PackageVersion, p.PackageExternalReferences[0].Locator)
			require.Contains(t, p.PackageSourceInfo, "go.sum h1:")
		}
	}
	for _, name := range []string{product, "linux-arm64/amd-host-device", "stdlib", "github.com/vishvananda/netlink",
		"github.com/containernetworking/cni"} {
		require.Contains(t, found, name)
	}
	for _, r := range doc.Relationships {
		require.True(t, ids[string(r.RefB.ElementRefID)], r.RefB.ElementRefID)
	}

	// Where it was built is nowhere.
	checkout, err := filepath.Abs(repository)
	require.NoError(t, err)
	for _, name := range []string{"cilium-network-driver-1.2.3-rc.1.spdx.json", "ndev.yaml", "images.txt", sums} {
		require.NotContains(t, read(name), checkout, name)
		require.NotContains(t, read(name), os.TempDir(), name)
	}
}

// requireArchive returns the files of a tar.gz with their modes, which are nobody's and of the commit's time.
func requireArchive(t *testing.T, file string) (files []string) {
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	require.True(t, zip.ModTime.IsZero(), zip.ModTime)
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		require.Equal(t, committed, h.ModTime.UTC(), h.Name)
		require.Empty(t, h.Uname+h.Gname, h.Name)
		require.Zero(t, h.Uid+h.Gid, h.Name)
		files = append(files, fmt.Sprintf("%s %o", h.Name, h.Mode))
	}
}

// A program that is not Go's, an image that is none and a platform without the program are errors that name the file.
func TestPackRefuses(t *testing.T) {
	dir := t.TempDir()
	require.ErrorContains(t, released.pack(dir, t.TempDir()), dir+" has no kubectl-ndev for any platform: build it first")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "linux-amd64"), 0o755))
	_, err := released.sbom(dir)
	require.ErrorContains(t, err, dir+" has no programs")
	script := filepath.Join(dir, "linux-amd64", "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755))
	_, err = released.sbom(dir)
	require.ErrorContains(t, err, "what "+script+" was built from: ")

	for index, want := range map[string]string{
		`{"manifests":[]}`: "it has 0 images", `{"manifests":[{}]}`: "invalid reference format", `x`: "read index.json: ",
	} {
		images := t.TempDir()
		writeImage(t, filepath.Join(images, "a.tar"), index)
		require.ErrorContains(t, writeImages(images), "a.tar: "+want)
	}
}

// repo is a repository of git to be released.
type repo struct {
	t   *testing.T
	dir string
}

func (r repo) git(args ...string) string {
	r.t.Helper()
	as := []string{"-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"}
	out, err := git(r.t.Context(), r.dir, append(as, args...)...)
	require.NoError(r.t, err)
	return out
}

func (r repo) write(file, data string) {
	require.NoError(r.t, os.MkdirAll(filepath.Dir(filepath.Join(r.dir, file)), 0o755))
	require.NoError(r.t, os.WriteFile(filepath.Join(r.dir, file), []byte(data), 0o644))
}

func (r repo) commit() {
	r.git("add", "-A")
	r.git("commit", "-q", "-m", "m")
}

func (r repo) check(version string) error { return check(r.t.Context(), r.dir, version) }

func TestCheck(t *testing.T) {
	r := repo{t, t.TempDir()}
	require.ErrorContains(t, r.check("1.2.3"), "git status --porcelain: ")
	r.git("init", "-q")
	r.write("api/crds/a.yaml", "a")
	r.write("api/released/v1.2.3/a.yaml", "a")
	r.commit()
	require.NoError(t, r.check("1.2.3"))
	for _, version := range []string{"", "v1.2.3", "1.2", "1.2.3+build", "01.2.3", "latest", "1.2.3-", "23d4d38-dirty"} {
		require.EqualError(t, r.check(version), "VERSION="+version+" is not a version such as 1.2.3 or 1.2.3-rc.1")
	}

	r.write("new", "")
	require.EqualError(t, r.check("1.2.3"), "what is released is a commit, and this is not committed:\n?? new")
	r.commit()

	require.ErrorContains(t, r.check("1.3.0"), "api/released/v1.3.0 does not have a.yaml as it is: run make release-crds VERSION=1.3.0")
	require.NoError(t, r.check("1.3.0-rc.1"))
	r.write("api/crds/a.yaml", "b")
	r.commit()
	require.ErrorContains(t, r.check("1.2.3"), "api/released/v1.2.3 does not have a.yaml as it is")
	r.git("revert", "--no-edit", "HEAD")

	r.git("tag", "nightly")
	require.NoError(t, r.check("1.2.3"))
	r.git("tag", "v1.2.2")
	require.EqualError(t, r.check("1.2.3"), "this commit is tagged v1.2.2, and cannot be released as v1.2.3")
	r.git("tag", "v1.2.3")
	require.NoError(t, r.check("1.2.3"), "a commit can have two")
	r.write("new", "more")
	r.commit()
	require.EqualError(t, r.check("1.2.3"), "the tag v1.2.3 is of another commit: check that one out, or take another version")
}

func TestReadCommit(t *testing.T) {
	r := repo{t, t.TempDir()}
	r.git("init", "-q")
	r.write("a", "a")
	r.commit()
	s := source{repository: r.dir}
	require.NoError(t, s.readCommit(t.Context()))
	require.Equal(t, r.git("rev-parse", "HEAD"), s.revision)
	require.Equal(t, r.git("log", "-1", "--format=%ct"), strconv.FormatInt(s.time.Unix(), 10))
	require.Equal(t, time.UTC, s.time.Location())
}

func TestRun(t *testing.T) {
	require.EqualError(t, run(t.Context(), nil), "say check, pack or ndev")
	require.EqualError(t, run(t.Context(), []string{"sign", "--repository", repository}), `"sign" is none of check, pack and ndev`)
	require.ErrorContains(t, run(t.Context(), []string{"check", "--repository", repository, "--version", "x"}), "VERSION=x is not a version")
}
