// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func (h *host) Remember(_ context.Context, dev types.Device, _ types.DeviceConfig) (types.Device, error) {
	return dev, nil
}
func (h *host) Note(*tables.DRAAllocation, bool) error { return nil }
func (h *host) Forget(*tables.DRAAllocation) error     { return nil }

func (h *host) OweClaim(claim Ref) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.owed = append(slices.DeleteFunc(h.owed, func(c Ref) bool { return c == claim }), claim)
	return nil
}

func (h *host) SettleClaim(claim kubetypes.UID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.owed = slices.DeleteFunc(h.owed, func(c Ref) bool { return c.UID == claim })
	return nil
}

func (h *host) OwedClaims() []Ref {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.owed)
}

func (h *host) IsHeld(_ context.Context, row *tables.DRAAllocation) (bool, error) {
	if h.held == nil {
		return false, errors.New("not expected")
	}
	return h.held(row)
}

// Withdraw counts under a name of its own.
func (o fakeObserver) Withdraw(claim Ref) { o["withdrawn "+claim.UID]++ }

// newJournal opens the journal in the directory.
func newJournal(t testing.TB, dir, driver string) *journal.Journal {
	db := statedb.New()
	table, err := journal.NewTable(db)
	require.NoError(t, err)
	j := journal.New(journal.Params{
		Logger: slog.New(slog.DiscardHandler), DB: db, Table: table, Dir: dir, BootID: testBoot, NodeName: testNode, DriverName: driver,
	})
	require.NoError(t, j.Open())
	return j
}

// preparedRow is the row of a device that was prepared for pod p by claim c.
func preparedRow(device string) *tables.DRAAllocation {
	return &tables.DRAAllocation{
		DeviceName: device, Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{Name: device, Found: true, Noted: "settings"}, Pool: "pool",
		PodUID: "uid-p", ClaimUID: "uid-c", Config: types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)},
		ClaimNamespace: "default", ClaimName: "c", PodName: "p", Request: "net",
	}
}

