// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/cilium/networkdriver/internal/testenv"
)

// The node's addresses are those that the Node has at present, however late they come.
func TestOwnNodeFollowsAddresses(t *testing.T) {
	api := fake.NewClientset()
	logs := &testenv.LogBuffer{}
	n := newOwnNode(slog.New(slog.NewTextHandler(logs, nil)), api.CoreV1().Nodes(), testNode)
	health, _ := cell.NewSimpleHealth()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.Run(ctx, health) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})

	waitForLog := func(message string, times int) {
		t.Helper()
		require.Eventually(t, func() bool { return logs.Count(message) == times }, receiveTimeout, 10*time.Millisecond, logs)
	}
	waitForLog("There is no Node of this name", 1)
	ips, changed := n.addresses()
	require.Empty(t, ips)
	own := node()
	_, err := api.CoreV1().Nodes().Create(ctx, own, metav1.CreateOptions{})
	require.NoError(t, err)
	receive(t, changed)
	n.wait(ctx)
	ips, changed = n.addresses()
	require.Empty(t, ips, "the cloud provider has not been there yet")

	own.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeExternalIP, Address: "2001:db8::1"},
		{Type: corev1.NodeHostName, Address: testNode}, {Type: corev1.NodeInternalIP, Address: "fe80::zz"},
	}
	update := func() {
		t.Helper()
		_, err := api.CoreV1().Nodes().UpdateStatus(ctx, own, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	update()
	receive(t, changed)
	ips, changed = n.addresses()
	require.Equal(t, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, ips)

	// A heartbeat changes nothing; the addresses of a Node that is deleted stay the node's.
	own.Labels = map[string]string{"beat": "1"}
	update()
	require.NoError(t, api.CoreV1().Nodes().Delete(ctx, testNode, metav1.DeleteOptions{}))
	waitForLog("There is no Node of this name", 2)
	same, still := n.addresses()
	require.Equal(t, ips, same)
	require.Equal(t, changed, still)
	require.Equal(t, 1, logs.Count("An address in the Node's status is no IP address", "address=fe80::zz"), logs)

	for _, action := range api.Actions() {
		switch action := action.(type) {
		case clienttesting.ListAction:
			require.Equal(t, "metadata.name="+testNode, action.GetListRestrictions().Fields.String())
		case clienttesting.WatchAction:
			require.Equal(t, "metadata.name="+testNode, action.GetWatchRestrictions().Fields.String())
		}
	}
}
