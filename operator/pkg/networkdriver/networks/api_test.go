// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	"github.com/cilium/networkdriver/test/lab"
)

// TestAPINetworks has the real API server say what of a network is used, which of two networks is in conflict, and which
// addresses are given back.
func TestAPINetworks(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	restConfig, err := server.RESTConfig()
	require.NoError(t, err)
	installer, err := apiextensionsclient.NewForConfig(restConfig)
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer))
	scheme := runtime.NewScheme()
	require.NoError(t, v2alpha1.AddToScheme(scheme))
	require.NoError(t, corev1.AddToScheme(scheme))
	c, err := client.New(restConfig, client.Options{Scheme: scheme})
	require.NoError(t, err)

	m, err := newMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	o := &operator{metrics: m}
	o.Logger, o.RESTConfig = slog.New(slog.DiscardHandler), restConfig
	o.Config = config.Config{K8sNamespace: "kube-system", LeaderElectionLeaseDuration: 3 * time.Second, LeaderElectionRenewDeadline: 2 * time.Second, LeaderElectionRetryPeriod: 500 * time.Millisecond,
		NetworkDriverAddressGracePeriod: 2 * time.Second}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- o.term(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})

	one := network("storage", 0, 7, nil, "192.0.2.0/24")
	one.ObjectMeta = metav1.ObjectMeta{Name: "storage"}
	require.NoError(t, c.Create(t.Context(), &one))
	for _, node := range []string{"node1", "node2", "node3"} {
		require.NoError(t, c.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}))
	}
	for i, node := range []string{"node1", "node2", "node3", "never-was"} {
		addr := fmt.Sprintf("192.0.2.%d", i+1)
		require.NoError(t, c.Create(t.Context(), addressObject("storage", addr, node, node)))
	}
	status := func(name string) v2alpha1.CiliumNetworkDriverNetworkStatus {
		n := &v2alpha1.CiliumNetworkDriverNetwork{}
		require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: name}, n))
		return n.Status
	}
	eventually := func(what string, check func() bool) {
		t.Helper()
		require.Eventually(t, check, 30*time.Second, 100*time.Millisecond, what)
	}
	eventually("counted, and the address of a node that never was is given back", func() bool {
		s := status("storage")
		return s.UsedAddresses == 3 && s.FreeAddresses == 251 && s.Claims == 3 && meta.IsStatusConditionTrue(s.Conditions, v2alpha1.ConditionReady)
	})
	require.True(t, meta.IsStatusConditionFalse(status("storage").Conditions, v2alpha1.ConditionNetworkUntagged))
	require.Equal(t, 251.0, testutil.ToFloat64(m.addresses.WithLabelValues("storage", "ipv4", "free")))

	two := network("later", 0, 7, nil, "192.0.2.128/25")
	two.ObjectMeta = metav1.ObjectMeta{Name: "xlater"}
	require.NoError(t, c.Create(t.Context(), &two))
	eventually("conflict", func() bool {
		return meta.IsStatusConditionTrue(status("xlater").Conditions, v2alpha1.ConditionNetworkConflicting)
	})

	// A node that is deleted, and one that is out of service; not one that is merely silent.
	require.NoError(t, c.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}))
	node2 := &corev1.Node{}
	require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: "node2"}, node2))
	node2.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute}}
	require.NoError(t, c.Update(t.Context(), node2))
	eventually("given back", func() bool { return status("storage").UsedAddresses == 1 })
	left := &v2alpha1.CiliumNetworkDriverAddressList{}
	require.NoError(t, c.List(t.Context(), left))
	require.Len(t, left.Items, 1)
	require.Equal(t, "node3", left.Items[0].Spec.Node)

	// Those that are kept for a pod: the nodes that are gone release them, and they stay for as long as the network keeps them.
	kept := network("kept", 0, 8, nil, "198.51.100.0/24")
	kept.ObjectMeta = metav1.ObjectMeta{Name: "kept"}
	kept.Spec.AddressReuse = &v2alpha1.NetworkAddressReuse{Mode: v2alpha1.AddressReusePodName}
	require.NoError(t, c.Create(t.Context(), &kept))
	for i, node := range []string{"node1", "node2", "node3"} {
		require.NoError(t, c.Create(t.Context(), reserve(addressObject("kept", fmt.Sprintf("198.51.100.%d", i+1), node, node), time.Time{})))
	}
	require.NoError(t, c.Create(t.Context(), reserve(addressObject("kept", "198.51.100.4", "node3", "old"), time.Now().Add(-25*time.Hour))))
	eventually("released, and what was kept for a day is deleted", func() bool {
		s := status("kept")
		return s.UsedAddresses == 1 && s.ReservedAddresses == 2 && s.FreeAddresses == 251 && s.Claims == 1
	})
	get := func(name string) *v2alpha1.CiliumNetworkDriverAddress {
		a := &v2alpha1.CiliumNetworkDriverAddress{}
		require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: name}, a))
		return a
	}
	first, second := get("kept.198.51.100.1"), get("kept.198.51.100.2")
	for _, a := range []*v2alpha1.CiliumNetworkDriverAddress{first, second} {
		require.Equal(t, v2alpha1.AddressReleased, a.Spec.State)
		require.WithinDuration(t, time.Now(), a.Spec.ReleasedAt.Time, time.Minute)
	}
	require.Equal(t, 2.0, testutil.ToFloat64(m.addresses.WithLabelValues("kept", "ipv4", "reserved")))

	// The next pod's node takes one over; then the network keeps none any more, and releases the last one after that.
	first.Spec.State, first.Spec.ReleasedAt, first.Spec.Node = v2alpha1.AddressInUse, metav1.Time{}, "node3"
	require.NoError(t, c.Update(t.Context(), first))
	require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: "kept"}, &kept))
	kept.Spec.AddressReuse.Mode = v2alpha1.AddressReuseNone
	require.NoError(t, c.Update(t.Context(), &kept))
	eventually("the one that is not in use is deleted", func() bool {
		s := status("kept")
		return s.UsedAddresses == 2 && s.ReservedAddresses == 0 && s.FreeAddresses == 252
	})
	require.Equal(t, "node3", get("kept.198.51.100.1").Spec.Node)
	require.NoError(t, c.Delete(t.Context(), &kept))
	require.Equal(t, v2alpha1.AddressInUse, get("kept.198.51.100.1").Spec.State, "pods keep theirs")
	require.NoError(t, c.Update(t.Context(), reserve(get("kept.198.51.100.1"), time.Now())))
	eventually("what is released of a network that is gone is deleted", func() bool {
		return apierrors.IsNotFound(c.Get(t.Context(), client.ObjectKey{Name: "kept.198.51.100.1"}, &v2alpha1.CiliumNetworkDriverAddress{}))
	})
	require.Equal(t, v2alpha1.AddressInUse, get("kept.198.51.100.3").Spec.State)

	require.NoError(t, c.Delete(t.Context(), &one))
	eventually("the conflict is over", func() bool {
		return meta.IsStatusConditionTrue(status("xlater").Conditions, v2alpha1.ConditionReady)
	})

	// It is changed to what a younger network has, a pod of which has an address.
	young := network("young", 0, 9, nil, "192.0.2.128/25")
	young.ObjectMeta = metav1.ObjectMeta{Name: "young"}
	require.NoError(t, c.Create(t.Context(), &young))
	used := addressObject("young", "192.0.2.200", "node3", "young")
	used.Spec.Vlan = 9
	require.NoError(t, c.Create(t.Context(), used))
	require.NoError(t, c.Get(t.Context(), client.ObjectKey{Name: "xlater"}, &two))
	two.Spec.Vlan = 9
	require.NoError(t, c.Update(t.Context(), &two))
	eventually("the older one has to wait for the pod", func() bool {
		s := status("xlater")
		conflict := meta.FindStatusCondition(s.Conditions, v2alpha1.ConditionNetworkConflicting)
		return s.ObservedGeneration == two.Generation && conflict.Status == metav1.ConditionTrue && strings.Contains(conflict.Message, "still has address 192.0.2.200")
	})

	// Two networks on different pools, which a node's agent finds to have devices of one PF.
	for _, name := range []string{"left", "right"} {
		n := network(name, 0, 10, []string{name}, "192.0.2.0/24")
		n.ObjectMeta = metav1.ObjectMeta{Name: name}
		require.NoError(t, c.Create(t.Context(), &n))
		eventually("ready", func() bool { return meta.IsStatusConditionTrue(status(name).Conditions, v2alpha1.ConditionReady) })
	}
	node := &v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: "node3"}}
	node.Spec.Default()
	require.NoError(t, c.Create(t.Context(), node))
	report := func(pf string) {
		before := node.DeepCopy()
		node.Status.Pools = []v2alpha1.DevicePoolStatus{{Name: "left", PFs: []string{"eth0"}}, {Name: "right", PFs: []string{pf}}}
		require.NoError(t, c.Status().Patch(t.Context(), node, client.MergeFrom(before)))
	}
	report("eth0")
	eventually("the wire is seen", func() bool {
		conflict := meta.FindStatusCondition(status("right").Conditions, v2alpha1.ConditionNetworkConflicting)
		return conflict.Status == metav1.ConditionTrue && strings.Contains(conflict.Message, "pools right and left have devices of PF eth0 on node node3")
	})
	require.True(t, meta.IsStatusConditionTrue(status("left").Conditions, v2alpha1.ConditionReady), "it is the older one")
	report("eth1")
	eventually("ports of their own", func() bool { return meta.IsStatusConditionTrue(status("right").Conditions, v2alpha1.ConditionReady) })
}
