// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package tables

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// stubDevice is a device with a name; the tables need no more of it.
type stubDevice struct {
	types.Device
	name string
}

func (d stubDevice) KernelIfName() string { return d.name }
func (d stubDevice) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]string{"name": d.name})
}

func names(rows []*DRAAllocation) []string {
	var names []string
	for _, row := range rows {
		names = append(names, AllocationKey(row.Pool, row.DeviceName)+"="+string(row.ClaimUID))
	}
	return names
}

func TestAllocationTable(t *testing.T) {
	db := statedb.New()
	table, err := NewAllocationTable(db)
	require.NoError(t, err)
	require.Equal(t, "networkdriver-dra-allocations", table.Name())
	txn := db.WriteTxn(table)
	for _, row := range []*DRAAllocation{
		{Pool: "p", DeviceName: "a", ClaimUID: "c1", PodUID: "pod1"},
		{Pool: "p", DeviceName: "b", ClaimUID: "c1", PodUID: "pod1"},
		{Pool: "p", DeviceName: "ab", ClaimUID: "c10", PodUID: "pod10"},
		{Pool: "q", DeviceName: "a", ClaimUID: "c2", PodUID: "pod1"}, // a conflict, and that must be seen
		{Pool: "p", DeviceName: "b", ClaimUID: "c3", PodUID: "pod3"}, // takes the place of the other p/b
	} {
		_, _, err := table.Insert(txn, row)
		require.NoError(t, err)
	}
	read := txn.Commit()
	list := func(q statedb.Query[*DRAAllocation]) []string { return names(statedb.Collect(table.List(read, q))) }
	require.Equal(t, []string{"p/a=c1", "p/ab=c10", "p/b=c3", "q/a=c2"}, names(statedb.Collect(table.All(read))))
	require.Equal(t, []string{"p/a=c1"}, list(AllocationByKey(AllocationKey("p", "a"))))
	require.Empty(t, list(AllocationByKey("p")))
	require.Equal(t, []string{"p/a=c1"}, list(AllocationsByClaim("c1")), "no prefix of another UID, and no row that was replaced")
	require.Equal(t, []string{"p/ab=c10"}, list(AllocationsByClaim("c10")))
	require.Empty(t, list(AllocationsByClaim("c")))
	require.Equal(t, []string{"p/a=c1", "q/a=c2"}, list(AllocationsByDevice("a")))
	require.Equal(t, []string{"p/a=c1", "q/a=c2"}, list(AllocationsByPod("pod1")))
	require.Empty(t, list(AllocationsByPod("")))
}

func TestAllocationState(t *testing.T) {
	row := &DRAAllocation{ClaimNamespace: "ns", ClaimName: "c"}
	require.Equal(t, "Prepared", row.State())
	attached := row.With(func(r *DRAAllocation) { r.Attachment = &types.Attachment{} })
	require.Equal(t, "Attached", attached.State())
	require.Equal(t, "Failed", attached.With(func(r *DRAAllocation) { r.Error = "x" }).State())
	require.Nil(t, row.Attachment, "rows are immutable")
	require.Equal(t, "ns/c", row.Claim())
}

func TestTableRows(t *testing.T) {
	vlan := 7
	row := &DRAAllocation{DeviceName: "a", Manager: types.DeviceManagerTypeDummy, Pool: "p", ClaimNamespace: "ns", ClaimName: "c", PodName: "pod",
		Config: types.DeviceConfig{PodIfName: "net1", Vlan: &vlan}, Error: "x"}
	require.Equal(t, []string{"a", "dummy", "p", "ns/c", "ns/pod", "net1", "7", "Failed", "x"}, row.TableRow())
	require.Len(t, row.TableHeader(), len(row.TableRow()))
	device := &DRADevice{Name: "a", Manager: types.DeviceManagerTypeSRIOV, Dev: stubDevice{name: "ens1v0"}}
	require.Equal(t, []string{"a", "sr-iov", "ens1v0"}, device.TableRow())
	require.Len(t, device.TableHeader(), len(device.TableRow()))
}

// The database's JSON has the fields that people's jq filters name.
func TestJSON(t *testing.T) {
	db := statedb.New()
	allocations, err := NewAllocationTable(db)
	require.NoError(t, err)
	devices, err := NewDeviceTable(db)
	require.NoError(t, err)
	vlan := 1001
	txn := db.WriteTxn(allocations, devices)
	_, _, err = allocations.Insert(txn, &DRAAllocation{DeviceName: "0000-03-00-1", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: stubDevice{name: "x"},
		Pool: "sriov-pool", PodUID: "pod", ClaimUID: "claim", Config: types.DeviceConfig{PodIfName: "sriov0", Vlan: &vlan}})
	require.NoError(t, err)
	_, _, err = devices.Insert(txn, &DRADevice{Name: "0000-03-00-1", Manager: types.DeviceManagerTypeSRIOV, Dev: stubDevice{name: "x"}})
	require.NoError(t, err)
	var buf bytes.Buffer
	require.NoError(t, txn.Commit().WriteJSON(&buf))
	var got struct {
		Inventory   []map[string]any `json:"networkdriver-dra-devices"`
		Allocations []map[string]any `json:"networkdriver-dra-allocations"`
	}
	require.NoError(t, json.Unmarshal(buf.Bytes(), &got))
	require.Equal(t, []map[string]any{{"Name": "0000-03-00-1", "Manager": "sr-iov", "Dev": map[string]any{"name": "x"}}}, got.Inventory)
	require.Len(t, got.Allocations, 1)
	for field, want := range map[string]any{"DeviceName": "0000-03-00-1", "Manager": "sr-iov", "Pool": "sriov-pool", "PodUID": "pod", "ClaimUID": "claim",
		"Config": map[string]any{"podIfName": "sriov0", "vlan": 1001.0}, "PreparedDevice": map[string]any{"name": "x"}} {
		require.Equal(t, want, got.Allocations[0][field], field)
	}
	require.NotContains(t, got.Allocations[0], "Attachment")
}

func TestDeviceTable(t *testing.T) {
	db := statedb.New()
	table, err := NewDeviceTable(db)
	require.NoError(t, err)
	require.Equal(t, "networkdriver-dra-devices", table.Name())
	txn := db.WriteTxn(table)
	for name, manager := range map[string]types.DeviceManagerType{"dummy0": "dummy", "dummy1": "dummy", "0000-03-00-1": "sr-iov"} {
		_, _, err := table.Insert(txn, &DRADevice{Name: name, Manager: manager})
		require.NoError(t, err)
	}
	read := txn.Commit()
	require.Len(t, statedb.Collect(table.List(read, DevicesByManager(types.DeviceManagerTypeDummy))), 2)
	require.Empty(t, statedb.Collect(table.List(read, DevicesByManager("dum"))))
	device, _, found := table.Get(read, DeviceByName("dummy1"))
	require.True(t, found)
	require.Equal(t, "dummy1", device.Name)
	_, _, found = table.Get(read, DeviceByName("dummy"))
	require.False(t, found)
}
