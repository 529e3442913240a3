// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab"
)

func TestCombinations(t *testing.T) {
	kubernetes, containerd, err := lab.Versions()
	require.NoError(t, err)
	require.Contains(t, containerd, lastCDISwitch)
	all := combinations(kubernetes, containerd)
	require.Len(t, all, len(kubernetes)+len(containerd)) // the defaults together are one, and one is without CDI
	require.Equal(t, "kubernetes-1.37.2-containerd-2.1.9-cdi-off", all[len(all)-1].String())
	names := map[string]bool{}
	for _, c := range all {
		require.False(t, names[c.String()], "twice: %s", c)
		names[c.String()] = true
	}
}

// A test that was renamed would not be run, and nothing would fail.
func TestTestsExist(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "e2e", "*_test.go"))
	require.NoError(t, err)
	var source strings.Builder
	for _, f := range files {
		data, err := os.ReadFile(f)
		require.NoError(t, err)
		source.Write(data)
	}
	for _, test := range attachAndDetach {
		require.Contains(t, source.String(), "func "+test+"(t *testing.T)")
	}
}

// event is a line of go test -json.
func event(action, test, output string) string {
	return fmt.Sprintf(`{"Action":%q,"Test":%q,"Output":%q}`+"\n", action, test, output)
}

func TestRead(t *testing.T) {
	const said = "    attach_test.go:83: \n        \tError Trace:\t/a/b/attach_test.go:83\n        \tError:      \tNot equal\n"
	events := event("output", "", "[ 1.0s] node1: Ready\n") +
		event("pass", "TestDummy", "") +
		event("pass", "TestNameTaken/part", "") +
		event("output", "TestAltNames", "=== RUN   TestAltNames\n")
	for _, line := range strings.SplitAfter(said, "\n") {
		events += event("output", "TestAltNames", line)
	}
	events += event("fail", "TestAltNames", "") +
		event("output", "TestHostNetwork", "    harness_test.go:140: slices of node1: 0 devices: want 1\n") +
		event("output", "TestHostNetwork", "    dump_test.go:20: more\n") +
		event("fail", "TestHostNetwork", "") +
		event("skip", "TestSandboxAgain", "") +
		event("output", "", "panic: test timed out\n") +
		"not JSON\n"
	r := result{tests: attachAndDetach}
	var words strings.Builder
	r.read(strings.NewReader(events), &words)
	require.Equal(t, 1, r.passed)
	require.Equal(t, map[string]string{
		"TestAltNames":             "Not equal",
		"TestHostNetwork":          "slices of node1: 0 devices: want 1",
		"TestSandboxAgain":         "",
		"TestSecondDeviceVanishes": "did not end: not JSON",
		"TestPodChangesInterface":  "did not end: not JSON",
		"TestNamespaceGone":        "did not end: not JSON",
		"TestNameTaken":            "did not end: not JSON",
	}, r.failed)
	require.Contains(t, words.String(), said)
}

func TestAllPassed(t *testing.T) {
	var events strings.Builder
	for _, test := range attachAndDetach {
		events.WriteString(event("pass", test, ""))
	}
	r := result{tests: attachAndDetach}
	r.read(strings.NewReader(events.String()), io.Discard)
	require.Empty(t, r.failed)
	require.Equal(t, len(attachAndDetach), r.passed)
}

func TestWriteTable(t *testing.T) {
	var s strings.Builder
	writeTable(&s, []result{
		{combination: combination{kubernetes: "1.34.4", containerd: "2.4.2"}, tests: attachAndDetach, passed: 8, took: 90 * time.Second},
		{
			combination: combination{kubernetes: "1.37.2", containerd: "2.1.9", cdi: "off"}, tests: attachAndDetach, passed: 7, took: time.Minute,
			failed: map[string]string{"TestAltNames": "Not equal"}, logPath: "there/test.log",
		},
	})
	require.Equal(t, `| Kubernetes | containerd | CDI | Passed | Failed | Time |
|---|---|---|---|---|---|
| 1.34.4 | 2.4.2 | default | 8 of 8 |  | 1m30s |
| 1.37.2 | 2.1.9 | off | 7 of 8 | TestAltNames | 1m0s |

kubernetes-1.37.2-containerd-2.1.9-cdi-off: TestAltNames: Not equal
(there/test.log)
`, s.String())
}
