// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/test/lab"
)

// privilege is something that the chart gives the agent.
type privilege struct {
	name string
	drop func(*corev1.PodSpec)
	// log is what the agent says without it. With pod it says nothing before it has something to do, and the event of a
	// pod with a claim says this.
	log, pod string
	// journal says that without it the journal is in the agent's own volume, as what the gate hook reads is, so that the next
	// agent would not know what to give back.
	journal bool
	// template is that of the pod's claim, if it is not the one with a VLAN.
	template string
}

// privileges are all that the chart gives the agent, but for NET_RAW, SYS_PTRACE and the host's process ids: without the latter it
// does not find a namespace that only a process of another user holds; the chart's TestCapabilities has these.
var privileges = []privilege{
	{name: "kube-api-access", drop: mount("kube-api-access"), log: `serviceaccount/token: no such file`},
	{name: "config", drop: mount("config"), log: `/etc/cilium-network-driver.*no such file`},
	{name: "run", drop: mount("run"), log: `/cilium.*read-only file system`},
	{name: "kubelet-plugins", drop: mount("kubelet-plugins"), log: `/plugins.*read-only file system`},
	{name: "kubelet-registry", drop: mount("kubelet-registry"), log: `plugins_registry.*(read-only file system|no such file)`},
	{name: "nri", drop: mount("nri"), log: `NRI socket .* does not exist`},
	{name: "cdi", drop: mount("cdi"), pod: `what the pod is to read about its devices: .*read-only file system`},
	{name: "journal", drop: mount("journal"), pod: `the devices of the claim with uid .* are in no pod`, journal: true},
	{name: "gate-hook", drop: mount("gate-hook"), log: `gate hook is not in place.*/networkdriver-hook: no such file`},
	{name: "netns", drop: mount("netns"), pod: `network namespace .* of the pod is gone`},
	{name: "sys-devices", drop: mount("sys-devices"), log: `PF ens1f0: the node has no interface of this name`},
	{name: "sys-bus-pci", drop: mount("sys-bus-pci"), log: `/host/sys/bus/pci.*no such file`},
	{name: "sys-class-net", drop: mount("sys-class-net"), log: `PF ens1f0: the node has no interface of this name`},
	{name: "proc-sys-net", drop: mount("proc-sys-net"), pod: `set interface .*: .*read-only file system`, template: "storage"},
	{name: "host-network", drop: func(s *corev1.PodSpec) { s.HostNetwork = false }, pod: `set up VF .*: no such device`},
	{name: "root", drop: func(s *corev1.PodSpec) { s.SecurityContext.RunAsUser = ptr.To[int64](65532) }, log: `needed is a directory of user 65532`},
	{name: "net-admin", drop: capability("NET_ADMIN"), pod: `operation not permitted`},
	{name: "sys-admin", drop: capability("SYS_ADMIN"), pod: `operation not permitted`},
}

func mount(name string) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		c := &s.Containers[0]
		c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
		s.Volumes = slices.DeleteFunc(s.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	}
}

func capability(name corev1.Capability) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		all := s.Containers[0].SecurityContext.Capabilities
		all.Add = slices.DeleteFunc(all.Add, func(c corev1.Capability) bool { return c == name })
	}
}

// dropPrivileges runs the agent of the chart without each of its privileges in turn, so that none is there without need.
func (e *T) dropPrivileges() {
	e.offerOnBoth()
	e.user("kubectl apply -f examples/networks.yaml")
	e.atEnd(func() { e.user("kubectl delete -f examples/networks.yaml --ignore-not-found") })
	set, err := e.Client.AppsV1().DaemonSets("kube-system").Get(e.ctx, "cilium-network-driver", metav1.GetOptions{})
	require.NoError(e, err)
	template := set.Spec.Template
	for _, v := range template.Spec.Containers[0].VolumeMounts {
		tried := slices.ContainsFunc(privileges, func(p privilege) bool { return p.name == v.Name })
		require.True(e, tried, "mount %s is not tried", v.Name)
	}
	e.user(`helm upgrade network-driver ./install/helm/cilium-network-driver -n kube-system --reuse-values --set agent.nodeSelector.none=here
kubectl -n kube-system wait pod -l app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent --for=delete --timeout=3m`)
	nodes := make(chan *lab.Node, len(e.nodes))
	for _, n := range e.nodes {
		nodes <- n
	}
	e.Run("each", func(t *testing.T) {
		for _, p := range privileges {
			t.Run(p.name, func(t *testing.T) {
				t.Parallel()
				n := <-nodes
				defer func() { nodes <- n }()
				s := *e
				s.T, s.ctx, s.node = t, t.Context(), n
				s.runWithout(p, template)
			})
		}
	})
	e.user(install + `
kubectl wait pods --all --for=delete --timeout=3m
kubectl wait ndnc --all --for=jsonpath='{.status.allocatedDevices}'=0 --timeout=3m`)
}

// runWithout runs the agent on a node without a privilege until it has said what it lacks.
func (e *T) runWithout(p privilege, template corev1.PodTemplateSpec) {
	agents := e.Client.CoreV1().Pods("kube-system")
	spec := *template.Spec.DeepCopy()
	spec.NodeName = e.node.Name()
	spec.TerminationGracePeriodSeconds = ptr.To[int64](5)
	// A kubelet refuses a pod for good whose port it still has down for the last one, though that is gone from the API. On
	// the host's network the agent listens without it.
	spec.Containers[0].Ports = nil
	spec.InitContainers = nil // what they install is there
	p.drop(&spec)
	pod, err := agents.Create(e.ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "agent-without-" + p.name}, Spec: spec}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.atEnd(func() {
		require.NoError(e, agents.Delete(e.ctx, pod.Name, metav1.DeleteOptions{}))
		e.user("kubectl -n kube-system wait pod/" + pod.Name + " --for=delete --timeout=3m")
	})
	// Where the runtime writes it, which costs the node less than to ask the kubelet, and has all starts of the container.
	log := func() string {
		return e.onNode(e.node, "cat /var/log/pods/kube-system_"+pod.Name+"_*/*/*.log 2>/dev/null || true")
	}
	says := func(text, pattern string) string {
		if regexp.MustCompile(pattern).MatchString(text) {
			return ""
		}
		return fmt.Sprintf("does not match %q: %s", pattern, text)
	}
	if p.log != "" {
		e.eventually("log of the agent without "+p.name, func() string { return says(log(), p.log) })
		return
	}
	e.eventually("log of the agent without "+p.name, func() string { return says(log(), "Registered with kubelet") })
	user := "without-" + p.name
	object := e.podObject(user, e.node.Name())
	object.Spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	object.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimTemplateName: ptr.To(cmp.Or(p.template, "sriov-vlan1001"))}}
	object.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	_, err = e.Client.CoreV1().Pods(e.ns).Create(e.ctx, object, metav1.CreateOptions{})
	require.NoError(e, err)
	e.eventually("event of the pod", func() string { return says(strings.Join(e.events(user), "\n"), p.pod) })
	if p.journal {
		e.deletePods(user)
		return
	}
	// The pod and its claim stay until an agent that can has freed the device.
	require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, user, metav1.DeleteOptions{}))
}
