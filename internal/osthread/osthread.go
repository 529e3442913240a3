// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package osthread runs functions that change their thread for good, such as by entering a network namespace.
package osthread

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Run calls fn on a thread of its own, which ends after it: nothing else ever runs on it, and what it alone held, such as
// a namespace, is let go of. That is never the main thread, which Go keeps until the program ends.
// fn has to return: Run would wait for one that ends its goroutine, as t.FailNow does.
func Run(fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked, which ends the thread with the goroutine
		if unix.Gettid() == unix.Getpid() {
			err := Run(fn) // on another one, since this one is taken
			runtime.UnlockOSThread()
			done <- err
			return
		}
		done <- fn()
	}()
	return <-done
}
