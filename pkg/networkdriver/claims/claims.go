// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package claims prepares, gives back and restores the devices that ResourceClaims were allotted.
//
// A claim's way: Prepare checks everything about it and has package attachments set its devices up. Unprepare has them
// given back and needs nothing but the claim's UID. The claim's status is the record that outlives the agent, kept by a
// Writer: Restore proves it and has the allocation table rebuilt from it. The package knows neither kubelet nor runtime
// nor kernel; they are behind small interfaces.
package claims

import (
	"errors"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Ref names one ResourceClaim object.
type Ref = tables.ClaimRef

// RefOf returns the reference to a claim.
func RefOf(claim *resourceapi.ResourceClaim) Ref {
	return Ref{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
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
