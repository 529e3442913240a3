// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package client connects a program to the Kubernetes API.
package client

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"

	"github.com/cilium/hive/cell"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Cell provides a [*rest.Config], a [kubernetes.Interface] and a [Prompt]. They are made only when something asks for them, so
// that a program with nothing to do in the cluster starts without one.
var Cell = cell.Module(
	"k8s-client",
	"Kubernetes API client",

	cell.Config(defaultConfig),
	cell.Provide(newCountedConfig, newClientset, newPrompt),
)

// Config says how to reach the API server.
type Config struct {
	K8sKubeconfigPath string
	K8sClientQPS      float32
	K8sClientBurst    int
}

var defaultConfig = Config{K8sClientQPS: 10, K8sClientBurst: 20}

// Flags implements [cell.Flagger].
func (c Config) Flags(flags *pflag.FlagSet) {
	flags.String("k8s-kubeconfig-path", c.K8sKubeconfigPath, "Path of a kubeconfig file (default: the pod's service account)")
	flags.Float32("k8s-client-qps", c.K8sClientQPS, "Requests per second to the Kubernetes API, on average")
	flags.Int("k8s-client-burst", c.K8sClientBurst, "Requests to the Kubernetes API in a burst")
}

// newCountedConfig returns a configuration whose requests are counted, if the program has metrics.
func newCountedConfig(p struct {
	cell.In

	Config  Config
	Metrics prometheus.Registerer `optional:"true"`
}) (*rest.Config, error) {
	cfg, err := newRESTConfig(p.Config)
	if err != nil || p.Metrics == nil {
		return cfg, err
	}
	requests := newRequestCounter()
	if err := p.Metrics.Register(requests); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return counted{next, requests} })
	return cfg, nil
}

// newRESTConfig returns a configuration for JSON, which every API group speaks.
func newRESTConfig(c Config) (*rest.Config, error) {
	cfg, err := load(c.K8sKubeconfigPath)
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = fmt.Sprintf("%s (%s/%s)", filepath.Base(os.Args[0]), runtime.GOOS, runtime.GOARCH)
	cfg.QPS, cfg.Burst = c.K8sClientQPS, c.K8sClientBurst
	return cfg, nil
}

func load(path string) (*rest.Config, error) {
	if path == "" {
		cfg, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("not in a Kubernetes pod: --k8s-kubeconfig-path is needed")
		}
		return cfg, err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return cfg, nil
}

// newClientset speaks protobuf, which costs both ends a fraction of what JSON does. Only built-in API groups have it.
func newClientset(cfg *rest.Config) (kubernetes.Interface, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = k8sruntime.ContentTypeProtobuf
	cfg.AcceptContentTypes = k8sruntime.ContentTypeProtobuf + "," + k8sruntime.ContentTypeJSON
	return kubernetes.NewForConfig(cfg)
}
