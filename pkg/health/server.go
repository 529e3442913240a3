// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"

	"github.com/cilium/hive/cell"
	"github.com/spf13/pflag"

	"github.com/cilium/networkdriver/pkg/httpserver"
)

// ServerCell serves the checks over HTTP to the kubelet's probes, when an address is given.
var ServerCell = cell.Module(
	"health-server",
	"Health endpoints for probes",

	cell.Config(ServerConfig{}),
	cell.Invoke(serve),
)

// ServerConfig says where to serve.
type ServerConfig struct {
	OperatorAPIServeAddr string
}

// Flags implements [cell.Flagger].
func (c ServerConfig) Flags(flags *pflag.FlagSet) {
	flags.String("operator-api-serve-addr", c.OperatorAPIServeAddr, "Address to serve /healthz and /readyz on, such as :9234 (default: off)")
}

// AddRoutes adds GET /healthz and GET /readyz: 200 or 503, the body is a [Status].
func (c *Checks) AddRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		status := c.Status()
		write(w, status.Live, status)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		status := c.Status()
		write(w, status.Ready, status)
	})
}

func write(w http.ResponseWriter, ok bool, status Status) {
	w.Header().Set("Content-Type", "application/json")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	// The client has gone away when this fails.
	_ = json.NewEncoder(w).Encode(status)
}

func serve(c ServerConfig, checks *Checks, lc cell.Lifecycle, log *slog.Logger) {
	if c.OperatorAPIServeAddr == "" {
		return
	}
	mux := http.NewServeMux()
	checks.AddRoutes(mux)
	httpserver.Server{
		Name: "health", Flag: "operator-api-serve-addr", Handler: mux,
		Listen: func(ctx context.Context) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "tcp", c.OperatorAPIServeAddr)
		},
	}.Append(lc, log)
}
