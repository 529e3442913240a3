// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nicowner says which of the project's programs on a node has a NIC, so that the network driver and the CNI plugin
// do not both give it away. A file says it, and not a lock of the kernel's, because a NIC is owned for longer than the
// process lives that took it. The files are below /run: after a reboot no NIC is owned.
package nicowner

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/networkdriver/pkg/statedir"
)

// Default is the directory of the node's owners.
const Default Dir = "/run/cilium/networkdriver/nics"

const (
	suffix = ".json"
	// maxSize is far beyond what an owner needs.
	maxSize = 64 << 10
)

// Dir is a directory with a file for each NIC that has an owner. NICs go by a key that all programs have for them.
//
// A program makes its calls for one NIC one after the other; what programs do at the same time does not matter.
type Dir string

// Owner is who has a NIC.
type Owner struct {
	// Program is what has to release the NIC.
	Program string `json:"program"`
	// For is for people: what the program has it for.
	For string `json:"for"`
}

func (o Owner) String() string { return o.Program + " has it for " + o.For }

// TakenError says that another program has the NIC.
type TakenError struct {
	Key   string
	Owner Owner
}

func (e *TakenError) Error() string { return fmt.Sprintf("NIC %s is taken: %s", e.Key, e.Owner) }

// Claim makes the program the NIC's owner, or says again what it has the NIC for; first is false if it was the owner
// already. If another program is, the error is a [TakenError].
func (d Dir) Claim(key string, by Owner) (first bool, err error) {
	data, err := json.Marshal(by)
	if err == nil {
		first, err = d.claim(key, by, data)
	}
	if err != nil {
		return false, fmt.Errorf("take NIC %s for %s: %w", key, by.Program, err)
	}
	return first, nil
}

func (d Dir) claim(key string, by Owner, data []byte) (first bool, err error) {
	if err := statedir.Make(string(d)); err != nil {
		return false, err
	}
	// A file gets its name when it is complete.
	tmp, err := os.CreateTemp(string(d), ".*.tmp")
	if err != nil {
		return false, err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	if err := errors.Join(err, tmp.Close()); err != nil {
		return false, err
	}
	for {
		err := os.Link(tmp.Name(), d.path(key))
		if !errors.Is(err, fs.ErrExist) {
			return err == nil, err
		}
		owner, err := d.Owner(key)
		switch {
		case err != nil:
			return false, err
		case owner == nil: // released since
		case owner.Program != by.Program:
			return false, &TakenError{Key: key, Owner: *owner}
		default:
			return false, os.Rename(tmp.Name(), d.path(key))
		}
	}
}

// Release ends the program's ownership of a NIC. A NIC that it does not have stays as it is.
func (d Dir) Release(key, program string) error {
	owner, err := d.Owner(key)
	if err == nil && owner != nil && owner.Program == program {
		err = os.Remove(d.path(key))
	}
	if err != nil {
		return fmt.Errorf("release NIC %s: %w", key, err)
	}
	return nil
}

// Owner returns who has a NIC, nil if nobody has.
func (d Dir) Owner(key string) (*Owner, error) {
	data, err := statedir.Read(d.path(key), maxSize)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	owner := &Owner{}
	if err == nil {
		err = json.Unmarshal(data, owner)
	}
	if err == nil && owner.Program == "" {
		err = errors.New("the program is missing")
	}
	if err != nil {
		return nil, fmt.Errorf("%s, which is to say who has the NIC: %w; remove the file if no pod has it", d.path(key), err)
	}
	return owner, nil
}

// Owned returns the keys of the NICs that a program has. Files that cannot be read are left out: nothing tells whose they
// are.
func (d Dir) Owned(program string) (keys []string, err error) {
	entries, err := os.ReadDir(string(d))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the owners of NICs: %w", err)
	}
	for _, e := range entries {
		key, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok {
			continue
		}
		if owner, err := d.Owner(key); err == nil && owner != nil && owner.Program == program {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// path is the file of a NIC. Keys are from names of the kernel's, which may have a slash at most.
func (d Dir) path(key string) string {
	return filepath.Join(string(d), strings.ReplaceAll(key, "/", "_")+suffix)
}
