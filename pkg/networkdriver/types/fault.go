// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import "context"

// Cause is a kind of fault that a device can have. It is the reason of the claim's condition, of events and a metric's label.
type Cause string

// The causes, from the one that says most to the one that says least of whether the device works.
const (
	// CauseQuarantined is a device of which the journal has what can neither be used nor undone.
	CauseQuarantined Cause = "Quarantined"
	// CauseLinkMissing is a device whose link, or whose PF's, is not where it should be.
	CauseLinkMissing Cause = "LinkMissing"
	// CauseDriverGone is a device without the kernel driver that it had.
	CauseDriverGone Cause = "DriverGone"
	// CausePFDown is a VF whose PF an administrator has set down.
	CausePFDown Cause = "PFDown"
	// CauseNoCarrier is a device without a link partner: its PF lost its carrier, or the PF keeps the VF's link down.
	CauseNoCarrier Cause = "NoCarrier"
	// CauseDuplicateMAC is a VF that has the hardware address of another function of its PF.
	CauseDuplicateMAC Cause = "DuplicateMAC"
	// CauseFailing is a device that goes on failing to be attached, or to be given back.
	CauseFailing Cause = "Failing"
	// CauseSlowLink is a device whose PF's link is slower than it was since the agent was started.
	CauseSlowLink Cause = "SlowLink"
)

// Causes are all causes in the order of their weight.
func Causes() []Cause {
	return []Cause{CauseQuarantined, CauseLinkMissing, CauseDriverGone, CausePFDown, CauseNoCarrier, CauseDuplicateMAC, CauseFailing, CauseSlowLink}
}

// What a fault is a fault of: the value of its taint.
const (
	OfPF = "pf"
	OfVF = "vf"
	// OfAttach and OfFree are what of a device's use fails.
	OfAttach = "attach"
	OfFree   = "free"
)

// Fault is something about a device that keeps it from serving, or from serving as it should.
type Fault struct {
	Cause Cause
	// Of says what the fault is of, by one of the constants above.
	Of string
	// Message says what is wrong and what to do, for people. It stays the same while the fault lasts.
	Message string
}

// Examiner is a device manager that can say what is wrong with its devices' links.
type Examiner interface {
	// Examine returns the faults of each of the devices, by what the kernel says now. It asks about what devices share, such
	// as a PF, and not about each of them. Without fresh it may go by what it heard before where asking is costly. An error is why
	// nothing can be said.
	Examine(ctx context.Context, devices []Prepared, fresh bool) ([][]Fault, error)
	// WatchLinks calls notify once it receives link events and for each change that Examine may tell of, and returns when the
	// context ends or events were lost.
	WatchLinks(ctx context.Context, notify func()) error
}
