// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package crdcompat

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// No release breaks the one before it, and the working tree not the last one, but for what is said to be meant.
func TestReleases(t *testing.T) {
	require.NoError(t, Check("../../api/released", "../../api/crds", "../../api/released/deliberate.yaml"))
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	released, present, deliberate := filepath.Join(dir, "released"), filepath.Join(dir, "present"), filepath.Join(dir, "deliberate.yaml")
	write := func(dir string, change func(*spec)) {
		crd := load(t)
		change(&crd.Spec)
		data, err := yaml.Marshal(crd)
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "things.yaml"), data, 0o644))
	}
	mean := func(text string) { require.NoError(t, os.WriteFile(deliberate, []byte(text), 0o644)) }
	check := func() error { return Check(released, present, deliberate) }
	removed := func(s *spec) { at(func(s *schema) { delete(s.Properties, "note") }, "spec")(s) }

	mean("[]")
	require.NoError(t, os.Mkdir(released, 0o755))
	require.ErrorContains(t, check(), "released has no released definitions")
	write(filepath.Join(released, "v0.9.0"), func(*spec) {})
	require.ErrorContains(t, check(), "present has no definitions")
	write(present, removed)
	require.EqualError(t, check(), "the working tree breaks v0.9.0: CRD things.example.com, version v1, field spec.note: the field is gone")

	// The release after it has the break, and is the one that counts for the working tree.
	write(filepath.Join(released, "v0.10.0"), removed)
	require.EqualError(t, check(), "v0.10.0 breaks v0.9.0: CRD things.example.com, version v1, field spec.note: the field is gone")

	meant := "- {from: v0.9.0, crd: things.example.com, version: v1, field: spec.note, what: the field is gone, reason: nobody used it}\n"
	mean(meant)
	require.NoError(t, check())
	mean(meant + "- {from: v0.10.0, crd: things.example.com, version: v1, field: spec.note, what: the field is gone, reason: again}\n")
	require.ErrorContains(t, check(), "this is no break since v0.10.0: CRD things.example.com, version v1, field spec.note: the field is gone")
	mean("- {from: v0.9.0, crd: things.example.com, version: v1, field: spec.note, what: the field is gone}\n")
	require.ErrorContains(t, check(), "a break without a reason: CRD things.example.com, version v1, field spec.note")
	mean("- {from: v0.9.0, since: v1}\n")
	require.ErrorContains(t, check(), `unknown field "since"`)

	require.NoError(t, os.Mkdir(filepath.Join(released, "next"), 0o755))
	mean("[]")
	require.ErrorContains(t, check(), "next: ")
}
