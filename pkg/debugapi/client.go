// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package debugapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"syscall"
	"time"

	"github.com/cilium/networkdriver/pkg/health"
)

// clientTimeout bounds a request, so that a hung program does not hang those who look into it.
const clientTimeout = 30 * time.Second

// Client asks a running agent or operator. It does not know which of the two answers, so its errors name the socket.
type Client struct {
	socketPath string
	http       http.Client
}

// NewClient returns a client of the program that listens on the socket.
func NewClient(socketPath string) *Client {
	return &Client{socketPath: socketPath, http: http.Client{
		Timeout: clientTimeout,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socketPath)
		}, DisableKeepAlives: true},
	}}
}

// Dump returns all StateDB tables, {"table": [rows]}.
func (c *Client) Dump(ctx context.Context) (json.RawMessage, error) {
	return c.get(ctx, "/dump", http.StatusOK)
}

// DumpTable returns the rows of one table.
func (c *Client) DumpTable(ctx context.Context, table string) (json.RawMessage, error) {
	body, err := c.get(ctx, "/dump/"+url.PathEscape(table), http.StatusOK)
	if err != nil {
		return nil, err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(body, &all); err != nil {
		return nil, fmt.Errorf("table %s: %w", table, err)
	}
	return all[table], nil
}

// Devices returns the driver's devices.
func (c *Client) Devices(ctx context.Context) ([]Device, error) {
	body, err := c.get(ctx, "/networkdriver", http.StatusOK)
	if err != nil {
		return nil, err
	}
	var devices []Device
	if err := json.Unmarshal(body, &devices); err != nil {
		return nil, fmt.Errorf("decode the devices: %w", err)
	}
	return devices, nil
}

// Status returns the program's health.
func (c *Client) Status(ctx context.Context) (health.Status, error) {
	var status health.Status
	body, err := c.get(ctx, "/readyz", http.StatusOK, http.StatusServiceUnavailable)
	if err != nil {
		return status, err
	}
	if err := json.Unmarshal(body, &status); err != nil {
		return status, fmt.Errorf("decode the status: %w", err)
	}
	return status, nil
}

// Config returns the program's flags with their values.
func (c *Client) Config(ctx context.Context) (map[string]string, error) {
	var config map[string]string
	body, err := c.get(ctx, "/config", http.StatusOK)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, &config); err != nil {
		return nil, fmt.Errorf("decode the configuration: %w", err)
	}
	return config, nil
}

// Version returns the program's version.
func (c *Client) Version(ctx context.Context) (string, error) {
	body, err := c.get(ctx, "/version", http.StatusOK)
	return string(body), err
}

// Log returns the last lines of the program's log.
func (c *Client) Log(ctx context.Context) ([]byte, error) { return c.get(ctx, "/log", http.StatusOK) }

func (c *Client) get(ctx context.Context, path string, want ...int) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://local"+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, c.explain(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", c.socketPath, err)
	}
	if slices.Contains(want, response.StatusCode) {
		return body, nil
	}
	var answer Error
	if json.Unmarshal(body, &answer) == nil && answer.Message != "" {
		return nil, errors.New(answer.Message)
	}
	return nil, fmt.Errorf("%s answers %s to %s", c.socketPath, response.Status, path)
}

func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("neither agent nor operator is running here: the socket %s does not exist (--socket-path names another)", c.socketPath)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("neither agent nor operator is running: nothing listens on the socket %s", c.socketPath)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the socket %s is for root alone", c.socketPath)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no answer on %s within %s", c.socketPath, clientTimeout)
	}
	return fmt.Errorf("ask on %s: %w", c.socketPath, err)
}
