// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// install is how the documentation installs the driver, and waits for it.
const install = `
helm upgrade --install network-driver ./install/helm/cilium-network-driver -n kube-system \
  --set networkDriver.enabled=true
kubectl -n kube-system rollout status daemonset/cilium-network-driver --timeout=5m
kubectl -n kube-system rollout status deployment/cilium-network-driver-operator --timeout=5m`

// TestChart is the driver as users have it: images and chart, helm and kubectl, all values at their defaults. The pages
// that are followed run all examples.
func TestChart(t *testing.T) {
	e := startEverywhere(t)
	e.ns = metav1.NamespaceDefault
	for _, n := range e.nodes {
		e.removeVFs(n)
	}
	e.guardChart()
	require.NoError(e, e.ImportImages(e.ctx, filepath.Join(repository, "_out", "images")))

	out := e.user(install)
	require.Contains(e, out, "kubectl get ndcc,ndnc", "the notes tell what to do next")
	e.user("kubectl apply -f examples/deviceclasses.yaml -f examples/claimtemplates.yaml")
	for _, step := range []struct {
		name string
		run  func(*T)
	}{
		{"Upgrade", (*T).changeUnderPods},
		{"Privileges", (*T).dropPrivileges},
		{"Pages", (*T).followPages},
		{"Uninstall", (*T).uninstall},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			s := *e
			s.T, s.ctx = t, t.Context()
			step.run(&s)
		}) {
			return
		}
	}
}

// guardChart takes the daemons' place for the test's time, and checks at its end that the nodes are as they were.
func (e *T) guardChart() {
	e.Helper()
	before := map[string]hostState{}
	for _, n := range e.nodes {
		before[n.Name()] = e.hostState(n)
	}
	require.NoError(e, e.Uninstall(e.ctx))
	// First, so that it is done last, and for the tests after this one also where the release cannot be removed.
	e.atEnd(func() {
		require.NoError(e, e.DeleteCRDs(e.ctx))
		require.NoError(e, installDaemons(e.ctx))
	})
	e.atEnd(func() {
		if e.Failed() {
			e.dump()
			out, _ := e.Shell(e.ctx, repository, `kubectl get pods,ndcc,ndnc,resourceslices,resourceclaims -A -o wide
for pod in $(kubectl -n kube-system get pods -o name); do
  kubectl -n kube-system describe $pod | tail -n 30; kubectl -n kube-system logs $pod --tail=40 || true
done`, nil)
			e.Logf("--- the cluster:\n%s", out)
		}
		e.user(`kubectl delete pods,resourceclaimtemplates,resourceclaims --all --timeout=3m
kubectl delete deviceclasses --all
helm uninstall network-driver -n kube-system --ignore-not-found --wait --timeout=3m
kubectl label nodes --all node-role-`)
		for _, n := range e.nodes {
			e.requireRestored(n, before[n.Name()])
		}
	})
}

// user runs what a user of the cluster would, in the repository's directory; it must succeed.
func (e *T) user(script string) string {
	e.Helper()
	out, err := e.Shell(e.ctx, repository, script, nil)
	require.NoError(e, err, "%s\n%s", script, out)
	return out
}

// exampleInterfaces are pods of the examples and their interfaces: more VFs than one node has, and a dummy link.
var exampleInterfaces = map[string][]string{
	"dummy": {"net1"}, "two-vfs": {"left0", "right0"}, "app-a": {"sriov0"}, "app-b": {"sriov0"}, "app-c": {"sriov0"},
}

// changeUnderPods configures the nodes as the examples do, one by hand and one by the operator, and changes a value of the
// release while pods on both use their devices.
func (e *T) changeUnderPods() {
	e.offerOnBoth()
	e.user("kubectl wait --for=condition=Ready --timeout=3m ndcc/sriov-workers ndnc/" + e.node.Name() + " ndnc/" + e.nodes[1].Name())
	before := map[string]hostState{}
	for _, n := range e.nodes {
		before[n.Name()] = e.hostState(n)
	}
	// The pod that wants two VFs of one node comes first.
	e.user("for example in two-requests pod-dummy pods-vlan; do kubectl apply -f examples/$example.yaml; done")
	e.running(slices.Sorted(maps.Keys(exampleInterfaces))...)
	for pod, names := range exampleInterfaces {
		for _, name := range names {
			require.Empty(e, e.hasInterface(pod, name))
		}
	}
	vlans := append(e.vlans(e.nodes[0]), e.vlans(e.nodes[1])...)
	slices.Sort(vlans)
	require.Equal(e, []int{0, 0, 0, 1001, 1001, 1001, 1001, 1002}, vlans)

	e.upgradeUnderPods()

	// The new agents free what the old ones have attached, and serve a new pod.
	e.deleteUsers(slices.Collect(maps.Keys(exampleInterfaces))...)
	for _, n := range e.nodes {
		e.requireRestored(n, before[n.Name()])
		require.Empty(e, e.rows(n))
	}
	e.user("kubectl apply -f examples/class-parameters.yaml")
	e.running("class-parameters")
	e.deleteUsers("class-parameters")

	require.Contains(e, e.user(`! kubectl create -f - 2>&1 <<'END'
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: refused}
spec:
  devices:
    requests: [{name: net, exactly: {deviceClassName: sriov-pool.networkdriver.cilium.io, count: 2}}]
    config: [{opaque: {driver: networkdriver.cilium.io, parameters: {addresses: [192.0.2.10/24]}}}]
END`), "parameters for the network driver: addresses: the request is for several devices")
}

