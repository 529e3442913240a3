// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
)

// testRuntime is the runtime's side of NRI, as containerd and CRI-O use it. It closes no connection by itself, since
// runtimes leave that to the end of their process; so plugins come in by a door that can be shut.
type testRuntime struct {
	*adaptation.Adaptation
	door   net.Listener
	copies sync.WaitGroup
	mu     sync.Mutex // guards conns
	conns  []net.Conn
}

func (r *testRuntime) admit(inner string) {
	for {
		outside, err := r.door.Accept()
		if err != nil {
			return
		}
		inside, err := net.Dial("unix", inner)
		if err != nil {
			outside.Close()
			return
		}
		r.mu.Lock()
		r.conns = append(r.conns, outside, inside)
		r.mu.Unlock()
		r.copies.Go(func() { _, _ = io.Copy(inside, outside); inside.Close() })
		r.copies.Go(func() { _, _ = io.Copy(outside, inside); outside.Close() })
	}
}

// kill ends the runtime the way the end of its process does.
func (r *testRuntime) kill() {
	r.Stop()
	r.door.Close()
	r.mu.Lock()
	for _, c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.copies.Wait()
}

func startRuntime(t *testing.T, socket string, pods ...*api.PodSandbox) *testRuntime {
	t.Helper()
	dir := t.TempDir()
	inner := filepath.Join(dir, "inner.sock")
	r, err := adaptation.New("test-runtime", "1.0.0",
		func(ctx context.Context, sync adaptation.SyncCB) error {
			_, err := sync(ctx, pods, nil)
			return err
		},
		func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil },
		adaptation.WithSocketPath(inner),
		adaptation.WithPluginPath(filepath.Join(dir, "plugins")),
		adaptation.WithPluginConfigPath(filepath.Join(dir, "conf")),
	)
	require.NoError(t, err)
	require.NoError(t, r.Start())
	door, err := net.Listen("unix", socket)
	require.NoError(t, err)
	runtime := &testRuntime{Adaptation: r, door: door}
	runtime.copies.Go(func() { runtime.admit(inner) })
	return runtime
}

func startPlugin(t *testing.T, f *fixture, socket string) *Plugin {
	p := NewPlugin(socket, DefaultIndex, f.hooks, f.metrics, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(10 * time.Second):
			t.Error("the plugin does not stop")
		}
	})
	return p
}

func waitStatus(t *testing.T, p *Plugin, want func(Status) bool) Status {
	t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		status, changed := p.Status()
		if want(status) {
			return status
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("status stays %+v", status)
		}
	}
}

func connected(s Status) bool    { return s.Connected }
func disconnected(s Status) bool { return !s.Connected }

// Real NRI over a real socket: connect, hooks, a refused pod, a runtime that restarts.
func TestConnection(t *testing.T) {
	f := newFixture(t)
	socket := filepath.Join(t.TempDir(), "nri.sock")
	f.pods.prepare("pod")
	f.pods.prepare("running")
	pod, running := newSandbox("pod", "s1"), newSandbox("running", "s2")

	plugin := startPlugin(t, f, socket)
	status := waitStatus(t, plugin, func(s Status) bool { return s.Reason != "not connected to the container runtime yet" })
	require.Contains(t, status.Reason, socket+" does not exist: enable NRI in the container runtime")
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorContains(t, plugin.WaitConnected(short), "does not exist")

	r := startRuntime(t, socket, running)
	require.NoError(t, plugin.WaitConnected(t.Context()))
	require.Equal(t, "s2", f.pods.where("running"))

	// The runtime lists the plugin just after it has synchronized it.
	ctx := t.Context()
	require.Eventually(t, func() bool {
		if err := r.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: pod}); err != nil {
			t.Error(err)
		}
		return f.pods.where("pod") == "s1"
	}, 5*time.Second, 5*time.Millisecond)
	require.NoError(t, r.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: pod}))
	require.Empty(t, f.pods.where("pod"))

	f.pods.failWith("attach s1", errors.New("device a: name net-a is taken in the pod"))
	err := r.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: pod})
	require.ErrorContains(t, err, "device a: name net-a is taken in the pod")
	_, err = r.CreateContainer(ctx, &api.CreateContainerRequest{Pod: pod, Container: &api.Container{Id: "c", Name: "app"}})
	require.ErrorContains(t, err, "container app is not started")

	r.kill()
	waitStatus(t, plugin, disconnected)
	f.pods.failWith("attach s1", nil)
	r = startRuntime(t, socket, running, pod)
	waitStatus(t, plugin, connected)
	require.Equal(t, "s1", f.pods.where("pod"))
	require.Equal(t, "s2", f.pods.where("running"))
	require.InDelta(t, 2, testutil.ToFloat64(f.metrics.connections), 0)
	r.kill()
	waitStatus(t, plugin, disconnected)
}

