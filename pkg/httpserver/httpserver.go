// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package httpserver runs the HTTP servers of a program in the lifecycle of its Hive.
package httpserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/cilium/hive/cell"
)

// Server is what to serve, and where.
type Server struct {
	// Name says in the log what is served, such as "metrics".
	Name string
	// Flag is the name of the flag with the address. The error of an address that cannot be listened on names it.
	Flag    string
	Handler http.Handler
	// Local says that root of this node alone can connect: answers may take their time, and connections are not counted.
	Local  bool
	Listen func(context.Context) (net.Listener, error)
}

const (
	// maxConnections is many times what the Prometheus servers and probes of a cluster keep open.
	maxConnections = 64
	maxHeaderBytes = 16 << 10
	// headerTimeout, readTimeout and writeTimeout bound a request, its body and its answer. A scrape takes ten seconds
	// at most by default.
	headerTimeout = 5 * time.Second
	readTimeout   = 10 * time.Second
	writeTimeout  = 30 * time.Second
	// idleTimeout lets a client that comes every minute keep its connection.
	idleTimeout = 90 * time.Second
)

// server is what serves. Whoever can reach the node's network can connect, without a name.
func (s Server) server() *http.Server {
	server := &http.Server{
		Handler: s.Handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}
	if !s.Local {
		server.ReadTimeout, server.WriteTimeout = readTimeout, writeTimeout
		server.ConnState = newConnections(maxConnections).changed
	}
	return server
}

// Append serves from the program's start to its stop, at which requests get a second to end.
func (s Server) Append(lc cell.Lifecycle, log *slog.Logger) {
	server := s.server()
	lc.Append(cell.Hook{
		OnStart: func(ctx cell.HookContext) error {
			listener, err := s.Listen(ctx)
			if err != nil {
				return fmt.Errorf("--%s: %w", s.Flag, err)
			}
			log.Info("Serving "+s.Name, "address", listener.Addr())
			go func() {
				if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
					log.Error("Not serving "+s.Name+" any more", "error", err)
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
