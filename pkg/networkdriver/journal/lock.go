// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const (
	lockFile     = "agent.lock"
	lockInterval = 250 * time.Millisecond
	// stuckAfter is how long a process may take to end that was killed: one that takes longer is stuck in the kernel.
	stuckAfter = 30 * time.Second
)

// Lock waits until no other agent is at work on the node, such as the one of a pod that was deleted by force. While it
// waits, report is told why; empty is for no reason any more. A process that was killed and does not end, since the kernel
// does not let it, counts as gone: report is told of it for as long as it is there. The lock ends with unlock, and with the process.
func (j *Journal) Lock(ctx context.Context, report func(problem string)) (unlock func(), err error) {
	if err := statedir.Make(j.Dir); err != nil {
		return nil, fmt.Errorf("lock the journal: %w", err)
	}
	path := filepath.Join(j.Dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the journal: %w", err)
	}
	var killed time.Time
	told := ""
	for {
		held, err := tryLock(f)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock the journal: %s: %w", path, err)
		}
		if held {
			report("")
			return func() { f.Close() }, nil
		}
		pid := holderOf(f, j.Proc)
		switch {
		case pid == 0 || !isKilled(j.Proc, pid):
			killed = time.Time{}
		case killed.IsZero():
			killed = time.Now()
		case time.Since(killed) >= stuckAfter:
			problem := fmt.Sprintf("the former agent, process %d, was killed and cannot end, since it is stuck in the kernel; it counts as gone, "+
				"but what it is at work on may hang or change: see dmesg, and reboot the node when it can be", pid)
			j.Logger.Error("Another agent counts as gone", "reason", problem)
			report(problem)
			return j.keepTrying(ctx, f, report), nil
		}
		problem := fmt.Sprintf("another agent is at work on this node and its end is waited for (%s, held by process %d)", path, pid)
		if problem != told {
			told = problem
			j.Logger.Warn("Waiting for another agent to end", "reason", problem)
			report(problem)
		}
		if !pause.For(ctx, lockInterval) {
			f.Close()
			return nil, fmt.Errorf("lock the journal: %s: %w", problem, ctx.Err())
		}
	}
}

// keepTrying takes the lock as soon as it can be had, so that it keeps the next agent out, and returns what ends that.
func (j *Journal) keepTrying(ctx context.Context, f *os.File, report func(string)) (unlock func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for pause.For(ctx, lockInterval) {
			if held, err := tryLock(f); held || err != nil {
				report("")
				return
			}
		}
	}()
	return func() {
		cancel()
		<-done
		f.Close()
	}
}

func tryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return err == nil, err
}

// holderOf returns the process that holds the file's lock, 0 if it is none that can be seen.
func holderOf(f *os.File, proc string) int {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.ReadFile(filepath.Join(proc, "locks"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(locks)) {
		// 1: FLOCK  ADVISORY  WRITE 4711 00:1a:123 0 EOF, and -> before FLOCK for who waits (lock_get_status in fs/locks.c)
		fields := strings.Fields(line)
		if len(fields) >= 6 && fields[1] == "FLOCK" && fields[5] == file {
			pid, _ := strconv.Atoi(fields[4])
			return max(pid, 0)
		}
	}
	return 0
}

// isKilled says whether a thread of the process has a SIGKILL that it has not died of yet.
func isKilled(proc string, pid int) bool {
	tasks, err := filepath.Glob(filepath.Join(proc, strconv.Itoa(pid), "task", "*", "status"))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(tasks, func(path string) bool {
		status, err := os.ReadFile(path)
		return err == nil && hasPendingKill(string(status))
	})
}

func hasPendingKill(status string) bool {
	for line := range strings.Lines(status) {
		name, mask, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		signals, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
		if err == nil && signals&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
}