// The journal says what was done, whatever has become of the record, and the claim whether it still holds.
func TestRestoreFromTheJournal(t *testing.T) {
	journaled := func(id string, change func(*types.Record)) types.Record {
		return changed(func(r *types.Record) {
			r.Journal = id
			change(r)
		})
	}
	as := func(r *types.Record) {}
	tests := []struct {
		name      string
		claim     func(id string) *resourceapi.ResourceClaim
		unsettled bool
		noPod     bool
		alsoPod   bool // there is pod q too
		empty     bool // the journal has no entry
		restored  string
		state     string
		withdrawn bool
		logs      string
	}{
		{name: "recorded", claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, restored: "c", state: "Prepared"},
		{name: "without a record", claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters))
		}, restored: "c", state: "Prepared", withdrawn: true},
		{name: "garbage in the record", claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", `{"version":`))
		}, restored: "c", state: "Prepared", withdrawn: true},
		{name: "the record of a later version", claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", changed(func(r *types.Record) { r.Version = 9 })))
		}, restored: "c", state: "Prepared", withdrawn: true},
		{name: "Setup was never answered", unsettled: true, claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, restored: "c", state: "Releasing"},
		{name: "the claim is gone", restored: "c", state: "Releasing", logs: "left over"},
		{name: "pod and claim are gone", noPod: true, restored: "c", state: "Releasing"},
		{name: "the pod is gone, the claim still reserved for it", noPod: true, claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, restored: "c", state: "Prepared"},
		{name: "another claim of that name", claim: func(string) *resourceapi.ResourceClaim {
			c := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters))
			c.UID = "uid-2"
			return c
		}, restored: "c", state: "Releasing"},
		{name: "deallocated", claim: func(string) *resourceapi.ResourceClaim {
			c := newClaim("c", forPod("p"), with("net", "a"))
			c.Status.Allocation = nil
			return c
		}, restored: "c", state: "Releasing"},
		{name: "allocated another device", claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "b"), fromClaim(parameters))
		}, restored: "c", state: "Releasing"},
		{name: "reserved for another pod", claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("q"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, restored: "c", state: "Releasing"},
		{name: "reserved for another pod that is here", claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("q"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, alsoPod: true, restored: "c", state: "Releasing"},
		{name: "reserved for nobody", claim: func(id string) *resourceapi.ResourceClaim {
			c := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
			c.Status.ReservedFor = nil
			return c
		}, restored: "c", state: "Releasing"},
		{name: "given back, with the record still there", empty: true, claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, withdrawn: true, logs: "its record does not count any more"},
		{name: "the journal is lost", empty: true, claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled("another", as)))
		}, restored: "c", state: "Prepared", withdrawn: true},
		{name: "a former version of the agent", empty: true, claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled("", as)))
		}, restored: "c", state: "Prepared", withdrawn: true},
		{name: "another claim since, by an agent without a journal", claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("d", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled("", as)))
		}, restored: "d", state: "Prepared", withdrawn: true, logs: "Journal entry of a device is dropped"},
		{name: "another claim's record that was rolled back", claim: func(id string) *resourceapi.ResourceClaim {
			return newClaim("d", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", journaled(id, as)))
		}, restored: "c", state: "Releasing", withdrawn: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			j := newJournal(t, dir, testDriver)
			if !tt.empty {
				require.NoError(t, j.Note(preparedRow("a"), !tt.unsettled))
			}
			j = newJournal(t, dir, testDriver)
			api := newFakeAPI()
			if tt.claim != nil {
				claim := tt.claim(j.ID())
				api = newFakeAPI(claim)
			}
			var pods []*corev1.Pod
			if !tt.noPod {
				pods = []*corev1.Pod{podWith("p", "c", "d")}
			}
			if tt.alsoPod {
				pods = append(pods, podWith("q", "c"))
			}
			r := newRestored(t, api)
			r.restorer.Journal = j
			require.NoError(t, r.restorer.Restore(t.Context(), pods))
			if tt.restored == "" {
				require.Empty(t, r.rows())
			} else {
				require.Len(t, r.rows(), 1)
				row := r.rows()[0]
				require.Equal(t, tt.restored, row.ClaimName)
				require.Equal(t, tt.state, row.State())
				want := preparedRow("a")
				want.PreparedDevice.(*fakeDevice).host = r.host
				if tt.empty || tt.restored == "d" {
					want.PreparedDevice.(*fakeDevice).Noted = "" // it comes from the record
				}
				want.ClaimName, want.ClaimUID, want.Releasing = row.ClaimName, kubetypes.UID("uid-"+row.ClaimName), row.Releasing
				want.Held = !row.Releasing
				require.Equal(t, want, row)
				require.Len(t, j.Entries(), 1)
				require.Equal(t, row.ClaimUID, j.Entries()[0].ClaimUID, "every row has its entry")
			}
			withdrawn := false
			for uid := range r.observed {
				withdrawn = withdrawn || strings.HasPrefix(string(uid), "withdrawn ")
			}
			require.Equal(t, tt.withdrawn, withdrawn)
			require.Contains(t, r.log.String(), tt.logs)
		})
	}
}

// What cannot be undone is not forgotten.
func TestRestoreQuarantines(t *testing.T) {
	for name, change := range map[string]func(*tables.DRAAllocation){
		"a manager that is not there": func(row *tables.DRAAllocation) { row.Manager = "macvlan" },
		"another device":              func(row *tables.DRAAllocation) { row.PreparedDevice = &fakeDevice{Name: "b", Found: true} },
		"no prepared device":          func(row *tables.DRAAllocation) { row.PreparedDevice = &fakeDevice{Name: "a"} },
	} {
		t.Run(name, func(t *testing.T) {
			j := newJournal(t, t.TempDir(), testDriver)
			require.NoError(t, j.Note(preparedRow("a").With(change), true))
			r := newRestored(t, newFakeAPI())
			r.restorer.Journal = j
			require.NoError(t, r.restorer.Restore(t.Context(), nil))
			require.Empty(t, r.rows())
			require.NotEmpty(t, j.Entries()[0].Quarantine)
			require.Contains(t, r.log.String(), "Device is quarantined")
		})
	}
	dir := t.TempDir()
	require.NoError(t, newJournal(t, dir, "former.example").Note(preparedRow("a"), true))
	r := newRestored(t, newFakeAPI())
	r.restorer.Journal = newJournal(t, dir, testDriver)
	require.NoError(t, r.restorer.Restore(t.Context(), nil))
	require.Contains(t, r.log.String(), "it is of driver former.example")
}

