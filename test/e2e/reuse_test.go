// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

// changeNode says whether the scheduler may use the node, and whether somebody has declared it out of service.
func (e *T) changeNode(n *lab.Node, schedulable, outOfService bool) {
	e.Helper()
	nodes := e.Client.CoreV1().Nodes()
	require.NoError(e, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := nodes.Get(e.ctx, n.Name(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		node.Spec.Unschedulable = !schedulable
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
		if outOfService {
			node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute})
		}
		_, err = nodes.Update(e.ctx, node, metav1.UpdateOptions{})
		return err
	}))
}

// statefulSet makes a StatefulSet of one pod, with a claim from the template.
func (e *T) statefulSet(name, template string) {
	e.Helper()
	pod := e.podObject("", "")
	pod.Labels = map[string]string{"app": name}
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimTemplateName: &template}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	_, err := e.Client.AppsV1().StatefulSets(e.ns).Create(e.ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: ptr.To[int32](1), Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.atEnd(func() { e.deleteStatefulSet(name) })
}

func (e *T) deleteStatefulSet(name string) {
	e.Helper()
	err := e.Client.AppsV1().StatefulSets(e.ns).Delete(e.ctx, name, metav1.DeleteOptions{})
	require.True(e, err == nil || apierrors.IsNotFound(err), "delete StatefulSet %s: %v", name, err)
	e.gone(name + "-0")
}

// moved deletes the StatefulSet's pod, and waits until the next one is on the other node, in whatever state.
func (e *T) moved(pod string, to *lab.Node, options metav1.DeleteOptions) {
	e.Helper()
	require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, pod, options))
	e.eventually("the next pod "+pod, func() string {
		next, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, pod, metav1.GetOptions{})
		if err != nil || next.Spec.NodeName != to.Name() {
			return fmt.Sprintf("is not on %s: %v", to.Name(), err)
		}
		return ""
	})
}

// addressNodes returns the states of the network's addresses, and the nodes that have them.
func (e *T) addressNodes(network string) map[string]string {
	e.Helper()
	list, err := e.Dynamic.Resource(addressResource).List(e.ctx, metav1.ListOptions{LabelSelector: v2alpha1.LabelNetwork + "=" + e.networkName(network)})
	require.NoError(e, err)
	found := map[string]string{}
	for _, object := range list.Items {
		address := v2alpha1.CiliumNetworkDriverAddress{}
		require.NoError(e, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &address))
		found[address.Spec.Address] = address.Spec.State + " " + address.Spec.Node
	}
	return found
}

// TestNetworkReuse moves a StatefulSet's pod to the other node: it keeps its addresses, and its peer reaches it at once. That node is
// cut off, and the pod deleted by force: the next one waits with an event that names node and claim, and nobody has the addresses twice.
// They follow when the node is tainted out-of-service.
func TestNetworkReuse(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	for _, n := range e.Nodes() {
		e.configure(n.Name(), sriovSpec())
		e.waitDevices(n.Name(), "sriov-pool", vfCount)
	}
	one, two := e.Nodes()[0], e.Nodes()[1]
	require.NoError(e, e.StartOperator(e.ctx, one, "--network-driver-address-grace-period=5s"))
	e.atEnd(func() { require.NoError(e, e.StopOperator(e.ctx, one)) })
	e.class("vf", "sriov-pool")
	e.network("db", `{namespaceSelector: {}, vlan: 1013, subnets: [{cidr: 10.78.13.0/24}, {cidr: '2001:db8:7813::/64'}], addressReuse: {mode: PodName}}`)
	e.networkTemplate("db", "vf", "db", `{"network": %q, "podIfName": "sriov0"}`)
	e.atEnd(func() {
		for _, n := range e.Nodes() {
			e.changeNode(n, true, false)
		}
	})
	e.pod("peer", one.Name(), "db")
	e.running("peer")
	e.changeNode(two, false, false)
	e.statefulSet("db", "db")
	e.eventually("pod db-0", func() string {
		_, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "db-0", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		return ""
	})
	e.running("db-0")
	addrs := e.addressesOf("db")["db-0"]
	require.Len(e, addrs, 2, "%v", addrs)
	e.reaches("peer", addrs[0])
	e.reaches("peer", addrs[1])
	// differ says how the addresses of the peer and of db-0 are not in use on the first node, and in the state on n.
	differ := func(state string, n *lab.Node) string {
		want := map[string]string{addrs[0]: state + " " + n.Name(), addrs[1]: state + " " + n.Name()}
		for _, addr := range e.addressesOf("db")["peer"] {
			want[addr] = "InUse " + one.Name()
		}
		return cmp.Diff(want, e.addressNodes("db"))
	}
	require.Empty(e, differ("InUse", one))

	// It moves.
	e.changeNode(one, false, false)
	e.changeNode(two, true, false)
	e.moved("db-0", two, metav1.DeleteOptions{})
	e.running("db-0")
	// The peer knows the former VF's hardware address, and is told of the new one's: it sends nothing, and would not look for itself.
	running := time.Now()
	mac := strings.TrimSpace(e.mustInPod("db-0", "cat /sys/class/net/sriov0/address"))
	e.eventually("neighbours of the peer", func() string {
		known := e.mustInPod("peer", "ip neigh")
		for _, addr := range addrs {
			if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(addr) + ` .*lladdr ` + mac).MatchString(known) {
				return fmt.Sprintf("%s is not known as %s:\n%s", addr, mac, known)
			}
		}
		return ""
	})
	e.reaches("peer", addrs[0])
	e.Logf("reached within %s of when it was seen to run", time.Since(running).Round(time.Millisecond))
	e.reaches("peer", addrs[1])
	require.Empty(e, differ("InUse", two))

	// Its node is cut off.
	reconnect := e.cutFromAPI(two)
	require.NoError(e, two.SetCarrier(e.ctx, lab.Uplink, false))
	e.atEnd(func() { require.NoError(e, two.SetCarrier(e.ctx, lab.Uplink, true)) })
	former := e.claimOf("db-0").Name
	e.changeNode(two, false, false)
	e.changeNode(one, true, false)
	e.moved("db-0", one, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	e.eventSays("db-0", "WaitsForAddress", "address "+addrs[0]+" is kept for the pod and is not released yet", "node "+two.Name(), "claim "+e.ns+"/"+former)
	require.Empty(e, differ("InUse", two))

	// It is given up, and the addresses follow.
	e.changeNode(two, false, true)
	e.running("db-0")
	require.Empty(e, differ("InUse", one))
	e.reaches("peer", addrs[0])

	// It comes back, and gives back what is its own.
	reconnect()
	require.NoError(e, two.SetCarrier(e.ctx, lab.Uplink, true))
	e.changeNode(two, true, false)
	e.noAllocations(two)
	require.Empty(e, differ("InUse", one))
	e.reaches("peer", addrs[0])

	// What is kept goes with the network.
	e.deleteStatefulSet("db")
	e.eventually("addresses of db-0", func() string { return differ("Released", one) })
	e.deletePods("peer")
	e.deleteNetwork("db")
	e.eventually("addresses of a network that is gone", func() string {
		if left := e.addressNodes("db"); len(left) > 0 {
			return fmt.Sprintf("are left: %v", left)
		}
		return ""
	})
}
