// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// monitorSocket is the name of the abstract socket of QEMU's monitor, in the
// lab's network namespace. A socket in the state directory could have too long
// a path.
func (n *Node) monitorSocket() string { return n.Name() + "-monitor" }

// Monitor lets QEMU execute a command of its monitor protocol (QMP) for the
// node's machine, and returns the answer.
func (n *Node) Monitor(ctx context.Context, command string, arguments any) (json.RawMessage, error) {
	m, err := n.dialMonitor(ctx)
	if err != nil {
		return nil, err
	}
	defer m.close()
	return m.execute(command, arguments)
}

// monitor is a connection to the monitor of a node's machine. QEMU serves one
// at a time.
type monitor struct {
	ctx     context.Context
	name    string // of the node
	encoder *json.Encoder
	decoder *json.Decoder
	deleted map[string]bool // devices that QEMU has said are gone
	close   func()
}

// message is what QEMU says: a greeting, an answer or an event.
type message struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`
	Data  struct {
		Device string `json:"device"`
	} `json:"data"`
}

func (n *Node) dialMonitor(ctx context.Context) (*monitor, error) {
	conn, err := netns.DialContext(ctx, n.lab.network.path(), "unix", "@"+n.monitorSocket())
	if err != nil {
		return nil, fmt.Errorf("monitor of node %s: %w", n.Name(), err)
	}
	m, err := newMonitor(ctx, n.Name(), conn)
	if err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func newMonitor(ctx context.Context, name string, conn net.Conn) (*monitor, error) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	m := &monitor{
		ctx: ctx, name: name, encoder: json.NewEncoder(conn), decoder: json.NewDecoder(conn), deleted: map[string]bool{},
		close: func() { stop(); conn.Close() },
	}
	if _, err := m.read(); err != nil { // the greeting
		return m, err
	}
	_, err := m.execute("qmp_capabilities", nil)
	return m, err
}

func (m *monitor) read() (message, error) {
	var msg message
	if err := m.decoder.Decode(&msg); err != nil {
		return msg, fmt.Errorf("monitor of node %s: %w", m.name, errors.Join(m.ctx.Err(), err))
	}
	if msg.Event == "DEVICE_DELETED" {
		m.deleted[msg.Data.Device] = true
	}
	return msg, nil
}

func (m *monitor) execute(command string, arguments any) (json.RawMessage, error) {
	request := struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, arguments}
	if err := m.encoder.Encode(request); err != nil {
		return nil, fmt.Errorf("monitor of node %s: %s: %w", m.name, command, err)
	}
	for {
		msg, err := m.read()
		switch {
		case err != nil:
			return nil, err
		case msg.Error != nil:
			return nil, fmt.Errorf("monitor of node %s: %s: %s: %s", m.name, command, msg.Error.Class, msg.Error.Desc)
		case msg.Return != nil:
			return msg.Return, nil
		}
	}
}

// waitDeleted returns when QEMU has said that a device is gone.
func (m *monitor) waitDeleted(device string) error {
	for !m.deleted[device] {
		if _, err := m.read(); err != nil {
			return fmt.Errorf("device %s is not gone: %w", device, err)
		}
	}
	return nil
}
