// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	k8sversion "k8s.io/apimachinery/pkg/version"
)

type server struct {
	version string
	err     error
	calls   int
}

func (s *server) ServerVersion() (*k8sversion.Info, error) {
	s.calls++
	if s.err != nil {
		err := s.err
		s.err = nil
		return nil, err
	}
	return &k8sversion.Info{GitVersion: s.version}, nil
}

func TestWaitForVersion(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for version, ok := range map[string]bool{
		"v1.34.0": true, "v1.37.2+k3s1": true, "v1.34.0-rc.1": true, "v2.0.0": true, "v1.33.9-gke.100": false, "v1.4.0": false,
	} {
		found, err := WaitForVersion(t.Context(), &server{version: version}, "1.34", log)
		if ok {
			require.NoError(t, err, version)
			require.NotNil(t, found)
			continue
		}
		require.ErrorContains(t, err, "too old", version)
	}
	_, err := WaitForVersion(t.Context(), &server{version: "v1.33.9-gke.100"}, "1.34", log)
	require.EqualError(t, err, "the API server runs Kubernetes 1.33.9, which is too old: at least 1.34 is needed")
	_, err = WaitForVersion(t.Context(), &server{version: "master"}, "1.34", log)
	require.ErrorContains(t, err, `version "master" of the API server`)

	slow := &server{version: "v1.34.0", err: errors.New("connection refused")}
	_, err = WaitForVersion(t.Context(), slow, "1.34", log)
	require.NoError(t, err)
	require.Equal(t, 2, slow.calls)

	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = WaitForVersion(stopped, &server{err: errors.New("connection refused")}, "1.34", log)
	require.ErrorIs(t, err, context.Canceled)
}

func TestConfig(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := newRESTConfig(defaultConfig)
	require.EqualError(t, err, "not in a Kubernetes pod: --k8s-kubeconfig-path is needed")

	path := filepath.Join(t.TempDir(), "kubeconfig")
	_, err = newRESTConfig(Config{K8sKubeconfigPath: path})
	require.ErrorContains(t, err, "kubeconfig "+path)

	require.NoError(t, os.WriteFile(path, []byte(`{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":"https://192.0.2.1:6443"}}],
		"contexts":[{"name":"c","context":{"cluster":"c"}}]}`), 0o600))
	cfg, err := newRESTConfig(Config{K8sKubeconfigPath: path, K8sClientQPS: 7, K8sClientBurst: 9})
	require.NoError(t, err)
	require.Equal(t, "https://192.0.2.1:6443", cfg.Host)
	require.Equal(t, float32(7), cfg.QPS)
	require.Equal(t, 9, cfg.Burst)
	_, err = newClientset(cfg)
	require.NoError(t, err)
	require.Empty(t, cfg.ContentType, "the shared configuration stays JSON")
}
