// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package debian fetches and unpacks Debian packages without installing them:
// with apt's own programs, but with a configuration, package lists and a
// status of its own, so that neither the machine's sources nor what is
// installed on it matter, and nothing of it changes.
package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Archive is a Debian release, and its backports where they are needed.
type Archive struct {
	// Release is the release's code name.
	Release string

	// Newer is the suite with a kernel and a QEMU that are new enough: the
	// release itself, or its backports.
	Newer string

	dir string // of apt's files
}

// Open prepares apt for the release of this machine. Its files are in dir.
func Open(dir string) (*Archive, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, err
	}
	codename := osRelease(string(release), "VERSION_CODENAME")
	if id := osRelease(string(release), "ID"); id != "debian" || codename == "" {
		return nil, fmt.Errorf("this is %q %q: the lab needs a Debian release for its packages", id, codename)
	}
	sources, err := readSources("/etc/apt")
	if err != nil {
		return nil, err
	}
	m, err := mirror(sources, codename)
	if err != nil {
		return nil, err
	}
	a := &Archive{Release: codename, Newer: codename, dir: dir}
	suites := []string{codename, codename + "-updates"}
	if codename == "bookworm" { // its QEMU 7.2 has no igb
		a.Newer = codename + "-backports"
		suites = append(suites, a.Newer)
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	// An empty status: to apt nothing is installed, so it names every package
	// that is needed.
	if err := os.WriteFile(filepath.Join(dir, "status"), nil, 0o644); err != nil {
		return nil, err
	}
	return a, os.WriteFile(filepath.Join(dir, "sources.list"), []byte(m.list(suites...)), 0o644)
}

// Update fetches the package lists.
func (a *Archive) Update(ctx context.Context) error {
	_, err := a.apt(ctx, a.dir, "apt-get", "update")
	return err
}

// Closure returns the packages that the named ones need, themselves included,
// as name=version. They come from the given suite where it has them.
func (a *Archive) Closure(ctx context.Context, suite string, names ...string) ([]string, error) {
	out, err := a.apt(ctx, a.dir, "apt-get", append([]string{"install", "--simulate", "--no-install-recommends", "--target-release=" + suite}, names...)...)
	if err != nil {
		return nil, err
	}
	return parseSimulation(out), nil
}

// parseSimulation reads lines such as "Inst zlib1g (1:1.2.13 Debian:12/stable [amd64])".
func parseSimulation(out string) []string {
	var packages []string
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0] == "Inst" && strings.HasPrefix(f[2], "(") {
			packages = append(packages, f[1]+"="+strings.TrimPrefix(f[2], "("))
		}
	}
	return packages
}

// Dependency returns the first package that a metapackage depends on, as
// name=version.
func (a *Archive) Dependency(ctx context.Context, suite, meta string) (string, error) {
	out, err := a.apt(ctx, a.dir, "apt-cache", "show", "--no-all-versions", "--target-release="+suite, meta)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		if deps, ok := strings.CutPrefix(line, "Depends: "); ok {
			// "linux-image-6.12.1-amd64 (= 6.12.1-1), other"
			first, _, _ := strings.Cut(strings.TrimSpace(deps), ",")
			name, version, _ := strings.Cut(first, " (= ")
			if version == "" {
				return name, nil
			}
			return name + "=" + strings.TrimSuffix(version, ")"), nil
		}
	}
	return "", fmt.Errorf("package %s in %s depends on nothing", meta, suite)
}

// Fetch downloads packages, named with their versions, to a directory.
func (a *Archive) Fetch(ctx context.Context, dir string, packages ...string) error {
	_, err := a.apt(ctx, dir, "apt-get", append([]string{"download"}, packages...)...)
	return err
}

func (a *Archive) apt(ctx context.Context, dir, program string, args ...string) (string, error) {
	options := []string{"-q", "-y"}
	if program == "apt-cache" {
		options = []string{"-q"}
	}
	for _, o := range []string{
		"Dir::Etc::SourceList=" + filepath.Join(a.dir, "sources.list"),
		"Dir::Etc::SourceParts=/dev/null",
		"Dir::Etc::Preferences=/dev/null",
		"Dir::Etc::PreferencesParts=/dev/null",
		"Dir::State::Lists=" + filepath.Join(a.dir, "lists"),
		"Dir::State::Status=" + filepath.Join(a.dir, "status"),
		"Dir::Cache=" + filepath.Join(a.dir, "cache"),
		"APT::Architecture=amd64",
		"APT::Architectures=amd64",
		"APT::Sandbox::User=root", // apt's own user may not enter the cache
		"APT::Update::Error-Mode=any",
		"Acquire::Languages=none",
		"Acquire::Retries=3",
	} {
		options = append(options, "-o", o)
	}
	cmd := exec.CommandContext(ctx, program, append(options, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(stderr.String() + stdout.String())
		return "", fmt.Errorf("%s %s: %w\n%s", program, args[0], err, text[:min(len(text), 4000)])
	}
	return stdout.String(), nil
}

// Unpack unpacks the packages in a directory into a root file system in which
// /bin, /sbin, /lib and /lib64 are links into /usr, and removes them.
func Unpack(ctx context.Context, dir, root string) error {
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.MkdirAll(filepath.Join(root, "usr", d), 0o755); err != nil {
			return err
		}
		if err := os.Symlink("usr/"+d, filepath.Join(root, d)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) == 0 {
		return fmt.Errorf("no packages in %s", dir)
	}
	for _, deb := range debs {
		// dpkg-deb's own extraction would replace the links by directories.
		unpack := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
		tar := exec.CommandContext(ctx, "tar", "--extract", "--keep-directory-symlink", "--directory", root)
		var stderr bytes.Buffer
		unpack.Stderr, tar.Stderr = &stderr, &stderr
		if tar.Stdin, err = unpack.StdoutPipe(); err != nil {
			return err
		}
		err := errors.Join(unpack.Start(), tar.Run(), unpack.Wait())
		if err != nil {
			return fmt.Errorf("unpacking %s: %w\n%s", filepath.Base(deb), err, stderr.String())
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return nil
}

func osRelease(text, key string) string {
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), key+"="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}
