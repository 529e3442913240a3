// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/lab"
)

// metric returns the value of the agent's metric for a pod; false if there is no such series.
func (e *T) metric(n *lab.Node, name, pod string) (float64, bool) {
	e.Helper()
	for line := range strings.Lines(e.onNode(n, `bash -c 'exec 3<>/dev/tcp/127.0.0.1/9962 && printf "GET /metrics HTTP/1.0\r\n\r\n" >&3 && cat <&3'`)) {
		if strings.HasPrefix(line, name+"{") && strings.Contains(line, `namespace="`+e.ns+`"`) && strings.Contains(line, `pod="`+pod+`"`) {
			value, err := strconv.ParseFloat(strings.Fields(line)[1], 64)
			require.NoError(e, err, line)
			return value, true
		}
	}
	return 0, false
}

// TestCounters: what two pods have sent each other is in the metrics of both of their VFs, with their names. A VF that a program drives has
// no series, since the PF's driver keeps no counters, and the NodeConfig says so.
func TestCounters(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.class("vf", "sriov-pool")
	before := e.hostState(n)
	e.vlanTemplate("counted", "vf", 1001)
	ips := map[string]string{"a": "10.78.0.1", "b": "10.78.0.2"}
	for pod := range ips {
		e.pod(pod, n.Name(), "counted")
	}
	e.running("a", "b")
	for pod, ip := range ips {
		e.address(pod, ip)
	}
	e.reaches("a", ips["b"])

	const (
		received = "cilium_networkdriver_device_receive_bytes_total"
		sent     = "cilium_networkdriver_device_transmit_bytes_total"
		pings    = 500
		frame    = 14 + 20 + 8 + 1400 // Ethernet, IPv4, ICMP, data
	)
	read := func(name, pod string) float64 {
		value, found := e.metric(n, name, pod)
		require.True(e, found, "%s of pod %s", name, pod)
		return value
	}
	names := map[string]string{"received": received, "sent": sent}
	start := map[string]float64{}
	for pod := range ips {
		for direction, name := range names {
			start[pod+direction] = read(name, pod)
		}
	}
	out := e.mustInPod("a", fmt.Sprintf("ping -q -c %d -i 0.01 -s 1400 %s", pings, ips["b"]))
	require.Contains(e, out, fmt.Sprintf("%d packets transmitted, %d", pings, pings), "all of them are answered")
	for pod := range ips {
		for direction, name := range names {
			bytes := 0.
			e.eventually("counter of what was "+direction, func() string { // the agent tells what it has read in the last 5 seconds
				if bytes = read(name, pod) - start[pod+direction]; bytes < 0.98*pings*frame {
					return fmt.Sprintf("%.0f bytes", bytes)
				}
				return ""
			})
			t.Logf("pod %s has %s %.0f bytes in %d frames of %d", pod, direction, bytes, pings, frame)
			require.InEpsilon(e, pings*frame, bytes, 0.02, "pod %s, %s", pod, direction)
		}
	}

	e.deletePods("a", "b")
	e.cleanUp()
	require.Empty(e, e.difference(n, before))
}

// TestNoCounters: the kernel tells zeros of VFs whose PF keeps no counters, as igb does. A VF that a program drives has no series then, and
// the NodeConfig names the PF.
func TestNoCounters(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.class("vf", "sriov-pool")
	before := e.hostState(n)
	e.vfioTemplate("driven", "vf", 1001)
	e.pod("driven", n.Name(), "driven")
	e.running("driven")
	e.eventually("NodeConfig names the PF", func() string {
		_, found := e.metric(n, "cilium_networkdriver_device_receive_bytes_total", "driven")
		require.False(e, found, "a series of what nobody counts")
		object, err := e.Dynamic.Resource(nodeConfigs).Get(e.ctx, n.Name(), metav1.GetOptions{})
		require.NoError(e, err)
		status, _ := object.Object["status"].(map[string]any)
		if fmt.Sprint(status["withoutCounters"]) == fmt.Sprint([]any{lab.Uplink}) {
			return ""
		}
		return fmt.Sprint("withoutCounters is ", status["withoutCounters"])
	})
	e.deletePods("driven")
	e.cleanUp()
	require.Empty(e, e.difference(n, before))
}
