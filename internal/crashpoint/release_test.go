// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package crashpoint_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/crashpoint"
)

// TestReleaseHasNone builds the agent as the Makefile does, which must have no crash point in it, and as the fault matrix
// does, which must have all.
func TestReleaseHasNone(t *testing.T) {
	for _, tc := range []struct {
		name, tags string
		has        bool
	}{
		{"release", "grpcnotrace", false},
		{"faults", "grpcnotrace,crashpoints", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "cilium-agent")
			// The flags of the Makefile but for the symbols, which stay to be looked at.
			cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-tags="+tc.tags, "-o", program, "./cmd/cilium-agent")
			cmd.Dir = filepath.Join("..", "..")
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			data, err := os.ReadFile(program)
			require.NoError(t, err)
			for _, p := range crashpoint.Points() {
				require.Equal(t, tc.has, bytes.Contains(data, []byte(p)), "%s", p)
			}
			for _, text := range []string{crashpoint.Dir, "internal/crashpoint.act"} {
				require.Equal(t, tc.has, bytes.Contains(data, []byte(text)), "%s", text)
			}
		})
	}
}