// offerOnBoth configures one node by hand and the other by the operator.
func (e *T) offerOnBoth() {
	e.Helper()
	e.user("kubectl label --overwrite node " + e.nodes[1].Name() + " node-role=sriov-worker; kubectl apply -f examples/clusterconfig.yaml -f examples/nodeconfig-both.yaml")
	for _, n := range e.nodes {
		e.waitDevices(n.Name(), "sriov-pool", vfCount)
	}
}

// vlans returns the VLANs of a node's VFs, sorted.
func (e *T) vlans(n *lab.Node) []int {
	e.Helper()
	var vlans []int
	for _, vf := range e.hostState(n).VFs {
		vlans = append(vlans, vf.VLAN)
	}
	slices.Sort(vlans)
	return vlans
}

// upgradeUnderPods changes a value of the release while the examples' pods on both nodes use devices.
func (e *T) upgradeUnderPods() {
	e.reaches("app-a", "192.0.2.2")
	e.doesNotReach("app-a", "192.0.2.3")
	used := func() map[string]any {
		state := map[string]any{}
		for pod, names := range exampleInterfaces {
			object, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
			require.NoError(e, err)
			state[pod] = fmt.Sprint(object.UID, object.Status.ContainerStatuses[0].RestartCount)
			for _, name := range names {
				state[pod+" "+name] = e.mustInPod(pod, "ip -o -d link show "+name)
			}
		}
		for _, n := range e.nodes {
			state[n.Name()] = e.hostState(n)
			state["rows of "+n.Name()] = e.rows(n)
		}
		return state
	}
	was := used()
	agents := e.agentPods()

	e.user(`helm upgrade network-driver ./install/helm/cilium-network-driver -n kube-system --reuse-values --set debug=true
kubectl -n kube-system rollout status daemonset/cilium-network-driver --timeout=5m`)
	for node, pod := range e.agentPods() {
		require.NotEqual(e, agents[node].UID, pod.UID, "the agent of %s is another", node)
		require.Zero(e, pod.Status.ContainerStatuses[0].RestartCount)
	}
	require.Empty(e, cmp.Diff(was, used()), "what pods use, and what the agents know of it")
	e.reaches("app-a", "192.0.2.2")
	e.doesNotReach("app-a", "192.0.2.3")
}

// rows returns the allocation table of the agent in its pod on a node, without what pods make of their devices.
func (e *T) rows(n *lab.Node) []allocation {
	e.Helper()
	pod := e.agentPods()[n.Name()].Name
	var rows []allocation
	out := e.user("kubectl -n kube-system exec " + pod + " -c cilium-agent -- cilium-dbg statedb networkdriver-dra-allocations")
	require.NoError(e, json.Unmarshal([]byte(out), &rows), out)
	return rows
}

// deleteUsers deletes pods and waits until their devices are free.
func (e *T) deleteUsers(pods ...string) {
	e.Helper()
	e.deletePods(pods...)
	e.user("kubectl wait ndnc --all --for=jsonpath='{.status.allocatedDevices}'=0 --timeout=3m")
}

// agentPods returns the agents of all nodes by these.
func (e *T) agentPods() map[string]corev1.Pod {
	e.Helper()
	list, err := e.Client.CoreV1().Pods("kube-system").List(e.ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent",
	})
	require.NoError(e, err)
	require.Len(e, list.Items, len(e.nodes))
	pods := map[string]corev1.Pod{}
	for _, pod := range list.Items {
		pods[pod.Spec.NodeName] = pod
	}
	return pods
}

// uninstall removes the release: it says what stays, and the nodes are as they were.
func (e *T) uninstall() {
	e.offerOnBoth()
	e.user("kubectl wait ndnc --all --for=jsonpath='{.status.allocatedDevices}'=0 --timeout=3m")
	out := e.user("helm uninstall network-driver -n kube-system --wait --timeout=3m")
	for _, name := range []string{"ciliumnetworkdrivernodeconfigs.cilium.io", "ciliumnetworkdriverclusterconfigs.cilium.io", "ciliumnetworkdrivernetworks.cilium.io", "ciliumnetworkdriveraddresses.cilium.io"} {
		require.Contains(e, out, name, "it is said to stay")
	}
	// The CRD of CiliumNodes is made once, where there is none, and belongs to no release after the first.
	e.user("kubectl get crd ciliumnodes.cilium.io")
	e.user("kubectl get ndnc/node1 ndcc/sriov-workers")
	for _, n := range e.nodes {
		e.eventually("slices of "+n.Name(), func() string {
			if s := e.slices(n.Name()); len(s) > 0 {
				return fmt.Sprintf("%d are left", len(s))
			}
			return ""
		})
	}
	// A pod that still ran would need it.
	for _, n := range e.nodes {
		require.Equal(e, "networkdriver-hook", e.onNode(n, "ls -A "+filepath.Dir(deploy.HookPath)))
	}
	left := strings.Fields(e.user("kubectl -n kube-system get pods,secrets,configmaps,serviceaccounts,leases -o name"))
	left = slices.DeleteFunc(left, func(name string) bool { return !strings.Contains(name, "network-driver") })
	require.ElementsMatch(e, []string{
		"lease.coordination.k8s.io/cilium-network-driver-operator",
		"lease.coordination.k8s.io/cilium-network-driver-networks",
	}, left, "the operator's own objects")
	require.Empty(e, e.user("kubectl get clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings -l app.kubernetes.io/name=cilium-network-driver -o name"))
}
