// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/hivetest"
	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/lastlog"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// device is a device of a name and no more.
type device string

func (d device) MarshalJSON() ([]byte, error)                                         { return json.Marshal(string(d)) }
func (d device) IfName() string                                                       { return string(d) }
func (d device) KernelIfName() string                                                 { return "k-" + string(d) }
func (d device) Attrs() (a map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) { return a }
func (d device) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool                 { return true }
func (d device) Link() nic.Identity                                                   { return nic.Identity{} }
func (d device) HostState() nic.State                                                 { return nic.State{} }
func (d device) Validate(types.DeviceConfig) error                                    { return nil }
func (d device) Setup(context.Context, types.DeviceConfig) (types.Device, error)      { return d, nil }
func (d device) Free(context.Context, types.DeviceConfig) error                       { return nil }
func (d device) Merge(types.Device) types.Device                                      { return d }

// startAgent serves the local API over the real tables, filled.
func startAgent(t *testing.T, socket string) *health.Checks {
	t.Helper()
	var checks *health.Checks
	lines := lastlog.New()
	_, err := lines.Write([]byte("level=INFO msg=Starting\n"))
	require.NoError(t, err)
	h := hive.New(statedb.Cell, health.Cell, debugapi.Cell,
		cell.Provide(func() *lastlog.Ring { return lines }),
		cell.Provide(tables.NewDeviceTable, tables.NewAllocationTable, tables.NewHealthTable, inventory.NewReportTable, tables.NewPoolTable),
		cell.Invoke(func(c *health.Checks, db *statedb.DB, devices statedb.RWTable[*tables.DRADevice],
			allocations statedb.RWTable[*tables.DRAAllocation], faults statedb.RWTable[*tables.DeviceHealth],
			reports statedb.RWTable[*inventory.Report], pools statedb.RWTable[*tables.Pool]) error {
			checks = c
			txn := db.WriteTxn(devices, allocations, faults, reports, pools)
			defer txn.Commit()
			vlan := 1001
			var errs []error
			for _, name := range []string{"0000-03-00-1", "0000-03-00-2", "0000-03-00-3"} {
				_, _, err := devices.Insert(txn, &tables.DRADevice{Name: name, Manager: types.DeviceManagerTypeSRIOV, Dev: device(name)})
				errs = append(errs, err)
			}
			for _, row := range []*tables.DRAAllocation{
				{DeviceName: "0000-03-00-1", PodUID: "pod-1", ClaimUID: "claim-1", ClaimName: "net", PodName: "app",
					Config:     types.DeviceConfig{PodIfName: "sriov0", Vlan: &vlan},
					Attachment: &types.Attachment{SandboxID: "s", NetNS: "/run/netns/x", IfName: "sriov0"}},
				{DeviceName: "0000-03-00-2", PodUID: "pod-2", ClaimUID: "claim-2", ClaimName: "old", PodName: "gone",
					Config: types.DeviceConfig{Network: "storage", Joined: &types.Network{VLAN: 1002,
						Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.7/24"), netip.MustParsePrefix("2001:db8::7/64")}}},
					Error: "the PF is busy"},
				{DeviceName: "0000-03-00-9", PodUID: "pod-3", ClaimUID: "claim-3", ClaimName: "lost", PodName: "alone"},
			} {
				row.Manager, row.Pool, row.PreparedDevice = types.DeviceManagerTypeSRIOV, "sriov-pool", device(row.DeviceName)
				row.ClaimNamespace = "default"
				_, _, err := allocations.Insert(txn, row)
				errs = append(errs, err)
			}
			for device, causes := range map[string][]types.Cause{
				"0000-03-00-1": {types.CauseNoCarrier, types.CauseDuplicateMAC}, "0000-03-00-3": {types.CauseDriverGone},
			} {
				row := &tables.DeviceHealth{Device: device}
				for _, cause := range causes {
					row.Faults = append(row.Faults, tables.DeviceFault{Fault: types.Fault{Cause: cause, Message: "message"}})
				}
				_, _, err := faults.Insert(txn, row)
				errs = append(errs, err)
			}
			_, _, err := reports.Insert(txn, &inventory.Report{Manager: types.DeviceManagerTypeSRIOV, Devices: 3,
				Skipped: []types.Skipped{{Device: "0000-03-00-3", Reason: "lost its driver", Cause: types.CauseDriverGone},
					{Device: "0000-03-00-7", Reason: "has no driver"}}})
			errs = append(errs, err)
			_, _, err = pools.Insert(txn, &tables.Pool{Name: "sriov-pool", Devices: []string{"0000-03-00-1", "0000-03-00-3"}, Free: []string{"0000-03-00-3"}})
			return errors.Join(append(errs, err)...)
		}))
	h.Viper().Set("socket-path", socket)
	log := hivetest.Logger(t)
	require.NoError(t, h.Start(log, t.Context()))
	t.Cleanup(func() { require.NoError(t, h.Stop(log, context.Background())) })
	return checks
}

func dbg(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := command()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestAgainstAgent(t *testing.T) {
	// A socket that a killed agent left, in a directory that is there.
	socket := filepath.Join(t.TempDir(), "run", "cilium.sock")
	require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	require.NoError(t, err)
	left.SetUnlinkOnClose(false)
	require.NoError(t, left.Close())
	_, err = dbg(t, "--socket-path", socket, "statedb")
	require.EqualError(t, err, "neither agent nor operator is running: nothing listens on the socket "+socket)

	checks := startAgent(t, socket)
	info, err := os.Stat(socket)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	out, err := dbg(t, "--socket-path", socket, "statedb")
	require.NoError(t, err)
	// What the documented jq filter asks for.
	var all struct {
		Inventory []struct {
			Name    string
			Manager string
		} `json:"networkdriver-dra-devices"`
		Allocations []struct {
			DeviceName, Manager, Pool, PodUID, ClaimUID string
			Config                                      map[string]any
		} `json:"networkdriver-dra-allocations"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &all))
	require.Len(t, all.Inventory, 3)
	require.Equal(t, "0000-03-00-1", all.Inventory[0].Name)
	require.Len(t, all.Allocations, 3)
	require.Equal(t, "sriov-pool", all.Allocations[0].Pool)
	require.Equal(t, map[string]any{"podIfName": "sriov0", "vlan": 1001.0}, all.Allocations[0].Config)

	out, err = dbg(t, "--socket-path", socket, "statedb", tables.DeviceTableName)
	require.NoError(t, err)
	var rows []map[string]any
	require.NoError(t, json.Unmarshal([]byte(out), &rows))
	require.Len(t, rows, 3)

	_, err = dbg(t, "--socket-path", socket, "statedb", "nonsense")
	require.ErrorContains(t, err, `there is no table "nonsense"; the tables are [`)
	require.ErrorContains(t, err, `"networkdriver-dra-devices"`)

	out, err = dbg(t, "--socket-path", socket, "networkdriver")
	require.NoError(t, err)
	require.Equal(t, `DEVICE         MANAGER   POOL         CLAIM          POD             INTERFACE        VLAN   NETWORK   ADDRESSES                     HEALTH                   STATE
0000-03-00-1   sr-iov    sriov-pool   default/net    default/app     sriov0           1001   -         -                             NoCarrier,DuplicateMAC   Attached
0000-03-00-2   sr-iov    sriov-pool   default/old    default/gone    k-0000-03-00-2   1002   storage   192.0.2.7/24,2001:db8::7/64   Healthy                  Failed: the PF is busy
0000-03-00-3   sr-iov    sriov-pool   -              -               k-0000-03-00-3   -      -         -                             DriverGone               Free
0000-03-00-7   sr-iov    -            -              -               -                -      -         -                             -                        NotOffered: has no driver
0000-03-00-9   sr-iov    sriov-pool   default/lost   default/alone   -                -      -         -                             Healthy                  Missing

POOL         PREPARED   FREE
sriov-pool   3          1
`, out)
	out, err = dbg(t, "--socket-path", socket, "networkdriver", "-o", "json")
	require.NoError(t, err)
	var devices []debugapi.Device
	require.NoError(t, json.Unmarshal([]byte(out), &devices))
	require.Len(t, devices, 5)
	require.Equal(t, []string{"NoCarrier", "DuplicateMAC"}, devices[0].Faults)
	require.Equal(t, "message; message", devices[0].Fault)
	_, err = dbg(t, "--socket-path", socket, "networkdriver", "-o", "xml")
	require.EqualError(t, err, `--output: "xml" is neither table nor json`)

	out, err = dbg(t, "--socket-path", socket, "status")
	require.NoError(t, err)
	require.Equal(t, "Ready\n", out)
	checks.AddReadiness("nri", func() error { return errors.New("not connected") })
	out, err = dbg(t, "--socket-path", socket, "status")
	require.EqualError(t, err, "the program is not ready")
	require.Equal(t, "nri: not connected\n", out)
	_, err = dbg(t, "--socket-path", socket, "status", "--liveness")
	require.NoError(t, err)
	checks.AddLiveness("hooks", func() error { return errors.New("stuck") })
	_, err = dbg(t, "--socket-path", socket, "status", "--liveness")
	require.EqualError(t, err, "the program hangs and must be restarted")
}

// TestBugreport: what is packed of an agent that answers is what it answers.
func TestBugreport(t *testing.T) {
	dir := t.TempDir()
	socket, file := filepath.Join(dir, "run", "cilium.sock"), filepath.Join(dir, "bugreport.tar.gz")
	startAgent(t, socket)
	args := []string{"bugreport", "--socket-path", socket, "--journal-dir", dir, "--cdi-spec-dir", dir}
	out, err := dbg(t, append(args, "-o", file)...)
	require.NoError(t, err)
	require.Empty(t, out)
	_, err = dbg(t, append(args, "-o", file)...)
	require.ErrorIs(t, err, os.ErrExist, "a file that is there is not written over")
	packed, err := os.ReadFile(file)
	require.NoError(t, err)
	out, err = dbg(t, args...)
	require.NoError(t, err)
	for _, archive := range []string{string(packed), out} {
		files := unpack(t, archive)
		require.Equal(t, "level=INFO msg=Starting\n", files["bugreport/log.txt"])
		require.Contains(t, files["bugreport/config.json"], `"socket-path": "`+socket+`"`)
		require.Contains(t, files["bugreport/version.txt"], "program: dev (")
		require.Contains(t, files["bugreport/devices.json"], `"0000-03-00-9"`)
		require.Contains(t, files["bugreport/tables.json"], `"networkdriver-dra-devices"`)
		require.Contains(t, files["bugreport/status.json"], `"ready": true`)
		require.NotContains(t, files, "bugreport/missing.txt")
	}
}

// unpack returns the files of an archive.
func unpack(t *testing.T, archive string) map[string]string {
	t.Helper()
	compressed, err := gzip.NewReader(strings.NewReader(archive))
	require.NoError(t, err)
	files := map[string]string{}
	for reader := tar.NewReader(compressed); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(reader)
		require.NoError(t, err)
		files[header.Name] = string(content)
	}
}

func TestNoAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cilium.sock")
	for _, args := range [][]string{{"statedb"}, {"networkdriver"}, {"status"}, {"statedb", "x"}} {
		_, err := dbg(t, append(args, "--socket-path", socket)...)
		require.ErrorContains(t, err, "neither agent nor operator is running here: the socket "+socket+" does not exist")
	}
	_, err := dbg(t, "shell", "--shell-sock-path", socket, "db")
	require.ErrorContains(t, err, "neither agent nor operator is running here")
}

func TestSecondAgentKeepsOut(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cilium.sock")
	startAgent(t, socket)
	h := hive.New(statedb.Cell, health.Cell, debugapi.Cell)
	h.Viper().Set("socket-path", socket)
	require.ErrorContains(t, h.Start(hivetest.Logger(t), t.Context()), "another process listens on "+socket)
}
