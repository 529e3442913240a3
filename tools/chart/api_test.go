// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

const testTimeout = time.Minute

// cluster is a real API server.
type cluster struct {
	*kubernetes.Clientset
	config  *rest.Config
	objects dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{testenv.KubeBin(t)}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(t, err)
	config.QPS = -1
	c := &cluster{config: config}
	c.Clientset, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	c.objects, err = dynamic.NewForConfig(config)
	require.NoError(t, err)
	c.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(discovery.NewDiscoveryClientForConfigOrDie(config)))
	return c
}

// resource returns the client for objects of a kind, nil for a kind that the API server does not know.
func (c *cluster) resource(t *testing.T, client dynamic.Interface, object *unstructured.Unstructured) dynamic.ResourceInterface {
	t.Helper()
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if meta.IsNoMatchError(err) {
		return nil
	}
	require.NoError(t, err)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		return client.Resource(mapping.Resource).Namespace(object.GetNamespace())
	}
	return client.Resource(mapping.Resource)
}

// apply applies objects as Helm does, and returns the first refusal.
func (c *cluster) apply(t *testing.T, release string, options metav1.PatchOptions, all ...*unstructured.Unstructured) error {
	t.Helper()
	options.FieldManager, options.FieldValidation = "helm", metav1.FieldValidationStrict
	for _, object := range all {
		client := c.resource(t, c.objects, object)
		if client == nil {
			return fmt.Errorf("%s %s: the API server does not know the kind", object.GetKind(), object.GetName())
		}
		object = object.DeepCopy()
		annotations := object.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations["meta.helm.sh/release-name"] = release
		annotations["meta.helm.sh/release-namespace"] = cmp.Or(object.GetNamespace(), "kube-system")
		object.SetAnnotations(annotations)
		data, err := json.Marshal(object)
		require.NoError(t, err)
		if _, err := client.Patch(t.Context(), object.GetName(), types.ApplyPatchType, data, options); err != nil {
			return fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

func (c *cluster) namespace(t *testing.T, name string) {
	t.Helper()
	_, err := c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		require.NoError(t, err)
	}
}

// agentClient returns the client of an agent on a node, whose token is bound to it as a DaemonSet's pod's is; to
// nothing for no node.
func (c *cluster) agentClient(t *testing.T, namespace, account, node string) dynamic.Interface {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	if node != "" {
		object, err := c.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
		require.NoError(t, err)
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: object.UID}
	}
	token, err := c.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	require.NoError(t, err)
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken, config.QPS = token.Status.Token, -1
	client, err := dynamic.NewForConfig(config)
	require.NoError(t, err)
	return client
}

// TestAPIChart installs the chart, and runs all that needs a real API server on one.
func TestAPIChart(t *testing.T) {
	c := startCluster(t)
	c.namespace(t, "kube-system")
	c.namespace(t, "networking")
	for _, node := range []string{"worker1", "worker2"} {
		_, err := c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	t.Run("Refusals", c.testRefusals)
	t.Run("CiliumNodes", c.testCiliumNodes)
	t.Run("DryRun", c.testDryRun)
	t.Run("Policies", c.testPolicies)
	t.Run("Elsewhere", c.testElsewhere)
}

// testDryRun lets the API server check all objects of all value sets.
func (c *cluster) testDryRun(t *testing.T) {
	for name, values := range valueSets(t) {
		all := objects(t, render(t, values, Options{}).YAML())
		require.NotEmpty(t, all)
		for _, object := range all {
			if strings.HasPrefix(object.GetAPIVersion(), "monitoring.coreos.com/") {
				continue // their CRDs are the Prometheus operator's
			}
			require.NoError(t, c.apply(t, "network-driver", metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, object), name)
		}
	}
}

// testRefusals is about releases that the chart must not replace.
func (c *cluster) testRefusals(t *testing.T) {
	over := func(release, namespace string) error {
		_, err := Render(enabled(), Options{Release: release, Namespace: namespace, Upgrade: true, Cluster: c.config})
		return err
	}
	require.NoError(t, over("cni", "kube-system"))
	config := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": "cilium-config", "namespace": "kube-system"},
		"data":     map[string]any{"enable-ipv4": "true"},
	}}
	require.NoError(t, c.apply(t, "cni", metav1.PatchOptions{}, config))
	require.ErrorContains(t, over("cni", "kube-system"),
		`release "cni" in namespace "kube-system" holds Cilium (ConfigMap cilium-config), which this chart would remove`)
	require.NoError(t, over("network-driver", "kube-system"), "another release beside it")
	require.NoError(t, over("cni", "networking"), "a release of the same name in another namespace")

	// Off, the chart would remove everything all the more.
	_, err := Render(nil, Options{Release: "cni", Upgrade: true, Cluster: c.config})
	require.ErrorContains(t, err, "holds Cilium")

	config.Object["data"] = map[string]any{"enable-cilium-network-driver": "true"}
	require.NoError(t, c.apply(t, "cni", metav1.PatchOptions{}, config))
	require.ErrorContains(t, over("network-driver", "kube-system"), "Cilium's own network driver is enabled (ConfigMap kube-system/cilium-config)")
	require.ErrorContains(t, over("network-driver", "networking"), "Cilium's own network driver is enabled (ConfigMap kube-system/cilium-config)")
	require.NoError(t, c.CoreV1().ConfigMaps("kube-system").Delete(t.Context(), "cilium-config", metav1.DeleteOptions{}))
}

