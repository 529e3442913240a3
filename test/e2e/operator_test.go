// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// TestClusterConfig configures a node by a cluster config: the operator makes the node's config, the agent picks it up
// and a pod gets its VF. When the cluster config is deleted nothing is offered any more, and the pod keeps its VF until
// it ends.
func TestClusterConfig(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	before := e.hostState(n)
	require.NoError(e, e.StartOperator(e.ctx, n))
	e.atEnd(func() { require.NoError(e, e.StopOperator(e.ctx, n)) })

	spec := sriovPools(vfPool("first", 0), vfPool("second", 1))
	spec.Default()
	config := &v2alpha1.CiliumNetworkDriverClusterConfig{
		TypeMeta:   metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.ClusterConfigKind},
		ObjectMeta: metav1.ObjectMeta{Name: e.className("fabric")},
		Spec: v2alpha1.CiliumNetworkDriverClusterConfigSpec{
			NodeSelector: &v2alpha1.LabelSelector{MatchLabels: map[string]v2alpha1.LabelValue{corev1.LabelHostname: v2alpha1.LabelValue(n.Name())}},
			Spec:         spec,
		},
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(config)
	require.NoError(e, err)
	delete(object, "status")
	configs := e.Dynamic.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.ClusterConfigResource))
	_, err = configs.Create(e.ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.atEnd(func() {
		err := configs.Delete(e.ctx, config.Name, metav1.DeleteOptions{})
		require.True(e, err == nil || apierrors.IsNotFound(err), "delete cluster config: %v", err)
	})

	e.waitDevices(n.Name(), "first", 1)
	e.waitDevices(n.Name(), "second", 1)
	e.class("first", "first")
	e.class("second", "second")
	e.vlanTemplate("first", "first", 1001)
	e.vlanTemplate("second", "second", 1001)
	e.pod("a", n.Name(), "first")
	e.running("a")
	require.Empty(e, e.hasInterface("a", "sriov0"))
	require.Equal(e, 1001, e.vlanOf(n, 0))

	require.NoError(e, configs.Delete(e.ctx, config.Name, metav1.DeleteOptions{}))
	e.eventually("node config", func() string {
		_, err := e.Dynamic.Resource(nodeConfigs).Get(e.ctx, n.Name(), metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Sprintf("is not gone: %v", err)
		}
		return ""
	})
	e.waitDevices(n.Name(), "second", 0)
	e.pod("late", n.Name(), "second")
	e.eventSays("late", "FailedScheduling")
	require.Empty(e, e.hasInterface("a", "sriov0"))
	require.Equal(e, 1001, e.vlanOf(n, 0))
	require.Len(e, e.allocations(n), 1)

	e.deletePods("a", "late")
	e.noAllocations(n)
	e.requireRestored(n, before)
}
