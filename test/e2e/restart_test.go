// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// onePodEach starts a pod with a VF and one with a dummy on the node.
func (e *T) onePodEach(n *lab.Node) {
	e.Helper()
	e.offerBoth(n)
	e.pod("vf", n.Name(), "vf")
	e.pod("dummy", n.Name(), "dummy")
	e.running("vf", "dummy")
}

// offerBoth has the node offer four VFs and three dummies, with a class and a template for each kind.
func (e *T) offerBoth(n *lab.Node) {
	e.Helper()
	e.configure(n.Name(), mixedSpec(3))
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.waitDevices(n.Name(), "fast-net", 3)
	e.class("vf", "sriov-pool")
	e.class("dummy", "fast-net")
	e.template("vf", []resourceapi.DeviceRequest{e.request("net", "vf")}, config(`{"vlan": 1001, "podIfName": "vf0"}`))
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "dum0"}`))
}

// prepared is everything that the driver keeps and has set up on a node.
type prepared struct {
	Rows []allocation
	Host hostState
	Pods map[string]string
}

func (e *T) prepared(n *lab.Node, interfaces map[string]string) prepared {
	e.Helper()
	p := prepared{Rows: e.allocations(n), Host: e.hostState(n), Pods: map[string]string{}}
	for pod, name := range interfaces {
		p.Pods[pod] = e.mustInPod(pod, "ip -o -d link show "+name)
	}
	return p
}

// TestAgentRestart restarts the agent under running pods, asked and killed: what it knew is there again, nothing is
// set up a second time, and the pods' devices are given back properly later.
func TestAgentRestart(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.onePodEach(n)
	interfaces := map[string]string{"vf": "vf0", "dummy": "dum0"}
	before := e.prepared(n, interfaces)
	require.Len(e, before.Rows, 2)
	for _, row := range before.Rows {
		require.NotNil(e, row.Attachment, "%+v", row)
	}

	for _, end := range []func(*lab.Node){e.stopAgent, e.killAgent} {
		m := e.mark(n, deploy.Agent)
		changes := e.watchLinks(n)
		end(n)
		e.startAgent(n)
		e.logSays(m, "Prepared devices restored", "devices=2")
		e.eventually("what is prepared", func() string { return cmp.Diff(before, e.prepared(n, interfaces)) })
		require.Empty(e, changes(), "links of the host changed")
		for _, again := range []string{"Device prepared", "Device attached", "Device freed"} {
			require.Empty(e, e.matching(m, again))
		}
	}

	e.deletePods("vf", "dummy")
	e.noAllocations(n)
}

// TestAgentDiesBeforeSandbox kills the agent between Prepare and the start of the pod's sandbox. Once it is back before
// the sandbox has started, so that it finds the restored row (containerd takes in no plugin while it makes a sandbox);
// once the sandbox has started without it, and the device is attached late. A container that lists the claim does not run
// without it, and neither does a pod that says that it needs the driver.
func TestAgentDiesBeforeSandbox(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.offerBoth(n)
	prepared := func(rows int) {
		e.eventually("allocation table", func() string {
			if got := len(e.allocations(n)); got != rows {
				return fmt.Sprintf("%d rows, want %d", got, rows)
			}
			return ""
		})
	}

	resume := e.holdSandboxes(n)
	e.pod("vf", n.Name(), "vf")
	prepared(1)
	e.killAgent(n)
	m := e.mark(n, deploy.Agent)
	require.NoError(e, e.StartAgent(e.ctx, n))
	e.logSays(m, "Prepared devices restored", "devices=1")
	resume()
	e.running("vf")
	e.eventually("VF", func() string { return e.hasInterface("vf", "vf0") })
	require.Empty(e, e.matching(m, "Device prepared"), "set up twice")

	e.logSays(m, "Registered with kubelet")
	resume = e.holdSandboxes(n)
	notListed := func(pod *corev1.Pod) { pod.Spec.Containers[0].Resources.Claims = nil }
	e.changedPod("dummy", n.Name(), "dummy", notListed)
	e.pod("gated", n.Name(), "dummy")
	e.changedPod("strict", n.Name(), "dummy", func(pod *corev1.Pod) {
		notListed(pod)
		pod.Annotations = map[string]string{"required-plugins.noderesource.dev": "[networkdriver]"}
	})
	prepared(4)
	// Kubelet has the answers too: what it asks again for would need the agent.
	e.eventually("kubelet's checkpoint", func() string {
		devices := strings.Fields(e.onNode(n, `grep -o 'DeviceName[^,]*dummy[0-9]*' /var/lib/kubelet/dra_manager_state | sort -u || true`))
		if len(devices) != 3 {
			return fmt.Sprint(devices)
		}
		return ""
	})
	e.killAgent(n)
	resume()
	e.running("dummy")
	require.NotEmpty(e, e.hasInterface("dummy", "dum0"), "without the agent there is nobody to move it")
	e.eventSays("strict", `required plugin "networkdriver" not present`)
	e.eventSays("gated", "unresolvable CDI device")
	e.neverStarted("gated")
	m = e.mark(n, deploy.Agent)
	e.startAgent(n)
	e.running("strict", "gated")
	for _, pod := range []string{"dummy", "strict", "gated"} {
		e.eventually(pod, func() string { return e.hasInterface(pod, "dum0") })
	}
	require.Len(e, e.matching(m, "Device attached", "interface=dum0"), 3)
	require.Empty(e, e.matching(m, "Device prepared"), "set up twice")

	e.deletePods("vf", "dummy", "gated", "strict")
	e.noAllocations(n)
}

// TestPodDeletedWhileAgentIsAway: the pod ends while nobody brings its devices home. When the agent is back they are.
func TestPodDeletedWhileAgentIsAway(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.onePodEach(n)
	e.killAgent(n)
	// With time to end: the API forgets a pod at once that has none, and its claim with the record.
	grace := int64(1)
	for _, pod := range []string{"vf", "dummy"} {
		require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, pod, metav1.DeleteOptions{GracePeriodSeconds: &grace}))
	}
	e.eventually("containers", func() string { return e.onNode(n, "ls /run/containerd/io.containerd.runtime.v2.task/k8s.io") })
	m := e.mark(n, deploy.Agent)
	e.startAgent(n)
	e.logSays(m, "Prepared devices restored", "devices=2")
	e.gone("vf", "dummy")
	e.noAllocations(n)
}

// TestPodDeletedByForceWhileAgentIsAway: the API forgets pod and claim at once, and with them the records. The node's
// journal tells what is to be given back, and as what.
func TestPodDeletedByForceWhileAgentIsAway(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.offerBoth(n)
	before := e.hostState(n)
	e.pod("vf", n.Name(), "vf")
	e.pod("dummy", n.Name(), "dummy")
	e.running("vf", "dummy")
	e.killAgent(n)
	now := int64(0)
	for _, pod := range []string{"vf", "dummy"} {
		require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, pod, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
	e.gone("vf", "dummy")
	e.eventually("containers", func() string { return e.onNode(n, "ls /run/containerd/io.containerd.runtime.v2.task/k8s.io") })
	e.startAgent(n)
	e.noAllocations(n)
	require.Empty(e, cmp.Diff(before, e.hostState(n)))
	require.Empty(e, e.onNode(n, "ls /run/cilium/networkdriver | grep json || true"))
}

// TestAgentStartsWithoutAPI starts the agent again while the node does not reach the API server. It serves from what the node
// keeps: it finds the devices in their pods, and brings one home whose sandbox ends. When the API server is back, the pod gets
// its new sandbox with its device, and what was deleted meanwhile is given back.
func TestAgentStartsWithoutAPI(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.offerBoth(n)
	always := func(pod *corev1.Pod) { pod.Spec.RestartPolicy = corev1.RestartPolicyAlways }
	e.changedPod("vf", n.Name(), "vf", always)
	e.pod("dummy", n.Name(), "dummy")
	e.running("vf", "dummy")
	attached := func(count int) {
		e.Helper()
		e.eventually("devices in pods", func() string {
			found := 0
			for _, row := range e.allocations(n) {
				if row.Attachment != nil {
					found++
				}
			}
			if found != count {
				return fmt.Sprintf("%d, want %d", found, count)
			}
			return ""
		})
	}
	attached(2)
	sandbox := e.allocationsOf("vf")[0].Attachment.SandboxID

	reconnect := e.cutFromAPI(n)
	m := e.mark(n, deploy.Agent)
	e.killAgent(n)
	require.NoError(e, e.StartAgent(e.ctx, n))
	e.logSays(m, "Running from the last node config", "generation=")
	e.logSays(m, "devices are restored from the node's journal alone", "devices=2")
	e.logSays(m, "Connected to the container runtime through NRI")
	attached(2)

	// Kubelet stops the sandbox, and cannot make the next one before it reads the claim.
	e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+sandbox)
	e.logSays(m, "Device is back from its pod", "sandbox="+sandbox)
	attached(1)
	now := int64(0)
	require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, "dummy", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	e.gone("dummy")

	reconnect()
	e.logSays(m, "Prepared devices restored")
	e.eventually("the VF in the pod's next sandbox", func() string {
		rows := e.allocations(n)
		if len(rows) != 1 || rows[0].Attachment == nil || rows[0].Attachment.SandboxID == sandbox {
			return fmt.Sprintf("%+v", rows)
		}
		return ""
	})
	e.running("vf")
	e.eventually("VF", func() string { return e.hasInterface("vf", "vf0") })
	require.Empty(e, e.matching(m, "Device prepared"), "set up twice")
	e.logSays(m, "Registered with kubelet")
	e.deletePods("vf")
	e.noAllocations(n)
}

// cutFromAPI keeps what runs on the node from the API server, until the function that it returns is called.
func (e *T) cutFromAPI(n *lab.Node) (reconnect func()) {
	e.Helper()
	const rule = `$(sed -n 's|.*server: https://\([0-9.]*\)$|to \1 ipproto tcp dport 443 unreachable|p' ` + lab.AdminKubeconfig + `)`
	e.onNode(n, "ip rule add "+rule)
	reconnect = func() {
		e.Helper()
		e.onNode(n, "ip rule del "+rule+" 2>/dev/null || true")
	}
	e.atEnd(reconnect)
	return reconnect
}

// gone waits until pods that have been deleted are gone.
func (e *T) gone(names ...string) {
	e.Helper()
	for _, name := range names {
		e.eventually("pod "+name, func() string {
			if _, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Sprintf("is not gone: %v", err)
			}
			return ""
		})
	}
}

// TestRuntimeRestart restarts containerd: the agent connects to it again, the devices stay in their pods, new pods get
// theirs, and all come home.
func TestRuntimeRestart(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.onePodEach(n)
	interfaces := map[string]string{"vf": "vf0", "dummy": "dum0"}
	before := e.prepared(n, interfaces)

	m := e.mark(n, deploy.Agent)
	require.NoError(e, n.Restart(e.ctx, lab.Containerd))
	e.logSays(m, "Connected to the container runtime through NRI")
	e.eventually("what is prepared", func() string { return cmp.Diff(before, e.prepared(n, interfaces)) })
	require.Empty(e, e.matching(m, "Device prepared"))
	require.Empty(e, e.matching(m, "Device attached"))

	e.pod("late", n.Name(), "vf")
	e.running("late")
	require.Empty(e, e.hasInterface("late", "vf0"))
	e.deletePods("vf", "dummy", "late")
	e.noAllocations(n)
}

// TestUnreadableRecord spoils the record of one device while the agent is away: the node's journal knows better, both
// devices are restored, and the record is mended.
func TestUnreadableRecord(t *testing.T) {
	e := start(t)
	n := e.node
	e.configure(e.node.Name(), dummySpec(2))
	e.waitDevices(e.node.Name(), "fast-net", 2)
	e.class("dummy", "fast-net")
	e.template("dummy", []resourceapi.DeviceRequest{e.request("net", "dummy")}, config(`{"podIfName": "dum0"}`))
	e.pod("bad", e.node.Name(), "dummy")
	e.pod("good", e.node.Name(), "dummy")
	e.running("bad", "good")
	bad := e.claimOf("bad")
	record := string(bad.Status.Devices[0].Data.Raw)
	rows := e.allocations(n)
	require.Len(e, rows, 2)

	e.killAgent(n)
	bad.Status.Devices[0].Data = &runtime.RawExtension{Raw: []byte(`{"version": "one"}`)}
	_, err := e.Client.ResourceV1().ResourceClaims(e.ns).UpdateStatus(e.ctx, bad, metav1.UpdateOptions{})
	require.NoError(e, err)
	link := e.mustInPod("bad", "ip -o link show dum0")

	m := e.mark(n, deploy.Agent)
	e.startAgent(n)
	e.logSays(m, "Prepared devices restored", "devices=2")
	e.eventually("record of "+bad.Name, func() string {
		return cmp.Diff(record, string(e.claimOf("bad").Status.Devices[0].Data.Raw))
	})
	require.Equal(e, link, e.mustInPod("bad", "ip -o link show dum0"))

	e.deletePods("bad", "good")
	e.noAllocations(n)
	// The device whose record was spoilt serves again.
	e.template("again", []resourceapi.DeviceRequest{named(e.request("net", "dummy"), bad.Status.Devices[0].Device)})
	e.pod("again", e.node.Name(), "again")
	e.running("again")
	e.deletePods("again")
}
