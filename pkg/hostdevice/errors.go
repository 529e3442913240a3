// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
)

// codedError is an error with the code that a CNI error object is to have.
type codedError struct {
	code uint
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

// errorf is [fmt.Errorf] for an error with a code of the CNI specification.
func errorf(code uint, format string, args ...any) error {
	return &codedError{code: code, err: fmt.Errorf(format, args...)}
}

// asCNI makes the CNI error object of an error: its whole text, and the code of the innermost error that has one.
func asCNI(err error) error {
	if err == nil {
		return nil
	}
	code := types.ErrInternal
	var coded *codedError
	var delegated *types.Error
	switch {
	case errors.As(err, &coded):
		code = coded.code
	case errors.As(err, &delegated) && delegated.Code != types.ErrUnknown:
		code = delegated.Code
	}
	return types.NewError(code, err.Error(), "")
}
