// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/netns"
)

// testWriter passes the lab's progress on to the test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

func TestLab(t *testing.T) {
	if !slices.Contains(strings.Split(os.Getenv("NETWORKDRIVER_REQUIRE"), ","), "lab") {
		t.Skip("boots virtual machines, which takes minutes: set NETWORKDRIVER_REQUIRE=lab")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Minute)
	defer cancel()
	opts := Options{BuildOptions: BuildOptions{Progress: testWriter{t}}, NodeOptions: NodeOptions{PFs: 2}, Nodes: 2, State: t.TempDir()}
	l, err := Up(ctx, opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range l.Nodes() {
				t.Logf("console of %s:\n%s", n.Name(), tail(n.ConsoleLog()))
			}
		}
		require.NoError(t, l.Down())
		requireNothingLeft(t, l)
	})
	require.Len(t, l.Nodes(), 2)
	require.Nil(t, l.Node("node3"))
	node1, node2 := l.Node("node1"), l.Node("node2")

	t.Run("second lab in the same directory", func(t *testing.T) {
		_, err := Up(ctx, opts)
		require.ErrorContains(t, err, "stop it first")
	})
	t.Run("exec", func(t *testing.T) { testExec(t, node1) })
	t.Run("files", func(t *testing.T) { testFiles(t, l, node1) })
	t.Run("daemons", func(t *testing.T) { testDaemons(t, node1) })
	t.Run("pods", func(t *testing.T) { testPods(t, l) })
	t.Run("VLANs of VFs", func(t *testing.T) { testVLANs(t, l, node1, node2) })
	t.Run("second PF", func(t *testing.T) { testSecondPF(t, node1) })
	t.Run("carrier", func(t *testing.T) { testCarrier(t, node1) })
	t.Run("unplug", func(t *testing.T) { testUnplug(t, node1) })
	t.Run("restarts", func(t *testing.T) { testRestarts(t, l, node1) })
	t.Run("destroy", func(t *testing.T) {
		require.NoError(t, node2.Destroy(ctx))
		require.Nil(t, l.Node("node2"))
		_, _, _, err := node2.Exec(ctx, "true")
		require.Error(t, err)
	})
	t.Run("processors", func(t *testing.T) {
		l.nodeOptions.CPUs = 2
		node, err := l.AddNode(ctx)
		require.NoError(t, err)
		out, err := node.Run(ctx, "nproc")
		require.NoError(t, err)
		require.Equal(t, "2", out)
	})
}

func requireNothingLeft(t *testing.T, l *Lab) {
	t.Helper()
	require.NoFileExists(t, netns.Path(l.network.Namespace))
	require.NoFileExists(t, l.recordPath())
	_, err := netlink.LinkByName(l.network.HostLink)
	require.ErrorAs(t, err, &netlink.LinkNotFoundError{})
}

func testExec(t *testing.T, n *Node) {
	stdout, stderr, code, err := n.Exec(t.Context(), "echo out; echo err >&2; exit 3")
	require.NoError(t, err)
	require.Equal(t, "out\n", stdout)
	require.Equal(t, "err\n", stderr)
	require.Equal(t, 3, code)

	_, _, code, err = n.Exec(t.Context(), "kill -9 $$")
	require.NoError(t, err)
	require.Equal(t, 128+9, code)

	out, err := n.Run(t.Context(), "head -c 3000000 /dev/zero | wc -c; cat /sys/class/net/"+Uplink+"/device/sriov_totalvfs")
	require.NoError(t, err)
	require.Equal(t, "3000000\n7", out)
	_, err = n.Run(t.Context(), "echo oops; false")
	require.ErrorContains(t, err, "oops")

	var big strings.Builder
	code, err = n.Stream(t.Context(), "tr a b", []byte(strings.Repeat("a", 1<<20)), &big, &big)
	require.NoError(t, err)
	require.Zero(t, code)
	require.Equal(t, strings.Repeat("b", 1<<20), big.String())

	// A script ends with its context, and with it what it started.
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if waitForOutput(t.Context(), n, "pgrep -f 'sleep 4711'") == nil {
			cancel()
		}
	}()
	_, _, _, err = n.Exec(ctx, "sleep 4711; true")
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, waitForOutput(t.Context(), n, "pgrep -fx 'sleep 4711' || echo gone"))
}

// waitForOutput returns when a script succeeds.
func waitForOutput(ctx context.Context, n *Node, script string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		_, err := n.Run(ctx, script)
		if err == nil {
			return nil
		}
		if wait(ctx, 200*time.Millisecond) != nil {
			return errors.Join(err, ctx.Err())
		}
	}
}

