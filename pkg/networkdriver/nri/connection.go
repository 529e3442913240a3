// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// PluginName and DefaultIndex are what the driver registers as. The index orders plugins.
	PluginName   = "networkdriver"
	DefaultIndex = "10"

	minBackoff = 100 * time.Millisecond
	// maxBackoff is short, since pods are without their devices until the runtime is back.
	maxBackoff = 500 * time.Millisecond
	// registrationLimit is how long the runtime may take from the connection to the first request.
	registrationLimit = 10 * time.Second
)

// Status says whether the runtime is connected.
type Status struct {
	Connected bool
	// Reason says in words why not, and what to do.
	Reason string
}

// Plugin keeps the hooks connected to the runtime.
type Plugin struct {
	socketPath string
	index      string
	hooks      *Hooks
	log        *slog.Logger
	metrics    *Metrics

	mu      sync.Mutex // guards status and changed
	status  Status
	changed chan struct{}
}

// NewPlugin returns a plugin for the runtime's NRI socket. index is the two digits that order it among plugins.
func NewPlugin(socketPath, index string, hooks *Hooks, metrics *Metrics, log *slog.Logger) *Plugin {
	return &Plugin{
		socketPath: socketPath, index: index, hooks: hooks, metrics: metrics, log: log,
		status:  Status{Reason: "not connected to the container runtime yet"},
		changed: make(chan struct{}),
	}
}

// Status returns the present state and a channel that is closed when it changes.
func (p *Plugin) Status() (Status, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status, p.changed
}

// WaitConnected returns when the runtime is connected and synchronized.
func (p *Plugin) WaitConnected(ctx context.Context) error {
	for {
		status, changed := p.Status()
		if status.Connected {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", status.Reason, ctx.Err())
		}
	}
}

func (p *Plugin) set(status Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if status == p.status {
		return
	}
	if status.Connected {
		p.metrics.connected.Set(1)
		p.metrics.connections.Inc()
		p.log.Info("Connected to the container runtime through NRI", "socket", p.socketPath)
	} else {
		p.metrics.connected.Set(0)
		p.log.Warn("Not connected to the container runtime through NRI; devices are attached when it is back",
			"socket", p.socketPath, "reason", status.Reason)
	}
	p.status = status
	close(p.changed)
	p.changed = make(chan struct{})
}

// Run connects to the runtime, and again whenever the connection is lost, until the context ends. Hooks that are at
// work then are waited for.
func (p *Plugin) Run(ctx context.Context) error {
	backoff := minBackoff
	for ctx.Err() == nil {
		err := p.serve(ctx)
		if ctx.Err() != nil {
			break
		}
		if status, _ := p.Status(); status.Connected {
			backoff = minBackoff
		}
		p.set(Status{Reason: p.explain(err)})
		pause.For(ctx, backoff)
		backoff = min(2*backoff, maxBackoff)
	}
	p.hooks.Wait()
	p.set(Status{Reason: "the driver is stopping"})
	return nil
}

// serve is one connection, from its beginning to its end.
func (p *Plugin) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var d net.Dialer
	raw, err := d.DialContext(ctx, "unix", p.socketPath)
	if err != nil {
		return err
	}
	conn := watch(raw)
	defer conn.Close()

	session := &session{Hooks: p.hooks, plugin: p, configured: make(chan struct{})}
	plugin, err := stub.New(session,
		stub.WithLogger(stubLogger{p.log}),
		stub.WithPluginName(PluginName),
		stub.WithPluginIdx(p.index),
		stub.WithConnection(conn),
		stub.WithOnClose(cancel),
		// A pod whose hook was not answered must fail and be retried, and must not cost the connection.
		stub.WithFailurePolicy(&api.FailurePolicy{FailRequest: true, KeepConnected: true}),
	)
	if err != nil {
		return fmt.Errorf("create the NRI plugin: %w", err)
	}
	session.stub = plugin
	returned := make(chan struct{})
	defer close(returned)
	go session.unblock(ctx, conn, returned)

	err = plugin.Run(ctx)
	plugin.Stop()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// explain puts a failed connection into the words of the one who can mend it.
func (p *Plugin) explain(err error) string {
	switch {
	case err == nil:
		return "the container runtime closed the NRI connection"
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("NRI socket %s does not exist: enable NRI in the container runtime (containerd: disable = false "+
			"in the plugin io.containerd.nri.v1.nri; CRI-O: enable_nri = true) or set --nri-socket-path", p.socketPath)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Sprintf("nothing listens on NRI socket %s: the container runtime is not running or has NRI disabled", p.socketPath)
	default:
		return fmt.Sprintf("NRI on %s: %v", p.socketPath, err)
	}
}

// session is the hooks over one connection.
type session struct {
	*Hooks
	plugin     *Plugin
	stub       stub.Stub
	once       sync.Once
	configured chan struct{}
}

// errNotConfigured ends a connection that the runtime accepted and then forgot.
var errNotConfigured = errors.New("the container runtime did not complete the plugin's registration")

// Configure is the runtime's first request.
func (s *session) Configure(_ context.Context, config, runtime, version string) (api.EventMask, error) {
	first := false
	s.once.Do(func() { close(s.configured); first = true })
	if !first {
		return 0, errNotConfigured
	}
	s.setRequestTimeout(s.stub.RequestTimeout())
	s.log.Info("Registered with the container runtime", "runtime", runtime, "version", version, "hookTimeout", s.hookTimeout())
	return 0, nil
}

// Synchronize is the second. From its answer on the runtime sends events.
func (s *session) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	updates, err := s.Hooks.Synchronize(ctx, pods, containers)
	if err == nil {
		s.plugin.set(Status{Connected: true})
	}
	return updates, err
}

// unblock ends a registration that stalls. The stub waits for Configure without end, even when the connection is
// gone, and only a failed Configure makes it give up.
func (s *session) unblock(ctx context.Context, conn *watchedConn, returned <-chan struct{}) {
	limit := time.NewTimer(registrationLimit)
	defer limit.Stop()
	select {
	case <-returned:
		return
	case <-s.configured:
		return
	case <-conn.ended:
	case <-ctx.Done():
	case <-limit.C:
	}
	conn.Close()
	// A registration that has not been answered fails by itself now.
	limit.Reset(minBackoff)
	select {
	case <-returned:
		return
	case <-limit.C:
	}
	s.once.Do(func() { close(s.configured) })
	if service, ok := s.stub.(api.PluginService); ok && conn.written.Load() {
		_, _ = service.Configure(ctx, &api.ConfigureRequest{})
	}
}
