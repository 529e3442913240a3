// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// bareDir is where containers write down on the node that they started without their interface.
const bareDir = "/run/e2e-bare"

// witness makes a pod that is kept running, whose containers all list the claim and tell when they start without the
// interface.
func (e *T) witness(name string, claim corev1.PodResourceClaim, ifName string, change func(*corev1.Pod)) {
	e.Helper()
	pod := e.podObject(name, e.node.Name())
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{claim}
	pod.Spec.Volumes = []corev1.Volume{{Name: "bare", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: bareDir, Type: ptr.To(corev1.HostPathDirectoryOrCreate)},
	}}}
	app := &pod.Spec.Containers[0]
	app.Resources.Claims = []corev1.ResourceClaim{{Name: claim.Name}}
	app.VolumeMounts = []corev1.VolumeMount{{Name: "bare", MountPath: "/bare"}}
	app.Command = []string{"sh", "-c", fmt.Sprintf("ip link show dev %s || touch /bare/%s; exec sleep 1000000", ifName, name)}
	if change != nil {
		change(pod)
	}
	_, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
}

// noneBare asserts that no container has started without its interface.
func (e *T) noneBare() {
	e.Helper()
	require.Empty(e, e.onNode(e.node, "ls "+bareDir))
}

// seesBare shows that a container is noticed which starts without the interface: one of a pod that has no claim.
func (e *T) seesBare() {
	e.Helper()
	e.witness("bare", corev1.PodResourceClaim{Name: "none"}, "dum0", func(pod *corev1.Pod) {
		pod.Spec.ResourceClaims, pod.Spec.Containers[0].Resources.Claims = nil, nil
	})
	e.eventually(bareDir, func() string {
		if seen := e.onNode(e.node, "ls "+bareDir+" 2>/dev/null || true"); seen != "bare" {
			return fmt.Sprintf("has %q", seen)
		}
		return ""
	})
	e.deletePods("bare")
	e.onNode(e.node, "rm "+bareDir+"/bare")
}

// startedWith waits until the pod's container runs and has the interface. The pod is called Running before, as its containers
// have ended and are to be started again.
func (e *T) startedWith(pod, ifName string) {
	e.Helper()
	e.eventually("container of pod "+pod, func() string {
		object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
		require.NoError(e, err)
		if object.Status.ContainerStatuses[0].State.Running == nil {
			return "does not run: " + strings.Join(e.events(pod), " | ")
		}
		return e.hasInterface(pod, ifName)
	})
}

// beside adds a container like the pod's, before that.
func beside(edit func(*corev1.Container)) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		first := *pod.Spec.Containers[0].DeepCopy()
		first.Name = "first"
		edit(&first)
		pod.Spec.InitContainers = []corev1.Container{first}
	}
}

// TestSecondPodWhileAgentIsAway: the file that lets containers of a claim start is there for another pod, and nobody but
// the gate hook can tell. No container starts bare, of whatever kind it is, and each pod is told who has the device. When the
// agent is back and the first pod has gone, the next one gets it.
func TestSecondPodWhileAgentIsAway(t *testing.T) {
	e := start(t)
	n := e.node
	e.sharedClaim()
	e.seesBare()
	shared := corev1.PodResourceClaim{Name: "net", ResourceClaimName: ptr.To("shared")}
	e.witness("one", shared, "dum0", nil)
	e.running("one")
	require.Empty(e, e.hasInterface("one", "dum0"))
	require.NotEmpty(e, e.onNode(n, "grep -l "+deploy.HookPath+" /run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json"))

	e.killAgent(n)
	e.witness("two", shared, "dum0", nil)
	e.witness("init", shared, "dum0", beside(func(c *corev1.Container) {
		c.Command[2] = strings.Replace(c.Command[2], "exec sleep 1000000", "true", 1)
	}))
	e.witness("sidecar", shared, "dum0", beside(func(c *corev1.Container) { c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways) }))
	e.witness("never", shared, "dum0", func(pod *corev1.Pod) { pod.Spec.RestartPolicy = corev1.RestartPolicyNever })
	for _, pod := range []string{"two", "init", "sidecar", "never"} {
		e.eventSays(pod, "stderr: claim "+e.ns+"/shared is in use by pod "+e.ns+"/one,", "ResourceClaimTemplate", "Recreate")
	}
	// A pod that is not to be restarted has failed by that, and has not run.
	e.eventually("pod never", func() string {
		pod, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "never", metav1.GetOptions{})
		require.NoError(e, err)
		if pod.Status.Phase != corev1.PodFailed {
			return "is " + string(pod.Status.Phase)
		}
		ended := pod.Status.ContainerStatuses[0].State.Terminated
		require.NotNil(e, ended)
		require.EqualValues(e, 128, ended.ExitCode)
		return ""
	})
	e.noneBare()
	require.Empty(e, e.hasInterface("one", "dum0"))

	e.deletePods("init", "sidecar", "never")
	e.startAgent(n)
	e.eventSays("two", "ClaimInUse: claim "+e.ns+"/shared is in use by pod "+e.ns+"/one")
	e.deletePods("one")
	e.startedWith("two", "dum0")
	e.noneBare()
	e.deletePods("two")
	e.noAllocations(n)
	e.noGates(n)
}