func testFiles(t *testing.T, l *Lab, n *Node) {
	require.NoError(t, n.WriteFile(t.Context(), "/opt/new/dir/f", []byte("one"), 0o640))
	data, err := n.ReadFile(t.Context(), "/opt/new/dir/f")
	require.NoError(t, err)
	require.Equal(t, "one", string(data))
	out, err := n.Run(t.Context(), "stat -c %a /opt/new/dir/f")
	require.NoError(t, err)
	require.Equal(t, "640", out)
	_, err = n.ReadFile(t.Context(), "/no/such/file")
	require.ErrorContains(t, err, "no such file")

	// A program in the shared directory can be replaced and is run as it is then.
	program := filepath.Join(l.ShareDir(), "program")
	for _, word := range []string{"first", "other"} {
		partial := program + ".partial"
		require.NoError(t, os.WriteFile(partial, []byte("#!/bin/sh\necho "+word+"\n"), 0o755))
		require.NoError(t, os.Rename(partial, program))
		out, err := n.Run(t.Context(), ShareDir+"/program")
		require.NoError(t, err)
		require.Equal(t, word, out)
	}
	_, _, code, err := n.Exec(t.Context(), "touch "+ShareDir+"/f")
	require.NoError(t, err)
	require.NotZero(t, code, "the shared directory is read-only")

	require.NoError(t, n.CopyFile(t.Context(), program, "/usr/local/bin/program"))
	out, err = n.Run(t.Context(), "program")
	require.NoError(t, err)
	require.Equal(t, "other", out)
}

func testDaemons(t *testing.T, n *Node) {
	ctx := t.Context()
	const script = `echo started $WORD; trap 'echo asked; exit 7' TERM; while :; do sleep 0.1; done`
	d := Daemon{Name: "d", Args: []string{"sh", "-c", script}, Env: []string{"WORD=hello"}}
	require.NoError(t, n.StartDaemon(ctx, d))
	require.ErrorContains(t, n.StartDaemon(ctx, d), "runs already")
	requireLog(t, n, "d", "started hello")
	state, err := n.Stop(ctx, "d")
	require.NoError(t, err)
	require.Equal(t, 7, state.Exit)
	requireLog(t, n, "d", "asked")

	// Again as it was, with the log going on.
	require.NoError(t, n.StartDaemon(ctx, Daemon{Name: "d"}))
	require.Eventually(t, func() bool {
		data, err := os.ReadFile(n.Log("d"))
		return err == nil && strings.Count(string(data), "started hello") == 2
	}, time.Minute, 50*time.Millisecond)
	state, err = n.Kill(ctx, "d")
	require.NoError(t, err)
	require.Equal(t, 128+9, state.Exit)
	state, err = n.Process(ctx, "d")
	require.NoError(t, err)
	require.False(t, state.Running)
	_, err = n.Process(ctx, "nobody")
	require.ErrorContains(t, err, "never started")
	require.ErrorContains(t, n.Start(ctx, "bad", "/no/such/program"), "no such file")
}

func requireLog(t *testing.T, n *Node, daemon, text string) {
	t.Helper()
	require.Eventually(t, func() bool {
		data, err := os.ReadFile(n.Log(daemon))
		return err == nil && strings.Contains(string(data), text)
	}, time.Minute, 50*time.Millisecond, "the log of %s says %q", daemon, text)
}

func testPods(t *testing.T, l *Lab) {
	client, err := l.Client()
	require.NoError(t, err)
	ips := map[string]string{}
	for _, n := range l.Nodes() {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "on-" + n.Name()},
			Spec:       corev1.PodSpec{NodeName: n.Name(), Containers: []corev1.Container{{Name: "c", Image: TestImage}}},
		}
		_, err = client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	for _, n := range l.Nodes() {
		require.Eventually(t, func() bool {
			p, err := client.CoreV1().Pods("default").Get(t.Context(), "on-"+n.Name(), metav1.GetOptions{})
			if err != nil || p.Status.Phase != corev1.PodRunning {
				return false
			}
			ips[n.Name()] = p.Status.PodIP
			return true
		}, 4*time.Minute, 200*time.Millisecond, "the pod on %s runs", n.Name())
	}
	// Pods have addresses of their node's range, and reach each other.
	require.True(t, strings.HasPrefix(ips["node1"], "10.244.1."), ips["node1"])
	require.True(t, strings.HasPrefix(ips["node2"], "10.244.2."), ips["node2"])
	_, err = l.Node("node1").Run(t.Context(), fmt.Sprintf(
		`nsenter -t $(pgrep -n -f 'sleep 1000000000$') -n ping -c1 -W20 %s && test -S /var/run/nri/nri.sock`, ips["node2"]))
	require.NoError(t, err)
}

func testVLANs(t *testing.T, l *Lab, nodes ...*Node) {
	ctx := t.Context()
	capture, err := l.CaptureUplinks()
	require.NoError(t, err)
	defer capture.Close()
	for i, n := range nodes {
		_, err := n.Run(ctx, fmt.Sprintf(`set -e
			echo 2 > /sys/class/net/%[1]s/device/sriov_numvfs
			until ip link show %[1]sv1 >/dev/null 2>&1; do sleep 0.1; done
			ip link set %[1]s vf 0 vlan 1001
			ip netns add vlan; ip link set %[1]sv0 netns vlan
			ip -n vlan addr add 192.0.2.%[2]d/24 dev %[1]sv0; ip -n vlan link set %[1]sv0 up
			until ip -n vlan link show %[1]sv0 | grep -q LOWER_UP; do sleep 0.1; done`, Uplink, i+1))
		require.NoError(t, err)
	}
	require.NoError(t, waitForOutput(ctx, nodes[0], "ip netns exec vlan ping -c1 -W5 192.0.2.2"))

	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	f, err := capture.WaitFor(limited, func(f Frame) bool {
		return f.Node == nodes[0].Name() && f.FromNode && f.EtherType == unix.ETH_P_IP && len(f.Payload) > 9 && f.Payload[9] == unix.IPPROTO_ICMP
	})
	require.NoError(t, err)
	require.True(t, f.Tagged)
	require.Equal(t, 1001, f.VLAN)

	// In another VLAN nothing answers.
	_, err = nodes[1].Run(ctx, "ip link set "+Uplink+" vf 0 vlan 1002")
	require.NoError(t, err)
	_, _, code, err := nodes[0].Exec(ctx, "ip netns exec vlan ping -c3 -W2 192.0.2.2")
	require.NoError(t, err)
	require.Equal(t, 1, code)
}

