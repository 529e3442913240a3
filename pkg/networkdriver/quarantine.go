// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/statedb"

	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// quarantineInterval is how often it is looked who is quarantined, firstJudgement how soon a device is judged again, and
	// lastJudgement the longest time from one judgement to the next.
	quarantineInterval            = 5 * time.Second
	firstJudgement, lastJudgement = 10 * time.Second, 10 * time.Minute
)

// reasonDeviceQuarantined is the reason of events.
const reasonDeviceQuarantined = "DeviceQuarantined"

// quarantine says why devices must not be given to anybody, by the device, and returns a channel that is closed when that may
// be otherwise.
func (s *session) quarantine() (map[string]string, <-chan struct{}) {
	entries, changed := s.journal.Table.AllWatch(s.db.ReadTxn())
	return quarantined(entries), changed
}

func quarantined(entries iter.Seq2[*journal.Entry, statedb.Revision]) map[string]string {
	reasons := map[string]string{}
	for e := range entries {
		if e.Quarantine != "" {
			reasons[e.Name] = e.Quarantine
		}
	}
	return reasons
}

// judge tells of devices that are quarantined, and has each of them judged again from time to time: a person may have mended what is
// wrong, or the device may be back.
func (s *session) judge(ctx context.Context, _ cell.Health) error {
	type judgement struct {
		due   time.Time
		delay time.Duration
	}
	judgements := map[string]judgement{}
	var told logonce.Problems[string]
	for ok := wait(ctx, s.compared); ok; ok = pause.For(ctx, quarantineInterval) {
		reasons, _ := s.quarantine()
		maps.DeleteFunc(judgements, func(device string, _ judgement) bool { return reasons[device] == "" })
		for _, device := range told.Replace(slices.Sorted(maps.Keys(reasons))...) {
			s.warnNode(reasonDeviceQuarantined, fmt.Sprintf("device %s is not offered: %s", device, reasons[device]))
		}
		for device := range reasons {
			now, j := time.Now(), judgements[device]
			switch {
			case j.delay == 0:
				judgements[device] = judgement{now.Add(firstJudgement), firstJudgement}
			case !now.Before(j.due):
				if err := s.restorer.Judge(ctx, device); err != nil {
					s.log.Warn("Quarantined device could not be judged again", "device", device, "error", err)
				}
				delay := min(2*j.delay, lastJudgement)
				judgements[device] = judgement{now.Add(delay), delay}
			}
		}
	}
	return nil
}

// withoutQuarantined skips the devices for which there is a reason.
func withoutQuarantined(s types.Snapshot, reasons map[string]string) types.Snapshot {
	s.Skipped = slices.Clone(s.Skipped)
	for i, skipped := range s.Skipped {
		if reasons[skipped.Device] != "" {
			// The inventory keeps what has a fault, which a claim may tolerate. This nobody may have.
			s.Skipped[i].Cause, s.Skipped[i].Of = "", ""
		}
	}
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(dev types.Device) bool {
		why := reasons[dev.IfName()]
		if why != "" {
			s.Skipped = append(s.Skipped, types.Skipped{Device: dev.IfName(), Reason: "quarantined: " + why})
		}
		return why != ""
	})
	return s
}
