// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package cache keeps what the lab builds and fetches: each artifact in a
// directory named by a key of its inputs. Other inputs give another directory,
// so nothing is ever stale and nothing is made twice.
package cache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Cache is a directory of artifacts.
type Cache struct {
	Dir string
}

// Artifact names something made from inputs.
type Artifact struct {
	Name   string
	Inputs []string // whatever the result depends on, in a fixed order
}

// Path returns where the artifact is once it is made.
func (c Cache) Path(a Artifact) string {
	h := sha256.New()
	for _, in := range a.Inputs {
		fmt.Fprintf(h, "%d:%s", len(in), in)
	}
	return filepath.Join(c.Dir, a.Name, hex.EncodeToString(h.Sum(nil))[:16])
}

// Has reports whether the artifact is made.
func (c Cache) Has(a Artifact) bool {
	_, err := os.Stat(c.Path(a))
	return err == nil
}

// Ensure returns the artifact's directory. If it is missing, fill makes its
// content in a new directory, which is renamed into place when that succeeded.
// Another process that makes an artifact of this name is waited for.
func (c Cache) Ensure(ctx context.Context, a Artifact, fill func(ctx context.Context, dir string) error) (string, error) {
	path := c.Path(a)
	if c.Has(a) {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(filepath.Dir(path), "lock"))
	if err != nil {
		return "", fmt.Errorf("%s: %w", a.Name, err)
	}
	defer unlock()
	if c.Has(a) { // made by whoever held the lock
		return path, nil
	}
	partial := path + ".partial"
	if err := os.RemoveAll(partial); err != nil {
		return "", err
	}
	if err := os.Mkdir(partial, 0o755); err != nil {
		return "", err
	}
	if err := fill(ctx, partial); err != nil {
		return "", fmt.Errorf("%s: %w", a.Name, err)
	}
	return path, os.Rename(partial, path)
}

func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}

// FileInputs returns the names and contents of files as inputs.
func FileInputs(paths ...string) ([]string, error) {
	var inputs []string
	for _, p := range paths {
		data, err := os.ReadFile(p)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, filepath.Base(p), string(data))
	}
	return inputs, nil
}
