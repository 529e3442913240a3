// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab"
)

// TestPackagesOnNode runs the tests of the packages that deal with the kernel on a node, where they find dummy links and
// a PF. They make and break VFs as they like, on a node that offers none.
func TestPackagesOnNode(t *testing.T) {
	e := take(t)
	n := e.node
	const module = "github.com/cilium/networkdriver/pkg/"
	e.removeVFs(n)
	// The module makes links of its own when the tests' first link of the kind loads it.
	e.onNode(n, "ip link add e2e-ifb type ifb && ip link del e2e-ifb")
	e.guard()
	for _, pkg := range []string{"nic", "networkdriver/dummy", "networkdriver/hostnet", "networkdriver/podnet", "networkdriver/sriov"} {
		t.Run(path.Base(pkg), func(t *testing.T) {
			name := path.Base(pkg) + ".test"
			program := filepath.Join(e.ShareDir(), name)
			build := exec.CommandContext(t.Context(), "go", "test", "-c", "-ldflags=-s -w", "-o", program, module+pkg)
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			out, err := build.CombinedOutput()
			require.NoError(t, err, "%s", out)
			defer os.Remove(program)
			var output bytes.Buffer
			// TestWatchLinks floods a link subscription, which a slow node rightly gives up: it needs no lab.
			status, err := n.Stream(t.Context(), fmt.Sprintf(
				"cd /tmp && NETWORKDRIVER_LAB_PF=%s NETWORKDRIVER_REQUIRE=privileged,lab %s -test.v -test.count=1 -test.timeout=10m -test.skip=TestWatchLinks",
				lab.Uplink, path.Join(lab.ShareDir, name)), nil, &output, &output)
			require.NoError(t, err)
			require.Zero(t, status, "%s", output.String())
			require.Contains(t, output.String(), "--- PASS")
			require.NotContains(t, output.String(), "--- SKIP")
		})
	}
	e.removeVFs(n)
}
