// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

const faultTimeout = 2 * time.Minute

// nodes makes CiliumNodes node-0000 to node-<count-1>, each with its number modulo groups as the label group.
func (c *cluster) nodes(tb testing.TB, count, groups int) {
	tb.Helper()
	var g errgroup.Group
	g.SetLimit(16)
	for i := range count {
		g.Go(func() error {
			_, err := c.dynamic.Resource(nodeResource).Create(context.Background(), &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": v2alpha1.CiliumNodeGroupVersion.String(), "kind": v2alpha1.CiliumNodeKind, "spec": map[string]any{},
				"metadata": map[string]any{"name": fmt.Sprintf("node-%04d", i), "labels": map[string]any{"group": fmt.Sprint(i % groups)}},
			}}, metav1.CreateOptions{})
			return err
		})
	}
	require.NoError(tb, g.Wait())
}

// config makes or replaces a cluster config for a group of nodes.
func (c *cluster) config(tb testing.TB, name string, group, count int) {
	tb.Helper()
	s := scripted{cluster: c}
	require.NoError(tb, s.put(context.Background(), clusterConfigResource, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v2alpha1.SchemeGroupVersion.String(), "kind": v2alpha1.ClusterConfigKind, "metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"nodeSelector": map[string]any{"matchLabels": map[string]any{"group": fmt.Sprint(group)}},
			"spec":         map[string]any{"deviceManagerConfigs": map[string]any{"dummy": map[string]any{"enabled": true, "count": int64(count)}}},
		},
	}}))
}

// dummies returns how many node configs have which number of dummies.
func (c *cluster) dummies(tb testing.TB) map[int64]int {
	tb.Helper()
	list, err := c.dynamic.Resource(nodeConfigResource).List(context.Background(), metav1.ListOptions{})
	require.NoError(tb, err)
	counts := map[int64]int{}
	for _, item := range list.Items {
		count, _, err := unstructured.NestedInt64(item.Object, "spec", "deviceManagerConfigs", "dummy", "count")
		require.NoError(tb, err)
		counts[count]++
	}
	return counts
}

// ready says whether a cluster config is ready with so many nodes.
func (c *cluster) ready(tb testing.TB, name string, nodes int) bool {
	tb.Helper()
	item, err := c.dynamic.Resource(clusterConfigResource).Get(context.Background(), name, metav1.GetOptions{})
	require.NoError(tb, err)
	config, err := typed(*item)
	require.NoError(tb, err)
	for _, condition := range config.Status.Conditions {
		if condition.Type == v2alpha1.ConditionReady {
			return condition.Status == metav1.ConditionTrue && config.Status.ObservedGeneration == config.Generation &&
				int(config.Status.ConfiguredNodes) == nodes
		}
	}
	return false
}

// outageEnv names the variable for an outage of another length.
const outageEnv = "NETWORKDRIVER_TEST_OUTAGE"

// TestAPIOutage takes the API server away in the middle of 1,000 changes, for longer than a lease lasts.
func TestAPIOutage(t *testing.T) {
	t.Parallel()
	const count = 1000
	away := 15 * time.Second
	if value := os.Getenv(outageEnv); value != "" {
		var err error
		away, err = time.ParseDuration(value)
		require.NoError(t, err, outageEnv)
	}
	c := startCluster(t)
	require.NoError(t, c.installCRDs(context.Background()))
	c.nodes(t, count, 1)
	c.config(t, "all", 0, 1)
	r, err := c.startReplica(t, func(config *Config) { config.NetworkDriverWriteQPS, config.NetworkDriverWriteBurst = 200, 1 })
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, r.stop())
		if t.Failed() {
			t.Log(r.log)
		}
	})
	require.Eventually(t, func() bool { return c.dummies(t)[1] >= 100 }, faultTimeout, 20*time.Millisecond)
	require.NoError(t, c.server.StopProgram(lab.APIServer))
	require.Less(t, r.traffic.count("POST", v2alpha1.NodeConfigResource), count, "the API server went in the middle")

	// The operator loses its lease, and asks now and then whether the API server is back.
	r.traffic.reset()
	<-time.After(away)
	require.Contains(t, r.log.String(), "leader election lost")
	requests := r.traffic.all()
	t.Logf("%d requests in %v without an API server", requests, away)
	require.Less(t, requests, 10*int(away.Seconds()), "no hot loop")
	require.NoError(t, c.server.Start(context.Background(), lab.APIServer))

	start := time.Now()
	require.Eventually(t, func() bool { return c.ready(t, "all", count) }, faultTimeout, 50*time.Millisecond)
	t.Logf("settled %v after the API server was back", time.Since(start).Round(time.Millisecond))
	require.Equal(t, map[int64]int{1: count}, c.dummies(t))
}
