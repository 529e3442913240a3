// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStatus(t *testing.T) {
	var c Checks
	require.Equal(t, Status{Live: true, Ready: true, Failures: []Failure{}}, c.Status())

	var nri, hook error
	c.AddReadiness("nri", func() error { return nri })
	c.AddLiveness("hook", func() error { return hook })
	require.True(t, c.Status().Ready)

	nri = errors.New("not connected")
	require.Equal(t, Status{Live: true, Failures: []Failure{{"nri", "not connected"}}}, c.Status())
	hook = errors.New("stuck")
	require.Equal(t, Status{Failures: []Failure{{"hook", "stuck"}, {"nri", "not connected"}}}, c.Status())
	nri, hook = nil, nil
	require.True(t, c.Status().Ready)
}
