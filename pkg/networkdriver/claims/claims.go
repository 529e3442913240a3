// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package claims prepares, gives back and restores the devices that ResourceClaims were allotted.
//
// A claim's way: Prepare checks everything about it, sets its devices up, records them in the claim's status and then
// in the allocation table. Unprepare does the reverse and needs nothing but the claim's UID. The status is the record
// that outlives the agent: Restore rebuilds the table from it. The package knows neither kubelet nor runtime nor
// kernel; they are behind small interfaces.
package claims

import (
	"context"
	"errors"
	"log/slog"

	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Ref names one ResourceClaim object. The UID tells it from an earlier or later claim of the same name.
type Ref struct {
	Namespace string
	Name      string
	UID       kubetypes.UID
}

// RefOf returns the reference to a claim.
func RefOf(claim *resourceapi.ResourceClaim) Ref {
	return Ref{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
}

func refOfRow(row *tables.DRAAllocation) Ref {
	return Ref{Namespace: row.ClaimNamespace, Name: row.ClaimName, UID: row.ClaimUID}
}

// String is the claim's namespace and name.
func (r Ref) String() string { return r.Namespace + "/" + r.Name }

// LogValue implements [slog.LogValuer].
func (r Ref) LogValue() slog.Value { return slog.StringValue(r.String()) }

// StatusWriter makes prepared devices durable in the status of their claim.
type StatusWriter interface {
	// Apply makes the claim's status say what rows, all of the claim's, say, and returns when that is durable. That a
	// claim without rows is gone is no error.
	Apply(ctx context.Context, claim Ref, rows []*tables.DRAAllocation) error
	// Withdraw takes the entries of devices that no longer have a row out of the claim's status, some time later
	// and without a promise: the claim may be gone. A later Apply for the claim overrules it.
	Withdraw(claim Ref)
}

// Returner brings links home from pods.
type Returner interface {
	// Return moves the link of the row's device to the host's network namespace, wherever it is now. A link that is
	// home already, or that is gone, is no error.
	Return(ctx context.Context, row *tables.DRAAllocation) error
}

// permanentError is an error that trying again does not cure: somebody has to change something.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

// IsPermanent says whether the claim, its class or its consumer has to be changed before Prepare can succeed.
func IsPermanent(err error) bool {
	var p permanentError
	return errors.As(err, &p)
}

// resultsOf returns the claim's allocation results of the driver.
func resultsOf(claim *resourceapi.ResourceClaim, driver string) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	var ours []resourceapi.DeviceRequestAllocationResult
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driver {
			ours = append(ours, result)
		}
	}
	return ours
}
