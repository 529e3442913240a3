// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package attachments

import (
	"context"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Sandbox is one sandbox of a pod, as the runtime tells of it.
type Sandbox struct {
	// ID is the runtime's name for it.
	ID     string
	PodUID kubetypes.UID
	// PodNamespace and PodName name the pod for people.
	PodNamespace, PodName string
	// NetNS is the path of its network namespace; empty if it has none of its own, since it was stopped or is on the
	// host network.
	NetNS string
	// Populated says that it has containers, which a sandbox left over does not. Only [Room.Synchronize] looks at it.
	Populated bool
}

// Pod is the pod's namespace and name.
func (s Sandbox) Pod() string { return s.PodNamespace + "/" + s.PodName }

// World is all that the room reaches outside: the kernel, by links and by devices, the claims' status, the gate before
// containers, events and the clock.
// [Outside] is the real one. No write transaction is open while the room calls it.
type World interface {
	// HostIndex returns the index of the device's link on the host, 0 if it is not there.
	HostIndex(ctx context.Context, dev types.Device) (int, error)
	// Attach moves the device's link from the host into the namespace, gives it the configuration's name (its host name when
	// that is empty) and MTU, and brings it up. Of hardware it moves the link that has the index link, and no other: the
	// error then wraps [podnet.ErrAnotherLink]. A link that is inside already is no error. When it fails the link is on the
	// host; an error that wraps [podnet.ErrLinkGone] says that it is neither there nor in the pod.
	Attach(ctx context.Context, netns string, dev types.Device, link int, config types.DeviceConfig) (*types.Attachment, error)
	// Detach brings the link home, from the namespace or from wherever the kernel left it. A link that is at home is no
	// error, neither is an empty path or a namespace that is gone.
	Detach(ctx context.Context, netns string, dev types.Device) error
	// Tidy removes from a sandbox that lives on what a link of the configuration leaves behind when it leaves.
	Tidy(netns string, config types.DeviceConfig) error
	// Announce tells the neighbours of an attached link which hardware address its network's addresses have now, without
	// being waited for.
	Announce(attachment *types.Attachment, config types.DeviceConfig)
	// Where looks for the link, inside the namespace first.
	Where(ctx context.Context, netns string, dev types.Device) (podnet.Sighting, error)
	// CheckNetNS says why the network namespace of a sandbox, which may be empty, is none to attach to.
	CheckNetNS(netns string) error

	// Validate, Setup and Free do what the device's methods of these names do.
	Validate(dev types.Device, config types.DeviceConfig) error
	Setup(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error)
	Free(ctx context.Context, dev types.Device, config types.DeviceConfig) error

	// Remember returns the device with what it is found as, and so is to be given back as, and changes nothing. A device
	// that remembers already, or has nothing to remember, comes back as it is.
	Remember(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error)

	StatusWriter
	Gate
	Events
	Checker
	Journal
	Addresses
	ClaimReader

	// Now is the time.
	Now() time.Time
	// WithTimeout is [context.WithTimeout] by the same clock.
	WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc)
}

// StatusWriter makes prepared devices durable in the status of their claim.
type StatusWriter interface {
	// Apply makes the claim's status say what rows, all of the claim's, say, and returns when that is durable. That a
	// claim without rows is gone is no error.
	Apply(ctx context.Context, claim tables.ClaimRef, rows []*tables.DRAAllocation) error
	// Withdraw takes the entries of devices that no longer have a row out of the claim's status, some time later
	// and without a promise: the claim may be gone. A later Apply for the claim overrules it.
	Withdraw(claim tables.ClaimRef)
}

// Addresses are those that networks have for devices.
type Addresses interface {
	// Take returns the row with the addresses that its network gives to the device, which then are the device's alone in the
	// cluster. note makes a choice durable before others can see it. When it fails nothing is taken.
	Take(ctx context.Context, row *tables.DRAAllocation, note func(*tables.DRAAllocation) error) (*tables.DRAAllocation, error)
	// Return gives the row's addresses back, whose device is free, some time later if it cannot be done at once.
	Return(ctx context.Context, row *tables.DRAAllocation)
	// ReturnLeft gives back, some time later, the addresses of devices that were left to the pods of a claim, since nothing was known of
	// them that counts. Those pods have ended.
	ReturnLeft(claim kubetypes.UID)
}

// Checker asks the kernel about prepared devices.
type Checker interface {
	// Check says of each row's device how it differs from what Setup made of it, or why that cannot be told; nil for one that
	// is as it should be. It changes nothing.
	Check(ctx context.Context, rows []*tables.DRAAllocation) []error
}
