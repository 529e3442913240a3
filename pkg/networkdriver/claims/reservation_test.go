// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
)

// forGroup reserves the claim for a PodGroup as well, as the scheduler does where the group names the claim.
func forGroup() claimOption {
	return alsoFor(resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "uid-g"})
}

// A pod of the group whose sandbox comes does not get the devices, however often it is asked, and the claim's event says why.
func TestReservedForGroup(t *testing.T) {
	h := newHandedOver(t, "a")
	claim := newClaim("c", with("net", "a"), func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }, forGroup())
	h.set(claim)
	h.host.run("member", "s1")
	for range 2 {
		_, err := h.Prepare(t.Context(), claim)
		require.ErrorContains(t, err, `the claim is reserved for PodGroup "g"`)
		require.True(t, IsPermanent(err))
	}
	h.wait(30)
	require.Empty(t, h.host.takeCalls(), "nothing is touched")
	require.Empty(t, h.rows())
	events := h.host.takeEvents()
	require.Len(t, events, 2)
	require.Contains(t, events[0], `c, g: ReservedForGroup: the claim is reserved for PodGroup "g"`)
}

// A pod that has the devices keeps them when the claim is reserved for a group besides, and the group does not get them when it ends.
func TestReservedForGroupWhileInUse(t *testing.T) {
	h := newHandedOver(t, "a")
	own := []claimOption{with("net", "a"), forPod("first")}
	first := h.prepareAndRun(newClaim("c", own...), "first", "s1")

	shared := newClaim("c", append(own, forGroup())...)
	h.set(shared)
	h.host.run("member", "s2")
	_, err := h.Prepare(t.Context(), shared)
	require.NoError(t, err)
	require.Empty(t, h.host.takeCalls(), "it is prepared already")
	require.Equal(t, kubetypes.UID("uid-first"), h.row("a").PodUID)
	require.Len(t, h.host.takeEvents(), 1)

	h.host.stop("s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.host.takeCalls()
	left := newClaim("c", with("net", "a"), func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }, forGroup())
	h.set(left)
	h.wait(30)
	for _, call := range h.host.takeCalls() {
		require.NotContains(t, call, "attach")
		require.NotContains(t, call, "setup")
	}
	require.False(t, isHeld(left, left.UID, Owner{Driver: testDriver, Node: testNode}, "pool", "a"), "it is given back")
}
