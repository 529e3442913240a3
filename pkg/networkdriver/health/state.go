// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package health

import (
	"slices"
	"time"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// device is what is known of one device: its faults, by their causes.
//
//	         seen                 lasted for rule.after
//	(none) -------> suspected ---------------------------> standing <------+
//	   ^                |                                     |            | seen
//	   +----------------+                                     v            |
//	   |    not seen                                         gone ---------+
//	   +------------------------------------------------------+
//	                      not seen for the time of peace
type device map[types.Cause]*episode

// episode is a fault from when it is first seen until it is over.
type episode struct {
	fault types.Fault
	since time.Time
	// standing is true once the fault counts.
	standing bool
	// gone is since when the standing fault is not seen, zero while it is.
	gone time.Time
}

// step takes what is seen of the device now. changed says whether something else stands than before. until is when something may
// change without anything else being seen, zero for never.
func (d device) step(now time.Time, seen []types.Fault) (changed bool, until time.Time) {
	sooner := func(t time.Time) {
		if until.IsZero() || t.Before(until) {
			until = t
		}
	}
	for _, fault := range seen {
		e := d[fault.Cause]
		if e == nil {
			e = &episode{fault: fault, since: now}
			d[fault.Cause] = e
		}
		changed = changed || e.standing && e.fault != fault
		e.fault, e.gone = fault, time.Time{}
		if due := e.since.Add(rules[fault.Cause].after); !e.standing {
			if e.standing = !now.Before(due); e.standing {
				changed = true
			} else {
				sooner(due)
			}
		}
	}
	for cause, e := range d {
		if slices.ContainsFunc(seen, func(f types.Fault) bool { return f.Cause == cause }) {
			continue
		}
		if e.standing && e.gone.IsZero() {
			e.gone = now
		}
		switch over := e.gone.Add(peace); {
		case !e.standing:
			delete(d, cause)
		case !now.Before(over):
			delete(d, cause)
			changed = true
		default:
			sooner(over)
		}
	}
	return changed, until
}

// row returns the device's row, nil for a healthy one.
func (d device) row(name string) *tables.DeviceHealth {
	row := &tables.DeviceHealth{Device: name}
	for _, cause := range types.Causes() {
		if e := d[cause]; e != nil && e.standing {
			row.Faults = append(row.Faults, tables.DeviceFault{Fault: e.fault, Since: e.since})
		}
	}
	if len(row.Faults) == 0 {
		return nil
	}
	return row
}
