// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package logonce

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProblems(t *testing.T) {
	var p Problems[string]
	require.False(t, p.Solved(), "nothing was wrong")
	require.Equal(t, []string{"b", "a"}, p.Replace("b", "a", "b"))
	require.Empty(t, p.Replace("a", "b"), "they last")
	require.Equal(t, []string{"c"}, p.Replace("a", "c"))
	require.Equal(t, []string{"b"}, p.Replace("b"), "it was over for a round")
	require.True(t, p.Solved())
	require.False(t, p.Solved())
	require.Equal(t, []string{"b"}, p.Replace("b"), "it is back")
}

func TestLevel(t *testing.T) {
	var p Problems[string]
	require.Equal(t, slog.LevelWarn, p.Level("refused", slog.LevelWarn))
	require.Equal(t, slog.LevelDebug, p.Level("refused", slog.LevelWarn))
	require.Equal(t, slog.LevelError, p.Level("forbidden", slog.LevelError), "another problem")
	p.Solved()
	require.Equal(t, slog.LevelError, p.Level("forbidden", slog.LevelError))
}
