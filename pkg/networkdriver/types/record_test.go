// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func validRecord() Record {
	vlan := 1001
	return Record{
		Version: RecordVersion, Manager: DeviceManagerTypeSRIOV, PodUID: "pod", BootID: "boot",
		Config: DeviceConfig{PodIfName: "sriov0", Vlan: &vlan}, Device: json.RawMessage(`{"addr":"0000:03:00.1"}`),
	}
}

func TestRecord(t *testing.T) {
	raw, err := json.Marshal(validRecord())
	require.NoError(t, err)
	require.JSONEq(t, `{"version":1,"manager":"sr-iov","podUID":"pod","bootID":"boot",
		"config":{"podIfName":"sriov0","vlan":1001},"device":{"addr":"0000:03:00.1"}}`, string(raw), "the format of version 1 is stored in clusters")
	got, err := DecodeRecord(raw)
	require.NoError(t, err)
	require.Equal(t, validRecord(), got)

	_, err = DecodeRecord([]byte(`{"version":1,"manager":"m","podUID":"p","bootID":"b","device":{},"later":true}`))
	require.NoError(t, err, "fields may be added without a new version")
}

// An agent that knows no networks must not take a record with one for one without.
func TestRecordWithNetwork(t *testing.T) {
	r := validRecord()
	r.Config = DeviceConfig{Network: "storage", Joined: &Network{VLAN: 5}}
	r.Version = RecordVersionOf(r.Config)
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	require.JSONEq(t, `{"version":2,"manager":"sr-iov","podUID":"pod","bootID":"boot",
		"config":{"network":"storage","joined":{"vlan":5}},"device":{"addr":"0000:03:00.1"}}`, string(raw))
	got, err := DecodeRecord(raw)
	require.NoError(t, err)
	require.Equal(t, r, got)
}

// And one that knows no drivers not one with a driver, which it would leave bound.
func TestRecordWithDriver(t *testing.T) {
	r := validRecord()
	r.Config = DeviceConfig{Driver: DriverVFIO, Vhost: true, Network: "storage", Joined: &Network{VLAN: 5}}
	r.Version = RecordVersionOf(r.Config)
	require.Equal(t, 4, r.Version)
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	got, err := DecodeRecord(raw)
	require.NoError(t, err)
	require.Equal(t, r, got)
}

// Nor one that knows no RDMA devices one with such a device, without which it would start containers.
func TestRecordWithRDMA(t *testing.T) {
	r := validRecord()
	r.Config = DeviceConfig{RDMA: true, Network: "storage", Joined: &Network{VLAN: 5}}
	r.Version = RecordVersionOf(r.Config)
	require.Equal(t, 5, r.Version)
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	got, err := DecodeRecord(raw)
	require.NoError(t, err)
	require.Equal(t, r, got)
}

func TestDecodeRecordRefuses(t *testing.T) {
	number := func(n int) *int { return &n }
	for _, tt := range []struct {
		change func(*Record)
		err    string
	}{
		{func(r *Record) { r.Version = 0 }, "record has version 0, version 1 is understood"},
		{func(r *Record) { r.Version = 2 }, "record has version 2, version 1 is understood"},
		{func(r *Record) { r.Manager = "" }, "record is incomplete: manager, podUID, bootID and device are needed"},
		{func(r *Record) { r.PodUID = "" }, "record is incomplete: manager, podUID, bootID and device are needed"},
		{func(r *Record) { r.BootID = "" }, "record is incomplete: manager, podUID, bootID and device are needed"},
		{func(r *Record) { r.Device = json.RawMessage("null") }, "record is incomplete: manager, podUID, bootID and device are needed"},
		{func(r *Record) { r.Config.Vlan = number(-1) }, "record: config.vlan: -1 is not in 0..4094"},
		{func(r *Record) { r.Config.Vlan = number(4095) }, "record: config.vlan: 4095 is not in 0..4094"},
		{func(r *Record) { r.Config.PodIfName = "a/b" }, `record: config.podIfName: "a/b" contains '/', which an interface name must not`},
	} {
		r := validRecord()
		tt.change(&r)
		raw, err := json.Marshal(r)
		require.NoError(t, err)
		_, err = DecodeRecord(raw)
		require.EqualError(t, err, tt.err)
	}
	for _, raw := range []string{``, `null`, `[]`, `"x"`, `{`, `{"version":"1"}`, `{"version":1,"manager":7}`, `{"version":1}{}`} {
		_, err := DecodeRecord([]byte(raw))
		require.Error(t, err, raw)
	}
}

// A record that is accepted is complete and within the limits.
func FuzzDecodeRecord(f *testing.F) {
	raw, err := json.Marshal(validRecord())
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"version":1,"manager":"m","podUID":"p","bootID":"b","device":null}`))
	f.Add([]byte(`{"version":1,"config":{"vlan":4095,"podIfName":".."}}`))
	f.Add([]byte(`{"version":1,"manager":"m","podUID":"p","bootID":"b","journal":"j","config":{"later":1},"device":{},"later":true}`))
	f.Add([]byte(`{"version":2,"manager":"m","podUID":"p","bootID":"b","device":{}}`))
	f.Add([]byte(`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"addresses":["192.0.2.10/24"],"routes":[{"to":"::/0","via":"fe80::1"}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := DecodeRecord(raw)
		if err != nil {
			return
		}
		require.Equal(t, RecordVersionOf(r.Config), r.Version)
		require.NotEmpty(t, r.Manager)
		require.NotEmpty(t, r.PodUID)
		require.NotEmpty(t, r.BootID)
		require.True(t, json.Valid(r.Device))
		require.True(t, r.Config.VLAN() >= 0 && r.Config.VLAN() <= MaxVLAN)
		if r.Config.PodIfName != "" {
			require.NoError(t, ValidatePodIfName(r.Config.PodIfName))
		}
		again, err := json.Marshal(r)
		require.NoError(t, err)
		_, err = DecodeRecord(again)
		require.NoError(t, err)
	})
}
