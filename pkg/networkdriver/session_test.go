// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"log/slog"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Pools are one wire where the node's devices in them are of one PF, those that are prepared too, whatever pool would have them now.
func TestWires(t *testing.T) {
	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	s := &session{db: db, devices: devices, allocations: allocations, node: "n1"}
	filter := func(pf string) *v2alpha1.CiliumNetworkDriverDeviceFilter {
		return &v2alpha1.CiliumNetworkDriverDeviceFilter{PfNames: []string{pf}}
	}
	s.pools.set([]v2alpha1.CiliumNetworkDriverDevicePoolConfig{{PoolName: "a", Filter: filter("eth0")}, {PoolName: "b", Filter: filter("eth1")}})
	between := func() string { return s.wires([]string{"a"}, []string{"b"}) }
	txn := db.WriteTxn(devices, allocations)
	for i, pf := range []string{"eth0", "eth0", "eth1"} {
		vf := inventorytest.VF(i)
		vf.PFName = pf
		_, _, err := devices.Insert(txn, &tables.DRADevice{Name: vf.Name, Manager: vf.Manager, Dev: vf})
		require.NoError(t, err)
	}
	txn.Commit()
	require.Empty(t, between())

	txn = db.WriteTxn(allocations)
	_, _, err = allocations.Insert(txn, &tables.DRAAllocation{DeviceName: inventorytest.VF(1).Name, Pool: "b", ClaimUID: "c"})
	require.NoError(t, err)
	txn.Commit()
	require.Equal(t, "pools a and b have devices of PF eth0 on node n1", between())
}

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
