// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/test/docs"
)

// TestValuesOnPages renders the chart with each block of values in the documentation, which its schema checks first.
func TestValuesOnPages(t *testing.T) {
	blocks, err := docs.Blocks("../..")
	require.NoError(t, err)
	seen := 0
	for _, b := range blocks {
		if b.Lang != docs.YAML || b.Mark != docs.Values {
			continue
		}
		seen++
		values := map[string]any{}
		require.NoError(t, yaml.UnmarshalStrict([]byte(b.Text), &values), b)
		values["networkDriver"] = map[string]any{"enabled": true}
		_, err := Render(values, Options{})
		require.NoError(t, err, b)
	}
	require.NotZero(t, seen)
}
