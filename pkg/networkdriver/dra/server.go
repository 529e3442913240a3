// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// socketCheckInterval is how often the sockets are looked for. Kubelet watches the directory and forgets a plugin
	// whose registration socket is gone.
	socketCheckInterval = time.Second

	// maxSocketPath is the longest path of a unix socket (sockaddr_un without the terminating zero).
	maxSocketPath = 107
)

// server is one pair of sockets: one that kubelet registers the driver by, and one for the calls about claims.
type server struct {
	log    *slog.Logger
	plugin *kubeletPlugin
	helper *kubeletplugin.Helper
	// statuses takes what kubelet says about the registration. The helper keeps that too, but without a lock.
	statuses chan *registerapi.RegistrationStatus
	// sockets are the files as they were made.
	sockets map[string]os.FileInfo
}

// socketPaths are the paths of the sockets for registration and for claims.
func (c Config) socketPaths() (registrar, plugin string) {
	return filepath.Join(c.KubeletRootDir, "plugins_registry", c.DriverName+"-reg.sock"),
		filepath.Join(PluginDir(c.KubeletRootDir, c.DriverName), "dra.sock")
}

// PluginDir is the driver's directory in kubelet's.
func PluginDir(kubeletRootDir, driverName string) string {
	return filepath.Join(kubeletRootDir, "plugins", driverName)
}

func (c Config) validate() error {
	registrar, plugin := c.socketPaths()
	for _, path := range []string{registrar, plugin} {
		if len(path) > maxSocketPath {
			return fmt.Errorf("socket path %s is %d bytes long, at most %d are allowed: use a shorter driver name or kubelet directory",
				path, len(path), maxSocketPath)
		}
	}
	return nil
}

// startServer makes the sockets.
func (d *Driver) startServer(ctx context.Context) (*server, error) {
	registrar, plugin := d.config.socketPaths()
	for _, dir := range []string{filepath.Dir(registrar), filepath.Dir(plugin)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, fmt.Errorf("make the directory of a socket: %w", err)
		}
	}
	s := &server{
		log:      d.log,
		plugin:   newKubeletPlugin(d.log, d.config.DriverName, d.claims, d.reporter, d.metadata, d.runtime),
		statuses: make(chan *registerapi.RegistrationStatus, 16),
		sockets:  map[string]os.FileInfo{},
	}
	var err error
	s.helper, err = kubeletplugin.Start(klog.NewContext(ctx, logr.FromSlogHandler(d.log.Handler())), s.plugin, append(d.metadata.Options(),
		kubeletplugin.DriverName(d.config.DriverName),
		kubeletplugin.NodeName(d.config.NodeName),
		kubeletplugin.KubeClient(d.prompt),
		kubeletplugin.RegistrarDirectoryPath(filepath.Dir(registrar)),
		kubeletplugin.PluginDataDirectoryPath(filepath.Dir(plugin)),
		kubeletplugin.GRPCInterceptor(s.intercept),
		kubeletplugin.Serialize(false),
		kubeletplugin.HealthService(d.reporter != nil),
		kubeletplugin.NodeV1beta1(false), // every kubelet of a supported release calls v1, whose answers are completed here
	)...)
	if err != nil {
		return nil, fmt.Errorf("make the kubelet plugin sockets: %w", err)
	}
	for _, path := range []string{registrar, plugin} {
		if s.sockets[path], err = os.Lstat(path); err != nil {
			s.helper.Stop()
			return nil, fmt.Errorf("look at the kubelet plugin socket: %w", err)
		}
	}
	return s, nil
}

// intercept sees kubelet's verdict on the registration go by, and completes the answers that kubeletplugin gives.
func (s *server) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	switch req := req.(type) {
	case *registerapi.RegistrationStatus:
		select {
		case s.statuses <- req:
		default:
		}
	case *drapb.NodePrepareResourcesRequest:
		if answer, ok := resp.(*drapb.NodePrepareResourcesResponse); ok && err == nil {
			s.plugin.described(ctx, req.Claims, answer)
		}
	case *drapb.NodeUnprepareResourcesRequest:
		if answer, ok := resp.(*drapb.NodeUnprepareResourcesResponse); ok && err == nil {
			s.plugin.answered(ctx, answer)
		}
	}
	return resp, err
}

// waitRegistered returns nil once kubelet has registered the driver. Kubelet tries again by itself while the socket is
// there, so a refusal ends the wait only together with the timeout.
func (s *server) waitRegistered(ctx context.Context, timeout time.Duration) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	err := fmt.Errorf("kubelet did not answer within %s", timeout)
	for {
		select {
		case status := <-s.statuses:
			if status.PluginRegistered {
				return nil
			}
			err = refusal(status)
		case failure := <-s.plugin.failed:
			return failure
		case <-timer.C:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watch returns why the driver can no longer be reached by kubelet, or the context's error when that ends.
func (s *server) watch(ctx context.Context) error {
	ticker := time.NewTicker(socketCheckInterval)
	defer ticker.Stop()
	for {
		select {
		case status := <-s.statuses:
			if !status.PluginRegistered {
				return refusal(status)
			}
			s.log.Info("Kubelet registered the driver again")
		case failure := <-s.plugin.failed:
			return failure
		case <-ticker.C:
			if err := s.checkSockets(); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *server) checkSockets() error {
	for path, made := range s.sockets {
		now, err := os.Lstat(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return fmt.Errorf("socket %s was removed", path)
		case err == nil && !os.SameFile(made, now):
			return fmt.Errorf("socket %s was replaced", path)
		}
	}
	return nil
}

func refusal(status *registerapi.RegistrationStatus) error {
	return fmt.Errorf("kubelet refused the driver: %.512q", status.Error)
}

// stop ends the servers and removes the sockets.
func (s *server) stop() { s.helper.Stop() }
