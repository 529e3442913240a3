// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// unanswered is the error of a question that the API server has not answered.
type unanswered struct{ error }

func (e unanswered) Unwrap() error { return e.error }

// Unanswered marks the error of a read, for those who decide by what was read: nothing follows from one that the API server did not
// answer. That there is no such object is an answer, and no error is none.
func Unanswered(err error) error {
	if err == nil || apierrors.IsNotFound(err) {
		return err
	}
	return unanswered{err}
}

// IsUnanswered says whether the error is, or wraps, one that was marked.
func IsUnanswered(err error) bool {
	var e unanswered
	return errors.As(err, &e)
}
