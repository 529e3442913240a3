// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// A cause makes one event a minute, whatever else there is to say of the object, also when the library makes one event of many.
func TestCauseOf(t *testing.T) {
	event := func(reason, message, pod string) *corev1.Event {
		return &corev1.Event{Reason: reason, Message: message, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: pod}}
	}
	correlator := record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{BurstSize: 1, QPS: eventRate, SpamKeyFunc: causeOf})
	said := func(e *corev1.Event) bool {
		result, err := correlator.EventCorrelate(e)
		require.NoError(t, err)
		return !result.Skip
	}
	require.True(t, said(event("A", "m", "p")))
	require.False(t, said(event("A", "m", "p")))
	require.True(t, said(event("A", "n", "p")))
	require.True(t, said(event("B", "m", "p")))
	require.True(t, said(event("A", "m", "q")))
	count := 0
	for i := range 100 {
		if said(event("A", fmt.Sprint(i), "p")) {
			count++
		}
	}
	require.Less(t, count, 12)
}

// An event is the pod's and has a message that the API takes.
func TestPodEvents(t *testing.T) {
	client := fake.NewClientset()
	events := newPodEvents(client, testNode)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- events.Run(ctx, nil) }()
	pod := attachments.Sandbox{PodNamespace: "default", PodName: "p", PodUID: "uid-p"}
	list := func() []corev1.Event {
		list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		return list.Items
	}
	require.Eventually(t, func() bool {
		events.Warn(pod, attachments.ReasonClaimInUse, strings.Repeat("x", 2000))
		return len(list()) > 0
	}, 10*time.Second, 10*time.Millisecond)
	event := list()[0]
	require.Equal(t, "uid-p", string(event.InvolvedObject.UID))
	require.Equal(t, "ClaimInUse", event.Reason)
	require.Len(t, event.Message, 1024)
	require.Equal(t, testNode, event.Source.Host)

	claim := claims.Ref{Namespace: "default", Name: "c", UID: "uid-c"}
	events.WarnClaim(claim, resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "uid-g"}, "R", "a group's")
	events.WarnClaim(claim, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "q", UID: "uid-q"}, "R", "a pod's")
	row := &tables.DRAAllocation{ClaimNamespace: "default", PodName: "q", PodUID: "uid-q"}
	events.Unhealthy(row, "no carrier")
	events.Healthy(row, "healthy again")
	var told []string
	require.Eventually(t, func() bool {
		told = nil
		for _, e := range list() {
			if e.InvolvedObject.UID != "uid-p" {
				told = append(told, e.InvolvedObject.Kind+" "+e.InvolvedObject.Name+": "+e.Type+" "+e.Reason+" "+e.Message)
			}
		}
		return slices.Contains(told, "Pod q: Normal DeviceHealthy healthy again") // the last one
	}, 10*time.Second, 10*time.Millisecond)
	require.ElementsMatch(t, []string{
		"ResourceClaim c: Warning R a group's", "ResourceClaim c: Warning R a pod's", "Pod q: Warning R a pod's",
		"Pod q: Warning DeviceUnhealthy no carrier", "Pod q: Normal DeviceHealthy healthy again",
	}, told)
	cancel()
	require.NoError(t, <-done)
	events.Warn(pod, attachments.ReasonClaimInUse, "after the end")
}
