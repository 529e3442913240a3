// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package metrics serves a program's Prometheus metrics.
package metrics

import (
	"context"
	"log/slog"
	"net"
	"net/http"

	"github.com/cilium/hive/cell"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"

	"github.com/cilium/networkdriver/pkg/httpserver"
)

// Cell provides a [prometheus.Registerer] and, when an address is given, serves what is registered.
var Cell = cell.Module(
	"metrics",
	"Prometheus metrics",

	cell.Config(Config{}),
	cell.Provide(newRegistry),
	cell.Invoke(serve),
)

// Config says where to serve.
type Config struct {
	PrometheusServeAddr string
}

// Flags implements [cell.Flagger].
func (c Config) Flags(flags *pflag.FlagSet) {
	flags.String("prometheus-serve-addr", c.PrometheusServeAddr, "Address to serve Prometheus metrics on, such as :9962 (default: off)")
}

func newRegistry() (*prometheus.Registry, prometheus.Registerer) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry, registry
}

func serve(c Config, registry *prometheus.Registry, lc cell.Lifecycle, log *slog.Logger) {
	if c.PrometheusServeAddr == "" {
		return
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}))
	httpserver.Server{
		Name: "metrics", Flag: "prometheus-serve-addr", Handler: mux,
		Listen: func(ctx context.Context) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "tcp", c.PrometheusServeAddr)
		},
	}.Append(lc, log)
}
