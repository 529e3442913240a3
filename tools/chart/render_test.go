// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write what the chart renders to testdata, and its values to the documentation")

const chartDir = "../../install/helm/cilium-network-driver"

func render(t *testing.T, values map[string]any, opts Options) *Rendered {
	t.Helper()
	rendered, err := Render(values, opts)
	require.NoError(t, err)
	return rendered
}

func enabled() map[string]any {
	return map[string]any{"networkDriver": map[string]any{"enabled": true}}
}

// valueSets are the files of values in testdata, by name.
func valueSets(t *testing.T) map[string]map[string]any {
	t.Helper()
	files, err := filepath.Glob("testdata/values-*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	sets := map[string]map[string]any{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		values := map[string]any{}
		require.NoError(t, yaml.Unmarshal(data, &values))
		sets[strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "values-"), ".yaml")] = values
	}
	return sets
}

func objects(t *testing.T, stream []byte) []*unstructured.Unstructured {
	t.Helper()
	var found []*unstructured.Unstructured
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096); ; {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(object)
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		if len(object.Object) > 0 {
			found = append(found, object)
		}
	}
}

// requireGolden compares with a file, or writes it with -update.
func requireGolden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(path, got, 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "if this is wanted: make golden")
}

// TestGolden shows in a change of the chart what becomes of it. The CRDs have a test of their own.
func TestGolden(t *testing.T) {
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			opts := Options{}
			if name == "elsewhere" {
				opts = Options{Release: "nics", Namespace: "networking"}
			}
			rendered := render(t, values, opts)
			var out bytes.Buffer
			for _, m := range rendered.Manifests {
				if !strings.Contains(m, "kind: CustomResourceDefinition\n") {
					out.WriteString("---\n" + strings.TrimPrefix(strings.TrimSpace(m), "---\n") + "\n")
				}
			}
			requireGolden(t, filepath.Join("testdata", "golden-"+name+".yaml"), out.Bytes())
			requireGolden(t, filepath.Join("testdata", "golden-"+name+".txt"), []byte(rendered.Notes+"\n"))
		})
	}
}

func TestLint(t *testing.T) {
	version, err := common.ParseKubeVersion("v1.37.2")
	require.NoError(t, err)
	for name, values := range valueSets(t) {
		result := lint.RunAll(chartDir, values, "kube-system", lint.WithKubeVersion(version))
		for _, message := range result.Messages {
			require.Less(t, message.Severity, support.WarningSev, "%s: %v", name, message)
		}
	}
}

func TestOffByDefault(t *testing.T) {
	rendered := render(t, nil, Options{})
	require.Empty(t, rendered.Manifests)
	require.Contains(t, rendered.Notes, "--set networkDriver.enabled=true")
}

func TestKubernetesTooOld(t *testing.T) {
	_, err := Render(enabled(), Options{Kubernetes: "v1.33.9"})
	require.ErrorContains(t, err, ">=1.34.0-0 which is incompatible with Kubernetes v1.33.9")
	for _, version := range []string{"v1.34.0", "v1.34.4-gke.100", "v1.37.2"} {
		render(t, enabled(), Options{Kubernetes: version})
	}
}

// TestCiliumsName is about what is refused without a look at the cluster; TestAPIBesideCilium about the rest.
func TestCiliumsName(t *testing.T) {
	for _, upgrade := range []bool{false, true} {
		for _, values := range []map[string]any{nil, enabled()} {
			_, err := Render(values, Options{Release: "cilium", Upgrade: upgrade})
			require.ErrorContains(t, err, `release "cilium": the name is Cilium's own; this chart is a release of its own`)
		}
	}
}

func TestImageNames(t *testing.T) {
	images := func(values map[string]any) (found []string) {
		values["networkDriver"] = map[string]any{"enabled": true}
		for _, object := range objects(t, render(t, values, Options{}).YAML()) {
			containers, _, err := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
			require.NoError(t, err)
			for _, c := range containers {
				found = append(found, c.(map[string]any)["image"].(string))
			}
		}
		return found
	}
	digest := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	require.Equal(t, []string{"cilium/network-driver-agent:0.1.0", "cilium/network-driver-operator:0.1.0"}, images(map[string]any{}))
	require.Equal(t, []string{"mirror.example.com:5000/x/cilium/network-driver-agent@" + digest, "mirror.example.com:5000/x/cilium/network-driver-operator:v2"},
		images(map[string]any{
			"image": map[string]any{"registry": "mirror.example.com:5000/x", "tag": "v2"},
			"agent": map[string]any{"image": map[string]any{"digest": digest}},
		}))
}

// TestConfigRollsPods says that a changed flag makes other pods, and a changed label of the release does not.
func TestConfigRollsPods(t *testing.T) {
	checksums := func(values map[string]any) map[string]string {
		values["networkDriver"] = map[string]any{"enabled": true}
		found := map[string]string{}
		for _, object := range objects(t, render(t, values, Options{}).YAML()) {
			sum, ok, err := unstructured.NestedString(object.Object, "spec", "template", "metadata", "annotations", "checksum/config")
			require.NoError(t, err)
			if ok {
				found[object.GetKind()] = sum
			}
		}
		return found
	}
	before := checksums(map[string]any{})
	after := checksums(map[string]any{"agent": map[string]any{"nriPluginIndex": "20"}})
	require.Len(t, before, 2)
	require.NotEqual(t, before["DaemonSet"], after["DaemonSet"])
	require.Equal(t, before["Deployment"], after["Deployment"])
}
