// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package httpserver

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// start serves a page, and returns the address.
func start(t *testing.T, s Server) string {
	t.Helper()
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("scraped")) })
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := s.server()
	server.ReadHeaderTimeout, server.ReadTimeout = 0, 0 // what closes connections here is their number
	done := make(chan error)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return listener.Addr().String()
}

func dial(t *testing.T, address, sent string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	_, err = conn.Write([]byte(sent))
	require.NoError(t, err)
	return conn
}

func scrape(t *testing.T, address string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, "scraped", string(body))
}

// Whoever holds connections, without a word or with half a request, keeps nobody out, and holds a limited number.
func TestIdleConnections(t *testing.T) {
	for name, sent := range map[string]string{"silent": "", "half a request": "GET /metrics HTTP/1.1\r\nHost: "} {
		t.Run(name, func(t *testing.T) {
			address := start(t, Server{})
			var held []net.Conn
			for range 50 {
				held = append(held, dial(t, address, sent))
			}
			scrape(t, address)
			for range maxConnections + 50 {
				held = append(held, dial(t, address, sent))
			}
			scrape(t, address)
			// The first ones were closed for the later ones.
			for _, conn := range held[:50] {
				require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
				_, err := io.ReadAll(conn)
				if err != nil {
					require.ErrorContains(t, err, "reset by peer")
				}
			}
			scrape(t, address)
		})
	}
}

// traced is the request's context, which notes the local address of the connection that is used.
func traced(r *http.Request, into map[string]bool) context.Context {
	return httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { into[info.Conn.LocalAddr().String()] = true },
	})
}

// A connection that is used stays, whatever others hold.
func TestUsedConnectionStays(t *testing.T) {
	address := start(t, Server{})
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	local := map[string]bool{}
	for range 4 {
		for range maxConnections / 2 {
			dial(t, address, "")
		}
		scrape(t, address) // connections are accepted in their order
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
		require.NoError(t, err)
		response, err := client.Do(request.WithContext(traced(request, local)))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}
	require.Len(t, local, 1, "one connection for all requests")
}

// Every wait for a client has an end.
func TestTimeouts(t *testing.T) {
	for _, s := range []*http.Server{Server{}.server(), Server{Local: true}.server()} {
		require.NotZero(t, s.ReadHeaderTimeout)
		require.NotZero(t, s.IdleTimeout)
		require.NotZero(t, s.MaxHeaderBytes)
	}
	require.NotZero(t, Server{}.server().ReadTimeout)
	require.NotZero(t, Server{}.server().WriteTimeout)
	// Changes of a table are streamed; the end of the time to read ends a request's context as well.
	require.Zero(t, Server{Local: true}.server().ReadTimeout)
	require.Zero(t, Server{Local: true}.server().WriteTimeout)
}

func TestConnectionsAreForgotten(t *testing.T) {
	c := newConnections(2)
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	c.changed(a, http.StateNew)
	c.changed(a, http.StateActive)
	c.changed(a, http.StateClosed)
	c.changed(b, http.StateActive) // it was closed for another one
	require.Empty(t, c.known)
	require.Zero(t, c.order.Len())
}
