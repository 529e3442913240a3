// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/cilium/networkdriver/internal/testenv"
)

// TestCapabilities runs what the agent does to links and namespaces with the capabilities that the chart gives it, and
// with each of them taken away, so that none is missing and none is there without need.
func TestCapabilities(t *testing.T) {
	testenv.Privileged(t)
	const (
		move = "TestRepeatedAttachAndDetachChangeNothing"
		tell = "TestSendAnnouncement"
		find = "TestNamespaceOfAnotherUsersProcess"
	)
	programs := map[string]string{}
	for test, pkg := range map[string]string{move: "networkdriver/podnet", tell: "networkdriver/podnet", find: "netnamespace"} {
		programs[test] = filepath.Join(t.TempDir(), test)
		build := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", programs[test], "./pkg/"+pkg)
		build.Dir = "../.." // the packages' tests require what their module does
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := build.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}

	with := func(test string, capabilities []string) (passed bool, output string) {
		bounding := "-all"
		for _, name := range capabilities {
			bounding += ",+" + strings.ToLower(name)
		}
		cmd := exec.CommandContext(t.Context(), "setpriv", "--no-new-privs", "--bounding-set="+bounding, "--inh-caps=-all",
			programs[test], "-test.count=1", "-test.v", "-test.run=^"+test+"$")
		cmd.Dir = t.TempDir()
		cmd.Env = append(os.Environ(), "NETWORKDRIVER_REQUIRE=privileged")
		out, err := cmd.CombinedOutput()
		require.Contains(t, string(out), "=== RUN   "+test+"\n")
		return err == nil, string(out)
	}
	all := agentCapabilities(t)
	needs := map[string]string{"NET_ADMIN": move, "NET_RAW": tell, "SYS_ADMIN": move, "SYS_PTRACE": find}
	require.Len(t, needs, len(all), "a test for each capability")
	for _, name := range all {
		test := needs[name]
		require.NotEmpty(t, test, name)
		capabilities := slices.Clone(all)
		if test == find {
			// The test makes a process of another user, which the agent does not.
			capabilities = append(capabilities, "SETUID", "SETGID")
		}
		passed, output := with(test, capabilities)
		require.True(t, passed, "%s with all capabilities: %s", test, output)
		passed, output = with(test, slices.DeleteFunc(capabilities, func(other string) bool { return other == name }))
		require.False(t, passed, "%s passes without %s", test, name)
		require.Regexp(t, "operation not permitted|permission denied", output, name)
	}
}

// agentCapabilities returns what the chart adds to no capabilities at all.
func agentCapabilities(t *testing.T) []string {
	t.Helper()
	for _, object := range objects(t, render(t, enabled(), Options{}).YAML()) {
		if object.GetKind() != "DaemonSet" {
			continue
		}
		containers, _, err := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
		require.NoError(t, err)
		require.Len(t, containers, 1)
		capabilities, _, err := unstructured.NestedMap(containers[0].(map[string]any), "securityContext", "capabilities")
		require.NoError(t, err)
		require.Equal(t, []any{"ALL"}, capabilities["drop"])
		var names []string
		for _, name := range capabilities["add"].([]any) {
			names = append(names, name.(string))
		}
		return names
	}
	t.Fatal("the chart has no DaemonSet")
	return nil
}
