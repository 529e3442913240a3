// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Each fact has one source. What the chart repeats of another file is compared with it here.

// TestRBAC compares accounts, roles and bindings with the manifests for those who install without Helm.
func TestRBAC(t *testing.T) {
	sources, err := filepath.Glob("../../install/kubernetes/*rbac.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, sources)
	for _, source := range sources {
		t.Run(filepath.Base(source), func(t *testing.T) {
			manifest, err := os.ReadFile(source)
			require.NoError(t, err)
			values := enabled()
			values["ciliumNodes"] = map[string]any{"create": bytes.Contains(manifest, []byte("ciliumnodes"))}
			want := rights(objects(t, manifest))
			component, _, ok := strings.Cut(filepath.Base(source), "-")
			if !ok {
				component = "agent"
			}
			var ours []*unstructured.Unstructured
			for _, object := range objects(t, render(t, values, Options{}).YAML()) {
				if object.GetLabels()["app.kubernetes.io/component"] == component {
					object.SetLabels(nil)
					ours = append(ours, object)
				}
			}
			require.Equal(t, want, rights(ours))
		})
	}
}

// rights are the objects that give rights, by kind and name.
func rights(all []*unstructured.Unstructured) map[string]map[string]any {
	found := map[string]map[string]any{}
	for _, object := range all {
		if object.GetKind() == "ServiceAccount" || strings.HasPrefix(object.GetAPIVersion(), "rbac.authorization.k8s.io/") {
			found[object.GetKind()+" "+object.GetNamespace()+"/"+object.GetName()] = object.Object
		}
	}
	return found
}

func TestCRDs(t *testing.T) {
	source := os.DirFS("../../api/crds")
	names, err := fs.Glob(source, "*.yaml")
	require.NoError(t, err)
	require.Len(t, names, 4)
	rendered := map[string]*unstructured.Unstructured{}
	for _, object := range objects(t, render(t, enabled(), Options{}).YAML()) {
		if object.GetKind() == "CustomResourceDefinition" {
			rendered[object.GetName()] = object
		}
	}
	require.Len(t, rendered, len(names), "no other CRD without a look at the cluster")
	for _, name := range names {
		manifest, err := fs.ReadFile(source, name)
		require.NoError(t, err)
		want := objects(t, manifest)[0]
		got := rendered[want.GetName()]
		require.NotNil(t, got, "run make generate")
		require.Equal(t, "keep", got.GetAnnotations()["helm.sh/resource-policy"])
		require.Equal(t, want.Object["spec"], got.Object["spec"], "run make generate")
	}
}

func TestCiliumNodeCRD(t *testing.T) {
	values := enabled()
	values["ciliumNodes"] = map[string]any{"create": true}
	var got *unstructured.Unstructured
	for _, object := range objects(t, render(t, values, Options{}).YAML()) {
		if object.GetName() == "ciliumnodes.cilium.io" {
			got = object
		}
	}
	require.NotNil(t, got)
	require.Equal(t, "keep", got.GetAnnotations()["helm.sh/resource-policy"])
	require.NotContains(t, got.GetLabels(), "io.cilium.k8s.crd.schema.version", "by this label the chart knows Cilium's")
	manifest, err := os.ReadFile("../../install/kubernetes/ciliumnode-crd.yaml")
	if errors.Is(err, fs.ErrNotExist) {
		return // the chart has the only one
	}
	require.NoError(t, err)
	require.Equal(t, objects(t, manifest)[0].Object["spec"], got.Object["spec"], "run make generate")
}

// TestValuesDocumentation makes the reference of the values from values.yaml.
func TestValuesDocumentation(t *testing.T) {
	values, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	require.NoError(t, err)
	table, err := valuesTable(values)
	require.NoError(t, err)
	requireGolden(t, "../../Documentation/helm-values.md", table)
}