// makeVFs makes two VFs of a PF and returns when they have their names.
func makeVFs(t *testing.T, n *Node, pf string) {
	t.Helper()
	_, err := n.Run(t.Context(), fmt.Sprintf(`set -e
		echo 2 > /sys/class/net/%[1]s/device/sriov_numvfs
		until ip link show %[1]sv0 && ip link show %[1]sv1; do sleep 0.1; done >/dev/null 2>&1`, pf))
	require.NoError(t, err)
}

func testSecondPF(t *testing.T, n *Node) {
	makeVFs(t, n, Uplink2)
	out, err := n.Run(t.Context(), fmt.Sprintf(`cd /sys/class/net
		cat %[1]s/device/sriov_totalvfs %[2]s/device/sriov_totalvfs
		[ $(readlink -f %[2]s/device) = $(readlink -f %[2]sv1/device/physfn) ] && [ ! %[1]s/device -ef %[2]s/device ] && echo its own`,
		Uplink, Uplink2))
	require.NoError(t, err)
	require.Equal(t, "7\n7\nits own", out)
}

func testCarrier(t *testing.T, n *Node) {
	carrier := func(first, second string) {
		t.Helper()
		require.NoError(t, waitForOutput(t.Context(), n, fmt.Sprintf("[ $(cat /sys/class/net/%s/carrier)$(cat /sys/class/net/%s/carrier) = %s%s ]",
			Uplink, Uplink2, first, second)))
	}
	carrier("1", "1")
	require.NoError(t, n.SetCarrier(t.Context(), Uplink, false))
	carrier("0", "1")
	require.NoError(t, n.SetCarrier(t.Context(), Uplink2, false))
	carrier("0", "0")
	for _, pf := range []string{Uplink, Uplink2} {
		require.NoError(t, n.SetCarrier(t.Context(), pf, true))
	}
	carrier("1", "1")
}

// testUnplug takes a PF with VFs out of its slot and puts it back: without VFs, under its name and up.
func testUnplug(t *testing.T, n *Node) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	require.NoError(t, n.Unplug(ctx, Uplink2))
	links, err := n.Run(ctx, "ip -o link")
	require.NoError(t, err)
	require.NotContains(t, links, Uplink2)
	require.Contains(t, links, Uplink)
	require.ErrorContains(t, n.Unplug(ctx, Uplink2), "DeviceNotFound")

	require.NoError(t, n.Plug(ctx, Uplink2))
	require.NoError(t, waitForOutput(ctx, n, fmt.Sprintf("ip link show up %[1]s | grep -q LOWER_UP && [ $(cat /sys/class/net/%[1]s/device/sriov_numvfs) = 0 ]", Uplink2)))
	makeVFs(t, n, Uplink2)
}

func testRestarts(t *testing.T, l *Lab, n *Node) {
	ctx := t.Context()
	for _, name := range []string{Containerd, Kubelet} {
		require.NoError(t, n.Restart(ctx, name))
	}
	require.NoError(t, waitForOutput(ctx, n, "ctr --namespace k8s.io containers ls -q | grep ."))
	for _, restart := range []struct {
		name string
		do   func() error
	}{
		{"reboot", func() error { return n.Reboot(ctx) }},
		{"reset", func() error { return n.Reset(ctx) }},
		{"power", func() error { return errors.Join(n.PowerOff(), n.PowerOn(ctx)) }},
	} {
		before, err := n.BootID(ctx)
		require.NoError(t, err, restart.name)
		_, err = n.Run(ctx, "date > /root/kept; sync; touch /run/lost")
		require.NoError(t, err, restart.name)
		require.NoError(t, restart.do(), restart.name)
		after, err := n.BootID(ctx)
		require.NoError(t, err, restart.name)
		require.NotEqual(t, before, after, restart.name)
		_, err = n.Run(ctx, "test -s /root/kept && test ! -e /run/lost && ip link show "+Uplink)
		require.NoError(t, err, restart.name)
	}
	// Another program finds the lab and acts on it.
	opened, err := Open(Options{State: l.StateDir()})
	require.NoError(t, err)
	out, err := opened.Node(n.Name()).Run(ctx, "hostname")
	require.NoError(t, err)
	require.Equal(t, n.Name(), out)
}
