// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

type device struct {
	types.Device
	pad string
}

func (d device) MarshalJSON() ([]byte, error) { return json.Marshal(map[string]string{"pad": d.pad}) }

func row(name string) *tables.DRAAllocation {
	return &tables.DRAAllocation{
		DeviceName: name, Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: device{}, Pool: "pool", PodUID: "pod-uid", ClaimUID: "claim-uid",
		Config: types.DeviceConfig{PodIfName: "net1", Vlan: new(7)}, ClaimNamespace: "default", ClaimName: "claim", PodName: "pod", Request: "net",
	}
}

func open(t testing.TB, dir, boot string, log *slog.Logger) *Journal {
	db := statedb.New()
	table, err := NewTable(db)
	require.NoError(t, err)
	j := New(Params{Logger: log, DB: db, Table: table, Dir: dir, BootID: boot, NodeName: "node", DriverName: "driver"})
	require.NoError(t, j.Open())
	return j
}

func TestJournal(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	log := slog.New(slog.DiscardHandler)
	j := open(t, dir, "boot", log)
	require.Empty(t, j.Entries())
	require.NoError(t, j.Note(row("a"), false))
	require.NoError(t, j.Note(row("a"), true))
	require.NoError(t, j.Note(row("b"), false))

	again := open(t, dir, "boot", log)
	require.Equal(t, j.ID(), again.ID())
	require.Equal(t, j.Entries(), again.Entries(), "the table is what the directory is")
	a := again.Entries()[0]
	require.True(t, a.Settled)
	require.Equal(t, row("a"), a.Row(device{}))
	require.Equal(t, []string{"a", "sr-iov", "pool", "default/claim", "default/pod", "true", ""}, a.TableRow())
	require.Len(t, a.TableHeader(), len(a.TableRow()))

	driven := row("c").With(func(r *tables.DRAAllocation) {
		r.Config, r.PodClaim = types.DeviceConfig{Driver: types.DriverVFIO}, "nets"
	})
	require.NoError(t, j.Note(driven, true))
	require.Equal(t, driven, open(t, dir, "boot", log).Entries()[2].Row(device{}))
	require.NoError(t, j.Forget(driven))

	other := row("a").With(func(r *tables.DRAAllocation) { r.ClaimUID = "other" })
	require.NoError(t, again.Forget(other))
	require.Len(t, again.Entries(), 2, "another claim's entry stays")
	require.NoError(t, again.Forget(row("a")))
	require.NoError(t, again.Forget(row("a")))
	require.Len(t, again.Entries(), 1)
	require.NoFileExists(t, filepath.Join(dir, "a.json"))

	require.Empty(t, open(t, dir, "next boot", log).Entries())
	require.NoFileExists(t, filepath.Join(dir, "b.json"))
}

// What cannot be read is shown and stays, for a person or a claim's record to tell what it was.
func TestBrokenEntries(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "boot", slog.New(slog.DiscardHandler))
	for _, name := range []string{"good", "other"} {
		require.NoError(t, j.Note(row(name), true))
	}
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	valid, err := os.ReadFile(filepath.Join(dir, "good.json"))
	require.NoError(t, err)
	write("torn.json", string(valid[:40]))
	write("empty.json", "")
	write("renamed.json", string(valid))
	write("more.json", string(valid)+"x")
	write("field.json", strings.Replace(string(valid), `"name":"good"`, `"name":"field","x":1`, 1))
	write("version.json", strings.NewReplacer(`"name":"good"`, `"name":"version"`, `"version":1`, `"version":2`).Replace(string(valid)))
	write("vlan.json", strings.NewReplacer(`"name":"good"`, `"name":"vlan"`, `"vlan":7`, `"vlan":4095`).Replace(string(valid)))
	write("huge.json", strings.Repeat(" ", maxSize)+string(valid))
	require.NoError(t, os.Symlink(filepath.Join(dir, "good.json"), filepath.Join(dir, "link.json")))
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo.json"), 0o600))
	// These are nobody's.
	write(".good.json.tmp", "{")
	write("README", "x")
	write("UPPER.json", "x")

	log := &testenv.LogBuffer{}
	j = open(t, dir, "boot", slog.New(slog.NewTextHandler(log, nil)))
	quarantined := map[string]string{}
	for _, e := range j.Entries() {
		quarantined[e.Name] = e.Quarantine
	}
	require.Len(t, quarantined, 12)
	for name, reason := range quarantined {
		if name == "good" || name == "other" {
			require.Empty(t, reason)
			continue
		}
		require.Contains(t, reason, name+".json cannot be read")
	}
	require.Equal(t, 10, log.Count("Device is quarantined"))
	require.Contains(t, quarantined["version"], "version: 2 is not 1")
	require.Contains(t, quarantined["vlan"], "config.vlan: 4095 is not in 0..4094")
	require.Contains(t, quarantined["link"], "symbolic link")

	require.NoError(t, j.Note(row("torn"), true), "a record has told what it was")
	require.Empty(t, open(t, dir, "boot", j.Logger).find("torn").Quarantine)
}

func (j *Journal) find(name string) *Entry {
	e, _, _ := j.Table.Get(j.DB.ReadTxn(), ByName(name))
	return e
}

func TestRefusedEntries(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "boot", slog.New(slog.DiscardHandler))
	huge := row("a").With(func(r *tables.DRAAllocation) { r.PreparedDevice = device{pad: strings.Repeat("x", maxSize)} })
	require.ErrorContains(t, j.Note(huge, true), "at most 65536 are allowed")
	require.ErrorContains(t, j.Note(row("../a"), true), "is not the name of a device")
	require.NoError(t, os.Mkdir(filepath.Join(dir, ".a.json.tmp"), 0o700))
	require.ErrorContains(t, j.Note(row("a"), true), "make sure that there is space")
	require.Empty(t, j.Entries())

	require.NoError(t, os.Chmod(dir, 0o777))
	require.ErrorContains(t, j.Open(), "nobody else may write to")
}

