// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"slices"

	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// quarantined says why a device must not be given to anybody, empty if it may be.
func (s *session) quarantined(device string) string {
	e, _, found := s.journal.Table.Get(s.db.ReadTxn(), journal.ByName(device))
	if !found {
		return ""
	}
	return e.Quarantine
}

// withoutQuarantined skips the devices for which there is a reason.
func withoutQuarantined(s types.Snapshot, reason func(device string) string) types.Snapshot {
	s.Skipped = slices.Clone(s.Skipped)
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(dev types.Device) bool {
		why := reason(dev.IfName())
		if why != "" {
			s.Skipped = append(s.Skipped, types.Skipped{Device: dev.IfName(), Reason: "quarantined: " + why})
		}
		return why != ""
	})
	return s
}
