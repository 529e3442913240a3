// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package testenv

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// NetNS returns the path of a new network namespace, which the path alone keeps alive and which ends with the test. A
// test may unmount the path earlier.
func NetNS(tb testing.TB) string {
	tb.Helper()
	Privileged(tb)
	path := filepath.Join(tb.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	if err := mountNewNetNS(path); err != nil {
		tb.Fatalf("make a network namespace: %v", err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			tb.Errorf("unmount %s: %v", path, err)
		}
	})
	return path
}

// mountNewNetNS makes a network namespace that the path keeps alive, and leaves the thread where it was.
func mountNewNetNS(path string) error {
	runtime.LockOSThread()
	before, err := netns.Get()
	if err != nil {
		return err
	}
	defer func() { _ = before.Close() }()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	if backErr := netns.Set(before); backErr != nil {
		return backErr // the thread stays locked, nothing else may run on it
	}
	runtime.UnlockOSThread()
	return err
}
