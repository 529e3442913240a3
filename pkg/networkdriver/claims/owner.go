// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"

	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
)

// Owner is whose entries in a claim's status are meant: those for one node's devices of one driver. The driver alone
// does not tell, for a named claim can move to another node under the same UID.
type Owner struct {
	Driver string
	Node   string
}

// fieldManager is the name under which the API server keeps which fields the owner applied. Each node has its own, so
// that what one node leaves out is not taken from another.
func (o Owner) fieldManager() string {
	if name := o.Driver + "/" + o.Node; len(name) <= validation.FieldManagerMaxLength {
		return name
	}
	sum := sha256.Sum256([]byte(o.Node))
	return o.Driver + "/" + hex.EncodeToString(sum[:]) // fits, as a driver's name has at most 63 characters
}

// owns says whether the entry is the owner's. Shares of a device are not what the driver writes.
func (o Owner) owns(entry resourceapi.AllocatedDeviceStatus) bool {
	return entry.Driver == o.Driver && entry.ShareID == nil && o.hasPool(entry.Pool)
}

// isAllotted says whether the claim is allotted any of the owner's devices.
func (o Owner) isAllotted(claim *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(resultsOf(claim, o.Driver), func(result resourceapi.DeviceRequestAllocationResult) bool {
		return o.hasPool(result.Pool)
	})
}

func (o Owner) hasPool(pool string) bool {
	_, ok := pools.Configured(o.Node, pool)
	return ok
}
