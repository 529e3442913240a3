// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package metrics serves a program's Prometheus metrics.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
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
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	lc.Append(cell.Hook{
		OnStart: func(ctx cell.HookContext) error {
			listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.PrometheusServeAddr)
			if err != nil {
				return fmt.Errorf("--prometheus-serve-addr: %w", err)
			}
			log.Info("Serving metrics", "address", listener.Addr())
			go func() {
				if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
					log.Error("Metrics are not served any more", "error", err)
				}
			}()
			return nil
		},
		OnStop: func(ctx cell.HookContext) error {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if err := server.Shutdown(ctx); err != nil {
				return server.Close()
			}
			return nil
		},
	})
}
