// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lastlog

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRing: of lines of any length the last ones are there, each as a whole, within the size.
func TestRing(t *testing.T) {
	for _, size := range []int{40, 41, 64, 1000} {
		r := &Ring{size: size}
		var written []string
		for i := range 200 {
			line := fmt.Sprintf("line %d%s\n", i, strings.Repeat("x", i%7))
			n, err := r.Write([]byte(line))
			require.NoError(t, err)
			require.Equal(t, len(line), n)
			written = append(written, line)

			all, got := strings.Join(written, ""), string(r.Lines())
			require.LessOrEqual(t, len(got), size)
			require.True(t, strings.HasSuffix(all, got))
			require.True(t, got == all || strings.HasSuffix(all[:len(all)-len(got)], "\n"), "%q is cut", got)
			require.Contains(t, got, line, "the last one")
			if len(all) < size {
				require.Equal(t, all, got)
			}
		}
	}
}

// TestLongLine: a line that is too long does not push all others out.
func TestLongLine(t *testing.T) {
	r := New()
	_, _ = r.Write([]byte("before\n"))
	n, err := r.Write([]byte(strings.Repeat("x", 2*Size) + "\n"))
	require.NoError(t, err)
	require.Equal(t, 2*Size+1, n)
	got := string(r.Lines())
	require.True(t, strings.HasPrefix(got, "before\n"))
	require.True(t, strings.HasSuffix(got, "x [cut]\n"))
	require.Less(t, len(got), 2*maxLine)
}

// TestConcurrent is for the race detector.
func TestConcurrent(t *testing.T) {
	r := &Ring{size: 1000}
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for range 1000 {
				_, _ = r.Write([]byte("a line\n"))
				_ = r.Lines()
			}
		})
	}
	writers.Wait()
	require.Equal(t, strings.Repeat("a line\n", 142), string(r.Lines()))
}
