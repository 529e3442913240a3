// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package crashpoint names the places in the driver where a crash is worth trying. In a program that is built with the tag
// crashpoints a test can have the process end, stop or wait there; in any other one [Here] is nothing at all, and none
// of this is in it.
//
// A point is armed by a file of its name in [Dir] that says what is to happen: an action, and after a space how long after
// the point, as a duration, if not at once. It happens once: the file is renamed first, by [Reached].
package crashpoint

// Point is a place in the driver.
type Point string

// Dir is the folder on the node whose files arm points. It lies in the journal's, which an agent in a pod sees as well.
const Dir = "/run/cilium/networkdriver/crashpoints"

// Reached is added to the name of the file that armed a point when the driver has come there.
const Reached = ".reached"

// Actions are what can happen at a point.
const (
	// Kill ends the process without a word.
	Kill = "KILL"
	// Stop stops the whole process until somebody lets it go on.
	Stop = "STOP"
	// Block holds the one that came to the point until the renamed file is removed. The rest of the process goes on.
	Block = "BLOCK"
)

// The points in the order in which the life of an allocation comes by.
const (
	JournalBefore   Point = "crashpoint-journal-before"
	JournalAfter    Point = "crashpoint-journal-after"
	AddressBefore   Point = "crashpoint-address-before"
	AddressAfter    Point = "crashpoint-address-after"
	SetupBefore     Point = "crashpoint-setup-before"
	DriverChosen    Point = "crashpoint-driver-chosen"
	DriverUnbound   Point = "crashpoint-driver-unbound"
	DriverBound     Point = "crashpoint-driver-bound"
	SetupAfter      Point = "crashpoint-setup-after"
	StatusBefore    Point = "crashpoint-status-before"
	StatusAfter     Point = "crashpoint-status-after"
	RowBefore       Point = "crashpoint-row-before"
	RowAfter        Point = "crashpoint-row-after"
	Prepared        Point = "crashpoint-prepared"
	SandboxRun      Point = "crashpoint-sandbox-run"
	AttachBefore    Point = "crashpoint-attach-before"
	AttachMoved     Point = "crashpoint-attach-moved"
	MetadataBefore  Point = "crashpoint-metadata-before"
	MetadataAfter   Point = "crashpoint-metadata-after"
	CDIBefore       Point = "crashpoint-cdi-before"
	CDIAfter        Point = "crashpoint-cdi-after"
	DetachBefore    Point = "crashpoint-detach-before"
	DetachMoved     Point = "crashpoint-detach-moved"
	DetachRestored  Point = "crashpoint-detach-restored"
	SandboxStopped  Point = "crashpoint-sandbox-stopped"
	UnprepareBefore Point = "crashpoint-unprepare-before"
	FreeBefore      Point = "crashpoint-free-before"
	DriverCleared   Point = "crashpoint-driver-cleared"
	DriverReleased  Point = "crashpoint-driver-released"
	DriverBack      Point = "crashpoint-driver-back"
	FreeVLAN        Point = "crashpoint-free-vlan"
	FreeAfter       Point = "crashpoint-free-after"
	AddressReturned Point = "crashpoint-address-returned"
	Forgotten       Point = "crashpoint-forgotten"
	Unprepared      Point = "crashpoint-unprepared"
	PublishBefore   Point = "crashpoint-publish-before"
	PublishAfter    Point = "crashpoint-publish-after"
	RestoreBefore   Point = "crashpoint-restore-before"
	RestoreRows     Point = "crashpoint-restore-rows"
)

// Points returns all points, in their order.
func Points() []Point {
	return []Point{
		JournalBefore, JournalAfter, AddressBefore, AddressAfter, SetupBefore, DriverChosen, DriverUnbound, DriverBound, SetupAfter,
		StatusBefore, StatusAfter, RowBefore, RowAfter, Prepared,
		SandboxRun, AttachBefore, AttachMoved, MetadataBefore, MetadataAfter, CDIBefore, CDIAfter,
		DetachBefore, DetachMoved, DetachRestored, SandboxStopped,
		UnprepareBefore, FreeBefore, DriverCleared, DriverReleased, DriverBack, FreeVLAN, FreeAfter, AddressReturned, Forgotten, Unprepared,
		PublishBefore, PublishAfter, RestoreBefore, RestoreRows,
	}
}
