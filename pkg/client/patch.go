// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"errors"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IsPatchTestFailed tells a JSON patch that does not fit the object, above all one whose test failed, from one whose
// result is invalid: only the latter is refused because of fields.
func IsPatchTestFailed(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) {
		return false
	}
	details := status.Status().Details
	return details == nil || !slices.ContainsFunc(details.Causes, func(cause metav1.StatusCause) bool { return cause.Field != "" })
}
