// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// ATT-14
func TestCheckNetNS(t *testing.T) {
	o, err := NewOutside(nil, nil, nil)
	require.NoError(t, err)
	other := filepath.Join(t.TempDir(), "netns")
	require.ErrorContains(t, o.CheckNetNS(other), "network namespace "+other+" of the pod is gone")
	require.NoError(t, os.WriteFile(other, nil, 0o600))
	require.NoError(t, o.CheckNetNS(other))
	require.ErrorContains(t, o.CheckNetNS(filepath.Join(other, "x")), "network namespace of the pod: ")
	for _, host := range []string{"", "/proc/self/ns/net"} {
		require.ErrorIs(t, o.CheckNetNS(host), errHostNetwork, host)
	}
}
