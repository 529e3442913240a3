// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package journal remembers on the node what the driver has changed there, so that it can be undone whatever becomes of
// the agent, of pods and claims, and of the API server. There is one file for each device, written before the device is
// changed for the first time, and removed when it is as it was found.
//
// The directory is the node's and not the pod's, and does not outlive a boot, no more than what the files tell of. A claim's
// record names the journal by its id: with an entry in it the device is set up, without one it is not, whatever the record
// says.
package journal

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cilium/statedb"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const (
	suffix = ".json"
	// idFile has the journal's id.
	idFile = "id"
	// maxSize is far beyond what an entry needs.
	maxSize = 64 << 10
)

// Params are what a [Journal] works with.
type Params struct {
	Logger *slog.Logger
	DB     *statedb.DB
	Table  statedb.RWTable[*Entry]
	// Dir is the directory, on the node.
	Dir string
	// BootID is the kernel's boot id.
	BootID string
	// Proc is where the kernel's processes are, /proc but in tests.
	Proc string
	// DriverName and NodeName are noted in the entries.
	DriverName string
	NodeName   string
}

// Journal is the directory and the table that shows it.
type Journal struct {
	Params
	mu sync.Mutex // serialises changes, and guards id and owed
	id string
	// owed are claims that kubelet may take for prepared although their devices were given back.
	owed map[kubetypes.UID]tables.ClaimRef
}

// New returns the journal. It has to be opened before it is used.
func New(p Params) *Journal {
	p.Proc = cmp.Or(p.Proc, "/proc")
	return &Journal{Params: p, owed: map[kubetypes.UID]tables.ClaimRef{}}
}

// Open makes the directory if need be and reads the entries into the table. Entries of another boot are removed: of what
// they tell nothing is left. What cannot be read is quarantined.
func (j *Journal) Open() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := statedir.Make(j.Dir); err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	if err := j.identify(); err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	files, err := os.ReadDir(j.Dir)
	if err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	var entries []*Entry
	clear(j.owed)
	for _, file := range files {
		if err := j.readOwed(file.Name()); err != nil {
			return fmt.Errorf("open the journal: %w", err)
		}
		name, ok := strings.CutSuffix(file.Name(), suffix)
		if !ok || len(validation.IsDNS1123Label(name)) > 0 {
			continue
		}
		e, err := j.read(name)
		switch {
		case err != nil:
			e = &Entry{Name: name, Quarantine: err.Error()}
			j.Logger.Error("Device is quarantined", "device", name, "reason", e.Quarantine)
		case e.BootID != j.BootID:
			if err := statedir.Remove(j.path(name)); err != nil {
				return fmt.Errorf("remove journal entry %s of another boot: %w", j.path(name), err)
			}
			continue
		}
		entries = append(entries, e)
	}
	txn := j.DB.WriteTxn(j.Table)
	defer txn.Abort()
	if err := j.Table.DeleteAll(txn); err != nil {
		return fmt.Errorf("empty table %s: %w", TableName, err)
	}
	for _, e := range entries {
		if _, _, err := j.Table.Insert(txn, e); err != nil {
			return fmt.Errorf("row of device %s in table %s: %w", e.Name, TableName, err)
		}
	}
	txn.Commit()
	return nil
}

