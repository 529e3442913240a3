// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/modfile"
)

// TestSharedVersions checks that tools and the lab's programs are built with the versions of modules that the driver has. One
// other version of a module that much depends on, and minutes are spent to compile the same packages again.
func TestSharedVersions(t *testing.T) {
	// A runtime is tested as it is released: with its own NRI.
	own := map[string]bool{"github.com/containerd/nri": true}
	versions := func(path string) map[string]string {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		file, err := modfile.Parse(path, data, nil)
		require.NoError(t, err)
		found := map[string]string{}
		for _, r := range file.Require {
			found[r.Mod.Path] = r.Mod.Version
		}
		for _, r := range file.Replace {
			found[r.Old.Path] = r.New.Version
		}
		delete(found, "github.com/cilium/networkdriver") // tools take it as it is
		return found
	}
	root, err := moduleRoot()
	require.NoError(t, err)
	first := map[string]string{} // module: version
	where := map[string]string{} // module: go.mod in which it was seen first
	components, err := filepath.Glob(filepath.Join(root, "test", "lab", "components", "*", "go.mod"))
	require.NoError(t, err)
	require.NotEmpty(t, components)
	ours := []string{filepath.Join(root, "go.mod"), filepath.Join(root, "tools", "go.mod")}
	for _, path := range append(ours, components...) {
		for module, version := range versions(path) {
			if own[module] {
				continue
			}
			if first[module] == "" {
				first[module], where[module] = version, path
			}
			require.Equal(t, first[module], version, "%s in %s, compared with %s", module, path, where[module])
		}
	}
}
