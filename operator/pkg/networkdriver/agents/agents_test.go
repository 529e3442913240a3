// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package agents

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

func pod(node string, ready corev1.ConditionStatus) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agent-" + node},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled}, {Type: corev1.PodReady, Status: ready}}},
	}
}

func config(status metav1.ConditionStatus, reason string) *v2alpha1.CiliumNetworkDriverNodeConfig {
	c := &v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	c.Status.Devices = 9
	c.Status.Conditions = []metav1.Condition{{Type: v2alpha1.ConditionDegraded, Status: metav1.ConditionFalse, Reason: "AsConfigured"}}
	if reason != "" {
		c.Status.Conditions = append(c.Status.Conditions, metav1.Condition{Type: v2alpha1.ConditionReady, Status: status, Reason: reason})
	}
	return c
}

func TestAgents(t *testing.T) {
	request := reconcile.Request{NamespacedName: types.NamespacedName{Name: "n"}}
	for _, tt := range []struct {
		name   string
		config *v2alpha1.CiliumNetworkDriverNodeConfig
		pod    *corev1.Pod
		want   string // status and reason of Ready, a minute later
	}{
		{"gone", config(metav1.ConditionTrue, "Serving"), nil, "Unknown AgentGone"},
		{"another node's", config(metav1.ConditionTrue, "Serving"), pod("m", corev1.ConditionTrue), "Unknown AgentGone"},
		{"not ready", config(metav1.ConditionTrue, "Serving"), pod("n", corev1.ConditionFalse), "Unknown AgentGone"},
		{"ended", config(metav1.ConditionFalse, "AgentStopped"), nil, "Unknown AgentGone"},
		{"ready", config(metav1.ConditionTrue, "Serving"), pod("n", corev1.ConditionTrue), "True Serving"},
		{"has a reason of its own", config(metav1.ConditionFalse, "WaitingForNRI"), pod("n", corev1.ConditionFalse), "False WaitingForNRI"},
		{"never there", config("", ""), nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			scheme := runtime.NewScheme()
			require.NoError(t, v2alpha1.AddToScheme(scheme))
			require.NoError(t, corev1.AddToScheme(scheme))
			b := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(tt.config).WithObjects(tt.config).
				WithIndex(&corev1.Pod{}, nodeField, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} })
			if tt.pod != nil {
				b = b.WithObjects(tt.pod)
			}
			api := b.Build()
			now := time.Unix(1_000_000, 0)
			r := newReconciler(slog.New(slog.DiscardHandler), api, func() time.Time { return now })
			ready := func() string {
				now := &v2alpha1.CiliumNetworkDriverNodeConfig{}
				require.NoError(t, api.Get(t.Context(), request.NamespacedName, now))
				require.EqualValues(t, 9, now.Status.Devices, "the rest stays")
				require.NotNil(t, meta.FindStatusCondition(now.Status.Conditions, v2alpha1.ConditionDegraded))
				if c := meta.FindStatusCondition(now.Status.Conditions, v2alpha1.ConditionReady); c != nil {
					return string(c.Status) + " " + c.Reason
				}
				return ""
			}
			before := ready()
			first, err := r.Reconcile(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, before, ready(), "an upgrade takes less than a minute")
			if before != tt.want {
				require.Equal(t, patience, first.RequeueAfter)
			} else {
				require.Zero(t, first)
			}
			now = now.Add(patience)
			_, err = r.Reconcile(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, tt.want, ready())
		})
	}
}

// A pod that was ready in between has the whole time again.
func TestAgentThatComesBack(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, v2alpha1.AddToScheme(scheme))
	require.NoError(t, corev1.AddToScheme(scheme))
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(config(metav1.ConditionTrue, "Serving")).
		WithIndex(&corev1.Pod{}, nodeField, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).Build()
	now := time.Unix(1_000_000, 0)
	r := newReconciler(slog.New(slog.DiscardHandler), api, func() time.Time { return now })
	look := func() time.Duration {
		result, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "n"}})
		require.NoError(t, err)
		return result.RequeueAfter
	}
	require.Equal(t, patience, look())
	require.NoError(t, api.Create(t.Context(), pod("n", corev1.ConditionTrue)))
	now = now.Add(patience)
	require.Zero(t, look())
	require.NoError(t, api.Delete(t.Context(), pod("n", corev1.ConditionTrue)))
	require.Equal(t, patience, look())
}

func TestStripPod(t *testing.T) {
	full := pod("n", corev1.ConditionTrue)
	full.Spec.Containers = []corev1.Container{{Name: "c"}}
	stripped, err := StripPod(full)
	require.NoError(t, err)
	require.Equal(t, "n", stripped.(*corev1.Pod).Spec.NodeName)
	require.Empty(t, stripped.(*corev1.Pod).Spec.Containers)
	require.Len(t, stripped.(*corev1.Pod).Status.Conditions, 1)
}
