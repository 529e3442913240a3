// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

// TestAPI reads from the real API server, by pages and selectors, with the rights of the documented role and no others.
func TestAPI(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	restConfig, err := server.RESTConfig()
	require.NoError(t, err)
	restConfig.QPS = -1
	installer, err := apiextensionsclient.NewForConfig(restConfig)
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer))
	scheme := runtime.NewScheme()
	require.NoError(t, v2alpha1.AddToScheme(scheme))
	require.NoError(t, corev1.AddToScheme(scheme))
	require.NoError(t, rbacv1.AddToScheme(scheme))
	require.NoError(t, resourceapi.AddToScheme(scheme))
	c, err := client.New(restConfig, client.Options{Scheme: scheme})
	require.NoError(t, err)
	create := func(object client.Object) {
		t.Helper()
		if err := c.Create(t.Context(), object); !apierrors.IsAlreadyExists(err) {
			require.NoError(t, err)
		}
	}
	run := func(args ...string) (string, string, error) {
		streams, _, out, errOut := genericiooptions.NewTestIOStreams()
		cmd := Command(streams)
		cmd.SetArgs(append(args, "--kubeconfig", server.Kubeconfig(), "--as", "viewer"))
		err := cmd.ExecuteContext(t.Context())
		return out.String(), errOut.String(), err
	}

	const node1, nodes, perNode = "node1", 2*pageSize + 10, 3
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "default"}})
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: node1}}
	config.Spec.Default()
	create(config)
	config.Status.Conditions = []metav1.Condition{{
		Type: v2alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "WaitingForNRI", Message: "NRI is away",
		LastTransitionTime: metav1.Now(),
	}}
	require.NoError(t, c.Status().Update(t.Context(), config))
	create(&v2alpha1.CiliumNetworkDriverNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "storage"},
		Spec:       v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Vlan: 1001},
	})
	for i := range nodes {
		create(sliceOf(fmt.Sprintf("node%d", i+1), "pool", perNode))
	}
	create(&resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "pool"},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: `device.attributes["networkdriver.cilium.io"].pool == "pool"`,
		}}}},
	})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "app", Namespace: "default"}, Spec: corev1.PodSpec{
		NodeName: node1, ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("net")}},
		Containers: []corev1.Container{{Name: "app", Image: "x",
			Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "net"}}}}},
	}}
	create(pod)
	claim := claimOf("net", 0)
	create(claim)
	allot(claim, node1, "dev-1", pod.Name, pod.UID)
	require.NoError(t, c.Status().Update(t.Context(), claim))
	create(claimOf("pending", 0))
	create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "pending", Namespace: "default"}, Spec: corev1.PodSpec{
		ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("pending")}},
		Containers:     []corev1.Container{{Name: "app", Image: "x"}},
	}})
	create(&corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "app.1", Namespace: "default"}, Type: "Warning", Reason: "LateAttach", Message: "it came late",
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "app", UID: pod.UID},
		LastTimestamp:  metav1.NewTime(time.Now()),
	})
	create(addressOf("storage", "192.0.2.7", node1, "app", pod.UID))
	create(addressOf("storage", "192.0.2.8", "node2", "app", "another"))

	_, _, err = run()
	require.ErrorContains(t, err, "whoever uses the plugin needs the ClusterRole "+ViewerRole)

	role := &rbacv1.ClusterRole{}
	require.NoError(t, yaml.UnmarshalStrict(kubernetes.ViewerRBAC, role))
	require.Equal(t, ViewerRole, role.Name)
	create(role)
	create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "viewer"}, Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: "viewer"}},
		RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: ViewerRole},
	})
	var list DeviceList
	require.Eventually(t, func() bool { // the API server learns of the binding a little later
		out, errOut, err := run("-o", "json")
		list = DeviceList{}
		return err == nil && errOut == "" && json.Unmarshal([]byte(out), &list) == nil
	}, 30*time.Second, 100*time.Millisecond, "the viewer may read all that the list needs")
	require.Len(t, list.Items, nodes*perNode)
	seen := map[string]bool{}
	for _, d := range list.Items {
		seen[d.Node+"/"+d.Device] = true
		if d.Use != nil {
			require.Equal(t, "node1/dev-1", d.Node+"/"+d.Device)
			require.Equal(t, "storage", d.Use.Network)
		}
	}
	require.Len(t, seen, nodes*perNode, "each once")

	out, errOut, err := run("--node", node1, "--no-headers", "-n", "default")
	require.NoError(t, err)
	require.Empty(t, errOut)
	require.Equal(t, "node1 pool dev-1 Attached default/net default/app sriov0 storage agent=False(WaitingForNRI)",
		strings.Join(strings.Fields(out), " "))

	var story Story
	out, _, err = run("pod", "default/app", "-o", "json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(out), &story))
	require.Empty(t, story.Unread)
	require.Len(t, story.Events, 1)
	require.Equal(t, []HeldAddress{{"192.0.2.7", "InUse", node1, string(pod.UID)}}, story.Networks[0].Addresses)
	require.Len(t, story.Missing, 1, "%+v", story.Missing)
	require.Equal(t, "node node1: Ready is False (WaitingForNRI): NRI is away", story.Missing[0].What)

	out, _, err = run("pod", "default/pending")
	require.NoError(t, err)
	require.NotContains(t, out, "Not told")
	require.Contains(t, out, fmt.Sprintf("of %d devices %d match: 1 in use, 0 tainted, %d free on %d nodes", nodes*perNode, nodes*perNode,
		nodes*perNode-1, nodes))
}

func addressOf(network, address, node, pod string, uid kubetypes.UID) *v2alpha1.CiliumNetworkDriverAddress {
	return &v2alpha1.CiliumNetworkDriverAddress{
		ObjectMeta: metav1.ObjectMeta{Name: network + "." + address},
		Spec: v2alpha1.CiliumNetworkDriverAddressSpec{
			Network: network, Address: address, State: v2alpha1.AddressInUse, Node: node, Namespace: "default", Request: "net", Device: "dev-1",
			Claim: v2alpha1.AddressOwner{Name: "net", UID: "claim"}, Pod: v2alpha1.AddressOwner{Name: pod, UID: string(uid)},
		},
	}
}
