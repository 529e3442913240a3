// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/lab"
	"github.com/cilium/networkdriver/test/nodestate"
)

// hostState is what of a node's network a test must leave as it was.
type (
	hostState = nodestate.Network
	hostVF    = nodestate.VF
)

// hostState reads the node's links and the PF's table of VFs.
func (e *T) hostState(n *lab.Node) hostState {
	e.Helper()
	state, err := nodestate.ReadNetwork(e.ctx, n)
	require.NoError(e, err)
	return state
}

// requireRestored waits until the node is as it was: the links of before have their names, addresses, MTU and state,
// the PF's settings of its VFs are the same, and no link is there that was not.
func (e *T) requireRestored(n *lab.Node, before hostState) {
	e.Helper()
	e.eventually("host state of "+n.Name(), func() string { return e.difference(n, before) })
}

func (e *T) difference(n *lab.Node, before hostState) string {
	now := e.hostState(n)
	if len(before.VFs) == 0 && len(now.VFs) > 0 {
		// The test made the VFs; they stay, and must be as the kernel made them.
		for _, vf := range now.VFs {
			if vf.VLAN != 0 {
				return fmt.Sprintf("VF %d has VLAN %d", vf.VF, vf.VLAN)
			}
		}
		for name, l := range now.Links {
			if strings.HasPrefix(name, "dev") || l.Kind == "dummy" {
				return fmt.Sprintf("link %s (%+v) is left", name, l)
			}
		}
		return ""
	}
	return cmp.Diff(before, now)
}
