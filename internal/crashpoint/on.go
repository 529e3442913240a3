// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

//go:build crashpoints

package crashpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// poll is how often a blocked one looks whether it may go on.
const poll = 20 * time.Millisecond

// Here does what the point is armed for, if it is.
func Here(p Point) {
	path := filepath.Join(Dir, string(p))
	order, err := os.ReadFile(path)
	if err != nil || os.Rename(path, path+Reached) != nil {
		return // not armed, or somebody else came here just now
	}
	action, delay, _ := strings.Cut(strings.TrimSpace(string(order)), " ")
	if delay == "" {
		act(action, path+Reached)
		return
	}
	after, err := time.ParseDuration(delay)
	if err != nil {
		panic(fmt.Sprintf("crash point %s: %v", p, err))
	}
	time.AfterFunc(after, func() { act(action, path+Reached) })
}

func act(action, reached string) {
	switch action {
	case Kill:
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {} // until the signal is there
	case Stop:
		_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
	case Block:
		for {
			if _, err := os.Stat(reached); err != nil {
				return
			}
			time.Sleep(poll)
		}
	default:
		panic(fmt.Sprintf("crash point: unknown action %q", action))
	}
}
