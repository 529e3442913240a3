// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1_test

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/api/v2alpha1/internal/speccases"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

// TestAPI asks a real API server.
func TestAPI(t *testing.T) {
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{
		Dir: t.TempDir(),
		Bin: []string{testenv.KubeBin(t)},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	config, err := server.RESTConfig()
	require.NoError(t, err)

	installer, err := apiextensionsclient.NewForConfig(config)
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer))
	before, err := installer.CustomResourceDefinitions().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.NoError(t, crds.Install(t.Context(), installer), "once more")
	after, err := installer.CustomResourceDefinitions().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Equal(t, before.Items, after.Items, "installing again changes nothing")

	client, err := dynamic.NewForConfig(config)
	require.NoError(t, err)
	nodeConfigs := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NodeConfigResource))
	clusterConfigs := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.ClusterConfigResource))

	t.Run("specs", func(t *testing.T) {
		for _, test := range speccases.All {
			t.Run(test.Name, func(t *testing.T) {
				object := decode(t, v2alpha1.NodeConfigKind, test.Node(), test.YAML, "spec")
				requireVerdict(t, nodeConfigs, object, "spec", test.Field)
				if test.NodeName != "" {
					return
				}
				object = decode(t, v2alpha1.ClusterConfigKind, "workers", test.YAML, "spec", "spec")
				requireVerdict(t, clusterConfigs, object, "spec.spec", test.Field)
			})
		}
	})
	t.Run("selectors", func(t *testing.T) {
		for _, test := range speccases.Selectors {
			t.Run(test.Name, func(t *testing.T) {
				requireVerdict(t, clusterConfigs, withSelector(t, test), "spec.nodeSelector", test.Field)
			})
		}
	})
	t.Run("networks", func(t *testing.T) {
		networks := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NetworkResource))
		for _, test := range speccases.Networks {
			t.Run(test.Name, func(t *testing.T) {
				field := test.Field
				if test.GoOnly {
					field = ""
				}
				requireVerdict(t, networks, decode(t, v2alpha1.NetworkKind, test.Node(), test.YAML, "spec"), "", field)
			})
		}
	})
	t.Run("addresses", func(t *testing.T) {
		addresses := client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource))
		for _, test := range speccases.Addresses {
			t.Run(test.Name, func(t *testing.T) {
				requireVerdict(t, addresses, decode(t, v2alpha1.AddressKind, test.Node(), test.Address(), "spec"), "", test.Field)
			})
		}
		made, err := addresses.Create(t.Context(), &unstructured.Unstructured{
			Object: decode(t, v2alpha1.AddressKind, speccases.Addresses[0].NodeName, speccases.Addresses[0].Address(), "spec"),
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		require.NoError(t, unstructured.SetNestedField(made.Object, "worker-2", "spec", "node"))
		_, err = addresses.Update(t.Context(), made, metav1.UpdateOptions{})
		require.ErrorContains(t, err, "an address is made anew, not changed")
		found, err := addresses.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.node=worker-1"})
		require.NoError(t, err)
		require.Len(t, found.Items, 1)
		found, err = addresses.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.node=worker-2"})
		require.NoError(t, err)
		require.Empty(t, found.Items)
	})
	t.Run("reserved addresses", func(t *testing.T) {
		testAPIReservedAddresses(t, client.Resource(v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)))
	})
	t.Run("defaults", func(t *testing.T) { testAPIDefaults(t, nodeConfigs) })
	t.Run("status", func(t *testing.T) { testAPIStatus(t, nodeConfigs) })
	t.Run("names", func(t *testing.T) { testAPINames(t, config) })
	t.Run("columns", func(t *testing.T) { testAPIColumns(t, config, nodeConfigs) })
}

