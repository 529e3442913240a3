// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// agentClient speaks with the agent of a node.
type agentClient struct {
	node string
	base string
	http *http.Client
}

func newAgentClient(netnsPath, node, address string) *agentClient {
	return &agentClient{
		node: node,
		base: "http://" + net.JoinHostPort(address, strconv.Itoa(guest.Port)),
		http: &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				// Short, so that a node that is just booting is tried again soon.
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				defer cancel()
				return netns.DialContext(ctx, netnsPath, network, addr)
			},
			// A node that reboots leaves connections behind that nobody closes.
			IdleConnTimeout: 10 * time.Second,
		}},
	}
}

// do sends a request and returns the body of a successful answer.
func (c *agentClient) do(ctx context.Context, method, path string, query url.Values, body io.Reader) (io.ReadCloser, error) {
	u := c.base + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", c.node, err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return nil, fmt.Errorf("node %s: %s", c.node, bytes.TrimSpace(text))
	}
	return resp.Body, nil
}

// call sends a request with a JSON body, if in is not nil, and decodes the
// answer into out, if that is not nil.
func (c *agentClient) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	answer, err := c.do(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer answer.Close()
	if out == nil {
		_, err := io.Copy(io.Discard, answer)
		return err
	}
	if err := json.NewDecoder(answer).Decode(out); err != nil {
		return fmt.Errorf("node %s: answer to %s %s: %w", c.node, method, path, err)
	}
	return nil
}

// exec runs a script and passes its output on as it comes.
func (c *agentClient) exec(ctx context.Context, req guest.ExecRequest, stdout, stderr io.Writer) (int, error) {
	data, err := json.Marshal(req)
	if err != nil {
		return 0, err
	}
	answer, err := c.do(ctx, http.MethodPost, "/exec", nil, bytes.NewReader(data))
	if err != nil {
		return 0, err
	}
	defer answer.Close()
	code, err := readFrames(answer, stdout, stderr)
	if err != nil {
		return 0, fmt.Errorf("node %s: %w", c.node, err)
	}
	return code, nil
}

// readFrames reads the answer to an ExecRequest.
func readFrames(r io.Reader, stdout, stderr io.Writer) (int, error) {
	decoder := json.NewDecoder(r)
	for {
		var f guest.Frame
		if err := decoder.Decode(&f); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, fmt.Errorf("the script's output broke off: %w", err)
		}
		if f.Error != "" {
			return 0, errors.New(f.Error)
		}
		if f.Exit != nil {
			return *f.Exit, nil
		}
		if _, err := stdout.Write(f.Stdout); err != nil {
			return 0, err
		}
		if _, err := stderr.Write(f.Stderr); err != nil {
			return 0, err
		}
	}
}

func (c *agentClient) health(ctx context.Context) (guest.Health, error) {
	// A node that is down answers nothing, rather than an error.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var h guest.Health
	err := c.call(ctx, http.MethodGet, "/health", nil, nil, &h)
	return h, err
}

func (c *agentClient) signal(ctx context.Context, name string, sig unix.Signal) error {
	q := url.Values{"signal": {strconv.Itoa(int(sig))}}
	return c.call(ctx, http.MethodPost, "/daemon/"+url.PathEscape(name)+"/signal", q, nil, nil)
}

func (c *agentClient) process(ctx context.Context, name string, wait time.Duration) (guest.Process, error) {
	var p guest.Process
	q := url.Values{}
	if wait > 0 {
		q.Set("wait", strconv.FormatFloat(wait.Seconds(), 'f', 3, 64))
	}
	err := c.call(ctx, http.MethodGet, "/daemon/"+url.PathEscape(name), q, nil, &p)
	return p, err
}
