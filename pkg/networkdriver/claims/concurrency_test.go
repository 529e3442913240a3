// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"
)

// Two claims, by a mistake somewhere, on one device at the same moment.
func TestPrepareConcurrentlyOnOneDevice(t *testing.T) {
	f := newFixture(t, "a")
	f.host.block["setup a"] = make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := f.Prepare(t.Context(), newClaim("one", with("net", "a")))
		done <- err
	}()
	require.Eventually(t, f.host.seen("setup a"), waitFor, tick)
	_, err := f.Prepare(t.Context(), newClaim("two", with("net", "a")))
	require.EqualError(t, err, `prepare claim default/two: request "net": device a is being prepared for claim default/one (uid uid-one)`)
	close(f.host.block["setup a"])
	require.NoError(t, <-done)
	require.Equal(t, []string{"setup a"}, f.host.takeCalls())
}

// The clash does not pass, and is not said as if it did: kubelet's next try comes a minute later.
func TestPrepareConcurrentlyOneNameInThePod(t *testing.T) {
	f := newFixture(t, "a", "b")
	f.host.block["setup a"] = make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := f.Prepare(t.Context(), newClaim("one", forPod("p"), with("net", "a"), fromClaim(`{"podIfName":"net1"}`)))
		done <- err
	}()
	require.Eventually(t, f.host.seen("setup a"), waitFor, tick)
	_, err := f.Prepare(t.Context(), newClaim("two", forPod("p"), with("req", "b"), fromClaim(`{"podIfName":"net1"}`)))
	require.EqualError(t, err, `prepare claim default/two: request "req": podIfName: "net1" is also what request "net" of claim default/one has in the same pod `+
		`(permanent: trying again does not help)`)
	close(f.host.block["setup a"])
	require.NoError(t, <-done)
}

// A slow Setup delays its own claim only (SCL-05); a second call for that claim waits for the first.
func TestPrepareSlowClaimDelaysNoOther(t *testing.T) {
	f := newFixture(t, "a", "b")
	slow := newClaim("slow", with("net", "a"))
	f.host.block["setup a"] = make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := f.Prepare(t.Context(), slow)
		done <- err
	}()
	require.Eventually(t, f.host.seen("setup a"), waitFor, tick)
	_, err := f.Prepare(t.Context(), newClaim("quick", with("net", "b")))
	require.NoError(t, err)
	require.NoError(t, f.Unprepare(t.Context(), "uid-quick"))

	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = f.Prepare(impatient, slow)
	require.EqualError(t, err, "prepare claim default/slow: wait for an earlier call for the same claim: context canceled")
	require.ErrorIs(t, f.Unprepare(impatient, "uid-slow"), context.Canceled)

	go func() {
		_, err := f.Prepare(t.Context(), slow)
		done <- err
	}()
	close(f.host.block["setup a"])
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	require.Equal(t, []string{"setup a", "setup b", "return b", "free b"}, f.host.takeCalls())
	require.Empty(t, f.Preparer.reserved.held)
}

// Many claims fight for few devices; whoever gets one has it alone.
func TestPrepareUnderContention(t *testing.T) {
	f := newFixture(t, "a", "b", "c")
	const claims, rounds = 12, 20
	done := make(chan error)
	for i := range claims {
		go func() {
			name := fmt.Sprintf("c%d", i)
			device := string(rune('a' + i%3))
			for range rounds {
				if _, err := f.Prepare(t.Context(), newClaim(name, with("net", device), fromClaim(fmt.Sprintf(`{"vlan":%d}`, i+1)))); err != nil {
					continue
				}
				if row := f.row(device); row.ClaimName != name {
					done <- fmt.Errorf("device %s is claim %s's after claim %s got it", device, row.ClaimName, name)
					return
				}
				if id, _ := f.host.vlan(device); id != i+1 {
					done <- fmt.Errorf("device %s has vlan %d of another claim", device, id)
					return
				}
				if err := f.Unprepare(t.Context(), kubetypes.UID("uid-"+name)); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range claims {
		require.NoError(t, <-done)
	}
	require.Empty(t, f.rows())
}