// testAPIReservedAddresses has the server let go what is released and taken
// over, and nothing else.
func testAPIReservedAddresses(t *testing.T, addresses dynamic.ResourceInterface) {
	create := func(name, spec string) *unstructured.Unstructured {
		test := speccases.Case{YAML: spec}
		made, err := addresses.Create(t.Context(), &unstructured.Unstructured{
			Object: decode(t, v2alpha1.AddressKind, name, test.Address(), "spec"),
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return made
	}
	// change sets fields of the spec, those that are nil to nothing.
	change := func(object *unstructured.Unstructured, fields map[string]any, wanted string) *unstructured.Unstructured {
		t.Helper()
		changed := object.DeepCopy()
		for name, value := range fields {
			if value == nil {
				unstructured.RemoveNestedField(changed.Object, "spec", name)
			} else {
				require.NoError(t, unstructured.SetNestedField(changed.Object, value, "spec", name))
			}
		}
		updated, err := addresses.Update(t.Context(), changed, metav1.UpdateOptions{})
		if wanted != "" {
			require.ErrorContains(t, err, wanted)
			return object
		}
		require.NoError(t, err)
		return updated
	}
	owner := func(name, uid string) map[string]any { return map[string]any{"name": name, "uid": uid} }
	release := map[string]any{"state": "Released", "releasedAt": "2026-01-02T03:04:05Z"}
	takeOver := map[string]any{
		"state": "InUse", "releasedAt": nil, "node": "worker-2", "device": "dummy1", "request": "net/other", "vlan": int64(8), "pool": "b",
		"claim": owner("d", "x"), "pod": owner("p", "w"),
	}

	plain := create("storage.192.0.2.20", "address: 192.0.2.20")
	require.Equal(t, "InUse", plain.Object["spec"].(map[string]any)["state"], "by default")
	change(plain, release, "an address is made anew, not changed")
	change(plain, map[string]any{"reservation": map[string]any{"claim": "net", "request": "net", "ordinal": int64(0)}}, "an address is made anew, not changed")

	address := create("storage.192.0.2.21", "address: 192.0.2.21\nvlan: 7\npool: a\nreservation: {claim: net, request: net, ordinal: 0}")
	for field, value := range takeOver {
		if field != "state" && field != "releasedAt" {
			change(address, map[string]any{field: value}, "an address that is InUse is its device's until it is Released")
		}
	}
	change(address, map[string]any{"reservation": nil}, "an address stays reserved for whom it is reserved")
	change(address, map[string]any{"state": "Released"}, "an address that is Released has releasedAt and a reservation")
	stale := address
	address = change(address, release, "")
	change(address, map[string]any{"releasedAt": "2026-01-02T03:04:06Z"}, "an address that is Released changes only as it is taken over, InUse")
	change(address, map[string]any{"node": "worker-2"}, "an address that is Released changes only as it is taken over, InUse")
	for field, value := range map[string]any{
		"pod": owner("another", "w"), "namespace": "another", "reservation": map[string]any{"claim": "net", "request": "net", "ordinal": int64(1)},
	} {
		taken := maps.Clone(takeOver)
		taken[field] = value
		change(address, taken, "an address stays reserved for whom it is reserved")
	}
	change(address, map[string]any{"state": "InUse"}, "no releasedAt")
	first := change(address, takeOver, "")
	require.Equal(t, "worker-2", first.Object["spec"].(map[string]any)["node"])
	for _, late := range []*unstructured.Unstructured{stale, address} {
		_, err := addresses.Update(t.Context(), late, metav1.UpdateOptions{})
		require.True(t, apierrors.IsConflict(err), "one takes it over: %v", err)
	}
	found, err := addresses.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.node=worker-2"})
	require.NoError(t, err)
	require.Len(t, found.Items, 1)
	change(change(first, release, ""), map[string]any{"state": "InUse", "releasedAt": nil}, "")
}

// requireVerdict checks what the server says to an object, which it does not
// keep. A refusal has to name the field.
func requireVerdict(t *testing.T, client dynamic.ResourceInterface, object map[string]any, prefix, wanted string) {
	t.Helper()
	_, err := client.Create(t.Context(), &unstructured.Unstructured{Object: object}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if wanted == "" {
		require.NoError(t, err)
		return
	}
	require.True(t, apierrors.IsInvalid(err), "%v", err)
	var status apierrors.APIStatus
	require.True(t, errors.As(err, &status))
	named := false
	for _, cause := range status.Status().Details.Causes {
		if strings.Contains(cause.Message, "some validation rules were not checked") {
			continue
		}
		require.True(t, strings.HasPrefix(cause.Field, strings.TrimPrefix(prefix+"."+wanted, ".")), "%s: %s: not about %s.%s", cause.Field, cause.Message, prefix, wanted)
		named = true
	}
	require.True(t, named, "%v", err)
}

func testAPIDefaults(t *testing.T, client dynamic.ResourceInterface) {
	object := decode(t, v2alpha1.NodeConfigKind, "defaults", `
deviceManagerConfigs: {dummy: {enabled: true}}
pools: [{name: none}, {name: all, filter: {}}]`, "spec")
	_, err := client.Create(t.Context(), &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	require.NoError(t, err)
	read, err := client.Get(t.Context(), "defaults", metav1.GetOptions{})
	require.NoError(t, err)

	config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	convert(t, read.Object, config)
	require.Equal(t, v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DriverName:                   "networkdriver.cilium.io",
		DraRegistrationRetryInterval: 1,
		DraRegistrationTimeout:       5,
		DraRegistrationMaxAttempts:   10,
		DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
			Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true},
		},
		Pools: []v2alpha1.CiliumNetworkDriverDevicePoolConfig{
			{PoolName: "none", Claims: v2alpha1.ClaimsAny, FaultEffect: v2alpha1.FaultEffectNoSchedule},
			{PoolName: "all", Claims: v2alpha1.ClaimsAny, FaultEffect: v2alpha1.FaultEffectNoSchedule,
				Filter: &v2alpha1.CiliumNetworkDriverDeviceFilter{}},
		},
	}, config.Spec)
}

func testAPIStatus(t *testing.T, client dynamic.ResourceInterface) {
	object := decode(t, v2alpha1.NodeConfigKind, "status", "driverName: nics.example.com", "spec")
	object["status"] = map[string]any{"driverName": "by-its-maker"}
	created, err := client.Create(t.Context(), &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.NotContains(t, created.Object, "status", "only the subresource sets the status")

	require.NoError(t, unstructured.SetNestedField(created.Object, "nics.example.com", "status", "driverName"))
	require.NoError(t, unstructured.SetNestedField(created.Object, "changed.example.com", "spec", "driverName"))
	updated, err := client.UpdateStatus(t.Context(), created, metav1.UpdateOptions{})
	require.NoError(t, err)
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	convert(t, updated.Object, config)
	require.Equal(t, "nics.example.com", config.Status.DriverName)
	require.Equal(t, "nics.example.com", config.Spec.DriverName, "the subresource sets nothing else")
	require.EqualValues(t, 1, config.Generation)
}

func testAPINames(t *testing.T, config *rest.Config) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	require.NoError(t, err)
	list, err := client.ServerResourcesForGroupVersion(v2alpha1.SchemeGroupVersion.String())
	require.NoError(t, err)
	short := map[string][]string{}
	for _, resource := range list.APIResources {
		require.False(t, resource.Namespaced, resource.Name)
		short[resource.Name] = resource.ShortNames
	}
	require.Equal(t, map[string][]string{
		"ciliumnetworkdriveraddresses":             {"ndaddr"},
		"ciliumnetworkdrivernetworks":              {"ndnet"},
		"ciliumnetworkdrivernetworks/status":       nil,
		"ciliumnetworkdrivernodeconfigs":           {"ndnc"},
		"ciliumnetworkdrivernodeconfigs/status":    nil,
		"ciliumnetworkdriverclusterconfigs":        {"ndcc"},
		"ciliumnetworkdriverclusterconfigs/status": nil,
	}, short)
}

// testAPIColumns looks at a node config as kubectl get does.
func testAPIColumns(t *testing.T, config *rest.Config, client dynamic.ResourceInterface) {
	object := decode(t, v2alpha1.NodeConfigKind, "columns", "{}", "spec")
	created, err := client.Create(t.Context(), &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.NoError(t, unstructured.SetNestedMap(created.Object, map[string]any{
		"devices":          int64(7),
		"allocatedDevices": int64(2),
		"poolUse":          "a 5/7",
		"conditions": []any{
			map[string]any{"type": "Degraded", "status": "True", "reason": "PartlyApplied", "message": "m", "lastTransitionTime": "2026-01-02T03:04:05Z"},
			map[string]any{"type": "Ready", "status": "True", "reason": "Applied", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"},
		},
	}, "status"))
	_, err = client.UpdateStatus(t.Context(), created, metav1.UpdateOptions{})
	require.NoError(t, err)

	config = rest.CopyConfig(config)
	config.APIPath = "/apis"
	config.GroupVersion = &v2alpha1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	tables, err := rest.RESTClientFor(config)
	require.NoError(t, err)
	table := &metav1.Table{}
	raw, err := tables.Get().Resource(v2alpha1.NodeConfigResource).Name("columns").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").
		Do(t.Context()).Raw()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(raw, table))

	shown := map[string]any{}
	for i, column := range table.ColumnDefinitions {
		shown[column.Name] = table.Rows[0].Cells[i]
	}
	delete(shown, "Age")
	require.Equal(t, map[string]any{
		"Name": "columns", "Ready": "True", "Reason": "Applied", "Degraded": "True",
		"Devices": 7.0, "Allocated": 2.0, "Pools": "a 5/7", "Driver": nil, "Message": "m",
	}, shown)
}
