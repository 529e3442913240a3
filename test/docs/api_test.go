// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package docs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/test/lab"
)

// yamlBlocks returns the YAML blocks with a mark.
func yamlBlocks(t *testing.T, mark string) []Block {
	t.Helper()
	all, err := Blocks(root)
	require.NoError(t, err)
	var found []Block
	for _, b := range all {
		if b.Lang == YAML && b.Mark == mark {
			found = append(found, b)
		}
	}
	require.NotEmpty(t, found)
	return found
}

// TestParts says that what is no whole object is at least a mapping.
func TestParts(t *testing.T) {
	for _, b := range yamlBlocks(t, Part) {
		require.NoError(t, yaml.UnmarshalStrict([]byte(b.Text), &map[string]any{}), b)
	}
}

// TestAPIDocs has a real API server check all objects on the pages and in the examples, as kubectl does for a user.
func TestAPIDocs(t *testing.T) {
	bin := testenv.KubeBin(t)
	server, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{bin}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	kubectl := func(stdin string, args ...string) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "kubectl"), append([]string{"--kubeconfig", server.Kubeconfig()}, args...)...)
		cmd.Dir, cmd.Stdin = root, strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %v: %w: %s", args, err, out)
		}
		return nil
	}
	require.NoError(t, kubectl("", "apply", "--server-side", "-f", "api/crds"))
	require.NoError(t, kubectl("", "wait", "--for=condition=Established", "--timeout=30s", "-f", "api/crds"))
	for _, namespace := range []string{"default", "tenant-red", "tenant-blue"} { // the examples'
		if namespace != "default" {
			require.NoError(t, kubectl("", "create", "namespace", namespace))
		}
		require.NoError(t, kubectl("", "create", "serviceaccount", "default", "-n", namespace), "pods need it, and no controller makes it here")
	}
	check := func(objects string) error {
		return kubectl(objects, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
	}
	require.ErrorContains(t, check("apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: x}\nspec: {selektors: []}\n"),
		"selektors", "an unknown field is found")

	for _, b := range yamlBlocks(t, "") {
		require.NoError(t, check(b.Text), b)
	}
	files, err := filepath.Glob(filepath.Join(root, "examples", "*.yaml"))
	require.NoError(t, err)
	for _, file := range files {
		objects, err := os.ReadFile(file)
		require.NoError(t, err)
		if strings.Contains(string(objects), "kind: NetworkAttachmentDefinition") {
			continue // its CRD is Multus'
		}
		require.NoError(t, check(string(objects)), file)
	}
}
