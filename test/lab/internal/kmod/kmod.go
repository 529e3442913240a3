// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package kmod finds kernel modules and what they depend on in an unpacked
// kernel package, which has not been through depmod.
package kmod

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Tree is the modules of one kernel.
type Tree struct {
	busybox string            // decompresses
	paths   map[string]string // module name to file
	builtin map[string]bool
}

// Open indexes the modules below dir, which is /lib/modules/VERSION of a
// kernel. The program busybox decompresses them.
func Open(dir, busybox string) (*Tree, error) {
	t := &Tree{busybox: busybox, paths: map[string]string{}, builtin: map[string]bool{}}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if name, ok := moduleName(path); ok {
				t.paths[name] = path
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for _, path := range strings.Fields(string(builtin)) {
		if name, ok := moduleName(path); ok {
			t.builtin[name] = true
		}
	}
	return t, nil
}

// moduleName returns the name of the module in a file, with underscores as
// the kernel has it.
func moduleName(path string) (string, bool) {
	base, _, ok := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(base, "-", "_"), ok
}

// Module is a module's decompressed file.
type Module struct {
	Name string
	Path string // in the tree, without the compression's suffix
	Data []byte
}

// Closure returns the named modules and what they depend on, each after its
// dependencies, without those that the kernel has built in.
func (t *Tree) Closure(ctx context.Context, names ...string) ([]Module, error) {
	var out []Module
	seen := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		name = strings.ReplaceAll(name, "-", "_")
		if seen[name] || t.builtin[name] {
			return nil
		}
		seen[name] = true
		path, ok := t.paths[name]
		if !ok {
			return fmt.Errorf("the kernel has no module %s", name)
		}
		data, err := t.read(ctx, path)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		deps, err := dependencies(data)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, d := range deps {
			if err := visit(d); err != nil {
				return fmt.Errorf("for module %s: %w", name, err)
			}
		}
		out = append(out, Module{Name: name, Path: strings.TrimSuffix(path, ".xz"), Data: data})
		return nil
	}
	for _, n := range names {
		if err := visit(n); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (t *Tree) read(ctx context.Context, path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	return exec.CommandContext(ctx, t.busybox, "xzcat", path).Output()
}

// dependencies returns the names in a module's "depends" field.
func dependencies(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no module information")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	return parseDepends(info), nil
}

// parseDepends reads NUL-terminated key=value pairs.
func parseDepends(info []byte) []string {
	for pair := range strings.SplitSeq(string(info), "\x00") {
		if v, ok := strings.CutPrefix(pair, "depends="); ok && v != "" {
			return strings.Split(v, ",")
		}
	}
	return nil
}
