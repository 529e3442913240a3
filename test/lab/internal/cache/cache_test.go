// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEnsure(t *testing.T) {
	c := Cache{Dir: t.TempDir()}
	a := Artifact{Name: "a", Inputs: []string{"1", "2"}}
	var fills atomic.Int32
	fill := func(_ context.Context, dir string) error {
		fills.Add(1)
		return os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644)
	}
	require.False(t, c.Has(a))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			dir, err := c.Ensure(t.Context(), a, fill)
			if err != nil || dir != c.Path(a) {
				t.Errorf("Ensure: %s, %v", dir, err)
			}
		})
	}
	wg.Wait()
	require.Equal(t, int32(1), fills.Load(), "made once")
	require.True(t, c.Has(a))
	require.FileExists(t, filepath.Join(c.Path(a), "f"))
}

func TestEnsureThatFails(t *testing.T) {
	c := Cache{Dir: t.TempDir()}
	a := Artifact{Name: "a"}
	failure := errors.New("no")
	_, err := c.Ensure(t.Context(), a, func(_ context.Context, dir string) error {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "half"), nil, 0o644))
		return failure
	})
	require.ErrorIs(t, err, failure)
	require.False(t, c.Has(a))
	dir, err := c.Ensure(t.Context(), a, func(context.Context, string) error { return nil })
	require.NoError(t, err)
	require.NoFileExists(t, filepath.Join(dir, "half"))
}

func TestKeyTellsInputsApart(t *testing.T) {
	c := Cache{Dir: "d"}
	seen := map[string]bool{}
	for _, inputs := range [][]string{nil, {""}, {"ab"}, {"a", "b"}, {"b", "a"}, {"a", "b", ""}} {
		p := c.Path(Artifact{Name: "a", Inputs: inputs})
		require.False(t, seen[p], "%q", inputs)
		seen[p] = true
	}
}
