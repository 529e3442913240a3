// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"net"
	"sync"
	"sync/atomic"
)

// watchedConn tells when the connection ends, which the stub does not before it is configured.
type watchedConn struct {
	net.Conn
	once    sync.Once
	ended   chan struct{} // closed when the connection cannot be read any more
	written atomic.Bool   // the registration has been sent
}

func watch(conn net.Conn) *watchedConn {
	return &watchedConn{Conn: conn, ended: make(chan struct{})}
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.once.Do(func() { close(c.ended) })
	}
	return n, err
}

func (c *watchedConn) Write(b []byte) (int, error) {
	c.written.Store(true)
	return c.Conn.Write(b)
}
