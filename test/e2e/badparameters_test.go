// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// TestNodeConfigNotMet: what only the node can know is in the config's condition, with the field, the limit and the
// reason, while the rest of the configuration is at work. The agent lives and does not try hard again and again.
func TestNodeConfigNotMet(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	m := e.mark(n, deploy.Agent)
	spec := mixedSpec(2)
	spec.DeviceManagerConfigs.SRIOV.Ifaces = []v2alpha1.SRIOVDeviceConfig{
		{IfName: "ens9f9", VfCount: 2},
		{IfName: "mgmt0", VfCount: 2},
		{IfName: lab.Uplink, VfCount: 200},
	}
	e.configure(e.node.Name(), spec)
	limit := e.onNode(n, "cat /sys/class/net/"+lab.Uplink+"/device/sriov_totalvfs")
	e.degraded(e.node.Name(),
		"sriov.ifaces[0].ifName: PF ens9f9: the node has no interface of this name",
		"sriov.ifaces[1].ifName: PF mgmt0: the interface is no SR-IOV physical function",
		fmt.Sprintf("sriov.ifaces[2].vfCount: PF %s: 200 VFs are wanted, it supports at most %s (sriov_totalvfs)", lab.Uplink, limit))
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	e.waitDevices(e.node.Name(), "fast-net", 2)
	busy, since := e.cpuTime(n), time.Now()

	e.class("vf", "sriov-pool")
	e.template("vf", []resourceapi.DeviceRequest{e.request("net", "vf")}, config(`{"vlan": 1001, "podIfName": "vf0"}`))
	e.class("dummy", "fast-net")
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "dum0"}`))
	e.pod("vf", e.node.Name(), "vf")
	e.pod("dummy", e.node.Name(), "dummy")
	e.running("vf", "dummy")
	used := e.cpuTime(n) - busy
	require.Less(e, used, time.Since(since)/3, "the agent is busy")
	require.Len(e, e.matching(m, "SR-IOV configuration cannot be met"), 3, "each problem is logged once")

	// Another number than the PF has: the VFs, some of them in use, are left alone.
	more := mixedSpec(2)
	more.DeviceManagerConfigs.SRIOV.Ifaces[0].VfCount = vfCount + 2
	for range 2 {
		e.configure(e.node.Name(), more)
		e.degraded(e.node.Name(), fmt.Sprintf("sriov.ifaces[0].vfCount: PF %s: %d VFs are wanted and it has %d", lab.Uplink, vfCount+2, vfCount))
		require.Equal(e, strconv.Itoa(vfCount), e.onNode(n, "cat "+numVFs))
		require.Empty(e, e.hasInterface("vf", "vf0"))
		require.Len(e, e.allocations(n), 2)
		e.stopAgent(n)
		e.startAgent(n)
		require.Len(e, e.allocations(n), 2)
	}

	// A configuration that can be met ends the condition.
	e.configure(e.node.Name(), mixedSpec(2))
	e.eventually("node config", func() string {
		if c := meta.FindStatusCondition(e.configStatus(e.node.Name()).Conditions, v2alpha1.ConditionDegraded); c == nil || c.Status != metav1.ConditionFalse {
			return fmt.Sprintf("is still degraded: %+v", c)
		}
		return ""
	})
	e.deletePods("vf", "dummy")
	e.noAllocations(n)
}

// degraded waits until the config's condition says all of the messages.
func (e *T) degraded(node string, messages ...string) {
	e.Helper()
	e.eventually("node config of "+node, func() string {
		c := meta.FindStatusCondition(e.configStatus(node).Conditions, v2alpha1.ConditionDegraded)
		if c == nil || c.Status != metav1.ConditionTrue {
			return fmt.Sprintf("is not degraded: %+v", c)
		}
		for _, message := range messages {
			if !strings.Contains(c.Message, message) {
				return fmt.Sprintf("does not say %q but %q", message, c.Message)
			}
		}
		return ""
	})
}

// cpuTime returns the CPU time that the node's agent has used.
func (e *T) cpuTime(n *lab.Node) time.Duration {
	e.Helper()
	state, err := n.Process(e.ctx, deploy.Agent)
	require.NoError(e, err)
	require.True(e, state.Running, "the agent has ended")
	// utime and stime of proc(5), in ticks of 10 ms.
	stat := strings.Fields(e.onNode(n, fmt.Sprintf("cat /proc/%d/stat", state.PID)))
	user, err := strconv.Atoi(stat[13])
	require.NoError(e, err)
	system, err := strconv.Atoi(stat[14])
	require.NoError(e, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

// TestBadParameters: parameters that cannot be met are refused before anything is touched, and the pod's event names
// the request and the field.
func TestBadParameters(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	type bad struct {
		class, parameters string
		says              []string
	}
	pods := map[string]bad{
		"unknown-field":  {"dummy", `{"vlna": 100}`, []string{`unknown field "vlna"`, "rdma, routes, vhost and vlan"}},
		"vlan-text":      {"vf", `{"vlan": "100"}`, []string{"vlan: ", "whole number"}},
		"vlan-fraction":  {"dummy", `{"vlan": 1.5}`, []string{"vlan: ", "whole number"}},
		"vlan-4095":      {"vf", `{"vlan": 4095}`, []string{"vlan: 4095 is not in 0..4094"}},
		"vlan-minus-1":   {"vf", `{"vlan": -1}`, []string{"vlan: -1 is not in 0..4094"}},
		"vlan-on-dummy":  {"dummy", `{"vlan": 100}`, []string{"vlan: a dummy link has no VLAN"}},
		"name-number":    {"dummy", `{"podIfName": 7}`, []string{"podIfName: ", "number"}},
		"name-empty":     {"dummy", `{"podIfName": ""}`, []string{"podIfName: must not be empty"}},
		"name-long":      {"dummy", `{"podIfName": "abcdefghijklmnop"}`, []string{"podIfName: ", "at most 15"}},
		"name-lo":        {"dummy", `{"podIfName": "lo"}`, []string{`podIfName: "lo" is taken in every pod`}},
		"name-eth0":      {"vf", `{"podIfName": "eth0"}`, []string{`podIfName: "eth0" is taken in every pod`}},
		"name-slash":     {"dummy", `{"podIfName": "a/b"}`, []string{`podIfName: "a/b" contains '/'`}},
		"name-dots":      {"dummy", `{"podIfName": ".."}`, []string{`podIfName: ".."`}},
		"name-and-space": {"dummy", `{"podIfName": "a b"}`, []string{`podIfName: "a b" contains ' '`}},
	}
	e.configure(e.node.Name(), mixedSpec(int32(len(pods)+4)))
	e.waitDevices(e.node.Name(), "sriov-pool", vfCount)
	e.waitDevices(e.node.Name(), "fast-net", len(pods)+4)
	e.class("vf", "sriov-pool")
	e.class("dummy", "fast-net")
	before := e.hostState(n)
	m := e.mark(n, deploy.Agent)

	for name, p := range pods {
		e.template(name, []resourceapi.DeviceRequest{e.request("net", p.class)}, config(p.parameters, "net"))
	}
	e.template("same-name", []resourceapi.DeviceRequest{e.request("left", "dummy"), e.request("right", "dummy")},
		config(`{"podIfName": "same0"}`))
	for name := range pods {
		e.pod(name, e.node.Name(), name)
	}
	e.pod("same-name", e.node.Name(), "same-name")
	for name, p := range pods {
		e.eventSays(name, append([]string{`request "net"`}, p.says...)...)
	}
	e.eventSays("same-name", `request "right": podIfName: "same0" is also the interface name of request "left"`)
	require.Empty(e, e.allocations(n))
	require.Empty(e, e.difference(n, before))
	require.Empty(e, e.matching(m, "Device prepared"))
	require.True(e, e.cpuTime(n) > 0, "the agent lives")

	// Kubelet need not try them again.
	e.deletePods(slices.Collect(maps.Keys(pods))...)
	e.deletePods("same-name")

	// Two claims of one pod with one name: the second is refused, and nothing of it is set up.
	for _, name := range []string{"first", "second"} {
		e.template(name, []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "same0"}`))
	}
	e.pod("two-claims", e.node.Name(), "first", "second")
	e.eventSays("two-claims", `request "net": podIfName: "same0" is also what request "net" of claim `+e.ns+`/two-claims`)
	require.LessOrEqual(e, len(e.allocations(n)), 1)

	e.cleanUp()
	require.Empty(e, e.difference(n, before))
}

