// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// Describe must come before containers are let through.
func (w *fakeWorld) Describe(rows []*tables.DRAAllocation) error {
	claim := rows[0].ClaimUID
	w.write().Abort()
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.fail["describe "+string(claim)]; err != nil {
		return err
	}
	var sandboxes []string
	for _, row := range rows {
		if a := row.Attachment; a != nil {
			sandboxes = append(sandboxes, row.DeviceName+" in "+a.SandboxID)
		}
	}
	w.described[claim] = strings.Join(sandboxes, ", ")
	return nil
}

func (w *fakeWorld) Undescribe(claim tables.ClaimRef) { delete(w.described, claim.UID) }

func (w *fakeWorld) UndescribeOthers(claims []tables.ClaimRef) {
	w.write().Abort()
	maps.DeleteFunc(w.described, func(uid kubetypes.UID, _ string) bool {
		return !slices.Contains(w.claims(), uid) && !slices.ContainsFunc(claims, func(c tables.ClaimRef) bool { return c.UID == uid })
	})
}

// TestDescribedAfterARestart removes what was left of claims that have nothing any more, and leaves what kubelet has containers look for.
func TestDescribedAfterARestart(t *testing.T) {
	f := newFixture(t)
	row, _ := f.newRow("p", "d1", 1)
	f.world.described = map[kubetypes.UID]string{"claim-of-p": "d1 in s1", "owed": "", "left": "d2 in s2"}
	f.world.owed = []kubetypes.UID{"owed"}
	require.NoError(t, f.Restore([]*tables.DRAAllocation{row}))
	require.Equal(t, map[kubetypes.UID]string{"claim-of-p": "d1 in s1", "owed": ""}, f.world.described)
}

// TestDescribedFirst has containers read where all of a claim's devices are before any of them can start, also when only one of the
// devices has just been moved, and after the agent was ended in between.
func TestDescribedFirst(t *testing.T) {
	f := newFixture(t)
	f.prepare("p", "d1", 1)
	second := f.prepare("p", "d2", 2)
	require.NoError(t, f.Attach(t.Context(), newSandbox("p", "s1")))
	require.Equal(t, "d1 in s1, d2 in s1", f.world.described["claim-of-p"])

	// The second device is out, and comes back.
	f.world.put(second.ID, "")
	f.insert(f.row("d2").With(func(r *tables.DRAAllocation) { r.Attachment = nil }))
	require.NoError(t, f.Attach(t.Context(), newSandbox("p", "s1")))
	require.Equal(t, "d1 in s1, d2 in s1", f.world.described["claim-of-p"])

	// The next life of the agent finds them in the pod.
	f.world.described = map[kubetypes.UID]string{}
	for _, name := range []string{"d1", "d2"} {
		f.insert(f.row(name).With(func(r *tables.DRAAllocation) { r.Attachment = nil }))
	}
	f.Synchronize(t.Context(), []Sandbox{newSandbox("p", "s1")})
	require.Equal(t, "d1 in s1, d2 in s1", f.world.described["claim-of-p"])

	// Kubelet's answer was written without.
	f.world.described = map[kubetypes.UID]string{}
	require.NoError(t, f.Redescribe(t.Context(), "claim-of-p"))
	require.Equal(t, "d1 in s1, d2 in s1", f.world.described["claim-of-p"])
}

// TestNotDescribed holds containers back that would read what is not so any more, and tries again.
func TestNotDescribed(t *testing.T) {
	f := newFixture(t)
	dev := f.prepare("p", "d1", 1)
	f.world.fail["describe claim-of-p"] = errors.New("no space left on device")
	require.ErrorContains(t, f.Attach(t.Context(), newSandbox("p", "s1")), "no space left")
	f.at(dev, "", "")
	require.Empty(t, f.gate("p"))

	delete(f.world.fail, "describe claim-of-p")
	require.NoError(t, f.Attach(t.Context(), newSandbox("p", "s1")))
	require.Equal(t, "s1 net", f.gate("p"))

	f.world.fail["describe claim-of-p"] = errors.New("no space left on device")
	f.Synchronize(t.Context(), []Sandbox{newSandbox("p", "s1")})
	require.Empty(t, f.gate("p"), "a container would read of an earlier sandbox")
	require.Contains(t, f.row("d1").Error, "no space left")
	sandboxes := func(kubetypes.UID) []Sandbox { return []Sandbox{newSandbox("p", "s1")} }
	f.Ensure(context.Background(), sandboxes)
	require.Empty(t, f.gate("p"))
	delete(f.world.fail, "describe claim-of-p")
	f.Ensure(context.Background(), sandboxes)
	require.Equal(t, "s1 net", f.gate("p"))
	require.Empty(t, f.row("d1").Error)
}
