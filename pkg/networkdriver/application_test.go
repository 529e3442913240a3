// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAnotherApplication compiles a Hive application that is a module of its own and imports the driver, lets it fit the
// cells together, and looks at what it requires: none of what the project's own tools do.
func TestAnotherApplication(t *testing.T) {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	dir := t.TempDir()
	for name, source := range map[string]string{"main.go": "testdata/application/main.go", "go.sum": filepath.Join(root, "go.sum")} {
		data, err := os.ReadFile(source)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(`module application.example

go 1.26.0

require github.com/cilium/networkdriver v0.0.0

replace github.com/cilium/networkdriver => `+root+`
`), 0o600))
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		// With the module's other requirements written to go.mod on the way, as go get does.
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS="+os.Getenv("GOFLAGS")+" -mod=mod")
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		require.NoError(t, err, "%s %v: %s", name, args, &stderr)
		return string(out)
	}
	run("go", "build", "-buildvcs=false", "-o", "application", ".")
	run(filepath.Join(dir, "application"))

	tools := []string{
		"helm.sh/helm/v4", "honnef.co/go/tools", "sigs.k8s.io/controller-tools", "github.com/elastic/crd-ref-docs",
		"github.com/google/go-containerregistry", "github.com/yuin/goldmark",
	}
	tests := []string{"github.com/stretchr/testify", "go.uber.org/goleak", "sigs.k8s.io/controller-runtime", "k8s.io/apiserver"}
	compiled := strings.Fields(run("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "."))
	require.Contains(t, compiled, "github.com/cilium/networkdriver")
	requirements := func(dir string) string {
		data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		require.NoError(t, err)
		require.Contains(t, string(data), "github.com/cilium/hive v")
		return string(data)
	}
	for _, module := range tools {
		require.NotContains(t, compiled, module, "modules with packages that are compiled")
		require.NotContains(t, requirements(dir), module+" ", "what the application requires")
		require.NotContains(t, requirements(root), module+" ", "what the driver requires")
	}
	for _, module := range tests {
		require.NotContains(t, compiled, module, "modules with packages that are compiled")
	}
}
