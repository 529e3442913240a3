// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package stage marks errors with the stage of the work that they ended, for metrics.
package stage

import "errors"

// None and Other are what [Of] returns of no error and of one without a mark.
const (
	None  = "none"
	Other = "other"
)

type marked struct {
	error
	stage string
}

func (m marked) Unwrap() error { return m.error }

// In marks an error, whose text stays as it is. One that is marked already, which is nearer to the cause, and nil stay as they are.
func In(stage string, err error) error {
	var m marked
	if err == nil || errors.As(err, &m) {
		return err
	}
	return marked{err, stage}
}

// Of returns the stage that an error is marked with.
func Of(err error) string {
	var m marked
	switch {
	case err == nil:
		return None
	case errors.As(err, &m):
		return m.stage
	}
	return Other
}
