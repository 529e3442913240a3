// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package netnamespace opens network namespaces, tells them apart, and finds all that are in use on the node.
package netnamespace

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNone says that a path leads to no network namespace (any more).
var ErrNone = errors.New("is not a network namespace")

// Namespace is an open network namespace. The kernel keeps it as long as it is open, so keep it for one operation only.
type Namespace struct {
	// Path is what it was opened by.
	Path string
	// FD is a descriptor of it, until it is closed.
	FD int
	// ID identifies the namespace.
	ID ID
}

// ID tells namespaces apart whatever path they were opened by (ioctl_ns(2), st_dev and st_ino). The kernel may use the
// ID of a dead namespace again.
type ID struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

// Open opens the network namespace that the path leads to. The error is or wraps [ErrNone] when it leads to none.
func Open(path string) (*Namespace, error) {
	// Paths come from the runtime; not blocking keeps one that leads to a named pipe from hanging the caller.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		// The path was removed, or was one of a process that has ended.
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
			return nil, fmt.Errorf("%q %w: %w", path, ErrNone, err)
		}
		return nil, fmt.Errorf("open network namespace %q: %w", path, err)
	}
	ns := &Namespace{Path: path, FD: fd}
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(fd, &fs), unix.Fstat(fd, &st)); err != nil {
		ns.Close()
		return nil, fmt.Errorf("look at network namespace %q: %w", path, err)
	}
	// The file that a named namespace was mounted on remains when the namespace was unmounted.
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if fs.Type != unix.NSFS_MAGIC || err != nil || kind != unix.CLONE_NEWNET {
		ns.Close()
		return nil, fmt.Errorf("%q %w", path, ErrNone)
	}
	ns.ID = ID{Dev: st.Dev, Ino: st.Ino}
	return ns, nil
}

// Close releases the namespace.
func (ns *Namespace) Close() { _ = unix.Close(ns.FD) }

// Reachable opens all network namespaces in use on the node except the one to skip: named ones, then those of processes,
// then those that a process merely has open. Each is yielded once and closed afterwards. The latter two kinds need the
// host's PID namespace.
func Reachable(ctx context.Context, skip ID) iter.Seq[*Namespace] {
	return func(yield func(*Namespace) bool) {
		seen := map[ID]bool{skip: true}
		seenLinks := map[string]bool{}
		visit := func(path string) bool {
			// The target of the link has the namespace's inode, so the same one need not be opened for each process.
			if target, err := os.Readlink(path); err == nil && strings.HasPrefix(target, "net:[") {
				if seenLinks[target] {
					return true
				}
				seenLinks[target] = true
			}
			ns, err := Open(path)
			if err != nil {
				return true // gone since it was listed, or not a namespace
			}
			defer ns.Close()
			if seen[ns.ID] {
				return true
			}
			seen[ns.ID] = true
			return yield(ns)
		}
		for _, place := range []struct{ pattern, below string }{
			{"/run/netns/*", ""}, {"/var/run/netns/*", ""},
			// A process's directory of namespaces may be searched by other users but not listed.
			{"/proc/[0-9]*", "ns/net"},
		} {
			paths, _ := filepath.Glob(place.pattern)
			for _, path := range paths {
				if ctx.Err() != nil || !visit(filepath.Join(path, place.below)) {
					return
				}
			}
		}
		processes, _ := filepath.Glob("/proc/[0-9]*/fd")
		for _, dir := range processes {
			if ctx.Err() != nil {
				return
			}
			fds, _ := os.ReadDir(dir)
			for _, fd := range fds {
				path := filepath.Join(dir, fd.Name())
				target, err := os.Readlink(path)
				// A namespace that was opened by its name and has lost it since shows as "/".
				held := strings.HasPrefix(target, "net:[") || strings.Contains(target, "/netns/") || target == "/"
				if err == nil && held && !visit(path) {
					return
				}
			}
		}
	}
}