// testCiliumNodes is about whose the CRDs are.
func (c *cluster) testCiliumNodes(t *testing.T) {
	namespace := "kube-system"
	crds := func(values map[string]any) []string {
		values["networkDriver"] = map[string]any{"enabled": true}
		var names []string
		for _, object := range objects(t, render(t, values, Options{Cluster: c.config, Namespace: namespace}).YAML()) {
			if object.GetKind() == "CustomResourceDefinition" {
				names = append(names, object.GetName())
			}
		}
		slices.Sort(names)
		return names
	}
	makes := func() bool {
		return strings.Contains(string(render(t, enabled(), Options{Cluster: c.config}).YAML()), "auto-create-cilium-node-resource")
	}
	driver := []string{"ciliumnetworkdriveraddresses.cilium.io", "ciliumnetworkdriverclusterconfigs.cilium.io", "ciliumnetworkdrivernetworks.cilium.io", "ciliumnetworkdrivernodeconfigs.cilium.io"}
	require.Equal(t, append(slices.Clone(driver), "ciliumnodes.cilium.io"), crds(map[string]any{}), "the cluster has none")
	require.True(t, makes())
	require.Equal(t, driver, crds(map[string]any{"operator": map[string]any{"enabled": false}}), "nobody would read CiliumNodes")

	// The install makes them.
	for _, object := range objects(t, render(t, enabled(), Options{Cluster: c.config}).YAML()) {
		if object.GetKind() == "CustomResourceDefinition" {
			require.NoError(t, c.apply(t, "network-driver", metav1.PatchOptions{}, object))
		}
	}
	require.Equal(t, driver, crds(map[string]any{}), "the next upgrade leaves the CiliumNodes' alone")
	require.True(t, makes(), "and the agents go on with them")
	// The CRDs stay when the release is uninstalled. Helm refuses an object of a release of another namespace.
	namespace = "networking"
	require.Empty(t, crds(map[string]any{}), "a release of the same name elsewhere leaves them alone")
	namespace = "kube-system"
	c.mapper.Reset()

	// Cilium comes and takes it over; the driver's own come from somewhere else.
	definitions := c.objects.Resource(definitionResource)
	patch := []byte(`{"metadata":{"labels":{"io.cilium.k8s.crd.schema.version":"1.32.1"}}}`)
	_, err := definitions.Patch(t.Context(), "ciliumnodes.cilium.io", types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(t, err)
	require.False(t, makes(), "Cilium makes CiliumNodes")
	patch = []byte(`{"metadata":{"annotations":{"meta.helm.sh/release-name":null}}}`)
	_, err = definitions.Patch(t.Context(), driver[0], types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(t, err)
	require.Equal(t, driver[1:], crds(map[string]any{}), "a CRD of others is left alone")
	require.Equal(t, driver, crds(map[string]any{"crds": map[string]any{"networkDriver": true}}))
	require.Empty(t, crds(map[string]any{"crds": map[string]any{"networkDriver": false}}))
}

// testElsewhere checks that the policies know the agents of a release with other names.
func (c *cluster) testElsewhere(t *testing.T) {
	opts := Options{Release: "nics", Namespace: "networking"}
	values := valueSets(t)["elsewhere"]
	c.install(t, values, opts)
	agent := c.agentClient(t, "networking", "nic-agent", "worker1")
	waitDenied(t, func() error { return createSlice(t, agent, "elsewhere", "worker2", dryRun...) }, "worker1", "worker2")
	require.NoError(t, createSlice(t, agent, "elsewhere", "worker1"))
}

// install makes those objects that the tests of rights and policies need.
func (c *cluster) install(t *testing.T, values map[string]any, opts Options) {
	t.Helper()
	for _, object := range objects(t, render(t, values, opts).YAML()) {
		switch object.GetKind() {
		case "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition",
			"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding":
			require.NoError(t, c.apply(t, "network-driver", metav1.PatchOptions{Force: ptr.To(true)}, object))
		}
	}
	c.mapper.Reset()
}

// waitDenied tries until a policy has come into force, which takes a while, and wants its message.
func waitDenied(t *testing.T, try func() error, words ...string) {
	t.Helper()
	var err error
	require.Eventually(t, func() bool {
		err = try()
		return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy")
	}, testTimeout, 50*time.Millisecond, "not denied")
	for _, word := range words {
		require.ErrorContains(t, err, word)
	}
}

// skipUnknown skips a test of a slice whose nodes are said in a field that another Kubernetes than the lab's own does
// not have: that drops the field, and refuses the slice before it asks a policy.
func (c *cluster) skipUnknown(t *testing.T, try func() error) {
	t.Helper()
	version, err := c.Discovery().ServerVersion()
	require.NoError(t, err)
	if version.GitVersion == "v"+lab.DefaultKubernetes {
		return
	}
	if err := try(); err != nil && strings.Contains(err.Error(), "exactly one of `nodeName`, `nodeSelector`, `allNodes`") {
		t.Skipf("Kubernetes %s refuses it by itself: %v", version.GitVersion, err)
	}
}
