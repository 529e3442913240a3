// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// TableName is the name of the table of entries.
const TableName = "networkdriver-journal"

const version = 1

// Entry is what the journal has of one device, from before its first change until it is as it was found. Entries are
// immutable.
type Entry struct {
	Version int `json:"version"`
	// Driver is the driver's name, and Node and Pool are the names by which the device was allotted.
	Driver string `json:"driver"`
	Node   string `json:"node"`
	Pool   string `json:"pool"`
	// BootID is the boot in which the entry was made. Nothing of what it tells outlives that.
	BootID string `json:"bootID"`
	// Name is the device's name in ResourceSlices, and Manager the device manager that understands Device, which is the
	// device with what it was found as.
	Name    string                  `json:"name"`
	Manager types.DeviceManagerType `json:"manager"`
	Device  json.RawMessage         `json:"device,omitempty"`
	// ClaimNamespace, ClaimName, ClaimUID, PodName and PodUID say whose it is, and Request and Config what was asked for.
	ClaimNamespace string             `json:"claimNamespace"`
	ClaimName      string             `json:"claimName"`
	ClaimUID       kubetypes.UID      `json:"claimUID"`
	PodName        string             `json:"podName"`
	PodUID         kubetypes.UID      `json:"podUID"`
	Request        string             `json:"request"`
	Config         types.DeviceConfig `json:"config"`
	// PodClaim is that of the allocation's row.
	PodClaim string `json:"podClaim,omitempty"`
	// Settled is true from when the device is set up until it is being given back. What is not settled was never
	// promised to kubelet, or is not any more, and is undone.
	Settled bool `json:"settled"`

	// Quarantine is why the device cannot be used and not be given back either; empty for one that can. It is never in the file.
	Quarantine string `json:"quarantine,omitempty"`
}

// decode decodes an entry and checks its form. The error names the field.
func decode(data []byte) (*Entry, error) {
	e := &Entry{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(e); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("data after its end")
	}
	switch {
	case e.Version != version:
		return nil, fmt.Errorf("version: %d is not %d", e.Version, version)
	case len(validation.IsDNS1123Label(e.Name)) > 0:
		return nil, fmt.Errorf("name: %.64q is not the name of a device", e.Name)
	case e.Driver == "" || e.Pool == "" || e.BootID == "" || e.Manager == "" || e.ClaimNamespace == "" || e.ClaimName == "" ||
		e.ClaimUID == "" || e.PodUID == "":
		return nil, errors.New("driver, pool, bootID, manager, claimNamespace, claimName, claimUID and podUID are needed")
	case len(e.Device) == 0 || string(e.Device) == "null":
		return nil, errors.New("device: is missing")
	}
	if e.Quarantine != "" {
		return nil, errors.New("quarantine: is not for files")
	}
	if err := e.Config.Check(); err != nil {
		return nil, fmt.Errorf("config.%w", err)
	}
	return e, nil
}

// Claim names the claim that the device is for.
func (e *Entry) Claim() tables.ClaimRef {
	return tables.ClaimRef{Namespace: e.ClaimNamespace, Name: e.ClaimName, UID: e.ClaimUID}
}

// Row is the allocation that the entry tells of, with the device that was decoded from it.
func (e *Entry) Row(device types.Device) *tables.DRAAllocation {
	return &tables.DRAAllocation{
		DeviceName:     e.Name,
		Manager:        e.Manager,
		PreparedDevice: device,
		Pool:           e.Pool,
		PodUID:         e.PodUID,
		ClaimUID:       e.ClaimUID,
		Config:         e.Config,
		ClaimNamespace: e.ClaimNamespace,
		ClaimName:      e.ClaimName,
		PodName:        e.PodName,
		Request:        e.Request,
		PodClaim:       e.PodClaim,
	}
}

// TableHeader implements [statedb.TableWritable].
func (e *Entry) TableHeader() []string {
	return []string{"Name", "Manager", "Pool", "Claim", "Pod", "Settled", "Quarantine"}
}

// TableRow implements [statedb.TableWritable].
func (e *Entry) TableRow() []string {
	return []string{
		e.Name, e.Manager.String(), e.Pool, e.Claim().String(), e.ClaimNamespace + "/" + e.PodName, fmt.Sprint(e.Settled), e.Quarantine,
	}
}

var nameIndex = statedb.Index[*Entry, string]{
	Name:       "name",
	FromObject: func(e *Entry) index.KeySet { return index.NewKeySet(index.String(e.Name)) },
	FromKey:    index.String,
	FromString: index.FromString,
	Unique:     true,
}

// ByName queries the entries by the device's name.
var ByName = nameIndex.Query

// NewTable registers the table of entries.
func NewTable(db *statedb.DB) (statedb.RWTable[*Entry], error) {
	return statedb.NewTable(db, TableName, nameIndex)
}
