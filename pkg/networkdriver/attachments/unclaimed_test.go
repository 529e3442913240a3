// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// IsHeld is what the test says of the claim; it runs what is to happen while the claim is read.
func (w *fakeWorld) IsHeld(_ context.Context, row *tables.DRAAllocation) (bool, error) {
	w.mu.Lock()
	w.reads++
	held, during, err := !w.unheld[row.ClaimUID], w.duringRead, w.fail["read "+row.ClaimName]
	w.mu.Unlock()
	if during != nil {
		during()
	}
	return held, err
}

func (life) IsHeld(context.Context, *tables.DRAAllocation) (bool, error) { return true, nil }

func (w *fakeWorld) pass(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now = w.now.Add(d)
}

// Kubelet has lost its checkpoint and asks for nothing.
func TestReleaseWithoutKubelet(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	pod := newSandbox("pod", "s1")
	require.NoError(t, f.Attach(t.Context(), pod))
	f.world.unheld = map[kubetypes.UID]bool{ref.UID: true}
	checks := map[kubetypes.UID]claimCheck{}
	look := func(reads int) {
		t.Helper()
		f.world.reads = 0
		f.releaseUnclaimed(t.Context(), checks)
		require.Equal(t, reads, f.world.reads)
	}
	look(0)
	f.world.pass(time.Hour)
	look(0) // the sandbox is there, whatever the API server says

	require.NoError(t, f.Detach(t.Context(), pod))
	look(0)
	f.world.pass(firstClaimCheck - time.Second)
	look(0)
	require.Len(t, f.rows(), 1)
	f.world.pass(time.Second)
	look(1)
	require.Empty(t, f.rows())
	require.Equal(t, []string{"attach a", "detach a", "detach a", "free a", "apply claim"}, f.world.takeCalls())
	require.Equal(t, []kubetypes.UID{ref.UID}, f.world.owed, "kubelet may not ask again")
	look(0)
	require.Empty(t, checks)
}

// A claim that is its pod's is left alone, and the API server asked less and less.
func TestHeldClaimIsLeftAlone(t *testing.T) {
	f := newFixture(t)
	f.prepare("pod", "a", 1)
	checks := map[kubetypes.UID]claimCheck{}
	for range 24 * 60 {
		f.releaseUnclaimed(t.Context(), checks)
		f.world.pass(time.Minute)
	}
	require.Len(t, f.rows(), 1)
	require.Less(t, f.world.reads, 150)
	require.Greater(t, f.world.reads, 100)

	f.world.fail["read claim"] = errors.New("connection refused")
	f.world.unheld = map[kubetypes.UID]bool{ref.UID: true}
	f.world.pass(time.Hour)
	f.releaseUnclaimed(t.Context(), checks)
	require.Len(t, f.rows(), 1, "an API server that is away says nothing")

	delete(f.world.fail, "read claim")
	f.world.duringRead = func() { require.NoError(t, f.Attach(t.Context(), newSandbox("pod", "s1"))) }
	f.world.pass(time.Hour)
	f.releaseUnclaimed(t.Context(), checks)
	require.Len(t, f.rows(), 1, "it has got a sandbox meanwhile")
}
