// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func fault(cause types.Cause) types.Fault {
	return types.Fault{Cause: cause, Of: types.OfPF, Message: "message of " + string(cause)}
}

// The table of states, walked: when a fault counts, when it is over, and when the device has to be looked at again.
func TestStates(t *testing.T) {
	const second = time.Second
	noCarrier, slow := []types.Fault{fault(types.CauseNoCarrier)}, []types.Fault{fault(types.CauseSlowLink)}
	type at struct {
		after   time.Duration // since the beginning
		seen    []types.Fault
		changed bool
		causes  []types.Cause
		until   time.Duration // 0 for never
	}
	for name, steps := range map[string][]at{
		"never anything": {
			{0, nil, false, nil, 0},
			{second, nil, false, nil, 0},
		},
		"a flap of a second": {
			{0, nil, false, nil, 0},
			{1 * second, noCarrier, false, nil, 1*second + flap},
			{2 * second, nil, false, nil, 0},
			{3 * second, noCarrier, false, nil, 3*second + flap},
			{4 * second, nil, false, nil, 0},
		},
		"lost for good": {
			{0, nil, false, nil, 0},
			{1 * second, noCarrier, false, nil, 1*second + flap},
			{1*second + flap - 1, noCarrier, false, nil, 1*second + flap},
			{1*second + flap, noCarrier, true, []types.Cause{types.CauseNoCarrier}, 0},
			{time.Hour, noCarrier, false, []types.Cause{types.CauseNoCarrier}, 0},
		},
		"back after ten seconds of peace": {
			{0, nil, false, nil, 0},
			{1 * second, noCarrier, false, nil, 1*second + flap},
			{5 * second, noCarrier, true, []types.Cause{types.CauseNoCarrier}, 0},
			{6 * second, nil, false, []types.Cause{types.CauseNoCarrier}, 6*second + peace},
			{6*second + peace - 1, nil, false, []types.Cause{types.CauseNoCarrier}, 6*second + peace},
			{6*second + peace, nil, true, nil, 0},
		},
		"no peace": {
			{0, noCarrier, false, nil, flap},
			{5 * second, noCarrier, true, []types.Cause{types.CauseNoCarrier}, 0},
			{6 * second, nil, false, []types.Cause{types.CauseNoCarrier}, 6*second + peace},
			{15 * second, noCarrier, false, []types.Cause{types.CauseNoCarrier}, 0},
			{16 * second, nil, false, []types.Cause{types.CauseNoCarrier}, 16*second + peace},
			{25 * second, nil, false, []types.Cause{types.CauseNoCarrier}, 16*second + peace},
			{26 * second, nil, true, nil, 0},
		},
		"one after the other": {
			{-5 * second, slow, false, nil, flap - 5*second},
			{0, slow, true, []types.Cause{types.CauseSlowLink}, 0},
			{1 * second, noCarrier, false, []types.Cause{types.CauseSlowLink}, 1*second + flap},
			{3 * second, noCarrier, true, []types.Cause{types.CauseNoCarrier, types.CauseSlowLink}, 1*second + peace},
			{1*second + peace, noCarrier, true, []types.Cause{types.CauseNoCarrier}, 0},
		},
		"failing takes longer to count": {
			{0, nil, false, nil, 0},
			{1 * second, []types.Fault{fault(types.CauseFailing)}, false, nil, 1*second + repeated},
			{20 * second, []types.Fault{fault(types.CauseFailing)}, false, nil, 1*second + repeated},
			{31 * second, []types.Fault{fault(types.CauseFailing)}, true, []types.Cause{types.CauseFailing}, 0},
		},
		"quarantined at once": {
			{0, nil, false, nil, 0},
			{1 * second, []types.Fault{fault(types.CauseQuarantined)}, true, []types.Cause{types.CauseQuarantined}, 0},
		},
		"another message": {
			{-5 * second, noCarrier, false, nil, flap - 5*second},
			{0, noCarrier, true, []types.Cause{types.CauseNoCarrier}, 0},
			{1 * second, []types.Fault{{Cause: types.CauseNoCarrier, Of: types.OfVF}}, true, []types.Cause{types.CauseNoCarrier}, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			start, d := time.Unix(1000, 0), device{}
			for i, step := range steps {
				changed, until := d.step(start.Add(step.after), step.seen)
				require.Equal(t, step.changed, changed, "changed in step %d", i)
				var causes []types.Cause
				if row := d.row("d"); row != nil {
					for _, f := range row.Faults {
						causes = append(causes, f.Cause)
					}
				}
				require.Equal(t, step.causes, causes, "step %d", i)
				if step.until == 0 {
					require.Zero(t, until, "step %d", i)
				} else {
					require.Equal(t, step.until, until.Sub(start), "step %d", i)
				}
			}
		})
	}
}

// 200 flaps of a minute: the link is away for half of the time, and never for long.
func TestFlaps(t *testing.T) {
	d, start, changes := device{}, time.Unix(1000, 0), 0
	for i := range 400 {
		var seen []types.Fault
		if i%2 == 0 {
			seen = []types.Fault{fault(types.CauseNoCarrier)}
		}
		if changed, _ := d.step(start.Add(time.Duration(i)*150*time.Millisecond), seen); changed {
			changes++
		}
	}
	require.Zero(t, changes)
	require.Nil(t, d.row("d"))
}

// Each cause has a rule, and what it comes to.
func TestTaints(t *testing.T) {
	require.Len(t, rules, len(types.Causes()))
	const noSchedule, noExecute = resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute
	for cause, want := range map[types.Cause]struct {
		key     string
		evict   resourceapi.DeviceTaintEffect
		useless bool
	}{
		types.CauseQuarantined:  {"", "", true},
		types.CauseLinkMissing:  {"networkdriver.cilium.io/link-missing", noExecute, true},
		types.CauseDriverGone:   {"networkdriver.cilium.io/driver-gone", noExecute, true},
		types.CausePFDown:       {"networkdriver.cilium.io/pf-down", noExecute, false},
		types.CauseNoCarrier:    {"networkdriver.cilium.io/no-carrier", noExecute, false},
		types.CauseDuplicateMAC: {"networkdriver.cilium.io/duplicate-mac", noSchedule, true},
		types.CauseFailing:      {"networkdriver.cilium.io/failing", noSchedule, true},
		types.CauseSlowLink:     {"networkdriver.cilium.io/slow-link", noSchedule, false},
	} {
		h := &tables.DeviceHealth{Device: "d", Faults: []tables.DeviceFault{{Fault: fault(cause)}}}
		require.Equal(t, want.useless, CannotServe(h), cause)
		if want.key == "" {
			require.Empty(t, Taints(h, v2alpha1.FaultEffectNoExecute), cause)
			continue
		}
		require.Equal(t, []resourceapi.DeviceTaint{{Key: want.key, Value: "pf", Effect: noSchedule}}, Taints(h, v2alpha1.FaultEffectNoSchedule), cause)
		require.Equal(t, []resourceapi.DeviceTaint{{Key: want.key, Value: "pf", Effect: want.evict}}, Taints(h, v2alpha1.FaultEffectNoExecute), cause)
	}
	require.False(t, CannotServe(nil))
	require.Empty(t, Taints(nil, v2alpha1.FaultEffectNoExecute))
}