// TestMisspeltDriver: parameters for a driver that none of the claim's devices has are no error to the API server. A pod that would
// be in another network without them is not started, and claim and pod say why; one that loses nothing starts, and is told too.
func TestMisspeltDriver(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.class("vf", "sriov-pool")
	before := e.hostState(n)
	misspelt := func(parameters string) resourceapi.DeviceClaimConfiguration {
		c := config(parameters, "net")
		c.Opaque.Driver = "networkdrivr.cilium.io"
		return c
	}
	requests := []resourceapi.DeviceRequest{e.request("net", "vf")}
	e.template("misspelt", requests, config(`{"podIfName": "net1"}`), misspelt(`{"vlan": 100}`))
	e.template("harmless", requests, config(`{"vlan": 100}`), misspelt(`{"vlan": 200}`))
	refused := e.pod("misspelt", n.Name(), "misspelt")
	e.pod("harmless", n.Name(), "harmless")

	const says = `parameters for driver "networkdrivr.cilium.io", which none of the claim's devices has`
	e.eventSays("misspelt", `request "net": `+says, "correct the name")
	e.running("harmless")
	e.eventSays("harmless", "ParametersIgnored", says+": they are ignored")
	e.eventually("event of the claim", func() string {
		events, err := e.Client.CoreV1().Events(e.ns).List(e.ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=ResourceClaim,reason=ParametersIgnored"})
		require.NoError(e, err)
		for _, event := range events.Items {
			if strings.HasPrefix(event.InvolvedObject.Name, refused.Name) && strings.Contains(event.Message, says) {
				return ""
			}
		}
		return fmt.Sprintf("none among %d", len(events.Items))
	})
	require.Len(e, e.allocations(n), 1, "nothing of the claim is set up")

	e.deletePods("misspelt", "harmless")
	e.cleanUp()
	require.Empty(e, e.difference(n, before))
}