// A hook that overruns the runtime's limit fails the pod and does not cost the connection.
func TestFailurePolicy(t *testing.T) {
	adaptation.SetPluginRequestTimeout(50 * time.Millisecond)
	t.Cleanup(func() { adaptation.SetPluginRequestTimeout(adaptation.DefaultPluginRequestTimeout) })
	f := newFixture(t)
	socket := filepath.Join(t.TempDir(), "nri.sock")
	r := startRuntime(t, socket)
	t.Cleanup(r.kill)
	plugin := startPlugin(t, f, socket)
	require.NoError(t, plugin.WaitConnected(t.Context()))

	f.pods.prepare("pod")
	release := f.pods.hold("attach s1")
	pod := newSandbox("pod", "s1")
	require.Eventually(t, func() bool {
		return r.RunPodSandbox(t.Context(), &api.RunPodSandboxRequest{Pod: pod}) != nil
	}, 5*time.Second, 5*time.Millisecond)
	release()
	require.Eventually(t, func() bool {
		return r.RunPodSandbox(t.Context(), &api.RunPodSandboxRequest{Pod: pod}) == nil
	}, 5*time.Second, 5*time.Millisecond)
	require.Equal(t, "s1", f.pods.where("pod"))
	status, _ := plugin.Status()
	require.True(t, status.Connected)
	require.InDelta(t, 1, testutil.ToFloat64(f.metrics.connections), 0)
}

type forgetful struct{ registered chan struct{} }

func (r *forgetful) RegisterPlugin(context.Context, *api.RegisterPluginRequest) (*api.Empty, error) {
	defer close(r.registered)
	return &api.Empty{}, nil
}

func (r *forgetful) UpdateContainers(context.Context, *api.UpdateContainersRequest) (*api.UpdateContainersResponse, error) {
	return nil, errors.New("not expected")
}

// A runtime that dies between the registration and its first request does not block the plugin for good.
func TestRuntimeDiesWithinRegistration(t *testing.T) {
	f := newFixture(t)
	socket := filepath.Join(t.TempDir(), "nri.sock")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	plugin := startPlugin(t, f, socket)

	conn, err := l.Accept()
	require.NoError(t, err)
	// What comes before there is a listener for it is lost.
	mux := multiplex.Multiplex(conn, multiplex.WithBlockedRead())
	rpc, err := mux.Listen(multiplex.RuntimeServiceConn)
	require.NoError(t, err)
	server, err := ttrpc.NewServer()
	require.NoError(t, err)
	service := &forgetful{registered: make(chan struct{})}
	api.RegisterRuntimeService(server, service)
	served := make(chan error, 1)
	go func() { served <- server.Serve(t.Context(), rpc) }()
	mux.Unblock()
	<-service.registered
	require.NoError(t, server.Shutdown(t.Context()))
	mux.Close()
	l.Close()
	<-served

	waitStatus(t, plugin, func(s Status) bool { return s.Reason != "not connected to the container runtime yet" })
	r := startRuntime(t, socket)
	t.Cleanup(r.kill)
	require.NoError(t, plugin.WaitConnected(t.Context()))
}

// TestHookTimeoutFollowsRuntime: a runtime that gives plugins more time gives it to the hooks.
func TestHookTimeoutFollowsRuntime(t *testing.T) {
	adaptation.SetPluginRequestTimeout(8 * time.Second)
	t.Cleanup(func() { adaptation.SetPluginRequestTimeout(adaptation.DefaultPluginRequestTimeout) })
	f := newFixture(t)
	require.Equal(t, HookTimeout, f.hooks.hookTimeout())
	socket := filepath.Join(t.TempDir(), "nri.sock")
	t.Cleanup(startRuntime(t, socket).kill)
	require.NoError(t, startPlugin(t, f, socket).WaitConnected(t.Context()))
	require.Equal(t, 6*time.Second, f.hooks.hookTimeout())
}

// A runtime that was away for long is connected to at once, and that it is away is said once.
func TestReconnectWithinHalfASecond(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nri.sock")
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		log := &testenv.LogBuffer{}
		p := NewPlugin(socket, DefaultIndex, f.hooks, f.metrics, slog.New(slog.NewTextHandler(log, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(time.Hour)
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log)

		require.NoError(t, os.WriteFile(socket, nil, 0o600))
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		status, _ := p.Status()
		require.Contains(t, status.Reason, "nothing listens")
		cancel()
		require.NoError(t, <-done)
	})
}