// read reads the device's entry. The error says what a person has to do.
func (j *Journal) read(name string) (*Entry, error) {
	path := j.path(name)
	data, err := statedir.Read(path, maxSize)
	var e *Entry
	if err == nil {
		e, err = decode(data)
	}
	if err == nil && e.Name != name {
		err = fmt.Errorf("it is of device %s", e.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("journal entry %s cannot be read, so that it is not known what the device has to be given back as: %w; "+
			"see to it that the device is in no pod and in no VLAN, then remove the file", path, err)
	}
	return e, nil
}

// identify reads the journal's id, or gives it one.
func (j *Journal) identify() error {
	path := filepath.Join(j.Dir, idFile)
	data, err := statedir.Read(path, maxSize)
	if id := string(data); err == nil && len(validation.IsDNS1123Label(id)) == 0 {
		j.id = id
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s: %w", path, err)
	}
	j.id = strings.ToLower(rand.Text())
	if err := statedir.Write(path, []byte(j.id)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// ID is what claims' records name the journal by.
func (j *Journal) ID() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.id
}

func (j *Journal) path(device string) string { return filepath.Join(j.Dir, device+suffix) }

// Entries returns all entries, quarantined ones included.
func (j *Journal) Entries() []*Entry { return statedb.Collect(j.Table.All(j.DB.ReadTxn())) }

// Note makes the entry of the row's device say what the row says, and whether it is settled, and returns when that is
// durable.
func (j *Journal) Note(row *tables.DRAAllocation, settled bool) error {
	device, err := encode(row.PreparedDevice)
	if err != nil {
		return fmt.Errorf("encode device %s for the journal: %w", row.DeviceName, err)
	}
	e := &Entry{
		Version: version, Driver: j.DriverName, Node: j.NodeName, Pool: row.Pool, BootID: j.BootID,
		Name: row.DeviceName, Manager: row.Manager, Device: device,
		ClaimNamespace: row.ClaimNamespace, ClaimName: row.ClaimName, ClaimUID: row.ClaimUID,
		PodName: row.PodName, PodUID: row.PodUID, Request: row.Request, Config: row.Config, PodClaim: row.PodClaim, Settled: settled,
	}
	data, err := json.Marshal(e)
	if err == nil && len(data) > maxSize {
		err = fmt.Errorf("it has %d bytes, at most %d are allowed", len(data), maxSize)
	}
	if err == nil {
		_, err = decode(data)
	}
	if err != nil {
		return fmt.Errorf("journal entry of device %s: %w", row.DeviceName, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	crashpoint.Here(crashpoint.JournalBefore)
	if err := statedir.Write(j.path(e.Name), data); err != nil {
		return fmt.Errorf("write journal entry %s, without which the device could not be given back after a restart of the agent; "+
			"make sure that there is space and that %s can be written: %w", j.path(e.Name), j.Dir, err)
	}
	crashpoint.Here(crashpoint.JournalAfter)
	return j.insert(e)
}

func encode(device types.Device) ([]byte, error) {
	if n, ok := device.(types.Noted); ok {
		return n.MarshalNote()
	}
	return device.MarshalJSON()
}

// Quarantine notes why what the journal has of a device cannot be undone. The file stays as it is.
func (j *Journal) Quarantine(device, reason string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := &Entry{Name: device}
	if present, _, found := j.Table.Get(j.DB.ReadTxn(), ByName(device)); found {
		e = present
	}
	if e.Quarantine == reason {
		return nil
	}
	e = new(*e)
	e.Quarantine = reason
	return j.insert(e)
}

// Reread reads the entry of a quarantined device again, whose file a person may have mended. If there is no file any more, the
// quarantine is over, and there is no entry. The error is why the entry cannot be read.
func (j *Journal) Reread(device string) (*Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, err := j.read(device)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, j.delete(&Entry{Name: device})
	}
	return e, err
}

// Readmit ends the quarantine of the entry's device.
func (j *Journal) Readmit(e *Entry) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.insert(e)
}

// Forget removes the entry of the row's device, unless it is another claim's by now.
func (j *Journal) Forget(row *tables.DRAAllocation) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, _, found := j.Table.Get(j.DB.ReadTxn(), ByName(row.DeviceName))
	if !found || e.ClaimUID != row.ClaimUID {
		return nil
	}
	if err := statedir.Remove(j.path(e.Name)); err != nil {
		return fmt.Errorf("remove journal entry %s of a device that was given back: %w", j.path(e.Name), err)
	}
	return j.delete(e)
}

// insert and delete change the table, with the lock held.
func (j *Journal) insert(e *Entry) error {
	txn := j.DB.WriteTxn(j.Table)
	defer txn.Abort()
	if _, _, err := j.Table.Insert(txn, e); err != nil {
		return fmt.Errorf("row of device %s in table %s: %w", e.Name, TableName, err)
	}
	txn.Commit()
	return nil
}

func (j *Journal) delete(e *Entry) error {
	txn := j.DB.WriteTxn(j.Table)
	defer txn.Abort()
	if _, _, err := j.Table.Delete(txn, e); err != nil {
		return fmt.Errorf("row of device %s in table %s: %w", e.Name, TableName, err)
	}
	txn.Commit()
	return nil
}
