// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package stage

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStage(t *testing.T) {
	cause := errors.New("no")
	require.NoError(t, In("setup", nil))
	require.Equal(t, None, Of(nil))
	require.Equal(t, Other, Of(cause))
	err := In("prepare", fmt.Errorf("set up: %w", In("setup", cause)))
	require.EqualError(t, err, "set up: no")
	require.ErrorIs(t, err, cause)
	require.Equal(t, "setup", Of(err))
	require.Equal(t, "setup", Of(errors.Join(errors.New("x"), err)))
}
