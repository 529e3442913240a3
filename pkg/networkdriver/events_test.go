// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
)

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
	cancel()
	require.NoError(t, <-done)
	events.Warn(pod, attachments.ReasonClaimInUse, "after the end")
}
