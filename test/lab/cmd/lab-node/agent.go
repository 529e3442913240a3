// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

// agent starts the node's daemons and serves the lab's requests.
func agent() error {
	cfg, err := guest.ReadConfig(filepath.Join(guest.ConfigDir, "node.json"))
	if err != nil {
		return err
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	address, _, err := net.ParseCIDR(cfg.Address)
	if err != nil {
		return err
	}
	s := &server{
		health:  guest.Health{BootID: strings.TrimSpace(string(bootID))},
		daemons: newDaemons(filepath.Join(guest.ConfigDir, "log")),
	}
	go nameNICs(cfg.Uplinks)
	go s.boot(cfg)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", s.getHealth)
	mux.HandleFunc("POST /exec", s.exec)
	mux.HandleFunc("GET /file", s.getFile)
	mux.HandleFunc("PUT /file", s.putFile)
	mux.HandleFunc("GET /socket", s.getSocket)
	mux.HandleFunc("GET /daemon/{name}", s.getDaemon)
	mux.HandleFunc("PUT /daemon/{name}", s.startDaemon)
	mux.HandleFunc("POST /daemon/{name}/signal", s.signalDaemon)
	mux.HandleFunc("POST /reboot", s.reboot)
	return http.ListenAndServe(net.JoinHostPort(address.String(), strconv.Itoa(guest.Port)), mux)
}

type server struct {
	daemons *daemons

	mu     sync.Mutex // guards health
	health guest.Health
}

// boot starts the configured daemons. The images are imported at the same
// time as those after the first one start: that is containerd.
func (s *server) boot(cfg *guest.Config) {
	imported := make(chan error, 1)
	err := func() error {
		for i, d := range cfg.Daemons {
			if _, err := s.daemons.start(d); err != nil {
				return err
			}
			if err := untilListening(d); err != nil {
				return err
			}
			if i == 0 {
				go func() { imported <- importImages() }()
			}
		}
		return <-imported
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.health.Booted = err == nil
	if err != nil {
		s.health.Error = err.Error()
		fmt.Println("lab: boot failed:", err)
	}
}

// listenTimeout is how long a daemon may take to listen on its socket.
const listenTimeout = 2 * time.Minute

func untilListening(d guest.Daemon) error {
	if d.Socket == "" {
		return nil
	}
	for end := time.Now().Add(listenTimeout); ; time.Sleep(50 * time.Millisecond) {
		// A socket that an earlier process left behind refuses.
		conn, err := net.Dial("unix", d.Socket)
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s does not listen on its socket: %w", d.Name, err)
		}
	}
}

// importImages gives the node's images to containerd, when it is new.
func importImages() error {
	const done = "/var/lib/lab/images-imported"
	if _, err := os.Stat(done); err == nil {
		return nil
	}
	images, err := filepath.Glob(guest.ImageDir + "/*.tar")
	if err != nil {
		return err
	}
	for _, image := range images {
		out, err := shell(context.Background(), "ctr --namespace k8s.io images import --local "+image, nil).CombinedOutput()
		if err != nil {
			return fmt.Errorf("importing %s: %w: %s", image, err, out)
		}
	}
	if err := os.MkdirAll(filepath.Dir(done), 0o755); err != nil {
		return err
	}
	return os.WriteFile(done, nil, 0o644)
}

// shell returns a command for a script, in a session of its own that ends with
// the context.
func shell(ctx context.Context, script string, env []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script)
	cmd.Env = append(environment, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	// A background process of the script may keep the output open: not waited for.
	cmd.WaitDelay = time.Second
	return cmd
}

func (s *server) getHealth(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = json.NewEncoder(w).Encode(s.health)
}

// exec runs a script and streams its output. It ends with the connection.
func (s *server) exec(w http.ResponseWriter, r *http.Request) {
	var req guest.ExecRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	frames := &frameWriter{encoder: json.NewEncoder(w), flusher: w.(http.Flusher)}
	cmd := shell(r.Context(), req.Script, req.Env)
	cmd.Stdin = strings.NewReader(string(req.Stdin))
	cmd.Stdout = frames.stream(func(p []byte) guest.Frame { return guest.Frame{Stdout: p} })
	cmd.Stderr = frames.stream(func(p []byte) guest.Frame { return guest.Frame{Stderr: p} })
	err := cmd.Run()
	if cmd.ProcessState == nil {
		frames.send(guest.Frame{Error: err.Error()})
		return
	}
	code := exitCode(cmd.ProcessState)
	frames.send(guest.Frame{Exit: &code})
}

// frameWriter writes the frames of an answer.
type frameWriter struct {
	mu      sync.Mutex // guards encoder: both outputs write at once
	encoder *json.Encoder
	flusher http.Flusher
}

func (f *frameWriter) send(frame guest.Frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.encoder.Encode(frame) == nil {
		f.flusher.Flush()
	}
}

func (f *frameWriter) stream(frame func([]byte) guest.Frame) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		f.send(frame(p))
		return len(p), nil
	})
}

type writerFunc func([]byte) (int, error)

func (w writerFunc) Write(p []byte) (int, error) { return w(p) }

func exitCode(state *os.ProcessState) int {
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return state.ExitCode()
}

func (s *server) getFile(w http.ResponseWriter, r *http.Request) {
	f, err := os.Open(r.URL.Query().Get("path"))
	if err != nil {
		fail(w, err)
		return
	}
	defer f.Close()
	_, _ = io.Copy(w, f)
}

// getSocket passes on what an HTTP server on a unix socket answers.
func (s *server) getSocket(w http.ResponseWriter, r *http.Request) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", r.URL.Query().Get("socket"))
	}}}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, "http://node"+r.URL.Query().Get("path"), nil)
	if err != nil {
		fail(w, err)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		fail(w, err)
		return
	}
	defer resp.Body.Close()
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
}

// putFile replaces a file at once: a running program can be replaced too.
func (s *server) putFile(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Query().Get("path")
	mode, err := strconv.ParseUint(r.URL.Query().Get("mode"), 8, 32)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	err = func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.CreateTemp(filepath.Dir(path), ".put-*")
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r.Body)
		err = errors.Join(err, f.Chmod(os.FileMode(mode)), f.Close())
		if err != nil {
			return errors.Join(err, os.Remove(f.Name()))
		}
		return os.Rename(f.Name(), path)
	}()
	if err != nil {
		fail(w, err)
	}
}

// answerTime is what the answer to a reboot request gets to leave the node.
const answerTime = 50 * time.Millisecond

// reboot restarts the machine: cleanly after writing out its files, or at once
// as if its power were cut.
func (s *server) reboot(w http.ResponseWriter, r *http.Request) {
	hard := r.URL.Query().Get("hard") != ""
	w.WriteHeader(http.StatusAccepted)
	time.AfterFunc(answerTime, func() {
		if !hard {
			s.daemons.stopAll()
			unix.Sync()
		}
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	})
}

func fail(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	if errors.Is(err, os.ErrNotExist) {
		status = http.StatusNotFound
	}
	http.Error(w, err.Error(), status)
}
