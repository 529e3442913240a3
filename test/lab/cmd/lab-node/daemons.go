// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

// daemons are the node's background processes, by name.
type daemons struct {
	logDir string

	mu      sync.Mutex // guards running
	running map[string]*daemon
}

type daemon struct {
	spec guest.Daemon
	cmd  *exec.Cmd
	done chan struct{} // closed when it ended
	exit int           // valid once done is closed
}

func newDaemons(logDir string) *daemons {
	return &daemons{logDir: logDir, running: map[string]*daemon{}}
}

// start starts a daemon that does not run. Its output is appended to its log,
// in a directory that the host sees. A spec without arguments is that of the
// last start.
func (ds *daemons) start(spec guest.Daemon) (*daemon, error) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	old := ds.running[spec.Name]
	if old != nil && !old.ended() {
		return nil, fmt.Errorf("daemon %s runs already, as process %d", spec.Name, old.cmd.Process.Pid)
	}
	if len(spec.Args) == 0 {
		if old == nil {
			return nil, fmt.Errorf("daemon %s was never started: %w", spec.Name, os.ErrNotExist)
		}
		spec = old.spec
	}
	log, err := os.OpenFile(filepath.Join(ds.logDir, spec.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	d := &daemon{spec: spec, done: make(chan struct{})}
	d.cmd = exec.Command(spec.Args[0], spec.Args[1:]...)
	d.cmd.Env = append(environment, spec.Env...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("daemon %s: %w", spec.Name, err)
	}
	go func() {
		_ = d.cmd.Wait()
		d.exit = exitCode(d.cmd.ProcessState)
		close(d.done)
	}()
	ds.running[spec.Name] = d
	return d, nil
}

func (d *daemon) ended() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

func (d *daemon) state() guest.Process {
	p := guest.Process{PID: d.cmd.Process.Pid, Running: !d.ended()}
	if !p.Running {
		p.Exit = d.exit
	}
	return p
}

func (ds *daemons) get(name string) (*daemon, error) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if d := ds.running[name]; d != nil {
		return d, nil
	}
	return nil, fmt.Errorf("daemon %s was never started: %w", name, os.ErrNotExist)
}

// stopAll ends all daemons before a clean reboot.
func (ds *daemons) stopAll() {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	limit := time.After(5 * time.Second)
	for _, d := range ds.running {
		if !d.ended() {
			_ = d.cmd.Process.Signal(unix.SIGTERM)
		}
	}
	for _, d := range ds.running {
		select {
		case <-d.done:
		case <-limit:
			return
		}
	}
}

// getDaemon answers with the daemon's state; with ?wait=SECONDS, once it has
// ended or the time is over.
func (s *server) getDaemon(w http.ResponseWriter, r *http.Request) {
	d, err := s.daemons.get(r.PathValue("name"))
	if err != nil {
		fail(w, err)
		return
	}
	if seconds, err := strconv.ParseFloat(r.URL.Query().Get("wait"), 64); err == nil {
		select {
		case <-d.done:
		case <-time.After(time.Duration(seconds * float64(time.Second))):
		case <-r.Context().Done():
		}
	}
	_ = json.NewEncoder(w).Encode(d.state())
}

func (s *server) startDaemon(w http.ResponseWriter, r *http.Request) {
	var spec guest.Daemon
	if err := json.NewDecoder(r.Body).Decode(&spec); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	spec.Name = r.PathValue("name")
	d, err := s.daemons.start(spec)
	if err != nil {
		fail(w, err)
		return
	}
	if err := untilListening(d.spec); err != nil {
		fail(w, err)
	}
}

func (s *server) signalDaemon(w http.ResponseWriter, r *http.Request) {
	d, err := s.daemons.get(r.PathValue("name"))
	if err != nil {
		fail(w, err)
		return
	}
	sig, err := strconv.Atoi(r.URL.Query().Get("signal"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if err := d.cmd.Process.Signal(syscall.Signal(sig)); err != nil {
		fail(w, fmt.Errorf("daemon %s: %w", d.spec.Name, err))
	}
}
