// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"bufio"
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// qemu plays QEMU's part on a monitor's connection: it says the greeting, after each request what is for it, and then
// it hangs up.
func qemu(t *testing.T, answers ...string) (conn net.Conn, requests chan string) {
	t.Helper()
	conn, far := net.Pipe()
	t.Cleanup(func() { far.Close() })
	requests = make(chan string, len(answers))
	go func() {
		defer far.Close()
		_, _ = far.Write([]byte(`{"QMP": {"version": {}, "capabilities": []}}`))
		lines := bufio.NewReader(far)
		for _, answer := range answers {
			request, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			requests <- request
			_, _ = far.Write([]byte(answer))
		}
	}()
	return conn, requests
}

func TestMonitor(t *testing.T) {
	conn, requests := qemu(t,
		`{"return": {}}`,
		`{"event": "NIC_RX_FILTER_CHANGED", "data": {"name": "pf1"}} {"return": {"a": 1}}`,
		`{"error": {"class": "DeviceNotFound", "desc": "no pf9"}}`,
	)
	m, err := newMonitor(t.Context(), "node1", conn)
	require.NoError(t, err)
	defer m.close()
	require.JSONEq(t, `{"execute": "qmp_capabilities"}`, <-requests)
	answer, err := m.execute("set_link", map[string]any{"name": "pf1", "up": false})
	require.NoError(t, err)
	require.JSONEq(t, `{"a": 1}`, string(answer))
	require.JSONEq(t, `{"execute": "set_link", "arguments": {"name": "pf1", "up": false}}`, <-requests)
	_, err = m.execute("device_del", map[string]any{"id": "pf9"})
	require.EqualError(t, err, "monitor of node node1: device_del: DeviceNotFound: no pf9")
}

// A device may be gone before QEMU has answered that it will be, or after; its parts go first.
func TestMonitorWaitsForDeletion(t *testing.T) {
	const parts = `{"event": "DEVICE_DELETED", "data": {"path": "/machine/x"}}`
	const gone = `{"event": "DEVICE_DELETED", "data": {"device": "pf1", "path": "/machine/peripheral/pf1"}}`
	for _, answer := range []string{parts + gone + `{"return": {}}`, `{"return": {}}` + parts + gone} {
		conn, _ := qemu(t, `{"return": {}}`, answer)
		m, err := newMonitor(t.Context(), "node1", conn)
		require.NoError(t, err)
		_, err = m.execute("device_del", map[string]any{"id": "pf1"})
		require.NoError(t, err)
		require.NoError(t, m.waitDeleted("pf1"))
		m.close()
	}
}

func TestMonitorEndsWithContext(t *testing.T) {
	conn, requests := qemu(t, `{"return": {}}`, `{"return": {}}`, "there is no third request")
	ctx, cancel := context.WithCancel(t.Context())
	m, err := newMonitor(ctx, "node1", conn)
	require.NoError(t, err)
	defer m.close()
	_, err = m.execute("device_del", map[string]any{"id": "pf1"})
	require.NoError(t, err)
	<-requests
	cancel()
	require.ErrorIs(t, m.waitDeleted("pf1"), context.Canceled)
}

func TestPFs(t *testing.T) {
	l := &Lab{nodeOptions: NodeOptions{PFs: 2}}
	n := l.newNode(3)
	require.Len(t, n.pfs(), 2)
	second, err := n.pf(Uplink2)
	require.NoError(t, err)
	require.Equal(t, "igb,id=pf2,bus=port2,netdev=uplink2,mac=52:54:00:00:02:03", second.nic().String())
	require.Equal(t, map[string]string{"52:54:00:00:01:03": Uplink, "52:54:00:00:02:03": Uplink2}, n.config().Uplinks)

	l.nodeOptions.PFs = 1
	require.Len(t, n.pfs(), 1)
	require.EqualError(t, n.SetCarrier(t.Context(), Uplink2, false), "node node3 has no PF ens2f0")
}
