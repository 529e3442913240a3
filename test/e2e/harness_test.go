// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

const (
	driverName = v2alpha1.DefaultDriverName
	// patience is how long something may take that takes seconds on an idle machine.
	patience = 3 * time.Minute
	poll     = 200 * time.Millisecond
)

var nodeConfigs = schema.GroupVersionResource{
	Group: v2alpha1.GroupName, Version: "v2alpha1", Resource: v2alpha1.NodeConfigResource,
}

// T is one test with the cluster.
type T struct {
	*testing.T
	ctx context.Context
	*deploy.Cluster
	// nodes are those that the test has for itself, and node is the first of them.
	nodes []*lab.Node
	node  *lab.Node
	// ns is the namespace of the pods and claims of tests on node.
	ns string
}

// start begins a test on a node without node config, claims and pods, and checks at its end that it left it so.
func start(t *testing.T) *T {
	t.Helper()
	e := take(t)
	e.guard()
	return e
}

// startEverywhere is start on all nodes, for a test that runs alone.
func startEverywhere(t *testing.T) *T {
	t.Helper()
	if cluster == nil {
		t.Skip("no lab")
	}
	return on(t, cluster.Nodes()...)
}

// take waits for a node that no other test uses and takes it until the test's end.
func take(t *testing.T) *T {
	t.Helper()
	if cluster == nil {
		t.Skip("no lab")
	}
	t.Parallel()
	n := <-freeNodes
	t.Cleanup(func() { freeNodes <- n })
	return on(t, n)
}

func on(t *testing.T, nodes ...*lab.Node) *T {
	return &T{T: t, ctx: t.Context(), Cluster: cluster, nodes: nodes, node: nodes[0], ns: namespaceOf(nodes[0])}
}

// namespaceOf returns the namespace of the tests that run on a node.
func namespaceOf(n *lab.Node) string { return "e2e-" + n.Name() }

// guard remembers how the test's nodes are, and at its end cleans up and checks that they are so again.
func (e *T) guard() {
	e.Helper()
	before := map[string]hostState{}
	for _, n := range e.nodes {
		before[n.Name()] = e.hostState(n)
	}
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		e.ctx = ctx
		if e.Failed() {
			e.dump()
			e.requireAgents()
		}
		e.cleanUp()
		for _, n := range e.nodes {
			e.requireRestored(n, before[n.Name()])
		}
	})
}

// eventually waits until check returns an empty string, which otherwise says what is missing.
func (e *T) eventually(what string, check func() string) {
	e.Helper()
	deadline := time.Now().Add(patience)
	for {
		missing := check()
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			e.Fatalf("%s: %s", what, missing)
		}
		select {
		case <-time.After(poll):
		case <-e.ctx.Done():
			e.Fatalf("%s: %s: %v", what, missing, e.ctx.Err())
		}
	}
}

// configure gives a node a node config and waits until the agent has applied it.
func (e *T) configure(node string, spec v2alpha1.CiliumNetworkDriverNodeConfigSpec) {
	e.Helper()
	spec.Default()
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.NodeConfigKind},
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec:       spec,
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(config)
	require.NoError(e, err)
	delete(object, "status")
	applied, err := e.Dynamic.Resource(nodeConfigs).Apply(e.ctx, node, &unstructured.Unstructured{Object: object},
		metav1.ApplyOptions{FieldManager: "e2e", Force: true})
	require.NoError(e, err)
	e.eventually("node config of "+node, func() string {
		status := e.configStatus(node)
		if status.ObservedGeneration < applied.GetGeneration() {
			return fmt.Sprintf("generation %d is not applied: %+v", applied.GetGeneration(), status)
		}
		if !meta.IsStatusConditionTrue(status.Conditions, v2alpha1.ConditionReady) {
			return fmt.Sprintf("not ready: %+v", status.Conditions)
		}
		return ""
	})
}

func (e *T) configStatus(node string) v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	e.Helper()
	object, err := e.Dynamic.Resource(nodeConfigs).Get(e.ctx, node, metav1.GetOptions{})
	require.NoError(e, err)
	var config v2alpha1.CiliumNetworkDriverNodeConfig
	require.NoError(e, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &config))
	return config.Status
}

// slices returns the node's ResourceSlices.
func (e *T) slices(node string) []resourceapi.ResourceSlice {
	e.Helper()
	list, err := e.Client.ResourceV1().ResourceSlices().List(e.ctx, metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + node + ",spec.driver=" + driverName,
	})
	require.NoError(e, err)
	return list.Items
}

// waitDevices waits until the node advertises count devices in the pool.
func (e *T) waitDevices(node, pool string, count int) []resourceapi.ResourceSlice {
	e.Helper()
	var found []resourceapi.ResourceSlice
	e.eventually("slices of "+node, func() string {
		found = nil
		devices := 0
		for _, s := range e.slices(node) {
			if s.Spec.Pool.Name == node+"/"+pool {
				found = append(found, s)
				devices += len(s.Spec.Devices)
			}
		}
		if devices != count {
			return fmt.Sprintf("%d devices in pool %s, want %d", devices, pool, count)
		}
		return ""
	})
	return found
}

