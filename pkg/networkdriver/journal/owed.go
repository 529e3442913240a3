// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package journal

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/statedir"
)

const claimSuffix = ".claim"

// owedClaim is the file of a claim that kubelet may take for prepared although its devices were given back. Kubelet
// prepares all claims anew after a boot.
type owedClaim struct {
	Version   int           `json:"version"`
	BootID    string        `json:"bootID"`
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	UID       kubetypes.UID `json:"uid"`
}

// OweClaim notes that the claim loses devices while kubelet takes it for prepared, and returns when that is durable. When it
// fails it is known for as long as the agent lives.
func (j *Journal) OweClaim(claim tables.ClaimRef) error {
	o := owedClaim{version, j.BootID, claim.Namespace, claim.Name, claim.UID}
	data, err := json.Marshal(o)
	if err == nil {
		err = o.check()
	}
	if err != nil {
		return fmt.Errorf("note that claim %s is owed its devices: %w", claim, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.owed[claim.UID] = claim
	if err := statedir.Write(j.claimPath(claim.UID), data); err != nil {
		return fmt.Errorf("write %s: %w", j.claimPath(claim.UID), err)
	}
	return nil
}

// SettleClaim forgets that the claim is owed anything.
func (j *Journal) SettleClaim(claim kubetypes.UID) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, known := j.owed[claim]; !known {
		return nil
	}
	if err := statedir.Remove(j.claimPath(claim)); err != nil {
		return fmt.Errorf("remove %s: %w", j.claimPath(claim), err)
	}
	delete(j.owed, claim)
	return nil
}

// OwedClaims returns the claims that are owed their devices, in the order of their UIDs.
func (j *Journal) OwedClaims() []tables.ClaimRef {
	j.mu.Lock()
	defer j.mu.Unlock()
	var claims []tables.ClaimRef
	for _, uid := range slices.Sorted(maps.Keys(j.owed)) {
		claims = append(claims, j.owed[uid])
	}
	return claims
}

func (j *Journal) claimPath(claim kubetypes.UID) string {
	return filepath.Join(j.Dir, string(claim)+claimSuffix)
}

// readOwed reads the file of a claim. One of another boot is removed, and one that cannot be read is left out, with a
// warning. The journal's lock is needed.
func (j *Journal) readOwed(file string) error {
	uid, ok := strings.CutSuffix(file, claimSuffix)
	if !ok {
		return nil
	}
	path := filepath.Join(j.Dir, file)
	var o owedClaim
	data, err := statedir.Read(path, maxSize)
	if err == nil {
		err = json.Unmarshal(data, &o)
	}
	if err == nil {
		err = o.check()
	}
	switch {
	case err != nil || string(o.UID) != uid:
		j.Logger.Warn("It cannot be read which claim is owed its devices; if kubelet takes it for prepared its pod waits until kubelet is restarted",
			"file", path, "error", err)
	case o.BootID != j.BootID:
		if err := statedir.Remove(path); err != nil {
			return fmt.Errorf("remove %s of another boot: %w", path, err)
		}
	default:
		j.owed[o.UID] = tables.ClaimRef{Namespace: o.Namespace, Name: o.Name, UID: o.UID}
	}
	return nil
}

// check checks the form. The error names the field.
func (o owedClaim) check() error {
	switch {
	case o.Version != version:
		return fmt.Errorf("version: %d is not %d", o.Version, version)
	case o.BootID == "" || o.Namespace == "" || o.Name == "":
		return fmt.Errorf("bootID, namespace and name are needed")
	case len(validation.IsDNS1123Subdomain(string(o.UID))) > 0:
		return fmt.Errorf("uid: %.64q is none", o.UID)
	}
	return nil
}
