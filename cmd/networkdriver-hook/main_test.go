// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
)

const asHook = "NETWORKDRIVER_TEST_AS_HOOK"

// TestMain makes the test's program the hook.
func TestMain(m *testing.M) {
	if os.Getenv(asHook) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// TestExit is what a runtime sees of the hook.
func TestExit(t *testing.T) {
	testenv.Privileged(t)
	ns, err := netnamespace.Open("/proc/self/ns/net")
	require.NoError(t, err)
	ns.Close()
	data, err := json.Marshal(gatehook.Place{NetNS: ns.ID, Sandbox: "s1", Claim: "default/shared", Pod: "default/one"})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "uid.json")
	require.NoError(t, os.WriteFile(file, data, 0o600))
	run := func(sandbox string, args ...string) (int, string) {
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = []string{asHook + "=1"}
		cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"pid":%d,"annotations":{"io.kubernetes.cri.sandbox-id":%q}}`, os.Getpid(), sandbox))
		out, err := cmd.CombinedOutput()
		if err != nil {
			require.IsType(t, &exec.ExitError{}, err)
		}
		return cmd.ProcessState.ExitCode(), string(out)
	}
	code, out := run("s1", file)
	require.Zero(t, code)
	require.Empty(t, out)
	code, out = run("s2", file)
	require.Equal(t, 1, code)
	require.Regexp(t, "^claim default/shared is in use by pod default/one, [^\n]*\n$", out)
	code, out = run("s1")
	require.Equal(t, 2, code)
	require.Contains(t, out, "run by the container runtime")
}
