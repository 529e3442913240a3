// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/v2alpha1"
	drivertypes "github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var (
	definitionResource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	sliceResource      = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceslices"}
	claimResource      = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"}
	templateResource   = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaimtemplates"}
	classResource      = schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "deviceclasses"}
	nodeConfigResource = v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NodeConfigResource)
	ciliumNodeResource = schema.GroupVersionResource{Group: "cilium.io", Version: "v2", Resource: "ciliumnodes"}
)

var dryRun = []string{metav1.DryRunAll}

// object decodes a YAML document.
func object(t *testing.T, format string, args ...any) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal(fmt.Appendf(nil, format, args...), &o.Object))
	return o
}

func slice(t *testing.T, name, driver, pool, where string) *unstructured.Unstructured {
	t.Helper()
	return object(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: %s}
spec:
  driver: %s
  %s
  pool: {name: %s, generation: 1, resourceSliceCount: 1}
  devices: []
`, name, driver, where, pool)
}

func createSlice(t *testing.T, client dynamic.Interface, name, node string, dryRun ...string) error {
	t.Helper()
	_, err := client.Resource(sliceResource).Create(t.Context(),
		slice(t, name, v2alpha1.DefaultDriverName, node+"/a-pool", "nodeName: "+node), metav1.CreateOptions{DryRun: dryRun})
	return err
}

// address is an address of a device of the node.
func address(t *testing.T, node string) *unstructured.Unstructured {
	return object(t, `
apiVersion: cilium.io/v2alpha1
kind: CiliumNetworkDriverAddress
metadata: {name: storage.192.0.2.10}
spec: {network: storage, address: 192.0.2.10, node: %s, namespace: default, claim: {name: c, uid: u}, pod: {name: p, uid: v}, request: net, device: vf1}
`, node)
}

// reserved is one that is reserved, under a name of its own.
func reserved(t *testing.T, addr, node string) *unstructured.Unstructured {
	o := address(t, node)
	o.SetName("storage." + addr)
	require.NoError(t, unstructured.SetNestedField(o.Object, addr, "spec", "address"))
	require.NoError(t, unstructured.SetNestedMap(o.Object, map[string]any{"claim": "net", "request": "net", "ordinal": int64(0)}, "spec", "reservation"))
	return o
}

// updateAddress has the client change node and state of an address.
func (c *cluster) updateAddress(t *testing.T, client dynamic.Interface, addr, node string, released bool, dryRun ...string) error {
	t.Helper()
	addresses := v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)
	o, err := c.objects.Resource(addresses).Get(t.Context(), "storage."+addr, metav1.GetOptions{})
	require.NoError(t, err)
	require.NoError(t, unstructured.SetNestedField(o.Object, node, "spec", "node"))
	if released {
		require.NoError(t, unstructured.SetNestedField(o.Object, v2alpha1.AddressReleased, "spec", "state"))
		require.NoError(t, unstructured.SetNestedField(o.Object, "2026-01-02T03:04:05Z", "spec", "releasedAt"))
	} else {
		require.NoError(t, unstructured.SetNestedField(o.Object, v2alpha1.AddressInUse, "spec", "state"))
		unstructured.RemoveNestedField(o.Object, "spec", "releasedAt")
	}
	_, err = client.Resource(addresses).Update(t.Context(), o, metav1.UpdateOptions{DryRun: dryRun})
	return err
}

// claim makes a claim that is allotted on a node, with devices of two drivers.
func (c *cluster) claim(t *testing.T, name, node string) *unstructured.Unstructured {
	t.Helper()
	claims := c.objects.Resource(claimResource).Namespace("default")
	made, err := claims.Create(t.Context(), object(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s, namespace: default}
spec:
  devices:
    requests:
    - {name: net, exactly: {deviceClassName: net}}
    - {name: gpu, exactly: {deviceClassName: gpu}}
    config:
    - requests: [net]
      opaque:
        driver: networkdriver.cilium.io
        parameters: {vlan: 5, podIfName: net1}
`, name), metav1.CreateOptions{})
	require.NoError(t, err)
	if node == "" {
		return made
	}
	made.Object["status"] = object(t, `
allocation:
  devices:
    results:
    - {request: net, driver: networkdriver.cilium.io, pool: %[1]s/a-pool, device: vf1}
    - {request: gpu, driver: gpu.example.com, pool: %[1]s, device: gpu1}
    config:
    - source: FromClaim
      requests: [net]
      opaque:
        driver: networkdriver.cilium.io
        parameters: {vlan: 5, podIfName: net1}
  nodeSelector:
    nodeSelectorTerms:
    - matchFields:
      - {key: metadata.name, operator: In, values: [%[1]s]}
reservedFor:
- {resource: pods, name: a-pod, uid: a-uid}
`, node).Object
	made, err = claims.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	require.NoError(t, err)
	return made
}

