// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package netns makes and enters named network namespaces.
package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
)

// dir is where iproute2 keeps named namespaces too, so that `ip netns` shows
// the lab's.
const dir = "/run/netns"

// Path returns where the namespace of a name is mounted.
func Path(name string) string { return filepath.Join(dir, name) }

// Create makes a named namespace. It lives until Delete, or until the machine
// goes down.
func Create(name string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(Path(name), os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", name, err)
	}
	f.Close()
	err = osthread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", Path(name), "", unix.MS_BIND, "")
	})
	if err != nil {
		return errors.Join(fmt.Errorf("making network namespace %s: %w", name, err), os.Remove(Path(name)))
	}
	return nil
}

// Delete removes a named namespace, if it is there. The links in it go with
// the last process that uses it.
func Delete(name string) error {
	if err := unix.Unmount(Path(name), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmounting network namespace %s: %w", name, err)
	}
	if err := os.Remove(Path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Do calls fn in the namespace at a path.
func Do(path string, fn func() error) error {
	return osthread.Run(func() error {
		if err := Enter(path); err != nil {
			return err
		}
		return fn()
	})
}

// Enter moves the calling thread into the namespace at a path. The caller has
// locked the thread.
func Enter(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering network namespace %s: %w", path, err)
	}
	return nil
}

// DialContext connects from within the namespace at a path to a literal
// address: resolving a name would use other threads.
func DialContext(ctx context.Context, path, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := Do(path, func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}
