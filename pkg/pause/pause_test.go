// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pause

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		require.True(t, For(ctx, time.Minute))
		require.Equal(t, time.Minute, time.Since(start))
		time.AfterFunc(time.Second, cancel)
		require.False(t, For(ctx, time.Minute))
		require.Equal(t, time.Minute+time.Second, time.Since(start))
		require.False(t, For(ctx, 0), "an ended context counts more than an ended wait")
	})
}
