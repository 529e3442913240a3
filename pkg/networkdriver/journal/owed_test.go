// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

func TestOwedClaims(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	a := tables.ClaimRef{Namespace: "default", Name: "a", UID: "11aa"}
	b := tables.ClaimRef{Namespace: "default", Name: "b", UID: "22bb"}
	j := open(t, dir, "boot", logger)
	for _, claim := range []tables.ClaimRef{b, a, b} {
		require.NoError(t, j.OweClaim(claim))
	}
	require.Equal(t, []tables.ClaimRef{a, b}, j.OwedClaims())
	require.Empty(t, j.Entries(), "it is of no device")

	j = open(t, dir, "boot", logger)
	require.Equal(t, []tables.ClaimRef{a, b}, j.OwedClaims())
	require.NoError(t, j.SettleClaim(a.UID))
	require.NoError(t, j.SettleClaim(a.UID))
	require.Equal(t, []tables.ClaimRef{b}, j.OwedClaims())

	require.EqualError(t, j.OweClaim(tables.ClaimRef{Namespace: "default", Name: "c", UID: "../c"}),
		`note that claim default/c is owed its devices: uid: "../c" is none`)
	require.Empty(t, log.String())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "33cc.claim"), []byte("{"), 0o600))
	require.Equal(t, []tables.ClaimRef{b}, open(t, dir, "boot", logger).OwedClaims())
	require.Contains(t, log.String(), "33cc.claim")
	require.Empty(t, open(t, dir, "next boot", logger).OwedClaims())
	require.NoFileExists(t, filepath.Join(dir, "22bb.claim"))
}

// With a disk that is full it is known for as long as the agent lives.
func TestOwedClaimThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "boot", slog.New(slog.DiscardHandler))
	require.NoError(t, os.RemoveAll(dir))
	a := tables.ClaimRef{Namespace: "default", Name: "a", UID: "11aa"}
	require.ErrorContains(t, j.OweClaim(a), "11aa.claim")
	require.Equal(t, []tables.ClaimRef{a}, j.OwedClaims())
}