// TestSandboxMadeAnewWhileAgentIsAway ends the sandbox of a pod, as a runtime may, when there is nobody to move the
// device into the next one. The pod's containers wait for the agent.
func TestSandboxMadeAnewWhileAgentIsAway(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.offerBoth(n)
	interfaces := map[string]string{"vf": "vf0", "dummy": "dum0"}
	for pod, name := range interfaces {
		e.witness(pod, corev1.PodResourceClaim{Name: "net", ResourceClaimTemplateName: ptr.To(pod)}, name, nil)
	}
	e.running("vf", "dummy")

	rows := e.allocations(n)
	e.Logf("namespaces: %s", e.onNode(n, "stat -Lc '%n %i' /run/netns/*"))
	e.killAgent(n)
	for _, row := range rows {
		e.onNode(n, fmt.Sprintf("kill -KILL $(cat /run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/init.pid)", row.Attachment.SandboxID))
	}
	for pod := range interfaces {
		claim := e.claimOf(pod).Name
		e.eventSays(pod, "stderr: claim "+e.ns+"/"+claim+" is in use by pod "+e.ns+"/"+pod+",", "made anew", "agent")
	}
	e.noneBare()
	e.Logf("namespaces now: %s", e.onNode(n, "stat -Lc '%n %i' /run/netns/*"))

	e.startAgent(n)
	for pod, name := range interfaces {
		e.startedWith(pod, name)
	}
	e.noneBare()
	e.deletePods("vf", "dummy")
	e.noAllocations(n)
	e.noGates(n)
}

// TestVFLostWhileAgentIsAway takes a VF from its pod, as a driver that is bound anew does, when there is nobody to put it back. A container
// that is started again waits for the agent, and says what has become of the device.
func TestVFLostWhileAgentIsAway(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.offerBoth(n)
	e.witness("vf", corev1.PodResourceClaim{Name: "net", ResourceClaimTemplateName: ptr.To("vf")}, "vf0", nil)
	e.running("vf")
	addr := pciAddr(e.allocationsOf("vf")[0].DeviceName)
	container := func() corev1.ContainerStatus {
		pod, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "vf", metav1.GetOptions{})
		require.NoError(e, err)
		return pod.Status.ContainerStatuses[0]
	}
	restart := func() {
		_, id, _ := strings.Cut(container().ContainerID, "://")
		e.onNode(n, fmt.Sprintf("kill -KILL $(cat /run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/init.pid)", id))
	}

	e.killAgent(n)
	restart()
	e.eventually("container of pod vf, which has lost nothing", func() string {
		if c := container(); c.RestartCount != 1 || c.State.Running == nil {
			return "was not started again: " + strings.Join(e.events("vf"), " | ")
		}
		return ""
	})

	e.bindVF(n, addr, "")
	e.atEnd(func() { e.bindVF(n, addr, "igbvf") })
	restart()
	e.eventSays("vf", "stderr: device "+addr+" of claim ", " is lost: the device has no driver;")
	e.bindVF(n, addr, "igbvf")
	e.eventSays("vf", "stderr: device "+addr+" of claim ", " is on the host")
	e.noneBare()

	e.startAgent(n)
	e.startedWith("vf", "vf0")
	e.noneBare()
	e.deletePods("vf")
	e.noAllocations(n)
	e.noGates(n)
}

// noGates waits until no file of a gate is left on the node.
func (e *T) noGates(n *lab.Node) {
	e.Helper()
	e.eventually("gates of "+n.Name(), func() string {
		return e.onNode(n, "ls -A /run/cilium/networkdriver/gates; ls /var/run/cdi | grep '"+driverName+"-claim' || true")
	})
}