// A record tells what an entry was that cannot be read.
func TestRecordMendsTheJournal(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.json"), []byte("{"), 0o600))
	j := newJournal(t, dir, testDriver)
	require.NotEmpty(t, j.Entries()[0].Quarantine)
	record := changed(func(r *types.Record) { r.Journal = j.ID() })
	r := newRestored(t, newFakeAPI(newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", record))))
	r.restorer.Journal = j
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Len(t, r.rows(), 1)
	require.Empty(t, newJournal(t, dir, testDriver).Entries()[0].Quarantine)
}

// What the API server says of a row's claim.
func TestIsHeld(t *testing.T) {
	gone := newClaim("c", forPod("p"), with("net", "a"))
	gone.Status.Allocation = nil
	other := newClaim("c", forPod("p"), with("net", "a"))
	other.UID = "uid-2"
	idle := newClaim("c", forPod("p"), with("net", "a"))
	idle.Status.ReservedFor = nil
	for name, tt := range map[string]struct {
		api  *fakeAPI
		want bool
	}{
		"held":                 {newFakeAPI(newClaim("c", forPod("p"), with("net", "a"))), true},
		"another pod's":        {newFakeAPI(newClaim("c", forPod("q"), with("net", "a"))), true},
		"gone":                 {newFakeAPI(), false},
		"another of that name": {newFakeAPI(other), false},
		"deallocated":          {newFakeAPI(gone), false},
		"another device":       {newFakeAPI(newClaim("c", forPod("p"), with("net", "b"))), false},
		"reserved for nobody":  {newFakeAPI(idle), false},
	} {
		t.Run(name, func(t *testing.T) {
			w := NewWriter(WriterParams{Client: tt.api, DriverName: testDriver, NodeName: testNode})
			held, err := w.IsHeld(t.Context(), preparedRow("a"))
			require.NoError(t, err)
			require.Equal(t, tt.want, held)
			tt.api.fail = func(string, string) error { return errors.New("connection refused") }
			_, err = w.IsHeld(t.Context(), preparedRow("a"))
			require.ErrorContains(t, err, "connection refused")
		})
	}
}

// lateJournal calls after when its entries were read.
type lateJournal struct {
	Journal
	after func()
}

func (j lateJournal) Entries() []*journal.Entry {
	defer j.after()
	return j.Journal.Entries()
}

// Without the API server the journal alone gives the rows. When the claims can be read, rows that they contradict are to be given
// back, and nothing else changes.
func TestRestoreAlone(t *testing.T) {
	held := func(id string, device string) *resourceapi.ResourceClaim {
		record := goodRecord(device, "p")
		record.Journal = id
		return newClaim("c", forPod("p"), with("net", device), fromClaim(parameters), recorded(device, record))
	}
	tests := []struct {
		name      string
		unsettled bool
		// meanwhile is what happens before the claims are read.
		meanwhile func(t *testing.T, r *restored)
		claim     func(id string) *resourceapi.ResourceClaim
		alone     string
		claims    []string
		state     string
		noEntry   bool
	}{
		{name: "held", claim: func(id string) *resourceapi.ResourceClaim { return held(id, "a") },
			alone: "Prepared", claims: []string{"c"}, state: "Prepared"},
		{name: "held, and in its pod since", claim: func(id string) *resourceapi.ResourceClaim { return held(id, "a") },
			meanwhile: func(_ *testing.T, r *restored) { r.attach("a") },
			alone:     "Prepared", claims: []string{"c"}, state: "Attached"},
		{name: "Setup was never answered", unsettled: true, claim: func(id string) *resourceapi.ResourceClaim { return held(id, "a") },
			alone: "Releasing", claims: []string{"c"}, state: "Releasing"},
		{name: "the claim is gone", alone: "Prepared", claims: []string{"c"}, state: "Releasing"},
		{name: "allocated another device", claim: func(id string) *resourceapi.ResourceClaim { return held(id, "b") },
			alone: "Prepared", claims: []string{"c"}, state: "Releasing"},
		{name: "unprepared since", claim: func(id string) *resourceapi.ResourceClaim { return held(id, "a") },
			meanwhile: func(t *testing.T, r *restored) {
				require.NoError(t, r.Unprepare(t.Context(), "uid-c"))
				require.NoError(t, r.restorer.Journal.Forget(preparedRow("a")))
			},
			alone: "Prepared", noEntry: true},
		{name: "unprepared while the claims are compared", claim: func(id string) *resourceapi.ResourceClaim { return held(id, "a") },
			meanwhile: func(t *testing.T, r *restored) {
				before := r.restorer.Journal
				calls := 0
				r.restorer.Journal = lateJournal{before, func() {
					if calls++; calls == 2 {
						require.NoError(t, r.Unprepare(t.Context(), "uid-c"))
						require.NoError(t, before.Forget(preparedRow("a")))
					}
				}}
			},
			alone: "Prepared", noEntry: true},
		{name: "another claim since, by an agent without a journal", unsettled: true, claim: func(string) *resourceapi.ResourceClaim {
			return newClaim("d", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", "p")))
		}, alone: "Releasing", claims: []string{"d"}, state: "Prepared"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			j := newJournal(t, dir, testDriver)
			require.NoError(t, j.Note(preparedRow("a"), !tt.unsettled))
			j = newJournal(t, dir, testDriver)
			api := newFakeAPI()
			if tt.claim != nil {
				api = newFakeAPI(tt.claim(j.ID()))
			}
			r := newRestored(t, api)
			r.restorer.Journal = j
			for range 2 {
				require.NoError(t, r.restorer.RestoreAlone())
			}
			require.Len(t, r.rows(), 1)
			require.Equal(t, tt.alone, r.rows()[0].State())
			if tt.meanwhile != nil {
				tt.meanwhile(t, r)
			}
			for range 2 {
				require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c", "d")}))
				var claims []string
				for _, row := range r.rows() {
					claims = append(claims, row.ClaimName)
					require.Equal(t, tt.state, row.State())
				}
				require.Equal(t, tt.claims, claims)
				require.Equal(t, tt.noEntry, len(j.Entries()) == 0)
			}
			for claim := range r.observed {
				require.Contains(t, claim, "withdrawn ", "the writer knows of the rows what is newer")
			}
		})
	}
}

// What is quarantined is judged again: a person may have mended the entry, or the device may be back.
func TestJudge(t *testing.T) {
	held := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters))
	good := func(t *testing.T) []byte {
		dir := t.TempDir()
		require.NoError(t, newJournal(t, dir, testDriver).Note(preparedRow("a"), true))
		data, err := os.ReadFile(filepath.Join(dir, "a.json"))
		require.NoError(t, err)
		return data
	}
	tests := []struct {
		name string
		// mend is what has become of the entry.
		mend       func(t *testing.T, path string)
		api        *fakeAPI
		quarantine string
		state      string // of its row
		err        string
	}{
		{name: "as before", api: newFakeAPI(held), quarantine: "cannot be read, so that it is not known what the device has to be given back as"},
		{name: "removed", mend: func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) }, api: newFakeAPI(held)},
		{name: "mended", mend: func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, good(t), 0o600)) },
			api: newFakeAPI(held), state: "Prepared"},
		{name: "mended, and the claim is another pod's", mend: func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, good(t), 0o600)) },
			api: newFakeAPI(newClaim("c", forPod("q"), with("net", "a"), fromClaim(parameters))), state: "Releasing"},
		{name: "mended, and the claim is gone", mend: func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, good(t), 0o600)) },
			api: newFakeAPI(), state: "Releasing"},
		{name: "mended, and not to be undone", mend: func(t *testing.T, path string) {
			data := strings.Replace(string(good(t)), `"manager":"sr-iov"`, `"manager":"macvlan"`, 1)
			require.NoError(t, os.WriteFile(path, []byte(data), 0o600))
		}, api: newFakeAPI(held), quarantine: `what the journal has of it cannot be undone: it names device manager "macvlan"`},
		{name: "mended, and the API server is away", mend: func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, good(t), 0o600)) },
			api: &fakeAPI{fail: func(string, string) error { return errors.New("connection refused") }}, quarantine: "cannot be read", err: "connection refused"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "a.json")
			require.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
			r := newRestored(t, tt.api)
			j := newJournal(t, dir, testDriver)
			r.restorer.Journal = j
			require.NoError(t, r.restorer.RestoreAlone())
			require.NotEmpty(t, j.Entries()[0].Quarantine)
			if tt.mend != nil {
				tt.mend(t, path)
			}
			for range 2 {
				if err := r.restorer.Judge(t.Context(), "a"); tt.err == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, tt.err)
				}
			}
			switch {
			case tt.quarantine != "":
				require.Contains(t, j.Entries()[0].Quarantine, tt.quarantine)
				require.Empty(t, r.rows())
			case tt.state == "":
				require.Empty(t, j.Entries())
				require.Empty(t, r.rows())
			default:
				require.Empty(t, j.Entries()[0].Quarantine)
				require.Len(t, r.rows(), 1)
				require.Equal(t, tt.state, r.rows()[0].State())
			}
		})
	}
}