// className returns the name in the cluster of a device class of the test: tests on other nodes have their own.
func (e *T) className(name string) string { return e.node.Name() + "-" + name }

// class makes a device class for a pool, with parameters of the driver if given.
func (e *T) class(name, pool string, parameters ...string) {
	e.Helper()
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.className(name)},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf(`device.driver == %q && device.attributes[%q].pool == %q`, driverName, driverName, pool),
		}}}},
	}
	for _, p := range parameters {
		class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{
			DeviceConfiguration: opaque(p),
		})
	}
	_, err := e.Client.ResourceV1().DeviceClasses().Create(e.ctx, class, metav1.CreateOptions{})
	require.NoError(e, err)
}

func opaque(parameters string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
	}}
}

// request is a request for one device of a class.
func (e *T) request(name, class string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: e.className(class)}}
}

// named is the request for the one device whose attribute ifName has the value.
func named(r resourceapi.DeviceRequest, ifName string) resourceapi.DeviceRequest {
	r.Exactly.Selectors = append(r.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].ifName == %q", driverName, ifName),
	}})
	return r
}

// config is parameters for requests, for all of them if none is named.
func config(parameters string, requests ...string) resourceapi.DeviceClaimConfiguration {
	return resourceapi.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: opaque(parameters)}
}

// template makes a claim template.
func (e *T) template(name string, requests []resourceapi.DeviceRequest, configs ...resourceapi.DeviceClaimConfiguration) {
	e.Helper()
	_, err := e.Client.ResourceV1().ResourceClaimTemplates(e.ns).Create(e.ctx, &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: requests, Config: configs},
		}},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
}

// pod makes a privileged pod on a node (any, if empty) with a claim from each template, and does not wait for it.
func (e *T) pod(name, node string, templates ...string) *corev1.Pod {
	e.Helper()
	pod := e.podObject(name, node)
	for i, t := range templates {
		claim := fmt.Sprintf("claim%d", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{
			Name: claim, ResourceClaimTemplateName: ptr.To(t),
		})
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: claim})
	}
	created, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
	return created
}

// podObject is a privileged pod on a node (any, if empty) without claims.
func (e *T) podObject(name, node string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			RestartPolicy:                 corev1.RestartPolicyNever,
			Containers: []corev1.Container{{
				Name: "app", Image: lab.TestImage, ImagePullPolicy: corev1.PullIfNotPresent,
				Command:         []string{"sleep", "1000000"},
				SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)},
			}},
		},
	}
	if node != "" {
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
	return pod
}

// running waits until the pods run.
func (e *T) running(names ...string) {
	e.Helper()
	for _, name := range names {
		e.eventually("pod "+name, func() string {
			pod, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, name, metav1.GetOptions{})
			require.NoError(e, err)
			if pod.Status.Phase != corev1.PodRunning {
				return fmt.Sprintf("is %s, want Running; events: %s", pod.Status.Phase, strings.Join(e.events(name), " | "))
			}
			return ""
		})
	}
}

// events returns the messages of a pod's events, not of an earlier pod's of the same name.
func (e *T) events(pod string) []string {
	selector := "involvedObject.name=" + pod
	if p, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{}); err == nil {
		selector += ",involvedObject.uid=" + string(p.UID)
	}
	list, err := e.Client.CoreV1().Events(e.ns).List(e.ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return []string{err.Error()}
	}
	var messages []string
	for _, event := range list.Items {
		messages = append(messages, event.Reason+": "+event.Message)
	}
	return messages
}

// eventSays waits until an event of the pod contains all the words.
func (e *T) eventSays(pod string, words ...string) {
	e.Helper()
	e.eventually("event of pod "+pod, func() string {
		events := e.events(pod)
	next:
		for _, event := range events {
			for _, w := range words {
				if !strings.Contains(event, w) {
					continue next
				}
			}
			return ""
		}
		return fmt.Sprintf("none says %q: %s", words, strings.Join(events, " | "))
	})
}

// deletePods deletes pods and waits until they and the claims made for them are gone.
func (e *T) deletePods(names ...string) {
	e.Helper()
	for _, name := range names {
		err := e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, name, metav1.DeleteOptions{})
		require.True(e, err == nil || apierrors.IsNotFound(err), "delete pod %s: %v", name, err)
	}
	for _, name := range names {
		e.eventually("pod "+name, func() string {
			_, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return ""
			}
			return "is not gone"
		})
	}
}

// podNode returns the node that the pod is on.
func (e *T) podNode(name string) *lab.Node {
	e.Helper()
	pod, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, name, metav1.GetOptions{})
	require.NoError(e, err)
	return e.Node(pod.Spec.NodeName)
}