// applyDevices applies entries to a claim's status as the agent does.
func applyDevices(t *testing.T, client dynamic.Interface, claim *unstructured.Unstructured, devices string, dryRun ...string) error {
	t.Helper()
	o := object(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s, namespace: default, uid: %s}
status: {devices: %s}
`, claim.GetName(), claim.GetUID(), devices)
	data, err := json.Marshal(o)
	require.NoError(t, err)
	_, err = client.Resource(claimResource).Namespace("default").Patch(t.Context(), claim.GetName(), types.ApplyPatchType, data,
		metav1.PatchOptions{FieldManager: v2alpha1.DefaultDriverName + "/a-node", Force: ptr.To(true), DryRun: dryRun}, "status")
	return err
}

func patchStatus(t *testing.T, client dynamic.Interface, node string, dryRun ...string) error {
	t.Helper()
	_, err := client.Resource(nodeConfigResource).Patch(t.Context(), node, types.MergePatchType, []byte(`{"status":{"devices":3}}`),
		metav1.PatchOptions{DryRun: dryRun}, "status")
	return err
}

func createCiliumNode(t *testing.T, client dynamic.Interface, node string, dryRun ...string) error {
	t.Helper()
	_, err := client.Resource(ciliumNodeResource).Create(t.Context(),
		object(t, "{apiVersion: cilium.io/v2, kind: CiliumNode, metadata: {name: %s}}", node), metav1.CreateOptions{DryRun: dryRun})
	return err
}

// testPolicies writes as agents do: with the rights that the chart gives what is right, and with all rights what is not,
// so that only the policies are in the way.
func (c *cluster) testPolicies(t *testing.T) {
	values := enabled()
	values["ciliumNodes"] = map[string]any{"create": true}
	c.install(t, values, Options{})
	for _, node := range []string{"worker1", "worker2"} {
		_, err := c.objects.Resource(nodeConfigResource).Create(t.Context(), object(t,
			"{apiVersion: cilium.io/v2alpha1, kind: CiliumNetworkDriverNodeConfig, metadata: {name: %s}, spec: {}}", node), metav1.CreateOptions{})
		require.NoError(t, err)
	}
	agent := c.agentClient(t, "kube-system", "cilium-network-driver", "worker1")
	waitDenied(t, func() error { return createSlice(t, agent, "probe", "worker2", dryRun...) }, "the agent of node worker1 may not write the ResourceSlice of node worker2")
	waitDenied(t, func() error { return patchStatus(t, agent, "worker2", dryRun...) },
		"the agent of node worker1 may not write the CiliumNetworkDriverNodeConfig of node worker2")

	own, foreign, free := c.claim(t, "own", "worker1"), c.claim(t, "foreign", "worker2"), c.claim(t, "free", "")
	ourEntry := "[{driver: networkdriver.cilium.io, pool: worker1/a-pool, device: vf1, data: {a: b}}]"
	t.Run("Accepted", func(t *testing.T) {
		require.NoError(t, createSlice(t, agent, "own", "worker1"))
		slices := agent.Resource(sliceResource)
		present, err := c.objects.Resource(sliceResource).Get(t.Context(), "own", metav1.GetOptions{})
		require.NoError(t, err)
		present.SetLabels(map[string]string{"a": "b"})
		_, err = slices.Update(t.Context(), present, metav1.UpdateOptions{})
		require.NoError(t, err)
		require.NoError(t, slices.Delete(t.Context(), "own", metav1.DeleteOptions{}))
		require.NoError(t, patchStatus(t, agent, "worker1"))
		require.NoError(t, createCiliumNode(t, agent, "worker1"))
		addresses := v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)
		_, err = agent.Resource(addresses).Create(t.Context(), address(t, "worker1"), metav1.CreateOptions{})
		require.NoError(t, err)
		require.NoError(t, agent.Resource(addresses).Delete(t.Context(), "storage.192.0.2.10", metav1.DeleteOptions{}))
		_, err = c.objects.Resource(addresses).Create(t.Context(), address(t, "worker2"), metav1.CreateOptions{})
		require.NoError(t, err)
		for _, addr := range []string{"192.0.2.20", "192.0.2.21"} {
			_, err = c.objects.Resource(addresses).Create(t.Context(), reserved(t, addr, "worker2"), metav1.CreateOptions{})
			require.NoError(t, err)
		}
		require.NoError(t, c.updateAddress(t, c.objects, "192.0.2.20", "worker2", true))
		require.ErrorContains(t, c.updateAddress(t, agent, "192.0.2.21", "worker1", false), "an address that is InUse is its device's until it is Released")
		require.NoError(t, c.updateAddress(t, agent, "192.0.2.20", "worker1", false), "taken over")
		require.NoError(t, c.updateAddress(t, agent, "192.0.2.20", "worker1", true), "released")
		require.NoError(t, c.updateAddress(t, c.objects, "192.0.2.20", "worker2", false))
		require.NoError(t, c.updateAddress(t, c.objects, "192.0.2.20", "worker2", true))
		require.NoError(t, applyDevices(t, agent, own, ourEntry))
		require.NoError(t, applyDevices(t, agent, own, "[]"), "and back")
		require.NoError(t, applyDevices(t, agent, own, ourEntry))
		written, err := c.objects.Resource(claimResource).Namespace("default").Get(t.Context(), own.GetName(), metav1.GetOptions{})
		require.NoError(t, err)
		unstructured.RemoveNestedField(written.Object, "status", "devices")
		_, err = agent.Resource(claimResource).Namespace("default").UpdateStatus(t.Context(), written, metav1.UpdateOptions{})
		require.NoError(t, err, "and back by an update")
		require.NoError(t, applyDevices(t, agent, free, "[]"), "nothing to take back")
	})

	_, err := c.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "everything"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "everything"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "kube-system", Name: "cilium-network-driver"}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = c.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "everything"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.NoError(t, createSlice(t, c.objects, "foreign", "worker2"))
	unbound := c.agentClient(t, "kube-system", "cilium-network-driver", "")
	create := func(client dynamic.Interface, o *unstructured.Unstructured) error {
		_, err := client.Resource(sliceResource).Create(t.Context(), o, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	for name, test := range map[string]struct {
		try  func() error
		want string
	}{
		"slice of all nodes": {
			func() error {
				return create(agent, slice(t, "x", v2alpha1.DefaultDriverName, "worker1/a-pool", "allNodes: true"))
			},
			"may not write the ResourceSlice of no single node",
		},
		"slice of another driver": {
			func() error {
				return create(agent, slice(t, "x", "gpu.example.com", "worker1/a-pool", "nodeName: worker1"))
			},
			"spec.driver: gpu.example.com is not among the chart's driverNames, which are networkdriver.cilium.io",
		},
		"slice whose devices choose their nodes": {
			func() error {
				return create(agent, slice(t, "x", v2alpha1.DefaultDriverName, "worker1/a-pool", "perDeviceNodeSelection: true"))
			},
			"may not write the ResourceSlice of no single node",
		},
		// The scheduler knows a pool by driver and name: a newer generation of it, or a device of the same name, would take
		// the other node's devices away.
		"slice in another node's pool": {
			func() error {
				return create(agent, slice(t, "x", v2alpha1.DefaultDriverName, "worker2/a-pool", "nodeName: worker1"))
			},
			"spec.pool.name: the agent of node worker1 may not write worker2/a-pool, for the names of its pools begin with worker1/",
		},
		"slice in the pool of a node with a longer name": {
			func() error {
				return create(agent, slice(t, "x", v2alpha1.DefaultDriverName, "worker10/a-pool", "nodeName: worker1"))
			},
			"spec.pool.name: the agent of node worker1 may not write worker10/a-pool",
		},
		"apply another node's slice": {
			func() error {
				_, err := agent.Resource(sliceResource).Apply(t.Context(), "x",
					slice(t, "x", v2alpha1.DefaultDriverName, "worker2/a-pool", "nodeName: worker2"), metav1.ApplyOptions{FieldManager: "x", DryRun: dryRun})
				return err
			},
			"the agent of node worker1 may not write the ResourceSlice of node worker2",
		},
		"delete all slices": {
			func() error {
				return agent.Resource(sliceResource).DeleteCollection(t.Context(), metav1.DeleteOptions{DryRun: dryRun}, metav1.ListOptions{})
			},
			"the agent of node worker1 may not write the ResourceSlice of node worker2",
		},
		"delete another node's slice": {
			func() error {
				return agent.Resource(sliceResource).Delete(t.Context(), "foreign", metav1.DeleteOptions{DryRun: dryRun})
			},
			"the agent of node worker1 may not write the ResourceSlice of node worker2",
		},
		"update another node's slice": {
			func() error {
				_, err := agent.Resource(sliceResource).Patch(t.Context(), "foreign", types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`),
					metav1.PatchOptions{DryRun: dryRun})
				return err
			},
			"the agent of node worker1 may not write the ResourceSlice of node worker2",
		},
		"token of no node": {
			func() error { return createSlice(t, unbound, "x", "worker1", dryRun...) },
			"has to use a token that is bound to its node",
		},
		"spec of another node's config": {
			func() error {
				_, err := agent.Resource(nodeConfigResource).Patch(t.Context(), "worker2", types.MergePatchType, []byte(`{"spec":{"driverName":"a.b"}}`),
					metav1.PatchOptions{DryRun: dryRun})
				return err
			},
			"may not write the CiliumNetworkDriverNodeConfig of node worker2",
		},
		"delete another node's config": {
			func() error {
				return agent.Resource(nodeConfigResource).Delete(t.Context(), "worker2", metav1.DeleteOptions{DryRun: dryRun})
			},
			"may not write the CiliumNetworkDriverNodeConfig of node worker2",
		},
		"another CiliumNode by a generated name": {
			func() error {
				_, err := agent.Resource(ciliumNodeResource).Create(t.Context(),
					object(t, "{apiVersion: cilium.io/v2, kind: CiliumNode, metadata: {generateName: worker1}}"), metav1.CreateOptions{DryRun: dryRun})
				return err
			},
			"may not write the CiliumNode of node worker1",
		},
		"another CiliumNode": {
			func() error { return createCiliumNode(t, agent, "worker2", dryRun...) },
			"may not write the CiliumNode of node worker2",
		},
		"address of another node": {
			func() error {
				_, err := agent.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)).Create(t.Context(), address(t, "worker2"), metav1.CreateOptions{DryRun: dryRun})
				return err
			},
			"spec.node: the agent of node worker1 may not write an address of node worker2",
		},
		"delete an address of another node": {
			func() error {
				return agent.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)).Delete(t.Context(), "storage.192.0.2.10", metav1.DeleteOptions{DryRun: dryRun})
			},
			"spec.node: the agent of node worker1 may not write an address of node worker2",
		},
		"release an address of another node": {
			func() error { return c.updateAddress(t, agent, "192.0.2.21", "worker2", true, dryRun...) },
			"spec.node: the agent of node worker1 may not write an address of node worker2",
		},
		"take over an address for another node": {
			func() error { return c.updateAddress(t, agent, "192.0.2.20", "worker2", false, dryRun...) },
			"spec.node: the agent of node worker1 may not write an address of node worker2",
		},
		"delete an address that another node has released": {
			func() error {
				return agent.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)).Delete(t.Context(), "storage.192.0.2.20", metav1.DeleteOptions{DryRun: dryRun})
			},
			"spec.node: the agent of node worker1 may not write an address of node worker2",
		},
		"claim of another node": {
			func() error {
				return applyDevices(t, agent, foreign, "[{driver: networkdriver.cilium.io, pool: worker2/a-pool, device: vf1}]", dryRun...)
			},
			"status.devices: the claim is not allotted to node worker1, whose agent may not write its status",
		},
		"entry of another driver": {
			func() error {
				return applyDevices(t, agent, own, "[{driver: gpu.example.com, pool: worker1, device: gpu1}]", dryRun...)
			},
			"may change entries of these drivers only: networkdriver.cilium.io",
		},
		"reservation": {
			func() error {
				changed, err := c.objects.Resource(claimResource).Namespace("default").Get(t.Context(), "own", metav1.GetOptions{})
				require.NoError(t, err)
				require.NoError(t, unstructured.SetNestedSlice(changed.Object, []any{map[string]any{"resource": "pods", "name": "b", "uid": "b"}}, "status", "reservedFor"))
				_, err = agent.Resource(claimResource).Namespace("default").UpdateStatus(t.Context(), changed, metav1.UpdateOptions{DryRun: dryRun})
				return err
			},
			"may change nothing of a claim but status.devices",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.skipUnknown(t, test.try)
			waitDenied(t, test.try, test.want)
		})
	}
	require.NoError(t, createSlice(t, c.objects, "by-somebody-else", "worker2", dryRun...), "the policies are about agents")
	require.NoError(t, c.RbacV1().ClusterRoleBindings().Delete(t.Context(), "everything", metav1.DeleteOptions{}))
	t.Run("Parameters", c.testParameters)
}