func TestDebts(t *testing.T) {
	dir := t.TempDir()
	log := &testenv.LogBuffer{}
	j := open(t, dir, "boot", slog.New(slog.NewTextHandler(log, nil)))
	a := podnet.Debt{Device: "a", Link: nic.PCI("0000:03:00.1"), Name: "ens1f0v0", AltNames: []string{"enp3s0f0v0"}}
	b := podnet.Debt{Device: "b", Link: nic.PCI("0000:03:00.2"), Name: "ens1f0v1", Settled: true}
	require.NoError(t, j.SaveDebt(a))
	require.NoError(t, j.SaveDebt(b))
	debts, err := j.Debts()
	require.NoError(t, err)
	require.Equal(t, []podnet.Debt{a, b}, debts)
	require.Empty(t, open(t, dir, "boot", j.Logger).Entries(), "no entries")
	for _, bad := range []podnet.Debt{{}, {Device: "../a", Link: a.Link, Name: "x"}, {Device: "a", Name: "x"}, {Device: "a", Link: a.Link, Name: "a/b"}} {
		require.Error(t, j.SaveDebt(bad))
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.names"), []byte("{"), 0o600))
	require.NoError(t, os.Rename(filepath.Join(dir, "b.names"), filepath.Join(dir, "c.names")))
	debts, err = j.Debts()
	require.NoError(t, err)
	require.Empty(t, debts)
	require.Equal(t, 2, log.Count("cannot be read"))

	require.NoError(t, j.SaveDebt(a))
	next := open(t, dir, "next boot", j.Logger)
	debts, err = next.Debts()
	require.NoError(t, err)
	require.Empty(t, debts)
	require.NoFileExists(t, filepath.Join(dir, "a.names"))
}

func FuzzDecodeDebt(f *testing.F) {
	debt := podnet.Debt{Device: "a", Link: nic.PCI("0000:03:00.1"), Name: "eth1", AltNames: []string{"enp3s0"}}
	valid, err := json.Marshal(owed{version, "boot", debt})
	require.NoError(f, err)
	f.Add(valid)
	f.Add([]byte(`{"version":1,"debt":{"device":"a"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := decodeDebt(data)
		if err != nil {
			return
		}
		require.NoError(t, nic.ValidateName(o.Debt.Name), "the kernel takes it")
		again, err := json.Marshal(o)
		require.NoError(t, err)
		same, err := decodeDebt(again)
		require.NoError(t, err, "what was decoded can be written")
		require.Equal(t, o.Debt.Link, same.Debt.Link)
	})
}

func FuzzDecode(f *testing.F) {
	dir := f.TempDir()
	require.NoError(f, open(f, dir, "boot", slog.New(slog.DiscardHandler)).Note(row("a"), true))
	valid, err := os.ReadFile(filepath.Join(dir, "a.json"))
	require.NoError(f, err)
	f.Add(valid)
	f.Add([]byte(`{"version":1,"name":"a"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := decode(data)
		if err != nil {
			return
		}
		again, err := json.Marshal(e)
		require.NoError(t, err)
		decoded, err := decode(again)
		require.NoError(t, err, "what was decoded can be written")
		require.Equal(t, e.Claim(), decoded.Claim())
		require.Equal(t, e.Config, decoded.Config)
	})
}

// What the driver was configured by is there for the next agent, for nobody else to read, and gone when there is none.
func TestLastConfig(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "boot", slog.New(slog.DiscardHandler))
	last, err := j.LastConfig()
	require.NoError(t, err)
	require.Nil(t, last)
	require.NoError(t, j.SaveConfig(nil, nil))

	config := &v2alpha1.CiliumNetworkDriverNodeConfig{
		ObjectMeta: metav1.ObjectMeta{Name: j.NodeName, UID: "uid", Generation: 3, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}},
		Spec:       v2alpha1.CiliumNetworkDriverNodeConfigSpec{DriverName: "d.example"},
		Status:     v2alpha1.CiliumNetworkDriverNodeConfigStatus{ObservedGeneration: 3},
	}
	addresses := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	require.NoError(t, j.SaveConfig(config, addresses))
	j = open(t, dir, "boot", slog.New(slog.DiscardHandler))
	require.Empty(t, j.Entries(), "it is no device's entry")
	last, err = j.LastConfig()
	require.NoError(t, err)
	require.Equal(t, &LastConfig{Version: version, Addresses: addresses, Config: &v2alpha1.CiliumNetworkDriverNodeConfig{
		ObjectMeta: metav1.ObjectMeta{Name: j.NodeName, UID: "uid", Generation: 3}, Spec: config.Spec,
	}}, last)
	path := filepath.Join(dir, "config")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())

	for content, message := range map[string]string{
		`{`: "unexpected end", `{"version":2}`: "version: 2 is not 1", `{"version":1}`: "config: is not that of node",
		`{"version":1,"config":{"metadata":{"name":"other"}}}`: "config: is not that of node",
	} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		_, err = j.LastConfig()
		require.ErrorContains(t, err, message)
	}
	require.NoError(t, j.SaveConfig(nil, nil))
	require.NoFileExists(t, path)
	require.NoError(t, os.Mkdir(path, 0o700))
	require.ErrorContains(t, j.SaveConfig(config, nil), "make sure that there is space")
}
