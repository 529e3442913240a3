// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package debugapi is the local API of the agent and the operator for people and probes: HTTP over a unix socket, for root alone.
//
//	GET /dump          all StateDB tables, {"table": [rows]}
//	GET /dump/TABLE    one table, {"table": [rows]}
//	GET /query, /changes/TABLE  the rest of StateDB's own API
//	GET /config        the flags and their values, {"flag": "value"}
//	GET /log           the last lines of the log, as text
//	GET /version       the program's version, as text
//	GET /networkdriver the devices and what they are used for, see [Device]
//	GET /healthz       200 when the agent is alive, else 503; the body is a [health.Status]
//	GET /readyz        200 when the agent can serve, else 503; the same body
package debugapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cilium/hive/cell"
	"github.com/cilium/statedb"
	"github.com/spf13/pflag"

	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/httpserver"
	"github.com/cilium/networkdriver/pkg/lastlog"
	"github.com/cilium/networkdriver/pkg/version"
)

const (
	// DefaultSocketPath is where the program serves this API.
	DefaultSocketPath = "/var/run/cilium/cilium.sock"
	// DefaultShellSocketPath is where it serves Hive's shell.
	DefaultShellSocketPath = "/var/run/cilium/shell.sock"
)

// Cell serves the API.
var Cell = cell.Module(
	"debug-api",
	"Local API on a unix socket",

	cell.Config(Config{SocketPath: DefaultSocketPath}),
	cell.Invoke(serve),
)

// Config says where the API listens.
type Config struct {
	SocketPath string
}

// Flags implements [cell.Flagger].
func (c Config) Flags(flags *pflag.FlagSet) {
	flags.String("socket-path", c.SocketPath, "Path of the unix socket for cilium-dbg")
}

// Params are what the API tells of.
type Params struct {
	cell.In

	DB       *statedb.DB
	Checks   *health.Checks
	Settings cell.AllSettings
	// LastLog is the end of the program's log, nil where the program keeps none.
	LastLog *lastlog.Ring `optional:"true"`
}

// NewHandler returns the API.
func NewHandler(p Params) http.Handler {
	db := p.DB
	mux := http.NewServeMux()
	mux.Handle("/", db.HTTPHandler())
	mux.HandleFunc("GET /dump/{table}", func(w http.ResponseWriter, r *http.Request) {
		// StateDB answers for a table that does not exist as for an empty one.
		if name := r.PathValue("table"); db.GetTable(db.ReadTxn(), name) == nil {
			writeJSON(w, http.StatusNotFound, unknownTable(db, name))
			return
		}
		db.HTTPHandler().ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /networkdriver", func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, http.StatusOK, Devices(db))
	})
	mux.HandleFunc("GET /config", func(w http.ResponseWriter, r *http.Request) {
		values := make(map[string]string, len(p.Settings))
		for name, value := range p.Settings {
			values[name] = fmt.Sprint(value)
		}
		writeJSON(w, http.StatusOK, values)
	})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, r *http.Request) { writeText(w, []byte(version.String())) })
	mux.HandleFunc("GET /log", func(w http.ResponseWriter, r *http.Request) {
		if p.LastLog == nil {
			writeJSON(w, http.StatusNotFound, Error{"the program keeps no lines of its log"})
			return
		}
		writeText(w, p.LastLog.Lines())
	})
	p.Checks.AddRoutes(mux)
	return mux
}

func writeText(w http.ResponseWriter, text []byte) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	// The client has gone away when this fails.
	_, _ = w.Write(text)
}

// Error is the body of an answer with an error.
type Error struct {
	Message string `json:"message"`
}

func unknownTable(db *statedb.DB, name string) Error {
	var names []string
	for _, table := range db.GetTables(db.ReadTxn()) {
		names = append(names, table.Name())
	}
	return Error{fmt.Sprintf("there is no table %q; the tables are %q", name, names)}
}

func writeJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// The client has gone away when this fails.
	_ = json.NewEncoder(w).Encode(body)
}

func serve(c Config, p Params, lc cell.Lifecycle, log *slog.Logger) {
	if c.SocketPath == "" {
		return
	}
	httpserver.Server{
		Name: "the local API", Flag: "socket-path", Handler: NewHandler(p), Local: true,
		Listen: func(ctx context.Context) (net.Listener, error) { return listen(ctx, c.SocketPath) },
	}.Append(lc, log)
}

// listen replaces a socket that a former process has left, and refuses to replace one that a process still listens on.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	var dialer net.Dialer
	switch conn, err := dialer.DialContext(ctx, "unix", path); {
	case err == nil:
		conn.Close()
		return nil, fmt.Errorf("another process listens on %s: is the program running twice?", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the socket that a former process left: %w", err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		listener.Close()
		return nil, err
	}
	return listener, nil
}
