// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
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
	o := &operator{metrics: m, after: 2 * time.Second}
	o.Logger, o.RESTConfig = slog.New(slog.DiscardHandler), restConfig
	o.Config = config.Config{K8sNamespace: "kube-system", LeaderElectionLeaseDuration: 3 * time.Second, LeaderElectionRenewDeadline: 2 * time.Second, LeaderElectionRetryPeriod: 500 * time.Millisecond}
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
		require.NoError(t, c.Create(t.Context(), &v2alpha1.CiliumNetworkDriverAddress{
			ObjectMeta: metav1.ObjectMeta{Name: "storage." + addr, Labels: map[string]string{v2alpha1.LabelNetwork: "storage"}},
			Spec: v2alpha1.CiliumNetworkDriverAddressSpec{
				Network: "storage", Address: addr, Node: node, Namespace: "default", Request: "net", Device: "vf0",
				Claim: v2alpha1.AddressOwner{Name: "c", UID: node}, Pod: v2alpha1.AddressOwner{Name: "p", UID: node},
			},
		}))
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

	require.NoError(t, c.Delete(t.Context(), &one))
	eventually("the conflict is over", func() bool {
		return meta.IsStatusConditionTrue(status("xlater").Conditions, v2alpha1.ConditionReady)
	})
}
