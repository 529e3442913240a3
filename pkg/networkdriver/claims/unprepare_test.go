// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

func TestUnprepare(t *testing.T) {
	f := newFixture(t, "a", "b")
	_, err := f.Prepare(t.Context(), newClaim("c", with("ra", "a"), with("rb", "b"), fromClaim(`{"vlan":9}`)))
	require.NoError(t, err)
	_, err = f.Prepare(t.Context(), newClaim("unknown", with("x", "zz")))
	require.Error(t, err)
	f.host.takeCalls()
	require.NoError(t, f.Unprepare(t.Context(), "uid-c"))
	require.Equal(t, []string{"return a", "free a", "return b", "free b"}, f.host.takeCalls())
	require.Empty(t, f.rows())
	require.Empty(t, f.host.vlans)
	require.Equal(t, map[kubetypes.UID][]string{"uid-c": nil}, f.status.applied, "the status has no record any more")
	require.Empty(t, f.status.takeWithdrawn())

	f.status.applied = nil
	for _, uid := range []kubetypes.UID{"uid-c", "uid-unknown", "uid-never-seen", ""} {
		require.NoError(t, f.Unprepare(t.Context(), uid), "uid %q", uid)
	}
	require.Empty(t, f.host.takeCalls())
	require.Empty(t, f.status.applied)
}

// A status that cannot be written does not keep the devices, and is written later.
func TestUnprepareWithoutAPI(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", with("ra", "a")))
	require.NoError(t, err)
	f.status.fail = errors.New("no API server")
	require.NoError(t, f.Unprepare(t.Context(), "uid-c"))
	require.Empty(t, f.rows())
	require.Equal(t, []Ref{{Namespace: "default", Name: "c", UID: "uid-c"}}, f.status.takeWithdrawn())
}

// A failure keeps the row and what is needed to try again; the claim's other devices are freed.
func TestUnprepareFails(t *testing.T) {
	for _, tt := range []struct{ step, err string }{
		{"return a", `unprepare claim default/c (uid uid-c): bring device a back from pod default/pod-c: busy`},
		{"free a", `unprepare claim default/c (uid uid-c): free device a: busy`},
	} {
		t.Run(tt.step, func(t *testing.T) {
			f := newFixture(t, "a", "b")
			_, err := f.Prepare(t.Context(), newClaim("c", with("ra", "a"), with("rb", "b")))
			require.NoError(t, err)
			f.attach("a")
			busy := errors.New("busy")
			f.host.fail[tt.step] = busy
			for range 2 {
				require.EqualError(t, f.Unprepare(t.Context(), "uid-c"), tt.err)
				require.Len(t, f.rows(), 1)
				row := f.row("a")
				require.Equal(t, "Failed", row.State())
				require.Contains(t, tt.err, row.Error)
				require.True(t, row.Releasing)
				require.Equal(t, tt.step == "return a", row.Attachment != nil, "the row says where the link is")
				require.Equal(t, []string{"a"}, f.status.applied["uid-c"])
			}
			clear(f.host.fail)
			require.NoError(t, f.Unprepare(t.Context(), "uid-c"))
			require.Empty(t, f.rows())
			require.Empty(t, f.host.vlans)
		})
	}
}

// A row that has changed while its link came home counts as it is then.
func TestUnprepareFreesTheRowAsItIsAfterReturn(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", with("ra", "a")))
	require.NoError(t, err)
	f.attach("a")
	f.host.onReturn = func() {
		f.insert(f.row("a").With(func(r *tables.DRAAllocation) {
			r.PreparedDevice = &fakeDevice{host: f.host, Name: "a2", Found: true}
		}))
	}
	f.host.takeCalls()
	require.NoError(t, f.Unprepare(t.Context(), "uid-c"))
	require.Equal(t, []string{"return a", "free a2"}, f.host.takeCalls())
	require.Empty(t, f.rows())
}

// A row that is another claim's all of a sudden is not touched, and neither is its device (DET-03).
func TestUnprepareTooLate(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("old", with("ra", "a")))
	require.NoError(t, err)
	f.host.takeCalls()
	var present *tables.DRAAllocation
	f.host.onReturn = func() {
		present = f.row("a").With(func(r *tables.DRAAllocation) { r.ClaimUID, r.ClaimName = "uid-new", "new" })
		f.insert(present)
	}
	require.NoError(t, f.Unprepare(t.Context(), "uid-old"))
	require.Equal(t, []string{"return a"}, f.host.takeCalls())
	require.Equal(t, []*tables.DRAAllocation{present}, f.rows())
}

// Devices may have been left to the pods of a claim that has no rows: they have ended.
func TestUnprepareReturnsWhatWasLeft(t *testing.T) {
	f := newFixture(t)
	require.NoError(t, f.Unprepare(t.Context(), "uid-old"))
	require.Equal(t, []kubetypes.UID{"uid-old"}, f.host.leftOf)
}

// A device with rows of two claims is freed by the last of them only.
func TestUnprepareSharedDevice(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("one", with("ra", "a")))
	require.NoError(t, err)
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) {
		r.Pool, r.ClaimUID, r.ClaimName = "pool2", "uid-two", "two"
	}))
	f.host.takeCalls()
	require.NoError(t, f.Unprepare(t.Context(), "uid-one"))
	require.Empty(t, f.host.takeCalls())
	require.Len(t, f.rows(), 1)
	require.NoError(t, f.Unprepare(t.Context(), "uid-two"))
	require.Equal(t, []string{"return a", "free a"}, f.host.takeCalls())
	require.Empty(t, f.rows())
}

// A kubelet that has lost its checkpoint unprepares the claim of a pod that runs when another pod of the claim ends.
func TestUnprepareUnderARunningPod(t *testing.T) {
	h := newHandedOver(t, "a")
	h.prepareAndRun(newClaim("c", with("net", "a"), forPod("first")), "first", "s1")
	h.host.held = func(*tables.DRAAllocation) (bool, error) { return false, errors.New("away") }
	require.ErrorContains(t, h.Unprepare(t.Context(), "uid-c"), "read the claim, whose device a is in pod default/first, which runs: away")
	h.host.held = func(*tables.DRAAllocation) (bool, error) { return true, nil }
	require.NoError(t, h.Unprepare(t.Context(), "uid-c"))
	require.Equal(t, "Attached", h.row("a").State())
	require.Empty(t, h.host.takeCalls())

	// The claim is nobody's any more, as after a deletion by force: kubelet may still be starting the pod's containers.
	h.host.held = func(*tables.DRAAllocation) (bool, error) { return false, nil }
	require.ErrorContains(t, h.Unprepare(t.Context(), "uid-c"),
		"its devices are in the sandbox of pod default/first, which still runs; they are freed when it has ended")
	require.Equal(t, "Attached", h.row("a").State())
	require.Empty(t, h.host.takeCalls())
	h.host.stop("s1")
	require.NoError(t, h.Unprepare(t.Context(), "uid-c"))
	require.Empty(t, h.rows())

	// The sandbox has ended, and the API is not asked.
	h.prepareAndRun(newClaim("c", with("net", "a"), forPod("first")), "first", "s2")
	h.host.stop("s2")
	h.host.held = nil
	require.NoError(t, h.Unprepare(t.Context(), "uid-c"))
	require.Empty(t, h.rows())
}