// inPod runs a script in the pod's container and returns its output and whether it succeeded. It costs the node much
// less than an exec by the runtime, which does nothing else.
func (e *T) inPod(pod, script string) (string, bool) {
	e.Helper()
	object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
	require.NoError(e, err)
	require.NotEmpty(e, object.Status.ContainerStatuses, "pod %s", pod)
	id, ok := strings.CutPrefix(object.Status.ContainerStatuses[0].ContainerID, "containerd://")
	require.True(e, ok, "container of pod %s: %+v", pod, object.Status.ContainerStatuses[0])
	quoted := strings.ReplaceAll(script, `'`, `'\''`)
	stdout, stderr, code, err := e.Node(object.Spec.NodeName).Exec(e.ctx,
		fmt.Sprintf(`nsenter -t $(cat /run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/init.pid) -m -n -p sh -c '%s'`, id, quoted))
	require.NoError(e, err)
	return strings.TrimSpace(stdout + stderr), code == 0
}

// mustInPod is inPod for a script that must succeed.
func (e *T) mustInPod(pod, script string) string {
	e.Helper()
	out, ok := e.inPod(pod, script)
	require.True(e, ok, "in pod %s: %s: %s", pod, script, out)
	return out
}

// hasInterface returns what is wrong with the pod's interface: nothing if it is there and up.
func (e *T) hasInterface(pod, name string) string {
	e.Helper()
	out, ok := e.inPod(pod, "ip -o link show up dev "+name+" | grep "+name)
	if !ok {
		return fmt.Sprintf("pod %s has no interface %s that is up: %s", pod, name, out)
	}
	return ""
}

// onNode runs a script on the node that must succeed.
func (e *T) onNode(n *lab.Node, script string) string {
	e.Helper()
	out, err := n.Run(e.ctx, script)
	require.NoError(e, err)
	return out
}

// allocation is a row of the allocation table as cilium-dbg prints it.
type allocation struct {
	DeviceName     string
	Manager        string
	Pool           string
	PodUID         string
	ClaimUID       string
	Config         map[string]any
	Attachment     *struct{ SandboxID, NetNS, IfName string }
	PreparedDevice json.RawMessage
	Error          string
}

// table returns a StateDB table of a node's agent as cilium-dbg prints it, without starting that on the node each time.
func (e *T) table(n *lab.Node, name string) json.RawMessage {
	e.Helper()
	rows, err := e.DumpTable(e.ctx, n, name)
	require.NoError(e, err)
	return rows
}

// allocations returns the allocation table of a node's agent.
func (e *T) allocations(n *lab.Node) []allocation {
	e.Helper()
	var rows []allocation
	require.NoError(e, json.Unmarshal(e.table(n, "networkdriver-dra-allocations"), &rows))
	return rows
}

// noAllocations waits until the node's allocation table is empty.
func (e *T) noAllocations(n *lab.Node) {
	e.Helper()
	e.eventually("allocation table of "+n.Name(), func() string {
		if rows := e.allocations(n); len(rows) > 0 {
			return fmt.Sprintf("not empty: %+v", rows)
		}
		return ""
	})
}

// cleanUp deletes everything that tests make.
func (e *T) cleanUp() {
	e.Helper()
	pods, err := e.Client.CoreV1().Pods(e.ns).List(e.ctx, metav1.ListOptions{})
	require.NoError(e, err)
	var names []string
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	e.deletePods(names...)
	all := metav1.ListOptions{}
	require.NoError(e, e.Client.ResourceV1().ResourceClaimTemplates(e.ns).DeleteCollection(e.ctx, metav1.DeleteOptions{}, all))
	require.NoError(e, e.Client.ResourceV1().ResourceClaims(e.ns).DeleteCollection(e.ctx, metav1.DeleteOptions{}, all))
	classes, err := e.Client.ResourceV1().DeviceClasses().List(e.ctx, all)
	require.NoError(e, err)
	for _, class := range classes.Items {
		if strings.HasPrefix(class.Name, e.className("")) {
			require.NoError(e, e.Client.ResourceV1().DeviceClasses().Delete(e.ctx, class.Name, metav1.DeleteOptions{}))
		}
	}
	for _, n := range e.nodes {
		e.noAllocations(n)
		err := e.Dynamic.Resource(nodeConfigs).Delete(e.ctx, n.Name(), metav1.DeleteOptions{})
		require.True(e, err == nil || apierrors.IsNotFound(err), "delete node config %s: %v", n.Name(), err)
	}
	for _, n := range e.nodes {
		e.eventually("slices of "+n.Name(), func() string {
			if s := e.slices(n.Name()); len(s) > 0 {
				return fmt.Sprintf("%d are left", len(s))
			}
			return ""
		})
	}
}
