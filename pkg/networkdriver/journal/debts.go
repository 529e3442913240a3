// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const debtSuffix = ".names"

// owed is the file of a device whose link came home without its names.
type owed struct {
	Version int         `json:"version"`
	BootID  string      `json:"bootID"`
	Debt    podnet.Debt `json:"debt"`
}

// SaveDebt keeps which names a device's link is owed, one file for each device, until the node is booted.
func (j *Journal) SaveDebt(d podnet.Debt) error {
	data, err := json.Marshal(owed{version, j.BootID, d})
	if err == nil {
		_, err = decodeDebt(data)
	}
	if err != nil {
		return fmt.Errorf("names that device %s is owed: %w", d.Device, err)
	}
	path := filepath.Join(j.Dir, d.Device+debtSuffix)
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := statedir.Write(path, data); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Debts returns what [Journal.SaveDebt] kept in this boot. A file that cannot be read is left out, with a warning.
func (j *Journal) Debts() ([]podnet.Debt, error) {
	files, err := os.ReadDir(j.Dir)
	if err != nil {
		return nil, fmt.Errorf("read which names links are owed: %w", err)
	}
	var debts []podnet.Debt
	for _, file := range files {
		device, ok := strings.CutSuffix(file.Name(), debtSuffix)
		if !ok {
			continue
		}
		path := filepath.Join(j.Dir, file.Name())
		var o owed
		data, err := statedir.Read(path, maxSize)
		if err == nil {
			o, err = decodeDebt(data)
		}
		switch {
		case err != nil || o.Debt.Device != device:
			j.Logger.Warn("Names that a link is owed cannot be read, it keeps the one that it has", "device", device, "file", path, "error", err)
		case o.BootID != j.BootID:
			if err := statedir.Remove(path); err != nil {
				return nil, fmt.Errorf("remove %s of another boot: %w", path, err)
			}
		default:
			debts = append(debts, o.Debt)
		}
	}
	return debts, nil
}

// decodeDebt decodes the file and checks its form.
func decodeDebt(data []byte) (owed, error) {
	var o owed
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&o); err != nil {
		return owed{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return owed{}, errors.New("data after its end")
	}
	switch {
	case o.Version != version:
		return owed{}, fmt.Errorf("version: %d is not %d", o.Version, version)
	case len(validation.IsDNS1123Label(o.Debt.Device)) > 0:
		return owed{}, fmt.Errorf("device: %.64q is not the name of a device", o.Debt.Device)
	case o.Debt.Link.IsZero():
		return owed{}, errors.New("link: is missing")
	}
	state := nic.State{Name: o.Debt.Name, AltNames: o.Debt.AltNames}
	if err := nic.ValidateName(state.Name); err != nil {
		return owed{}, fmt.Errorf("name: %w", err)
	}
	return o, state.Validate()
}