// testParameters writes parameters to all kinds of objects that have them. What is refused is what the agent refuses,
// and the words are the agent's.
func (c *cluster) testParameters(t *testing.T) {
	const driver = v2alpha1.DefaultDriverName
	config := func(driver, parameters string) string {
		return fmt.Sprintf("config: [{opaque: {driver: %s, parameters: %s}}]", driver, parameters)
	}
	claim := func(driver, parameters string) error {
		_, err := c.objects.Resource(claimResource).Namespace("default").Create(t.Context(), object(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: parameters, namespace: default}
spec: {devices: {requests: [{name: net, exactly: {deviceClassName: net}}], %s}}`, config(driver, parameters)), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	template := func(driver, parameters string) error {
		_, err := c.objects.Resource(templateResource).Namespace("default").Create(t.Context(), object(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: parameters, namespace: default}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: net}}], %s}}}`, config(driver, parameters)), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	class := func(driver, parameters string) error {
		_, err := c.objects.Resource(classResource).Create(t.Context(), object(t, `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: parameters}
spec: {%s}`, config(driver, parameters)), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	kinds := map[string]func(driver, parameters string) error{"claim": claim, "template": template, "class": class}
	waitDenied(t, func() error { return claim(driver, `{"vlna": 5}`) })

	for _, parameters := range []string{
		`{"vlna": 5}`, `{"VLAN": 5}`, `{"vlan": 5000}`, `{"vlan": -1}`, `{"vlan": 4095}`, `{"vlan": "5"}`, `{"vlan": 5.5}`, `{"vlan": true}`,
		`{"vlan": null}`, `{"podIfName": null}`, `{"podIfName": 5}`, `{"podIfName": true}`, `{"podIfName": ["a"]}`, `{"podIfName": {"a": "b"}}`,
		`{"podIfName": ""}`, `{"podIfName": "0123456789abcdef"}`, `{"podIfName": "ääääääää"}`, `{"podIfName": "."}`, `{"podIfName": ".."}`,
		`{"podIfName": "lo"}`, `{"podIfName": "eth0"}`, `{"podIfName": "all"}`, `{"podIfName": "default"}`,
		`{"podIfName": "a/b"}`, `{"podIfName": "a:b"}`, `{"podIfName": "a%b"}`, `{"podIfName": "a b"}`, `{"vlan": 5, "podIfName": "a/b"}`,
		`{"network": 5}`, `{"network": null}`, `{"network": ""}`, `{"network": "a.b"}`, `{"network": "A"}`, `{"network": "-a"}`,
		`{"network": "` + strings.Repeat("a", 64) + `"}`, `{"network": "storage", "vlan": 0}`,
		`{"driver": 5}`, `{"driver": null}`, `{"driver": ""}`, `{"driver": "igbvf"}`, `{"driver": "vfio-pci", "addresses": ["192.0.2.1/24"]}`, `{"driver": "vfio-pci", "routes": [{"to": "::/0", "via": "fe80::1"}]}`, `{"driver": "vfio-pci", "podIfName": "net1"}`,
		`{"vhost": 1}`, `{"vhost": "true"}`, `{"vhost": null}`, `{"vhost": []}`, `{"vhost": {}}`,
		`{"rdma": 1}`, `{"rdma": "true"}`, `{"rdma": null}`, `{"rdma": []}`, `{"driver": "vfio-pci", "rdma": true}`,
		`{"addresses": "192.0.2.1"}`, `{"addresses": []}`, `{"addresses": {}}`, `{"addresses": null}`, `{"addresses": [7]}`, `{"addresses": [null]}`, `{"addresses": ["192.0.2.1/24", ""]}`,
		`{"addresses": [` + strings.Repeat(`"192.0.2.1",`, 16) + `"192.0.2.1"]}`, `{"addresses": ["192.0.2.01"]}`, `{"addresses": ["192.0.2.1/33"]}`,
		`{"addresses": ["192.0.2.1/024"]}`, `{"addresses": ["2001:DB8::1"]}`, `{"addresses": ["2001:db8:0::1/64"]}`, `{"addresses": ["::ffff:192.0.2.1"]}`,
		`{"addresses": ["::ffff:192.0.2.1/120"]}`, `{"addresses": ["fe80::1%eth0"]}`, `{"addresses": ["0.0.0.0"]}`, `{"addresses": ["127.0.0.1/8"]}`, `{"addresses": ["ff02::1"]}`,
		`{"addresses": ["224.0.0.1/24"]}`, `{"addresses": ["169.254.0.1/16"]}`, `{"addresses": ["fe80::1/64"]}`, `{"addresses": ["255.255.255.255/32"]}`,
		`{"addresses": ["192.0.2.1", "192.0.2.2"]}`, `{"addresses": ["2001:db8::1", "2001:db8::2"]}`, `{"addresses": ["` + strings.Repeat("1", 99) + `"]}`,
		`{"network": "storage", "addresses": ["192.0.2.1/24"]}`, `{"network": "storage", "routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1"}]}`,
		`{"routes": {}}`, `{"routes": []}`, `{"routes": null}`, `{"routes": ["10.0.0.0/8"]}`, `{"routes": [null]}`,
		`{"routes": [` + strings.Repeat(`{"to": "10.0.0.0/8", "via": "192.0.2.1"},`, 64) + `{"to": "10.0.0.0/8", "via": "192.0.2.1"}]}`,
		`{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "table": 7}]}`, `{"routes": [{"TO": "10.0.0.0/8", "via": "192.0.2.1"}]}`,
		`{"routes": [{"to": null, "via": "192.0.2.1"}]}`, `{"routes": [{"via": "192.0.2.1"}]}`, `{"routes": [{"to": "10.0.0.0/8"}]}`,
		`{"routes": [{"to": 7, "via": "192.0.2.1"}]}`, `{"routes": [{"to": "10.0.0.0/8", "via": ["192.0.2.1"]}]}`, `{"routes": [{"to": "10.0.0.1/8", "via": "192.0.2.1"}]}`,
		`{"routes": [{"to": "10.0.0.0", "via": "192.0.2.1"}]}`, `{"routes": [{"to": "default", "via": "192.0.2.1"}]}`, `{"routes": [{"to": "::ffff:10.0.0.0/104", "via": "192.0.2.1"}]}`,
		`{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1/24"}]}`, `{"routes": [{"to": "::/0", "via": "fe80::1%eth0"}]}`, `{"routes": [{"to": "10.0.0.0/8", "via": "2001:db8::1"}]}`,
		`{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": -1}]}`, `{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": 2147483648}]}`,
		`{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": 1.5}]}`, `{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": "7"}]}`,
		`{"routes": [{"to": "10.0.0.0/8", "via": "192.0.2.1", "metric": true}]}`, `{"routes": [{"to": "::/0", "via": "fe80::1"}, {"to": "10.0.0.1/8", "via": "192.0.2.1"}]}`,
	} {
		_, wrong := drivertypes.ParseDeviceConfig([]byte(parameters))
		require.Error(t, wrong, parameters)
		for kind, create := range kinds {
			err := create(driver, parameters)
			require.ErrorContains(t, err, wrong.Error(), "%s %s", kind, parameters)
			require.NoError(t, create("other.example.com", parameters), "not ours: %s %s", kind, parameters)
		}
	}
	for _, parameters := range []string{
		`{}`, `{"vlan": 0}`, `{"vlan": 4094, "podIfName": "net1"}`, `{"podIfName": "0123456789abcde"}`, `{"podIfName": "büro-1_a.b"}`, `{"podIfName": "lo0"}`,
		`{"network": "storage"}`, `{"network": "` + strings.Repeat("a", 63) + `", "podIfName": "net1"}`,
		`{"driver": "vfio-pci", "vlan": 5, "vhost": true}`, `{"vhost": false}`, `{"rdma": true, "podIfName": "rdma0"}`, `{"driver": "vfio-pci", "rdma": false}`,
		`{"network": "storage", "addresses": ["192.0.2.10", "2001:db8::10"]}`, `{"addresses": ["192.0.2.10"]}`, `{"addresses": ["192.0.2.10/24", "192.0.2.11/24", "2001:db8::10/64"]}`,
		`{"vlan": 5, "addresses": ["192.0.2.10/24"], "routes": [{"to": "0.0.0.0/0", "via": "192.0.2.1", "metric": 2147483647}, {"to": "::/0", "via": "fe80::1"}]}`,
	} {
		_, err := drivertypes.ParseDeviceConfig([]byte(parameters))
		require.NoError(t, err, parameters)
		for kind, create := range kinds {
			require.NoError(t, create(driver, parameters), "%s %s", kind, parameters)
		}
	}
	// The agent's words have more for these, such as how Go writes a character that cannot be seen.
	for parameters, words := range map[string]string{
		`{"vlan": [5]}`:             "is not a whole number from 0 to 4094",
		`{"podIfName": "a\u0001b"}`: "which an interface name must not",
		`{"podIfName": "a\u200bb"}`: "which an interface name must not",
		`{"podIfName": "a\ufffdb"}`: "which an interface name must not",
	} {
		_, err := drivertypes.ParseDeviceConfig([]byte(parameters))
		require.ErrorContains(t, err, words)
		require.ErrorContains(t, claim(driver, parameters), words)
	}
	c.testSeveralDevices(t)
	c.testNumberForms(t)
	c.testLargestParameters(t)
	c.testOldParameters(t)
}

// testSeveralDevices asks for addresses for requests of several devices, which cannot all have them.
func (c *cluster) testSeveralDevices(t *testing.T) {
	create := func(requests, names, parameters string) error {
		spec := fmt.Sprintf("{devices: {requests: [%s], config: [{requests: %s, opaque: {driver: %s, parameters: %s}}]}}", requests, names, v2alpha1.DefaultDriverName, parameters)
		_, err := c.objects.Resource(claimResource).Namespace("default").Create(t.Context(), object(t,
			"{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: several, namespace: default}, spec: %s}", spec), metav1.CreateOptions{DryRun: dryRun})
		_, templateErr := c.objects.Resource(templateResource).Namespace("default").Create(t.Context(), object(t,
			"{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplate, metadata: {name: several, namespace: default}, spec: {spec: %s}}", spec), metav1.CreateOptions{DryRun: dryRun})
		require.Equal(t, err == nil, templateErr == nil, "%v, %v", err, templateErr)
		return err
	}
	const one, two, all = "{name: one, exactly: {deviceClassName: net}}", "{name: two, exactly: {deviceClassName: net, count: 2}}",
		"{name: all, exactly: {deviceClassName: net, allocationMode: All}}"
	const addresses, words = `{addresses: [192.0.2.10/24]}`, "addresses: the request is for several devices (count, or allocationMode All), which cannot all have them; make a request for each"
	require.ErrorContains(t, create(two, "[]", addresses), words)
	require.ErrorContains(t, create(one+","+all, "[one, all]", addresses), words)
	require.NoError(t, create(one+","+two+","+all, "[one]", addresses))
	require.NoError(t, create(one+","+two+","+all, "[]", "{vlan: 5}"))
}

// testOldParameters has an object with bad parameters from before the policy, which can still be worked with.
func (c *cluster) testOldParameters(t *testing.T) {
	bindings := c.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	binding, err := bindings.Get(t.Context(), "cilium-network-driver-parameters", metav1.GetOptions{})
	require.NoError(t, err)
	require.NoError(t, bindings.Delete(t.Context(), binding.Name, metav1.DeleteOptions{}))
	classes := c.objects.Resource(classResource)
	old := object(t, `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: old, finalizers: [example.com/a]}
spec: {config: [{opaque: {driver: networkdriver.cilium.io, parameters: {vlna: 5}}}]}`)
	require.Eventually(t, func() bool {
		_, err := classes.Create(t.Context(), old, metav1.CreateOptions{})
		return err == nil
	}, testTimeout, 50*time.Millisecond)
	binding.ResourceVersion, binding.UID = "", ""
	_, err = bindings.Create(t.Context(), binding, metav1.CreateOptions{})
	require.NoError(t, err)
	patch := func(patch string, dryRun ...string) error {
		_, err := classes.Patch(t.Context(), "old", types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dryRun})
		return err
	}
	waitDenied(t, func() error {
		return patch(`{"spec":{"config":[{"opaque":{"driver":"networkdriver.cilium.io","parameters":{"vlan":5000}}}]}}`, dryRun...)
	}, "vlan: 5000 is not in 0..4094")
	require.NoError(t, patch(`{"metadata":{"labels":{"a":"b"}}}`))
	require.NoError(t, patch(`{"metadata":{"finalizers":null}}`))
}
