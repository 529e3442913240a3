// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"log/slog"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// The journal has one claim for each device. One that two claims have, by a mistake somewhere, is held by both: neither's addresses are
// given to others.
func TestHeldByTwoClaims(t *testing.T) {
	db := statedb.New()
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	entries, err := journal.NewTable(db)
	require.NoError(t, err)
	s := &session{db: db, allocations: allocations, journal: journal.New(journal.Params{
		Logger: slog.New(slog.DiscardHandler), DB: db, Table: entries, Dir: t.TempDir(), BootID: "boot", DriverName: "d", NodeName: "n",
	})}
	require.NoError(t, s.journal.Open())

	one := &tables.DRAAllocation{
		DeviceName: "vf0", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &sriov.Device{}, Pool: "a", PodUID: "p", ClaimUID: "one",
		ClaimNamespace: "default", ClaimName: "one", PodName: "p", Request: "net",
	}
	two := one.With(func(r *tables.DRAAllocation) { r.Pool, r.ClaimUID, r.ClaimName = "b", "two", "two" })
	require.NoError(t, s.journal.Note(one, true))
	txn := db.WriteTxn(allocations)
	for _, row := range []*tables.DRAAllocation{one, two} {
		_, _, err := allocations.Insert(txn, row)
		require.NoError(t, err)
	}
	txn.Commit()
	var claims []kubetypes.UID
	for _, row := range s.held() {
		claims = append(claims, row.ClaimUID)
	}
	require.Equal(t, []kubetypes.UID{"one", "two"}, claims)
}
