// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/test/docs"
)

// followPages runs the commands of the documentation's pages, as far as they are for a cluster like this one.
func (e *T) followPages() {
	blocks, err := docs.Blocks(repository)
	require.NoError(e, err)
	// The pages begin where nothing is configured.
	e.user("kubectl delete ndcc,ndnc --all --timeout=1m; kubectl label nodes --all node-role-")
	ran := 0
	for _, b := range blocks {
		if b.Lang != docs.Shell {
			continue
		}
		began := time.Now()
		var out string
		switch b.Mark {
		case "":
			out, err = e.Shell(e.ctx, repository, b.Text, nil)
		case docs.OnNode:
			out, err = e.node.Run(e.ctx, "set -e\n"+b.Text)
		default:
			continue
		}
		require.NoError(e, err, "%s\n%s%s", b, b.Text, out)
		e.Logf("%s: %.1f s", b, time.Since(began).Seconds())
		ran++
	}
	require.NotZero(e, ran)
}
