// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

// Reasons of events.
const (
	// ReasonClaimInUse is that of a pod whose claim's devices another pod has.
	ReasonClaimInUse = "ClaimInUse"
	// ReasonFailedAttach is that of a pod whose devices could not be attached.
	ReasonFailedAttach = "FailedAttach"
	// ReasonWaitsForAddress is that of a pod whose device waits for an address of its network.
	ReasonWaitsForAddress = "WaitsForAddress"
	// ReasonFailedPrepare is that of a pod which waits for a claim that another pod had, and that cannot be prepared for it. Where kubelet asks
	// for a claim, the event is kubelet's.
	ReasonFailedPrepare = "FailedPrepare"
	// ReasonExpelled is that of a pod that has lost a device, which could not be kept from sending into another network.
	ReasonExpelled = "DeviceExpelled"
	// ReasonAstray is that of a pod which should have lost a device for the same reason, and still has it.
	ReasonAstray = "DeviceAstray"
)

// Events tell the owner of a pod what keeps it from running.
type Events interface {
	// Warn adds an event to the sandbox's pod, some time later and without a promise.
	Warn(s Sandbox, reason, message string)
}
