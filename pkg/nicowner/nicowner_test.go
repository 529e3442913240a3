// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nicowner

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

const key = "pci-0000:03:00.1"

func TestClaimAndRelease(t *testing.T) {
	dir := Dir(filepath.Join(t.TempDir(), "made"))
	owner, err := dir.Owner(key)
	require.NoError(t, err)
	require.Nil(t, owner)
	keys, err := dir.Owned("a")
	require.NoError(t, err)
	require.Empty(t, keys)

	first, err := dir.Claim(key, Owner{"a", "pod x"})
	require.NoError(t, err)
	require.True(t, first)
	first, err = dir.Claim(key, Owner{"a", "pod y"})
	require.NoError(t, err, "the owner may say it again")
	require.False(t, first)
	_, err = dir.Claim(key, Owner{"b", "pod z"})
	var taken *TakenError
	require.ErrorAs(t, err, &taken)
	require.Equal(t, Owner{"a", "pod y"}, taken.Owner)
	require.EqualError(t, err, "take NIC pci-0000:03:00.1 for b: NIC pci-0000:03:00.1 is taken: a has it for pod y")
	require.NoError(t, dir.Release(key, "b"), "not its own")
	keys, err = dir.Owned("a")
	require.NoError(t, err)
	require.Equal(t, []string{key}, keys)
	keys, err = dir.Owned("b")
	require.NoError(t, err)
	require.Empty(t, keys)

	require.NoError(t, dir.Release(key, "a"))
	require.NoError(t, dir.Release(key, "a"), "it can be repeated")
	first, err = dir.Claim(key, Owner{"b", "pod z"})
	require.NoError(t, err)
	require.True(t, first)
	entries, err := os.ReadDir(string(dir))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is left")
}

func TestBrokenFileIsNobodys(t *testing.T) {
	dir := Dir(t.TempDir())
	for _, content := range []string{``, `{`, `{}`, `[]`} {
		require.NoError(t, os.WriteFile(dir.path(key), []byte(content), 0o600))
		_, err := dir.Claim(key, Owner{"a", "x"})
		require.ErrorContains(t, err, "remove the file if no pod has it", content)
		require.ErrorContains(t, dir.Release(key, "a"), dir.path(key), content)
		keys, err := dir.Owned("a")
		require.NoError(t, err)
		require.Empty(t, keys)
	}
}

func TestOnlyOneProgramGetsIt(t *testing.T) {
	dir := Dir(t.TempDir())
	for range 100 {
		var got atomic.Int32
		var wg sync.WaitGroup
		for _, program := range []string{"a", "b", "c", "d"} {
			wg.Go(func() {
				_, err := dir.Claim(key, Owner{program, "x"})
				if err == nil {
					got.Add(1)
				} else if taken := new(TakenError); !errors.As(err, &taken) || taken.Owner.Program == program {
					t.Errorf("program %s: %v", program, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int32(1), got.Load())
		owner, err := dir.Owner(key)
		require.NoError(t, err)
		require.NoError(t, dir.Release(key, owner.Program))
	}
}
