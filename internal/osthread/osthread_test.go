// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package osthread

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestRun(t *testing.T) {
	failure := errors.New("failed")
	for range 1000 {
		var thread int
		require.ErrorIs(t, Run(func() error { thread = unix.Gettid(); return failure }), failure)
		require.NotEqual(t, unix.Getpid(), thread, "fn was given the main thread")
		require.Eventually(t, func() bool {
			_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", thread))
			return errors.Is(err, os.ErrNotExist)
		}, 30*time.Second, 100*time.Microsecond, "the thread has not ended")
	}
}
