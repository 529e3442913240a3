// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab/internal/netns"
	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

func TestNetwork(t *testing.T) {
	testenv.Privileged(t)
	n, err := createNetwork(t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.delete()) })

	require.NoError(t, n.addTap("uplink1", uplinkBridge))
	require.NoError(t, n.addTap("uplink1", uplinkBridge), "again, after the machine was off")
	require.NoError(t, n.routeTo("10.244.1.0/24", "10.88.0.11"))
	inside, err := n.handle()
	require.NoError(t, err)
	defer inside.Close()
	bridge, err := inside.LinkByName(uplinkBridge)
	require.NoError(t, err)
	tap, err := inside.LinkByName("uplink1")
	require.NoError(t, err)
	require.Equal(t, bridge.Attrs().Index, tap.Attrs().MasterIndex)
	require.Equal(t, uplinkMTU, tap.Attrs().MTU)
	_, err = netlink.LinkByName("uplink1")
	require.ErrorAs(t, err, &netlink.LinkNotFoundError{}, "the host has no such link")

	// The host reaches a server in the namespace, and so does a program that
	// dials from within.
	var listener net.Listener
	require.NoError(t, netns.Do(n.path(), func() (err error) {
		listener, err = net.Listen("tcp4", "0.0.0.0:0")
		return err
	}))
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	conn, err := net.Dial("tcp", net.JoinHostPort(n.Address, port))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	conn, err = netns.DialContext(t.Context(), n.path(), "tcp", net.JoinHostPort(managementAddress, port))
	require.NoError(t, err)
	require.NoError(t, conn.Close())

	// Another lab beside it has other names and addresses.
	other, err := createNetwork(t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.delete()) })
	require.NotEqual(t, n.Namespace, other.Namespace)
	require.NotEqual(t, n.Address, other.Address)

	require.NoError(t, n.deleteTap("uplink1"))
	require.NoError(t, n.deleteTap("uplink1"), "again")
}

// A lab whose program crashed is cleaned up by the next one in its directory;
// one that is up is not.
func TestRemainsOfACrash(t *testing.T) {
	testenv.Privileged(t)
	opts := Options{State: t.TempDir()}
	l := &Lab{state: opts.State, progress: newProgress(nil)}
	var err error
	l.network, err = createNetwork(l.state)
	require.NoError(t, err)
	spawner, err := proc.NewSpawner(l.network.path(), false)
	require.NoError(t, err)
	t.Cleanup(spawner.Close)
	node := l.newNode(1)
	machine, err := spawner.Start(proc.Command{Name: "machine", Args: []string{"/bin/sleep", "1000"}, Log: filepath.Join(l.state, "log")})
	require.NoError(t, err)
	l.processes.Set(node.Name(), machine)
	l.nodes = []*Node{node}
	require.NoError(t, l.save())

	require.ErrorContains(t, clearRemains(opts), "a lab is up")
	require.True(t, machine.Alive())
	require.NoError(t, machine.Stop(0))
	require.NoError(t, clearRemains(opts))
	requireNothingLeft(t, l)
	require.NoError(t, clearRemains(opts), "when nothing remains")
}
