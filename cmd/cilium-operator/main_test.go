// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	manifests "github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/test/lab"
)

const (
	// runEnv makes the test's program the operator.
	runEnv  = "NETWORKDRIVER_TEST_RUN_OPERATOR"
	timeout = time.Minute
	count   = 200
)

func TestMain(m *testing.M) {
	if os.Getenv(runEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// operator is a process.
type operator struct {
	*exec.Cmd
	socket string
	log    string
}

func start(t *testing.T, kubeconfig, name string) *operator {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	o := &operator{socket: filepath.Join(dir, "operator.sock"), log: filepath.Join(dir, "log")}
	o.Cmd = exec.Command(program, "--enable-network-driver", "--k8s-kubeconfig-path="+kubeconfig, "--socket-path="+o.socket,
		"--shell-sock-path="+filepath.Join(dir, "shell.sock"), "--debug",
		"--leader-election-lease-duration=3s", "--leader-election-renew-deadline=2s", "--leader-election-retry-period=500ms",
		"--network-driver-write-qps=100", "--network-driver-write-burst=1")
	o.Cmd.Env = append(os.Environ(), runEnv+"="+name)
	log, err := os.Create(o.log)
	require.NoError(t, err)
	o.Cmd.Stderr, o.Cmd.Stdout = log, log
	require.NoError(t, o.Cmd.Start())
	t.Cleanup(func() {
		_ = o.Process.Kill()
		_ = o.Wait()
		log.Close()
		if t.Failed() {
			data, _ := os.ReadFile(o.log)
			t.Logf("log of operator %s:\n%s", name, data)
		}
	})
	return o
}

// leads says whether the operator has begun to write.
func (o *operator) leads() bool {
	data, err := os.ReadFile(o.log)
	return err == nil && strings.Contains(string(data), "This replica leads")
}

// TestAPILeaderKilled kills the replica that leads in the middle of its work. The other one goes on: no node config is
// lost, made twice or deleted, and no condition is anything else on the way.
func TestAPILeaderKilled(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	rest, err := server.RESTConfig()
	require.NoError(t, err)
	extensions, err := apiextensionsclient.NewForConfig(rest)
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), extensions))
	ciliumNodes := &apiextensionsv1.CustomResourceDefinition{}
	require.NoError(t, yaml.UnmarshalStrict(manifests.CiliumNodeCRD, ciliumNodes))
	_, err = extensions.CustomResourceDefinitions().Create(t.Context(), ciliumNodes, metav1.CreateOptions{})
	require.NoError(t, err)

	client, err := dynamic.NewForConfig(rest)
	require.NoError(t, err)
	nodeConfigs := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NodeConfigResource))
	clusterConfigs := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.ClusterConfigResource))
	nodes := client.Resource(v2alpha1.CiliumNodeGroupVersion.WithResource(v2alpha1.CiliumNodeResource))
	require.Eventually(t, func() bool {
		_, err := nodes.List(context.Background(), metav1.ListOptions{})
		return err == nil
	}, timeout, 50*time.Millisecond, "the definition is served")
	for i := range count {
		node := object(v2alpha1.CiliumNodeGroupVersion.String(), v2alpha1.CiliumNodeKind, fmt.Sprintf("node-%03d", i), `{}`)
		_, err := nodes.Create(t.Context(), node, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	for _, name := range []string{"winner", "younger"} {
		_, err := clusterConfigs.Create(t.Context(), object(v2alpha1.SchemeGroupVersion.String(), v2alpha1.ClusterConfigKind, name,
			`{"spec": {"deviceManagerConfigs": {"dummy": {"enabled": true, "count": 1}}}}`), metav1.CreateOptions{})
		require.NoError(t, err)
	}
	watched, err := nodeConfigs.Watch(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	statuses, err := clusterConfigs.Watch(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)

	replicas := []*operator{start(t, server.Kubeconfig(), "a"), start(t, server.Kubeconfig(), "b")}
	var leader, other *operator
	require.Eventually(t, func() bool {
		for i, o := range replicas {
			if o.leads() {
				leader, other = o, replicas[1-i]
			}
		}
		return leader != nil
	}, timeout, 10*time.Millisecond)
	length := func() int {
		list, err := nodeConfigs.List(context.Background(), metav1.ListOptions{})
		require.NoError(t, err)
		return len(list.Items)
	}
	require.Eventually(t, func() bool { return length() >= count/4 }, timeout, 5*time.Millisecond)
	require.NoError(t, leader.Process.Kill())
	written := length()
	require.Less(t, written, count, "the leader was killed in the middle of its work")
	require.False(t, other.leads())
	require.Eventually(t, other.leads, timeout, 10*time.Millisecond)
	t.Logf("%d of %d node configs were written when the leader was killed", written, count)

	// The condition of the winner goes to Ready once, that of the other to conflict.
	seen := map[string][]string{}
	for len(seen["winner"]) == 0 || len(seen["younger"]) == 0 || seen["winner"][len(seen["winner"])-1] != "Configured" {
		seen = record(t, statuses, seen)
	}
	require.LessOrEqual(t, len(seen["winner"]), 2, "Configuring at most once, then Configured: %v", seen)
	require.Equal(t, []string{v2alpha1.ReasonConfigurationConflict}, seen["younger"], "%v", seen)
	require.Equal(t, count, length())
	events := map[watch.EventType]int{}
	for range count {
		events[(<-watched.ResultChan()).Type]++
	}
	require.Equal(t, map[watch.EventType]int{watch.Added: count}, events, "each was made once, none was deleted or written again")

	// What the replica that is left knows can be seen through its socket.
	raw, err := debugapi.NewClient(other.socket).DumpTable(t.Context(), config.NodeConfigTableName)
	require.NoError(t, err)
	var rows []config.NodeConfig
	require.NoError(t, json.Unmarshal(raw, &rows))
	require.Len(t, rows, count)
	for _, row := range rows {
		require.Equal(t, "winner", row.ClusterConfig)
		require.Equal(t, config.StateInSync, row.State)
	}
	status, err := debugapi.NewClient(other.socket).Status(t.Context())
	require.NoError(t, err)
	require.True(t, status.Ready, "%v", status)
}

// record adds the reason of Ready in the next event to those seen, if it is another one.
func record(t *testing.T, statuses watch.Interface, seen map[string][]string) map[string][]string {
	t.Helper()
	select {
	case event := <-statuses.ResultChan():
		item := event.Object.(*unstructured.Unstructured)
		conditions, _, err := unstructured.NestedSlice(item.Object, "status", "conditions")
		require.NoError(t, err)
		for _, c := range conditions {
			condition := c.(map[string]any)
			reasons := seen[item.GetName()]
			reason := condition["reason"].(string)
			if condition["type"] == v2alpha1.ConditionReady && (len(reasons) == 0 || reasons[len(reasons)-1] != reason) {
				seen[item.GetName()] = append(reasons, reason)
			}
		}
	case <-time.After(timeout):
		t.Fatalf("no more events; seen: %v", seen)
	}
	return seen
}

func object(apiVersion, kind, name, spec string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": apiVersion, "kind": kind, "metadata": map[string]any{"name": name},
	}}
	var value map[string]any
	if err := json.Unmarshal([]byte(spec), &value); err != nil {
		panic(err)
	}
	o.Object["spec"] = value
	return o
}
