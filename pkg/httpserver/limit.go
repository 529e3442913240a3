// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package httpserver

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// connections bounds how many connections a server has. When there is one too many, the one goes that nothing has
// happened on for longest: who only holds connections loses them, and keeps nobody out.
type connections struct {
	max int

	mu sync.Mutex // guards the fields below
	// order has connections by their last change of state, the oldest first.
	order list.List
	known map[net.Conn]*list.Element
}

func newConnections(most int) *connections {
	return &connections{max: most, known: map[net.Conn]*list.Element{}}
}

// changed is the server's [http.Server.ConnState].
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	if victim := c.note(conn, state); victim != nil {
		_ = victim.Close() // it is of no use either way
	}
}

// note returns the connection that has to go.
func (c *connections) note(conn net.Conn, state http.ConnState) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	element := c.known[conn]
	switch {
	case state == http.StateClosed || state == http.StateHijacked:
		if element != nil {
			c.forget(element)
		}
		return nil
	case element != nil:
		c.order.MoveToBack(element)
		return nil
	case state != http.StateNew:
		return nil // it was closed for another one
	}
	c.known[conn] = c.order.PushBack(conn)
	if c.order.Len() <= c.max {
		return nil
	}
	oldest := c.order.Front()
	c.forget(oldest)
	return oldest.Value.(net.Conn)
}

func (c *connections) forget(element *list.Element) {
	c.order.Remove(element)
	delete(c.known, element.Value.(net.Conn))
}
