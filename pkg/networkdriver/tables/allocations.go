// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package tables

import (
	"fmt"
	"log/slog"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// AllocationTableName is the name of the table of prepared devices.
const AllocationTableName = "networkdriver-dra-allocations"

// DRAAllocation is a row of the table of prepared devices. Rows are immutable: a change is a new row under the same key.
type DRAAllocation struct {
	// DeviceName is the device's name in ResourceSlices.
	DeviceName string
	// Manager is the device manager that set the device up.
	Manager types.DeviceManagerType
	// PreparedDevice is the device after Setup, with what is needed to restore it.
	PreparedDevice types.Device
	// Pool is the configured pool's name (without the node) that the device was allotted from.
	Pool string
	// PodUID is the pod that has the device or is to get it: one of those that the claim is reserved for.
	PodUID kubetypes.UID
	// ClaimUID is the claim that the device was prepared for.
	ClaimUID kubetypes.UID
	// Config is what the claim asked for.
	Config types.DeviceConfig

	// ClaimNamespace, ClaimName and PodName name the same for people and for writing the claim's status.
	ClaimNamespace string
	ClaimName      string
	PodName        string
	// Request is the claim's request (or request/subrequest) that the device satisfies.
	Request string
	// PodClaim is what the pod calls the device's claim, if that is known, by which programs find the device that they open: the name in its
	// spec, or the extended resource that it asks for instead of a claim.
	PodClaim string `json:",omitempty"`
	// Attachment says where the link is while it is in the pod; nil before and after.
	Attachment *types.Attachment `json:",omitempty"`
	// Held is true once the device was in its pod, and after a restart, when that is not known: no other pod of the claim
	// gets it for as long as the claim is reserved for this one.
	Held bool `json:",omitempty"`
	// Error is why the last attach or free of the device failed; empty when it did not.
	Error string `json:",omitempty"`
	// LostFrom is the sandbox that the link was in and, while that ran, was found to be gone from; empty once it is in a
	// sandbox again.
	LostFrom string `json:",omitempty"`
	// Releasing is true from the moment that the device is being given back, and stays so when that fails: the device is
	// not moved into a pod any more. No record of it outlives the agent.
	Releasing bool `json:",omitempty"`
}

// States are what [DRAAllocation.State] returns.
var States = []string{"Attached", "Failed", "Moved", "Prepared", "Releasing"}

// State is the row's state in a word: Prepared, Attached, Moved (by the pod, into a network namespace of its own), Releasing
// or Failed.
func (a *DRAAllocation) State() string {
	switch {
	case a.Error != "":
		return "Failed"
	case a.Releasing:
		return "Releasing"
	case a.Attachment != nil && a.Attachment.Moved:
		return "Moved"
	case a.Attachment != nil:
		return "Attached"
	default:
		return "Prepared"
	}
}

// ClaimRef names one ResourceClaim object. The UID tells it from an earlier or later claim of the same name.
type ClaimRef struct {
	Namespace string
	Name      string
	UID       kubetypes.UID
}

// String is the claim's namespace and name.
func (r ClaimRef) String() string { return r.Namespace + "/" + r.Name }

// LogValue implements [slog.LogValuer].
func (r ClaimRef) LogValue() slog.Value { return slog.StringValue(r.String()) }

// ClaimRef names the claim that the device was prepared for.
func (a *DRAAllocation) ClaimRef() ClaimRef {
	return ClaimRef{Namespace: a.ClaimNamespace, Name: a.ClaimName, UID: a.ClaimUID}
}

// Claim is the claim's namespace and name.
func (a *DRAAllocation) Claim() string { return a.ClaimNamespace + "/" + a.ClaimName }

// Pod is the pod's namespace and name.
func (a *DRAAllocation) Pod() string { return a.ClaimNamespace + "/" + a.PodName }

// With returns a copy of the row that change was applied to.
func (a *DRAAllocation) With(change func(*DRAAllocation)) *DRAAllocation {
	b := *a
	change(&b)
	return &b
}

// TableHeader implements [statedb.TableWritable].
func (a *DRAAllocation) TableHeader() []string {
	return []string{"DeviceName", "Manager", "Pool", "Claim", "Pod", "PodIfName", "VLAN", "State", "Error"}
}

// TableRow implements [statedb.TableWritable].
func (a *DRAAllocation) TableRow() []string {
	return []string{
		a.DeviceName, a.Manager.String(), a.Pool, a.Claim(), a.Pod(), a.Config.PodIfName,
		fmt.Sprint(a.Config.VLAN()), a.State(), a.Error,
	}
}

// AllocationKey is the primary key of a row. A device prepared in two pools has two rows, which is a conflict that the
// publication sees and does not resolve by itself.
func AllocationKey(pool, deviceName string) string { return pool + "/" + deviceName }

var (
	allocationKeyIndex = statedb.Index[*DRAAllocation, string]{
		Name: "key",
		FromObject: func(a *DRAAllocation) index.KeySet {
			return index.NewKeySet(index.String(AllocationKey(a.Pool, a.DeviceName)))
		},
		FromKey:    index.String,
		FromString: index.FromString,
		Unique:     true,
	}
	allocationClaimIndex = statedb.Index[*DRAAllocation, kubetypes.UID]{
		Name:       "claim-uid",
		FromObject: func(a *DRAAllocation) index.KeySet { return index.NewKeySet(uidKey(a.ClaimUID)) },
		FromKey:    uidKey,
		FromString: index.FromString,
	}
	allocationDeviceIndex = statedb.Index[*DRAAllocation, string]{
		Name:       "device-name",
		FromObject: func(a *DRAAllocation) index.KeySet { return index.NewKeySet(index.String(a.DeviceName)) },
		FromKey:    index.String,
		FromString: index.FromString,
	}
	allocationPodIndex = statedb.Index[*DRAAllocation, kubetypes.UID]{
		Name:       "pod-uid",
		FromObject: func(a *DRAAllocation) index.KeySet { return index.NewKeySet(uidKey(a.PodUID)) },
		FromKey:    uidKey,
		FromString: index.FromString,
	}

	// AllocationByKey queries by [AllocationKey].
	AllocationByKey = allocationKeyIndex.Query
	// AllocationsByClaim queries by claim UID.
	AllocationsByClaim = allocationClaimIndex.Query
	// AllocationsByDevice queries by device name.
	AllocationsByDevice = allocationDeviceIndex.Query
	// AllocationsByPod queries by pod UID.
	AllocationsByPod = allocationPodIndex.Query
)

func uidKey(uid kubetypes.UID) index.Key { return index.String(string(uid)) }

// NewAllocationTable registers the table of prepared devices.
func NewAllocationTable(db *statedb.DB) (statedb.RWTable[*DRAAllocation], error) {
	return statedb.NewTable(db, AllocationTableName, allocationKeyIndex, allocationClaimIndex, allocationDeviceIndex, allocationPodIndex)
}
