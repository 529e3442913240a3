// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// TestNamesLikeNumbers has names that YAML takes for something else than strings.
func TestNamesLikeNumbers(t *testing.T) {
	values := enabled()
	for _, component := range []string{"agent", "operator"} {
		values[component] = map[string]any{"serviceAccount": map[string]any{"name": "1e3"}, "priorityClassName": "true"}
	}
	values["prometheus"] = map[string]any{"serviceMonitor": map[string]any{"enabled": true}, "podMonitor": map[string]any{"enabled": true}}
	var check func(path string, value any)
	check = func(path string, value any) {
		switch value := value.(type) {
		case map[string]any:
			for key, v := range value {
				switch key {
				case "name", "namespace", "serviceAccountName", "priorityClassName", "app.kubernetes.io/instance":
					require.IsType(t, "", v, "%s.%s", path, key)
				}
				check(path+"."+key, v)
			}
		case []any:
			for _, v := range value {
				check(path, v)
			}
		}
	}
	for _, object := range objects(t, render(t, values, Options{Release: "12", Namespace: "34"}).YAML()) {
		if object.GetKind() != "CustomResourceDefinition" {
			check(object.GetKind()+" "+object.GetName(), object.Object)
		}
		require.Equal(t, "12", object.GetLabels()["app.kubernetes.io/instance"])
	}
}

// TestLargeNumbers has numbers as they come from a file of values.
func TestLargeNumbers(t *testing.T) {
	values := map[string]any{}
	require.NoError(t, yaml.Unmarshal([]byte(`
networkDriver: {enabled: true}
agent:
  k8sClient: {qps: 2500000, burst: 3000000}
  extraConfig: {a: 16777216, b: 0.5, c: true, d: "1e3"}
  terminationGracePeriodSeconds: 1000000
operator:
  writes: {qps: 1000000, burst: 2000000}
  extraConfig: {a: 16777216}
`), &values))
	found := map[string]*unstructured.Unstructured{}
	for _, object := range objects(t, render(t, values, Options{}).YAML()) {
		found[object.GetKind()+" "+object.GetName()] = object
	}
	for config, want := range map[string]map[string]string{
		"ConfigMap cilium-network-driver-config": {
			"k8s-client-qps": "2500000", "k8s-client-burst": "3000000", "a": "16777216", "b": "0.5", "c": "true", "d": "1e3",
		},
		"ConfigMap cilium-network-driver-operator-config": {
			"network-driver-write-qps": "1000000", "network-driver-write-burst": "2000000", "a": "16777216",
		},
	} {
		data, _, err := unstructured.NestedStringMap(found[config].Object, "data")
		require.NoError(t, err)
		require.Subset(t, data, want, config)
	}
	seconds, _, err := unstructured.NestedInt64(found["DaemonSet cilium-network-driver"].Object, "spec", "template", "spec", "terminationGracePeriodSeconds")
	require.NoError(t, err)
	require.EqualValues(t, 1000000, seconds)
}
