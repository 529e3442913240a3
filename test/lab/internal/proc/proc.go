// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package proc starts and ends the lab's own processes: in a network
// namespace where wanted, with a log file each, and identified by pid and
// start time, so that a process that reused a pid is never mistaken for ours.
package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/osthread"
	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// Command says what to run.
type Command struct {
	Name string   // for messages and the log's file name
	Args []string // program and arguments
	Env  []string // added to this process's environment
	Log  string   // file that gets standard output and error; appended to
}

// Process is a process that the lab started. Its exported fields identify it
// across restarts of the lab's own process.
type Process struct {
	Name      string
	PID       int
	StartTime uint64 // clock ticks since boot, field 22 of /proc/PID/stat
	Log       string
}

// Spawner starts processes from one thread of its own, which may be in another
// network namespace than the rest of the program.
type Spawner struct {
	detach bool
	jobs   chan func()
	done   chan struct{}
}

// NewSpawner returns a Spawner for the network namespace at path, or for the
// present one if it is empty. Processes outlive this program only with
// detach; without, the kernel kills them when this program ends in any way.
func NewSpawner(path string, detach bool) (*Spawner, error) {
	s := &Spawner{detach: detach, jobs: make(chan func()), done: make(chan struct{})}
	ready := make(chan error)
	go func() {
		// The thread may be in another namespace, and the kernel sends a parent-death signal when the thread that
		// started the child ends, not the process.
		_ = osthread.Run(func() error { s.loop(path, ready); return nil })
	}()
	if err := <-ready; err != nil {
		return nil, err
	}
	return s, nil
}

// loop runs jobs until Close, on the thread that it is called on.
func (s *Spawner) loop(path string, ready chan<- error) {
	if path != "" {
		if err := netns.Enter(path); err != nil {
			ready <- err
			return
		}
	}
	ready <- nil
	for {
		select {
		case job := <-s.jobs:
			job()
		case <-s.done:
			return
		}
	}
}

// Close ends the Spawner's thread, and with it the processes that are not
// detached.
func (s *Spawner) Close() { close(s.done) }

// Start starts a process.
func (s *Spawner) Start(c Command) (*Process, error) {
	if err := os.MkdirAll(filepath.Dir(c.Log), 0o755); err != nil {
		return nil, fmt.Errorf("log directory of %s: %w", c.Name, err)
	}
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", c.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if !s.detach {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	started := make(chan error)
	s.jobs <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.Name, err)
	}
	start, err := startTime(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // reaps; how it ended is in its log
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.Name, err)
	}
	return &Process{Name: c.Name, PID: cmd.Process.Pid, StartTime: start, Log: c.Log}, nil
}

// Alive reports whether the process still runs.
func (p *Process) Alive() bool {
	start, err := startTime(p.PID)
	return err == nil && start == p.StartTime
}

// Signal sends a signal to the process, unless it has ended.
func (p *Process) Signal(sig unix.Signal) error {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s (pid %d): %w", p.Name, p.PID, err)
	}
	defer unix.Close(fd)
	if !p.Alive() { // the pidfd pins whatever has the pid now: look who it is
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal %v to %s (pid %d): %w", sig, p.Name, p.PID, err)
	}
	return nil
}

// Wait returns when the process has ended or the context is done.
func (p *Process) Wait(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for p.Alive() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s (pid %d) still runs: %w", p.Name, p.PID, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}

// Stop asks the process to end, and kills it when it has not within the grace
// time.
func (p *Process) Stop(grace time.Duration) error {
	if grace > 0 {
		if err := p.Signal(unix.SIGTERM); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		if p.Wait(ctx) == nil {
			return nil
		}
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return p.Wait(ctx)
}

// Tail returns the last n lines of the process's log.
func (p *Process) Tail(n int) string {
	data, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// startTime returns when the process started; an error if there is none with
// this pid, or only its unreaped remains.
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStartTime(string(data))
}

func parseStartTime(stat string) (uint64, error) {
	// The second field is the program's name in parentheses and may hold anything:
	// the fields are counted from the third.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const state, start = 0, 22 - 3
	if len(fields) <= start {
		return 0, fmt.Errorf("unexpected process status %q", stat)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, os.ErrProcessDone
	}
	return strconv.ParseUint(fields[start], 10, 64)
}
