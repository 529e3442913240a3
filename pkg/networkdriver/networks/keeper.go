// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

const (
	// fullPatience is how long [Keeper.Take] waits for an address of a network that has none left.
	fullPatience = 30 * time.Second
	// firstWait and lastWait bound the pauses in that time.
	firstWait, lastWait = time.Second, 4 * time.Second
	// returnTimeout bounds one attempt to give an address back while a claim waits for it.
	returnTimeout = 2 * time.Second
	// firstRetry and lastRetry bound the pauses between attempts to give back what could not be given back at once.
	firstRetry, lastRetry = time.Second, time.Minute
	// checkInterval is how often the node's addresses are compared with its devices.
	checkInterval = time.Hour
	// maxDraws is how many blocks of a subnet are looked at by chance before they are looked at one after the other, and
	// maxBlocks how many of those.
	maxDraws, maxBlocks = 16, 4096
)

// Objects are the address objects of the API server.
type Objects interface {
	// Create makes the object; that one of the name exists is an error that [apierrors.IsAlreadyExists] knows.
	Create(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error
	Get(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverAddress, error)
	// InBlock returns a network's addresses in the block, or, for an empty network, those of all networks, as the API server has them in
	// its cache, which may be behind; fresh asks for an answer that is not.
	InBlock(ctx context.Context, network, block string, fresh bool) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// Reserved returns a network's addresses with the reservation, as their label has it.
	Reserved(ctx context.Context, network, reservation string) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// OfNode returns the addresses of the node, those that it has released too.
	OfNode(ctx context.Context, node string) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// Update changes the object if it is still that of the UID and the resource version; if not, that is an error that
	// [apierrors.IsConflict] or [apierrors.IsNotFound] knows.
	Update(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error
	// Delete removes the object if it is still that of the UID and the resource version; if not, that is an error that
	// [apierrors.IsConflict] knows. One that is gone is no error.
	Delete(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error
}

// Keeper takes addresses for the node's devices, and gives them back: nobody else does while the node exists. The API server
// decides who gets an address, by taking one object of a name.
type Keeper struct {
	// Metrics may be nil.
	Metrics *Metrics

	log     *slog.Logger
	objects Objects
	node    string
	// held returns the devices of the node that are not free, as the journal and the allocation table have them. One of which the
	// journal has nothing that can be read is without a claim, and one that is being set up or given back is releasing.
	held  func() []*tables.DRAAllocation
	waits func(row *tables.DRAAllocation, message string)

	mu sync.Mutex // guards the fields below
	// left are the devices that were left to the pods of claims.
	left map[claimDevice]bool
	// unreturned are the devices whose addresses could not be given back. The journal may still have them as it does, when it could not
	// be written either, and others later.
	unreturned map[claimDevice]bool
	// more is closed when there is more to return.
	more chan struct{}
}

// claimDevice is a device as a claim has it.
type claimDevice struct {
	claim  kubetypes.UID
	device string
}

// Params are what a [Keeper] works with.
type Params struct {
	Logger  *slog.Logger
	Objects Objects
	// Node is the node's name.
	Node string
	// Held returns the devices of the node that are not free, as the journal and the allocation table have them. One of which the
	// journal has nothing that can be read is without a claim, and one that is being set up or given back is releasing.
	Held func() []*tables.DRAAllocation
	// Waits tells the row's pod what its device waits for.
	Waits func(row *tables.DRAAllocation, message string)
}

// NewKeeper returns the keeper of a node's addresses.
func NewKeeper(p Params) *Keeper {
	return &Keeper{log: p.Logger, objects: p.Objects, node: p.Node, held: p.Held, waits: p.Waits,
		left: map[claimDevice]bool{}, unreturned: map[claimDevice]bool{}, more: make(chan struct{})}
}

// inUse says whether a device of the node has the address of the object, or is about to take it. One that has tried to take it for
// another claim or pod has found it taken.
func (k *Keeper) inUse(object *v2alpha1.CiliumNetworkDriverAddress, addr netip.Addr) bool {
	of := &object.Spec
	return slices.ContainsFunc(k.held(), func(row *tables.DRAAllocation) bool {
		return row.Config.Network == of.Network && string(row.ClaimUID) == of.Claim.UID && string(row.PodUID) == of.Pod.UID && row.DeviceName == of.Device &&
			row.Config.Joined != nil && slices.ContainsFunc(row.Config.Joined.Addresses, func(a netip.Prefix) bool { return a.Addr() == addr })
	})
}

// Leave keeps what addresses the claim's device has until [Keeper.ReturnLeft], or until the device is set up for another claim: it is
// left to its pod, which may use them.
func (k *Keeper) Leave(claim kubetypes.UID, device string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.left[claimDevice{claim, device}] = true
}

// ReturnLeft gives back, some time later, what was left to the pods of the claim, which have ended.
func (k *Keeper) ReturnLeft(claim kubetypes.UID) {
	k.mu.Lock()
	before := len(k.left)
	maps.DeleteFunc(k.left, func(d claimDevice, _ bool) bool { return d.claim == claim })
	changed := len(k.left) < before
	k.mu.Unlock()
	if changed {
		k.later()
	}
}

// isLeft says whether the object's device was left to the pods of the object's claim. One that is set up for another claim has been on
// the host since.
func (k *Keeper) isLeft(object *v2alpha1.CiliumNetworkDriverAddress) bool {
	d := claimDevice{kubetypes.UID(object.Spec.Claim.UID), object.Spec.Device}
	k.mu.Lock()
	left := k.left[d]
	k.mu.Unlock()
	return left && !slices.ContainsFunc(k.held(), func(row *tables.DRAAllocation) bool {
		return row.DeviceName == d.device && row.ClaimUID != "" && row.ClaimUID != d.claim && !row.Releasing
	})
}

// mayBeUsed says whether a device of the node may send from the object's address: one has it, was left to a pod that may have it, or is
// one of which nobody knows what it has.
func (k *Keeper) mayBeUsed(object *v2alpha1.CiliumNetworkDriverAddress, addr netip.Addr) bool {
	return k.isLeft(object) || k.inUse(object, addr) || slices.ContainsFunc(k.held(), func(row *tables.DRAAllocation) bool {
		return row.ClaimUID == "" && row.DeviceName == object.Spec.Device
	})
}

// errFull says that a network has no address left.
var errFull = errors.New("no address is left")

// object is the object for an address of a row.
func (k *Keeper) object(row *tables.DRAAllocation, addr netip.Addr) *v2alpha1.CiliumNetworkDriverAddress {
	object := &v2alpha1.CiliumNetworkDriverAddress{
		TypeMeta: metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: v2alpha1.AddressKind},
		ObjectMeta: metav1.ObjectMeta{
			Name:   v2alpha1.AddressName(row.Config.Network, addr),
			Labels: map[string]string{v2alpha1.LabelNetwork: row.Config.Network, v2alpha1.LabelBlock: v2alpha1.AddressBlock(addr)},
		},
		Spec: v2alpha1.CiliumNetworkDriverAddressSpec{
			Network: row.Config.Network, Address: addr.String(), Vlan: int32(row.Config.VLAN()), Pool: row.Pool, Node: k.node, Namespace: row.ClaimNamespace,
			State: v2alpha1.AddressInUse,
			Claim: v2alpha1.AddressOwner{Name: row.ClaimName, UID: string(row.ClaimUID)},
			Pod:   v2alpha1.AddressOwner{Name: row.PodName, UID: string(row.PodUID)}, Request: row.Request, Device: row.DeviceName,
		},
	}
	if row.Config.Joined.Reservation != nil {
		object.Spec.Reservation = *row.Config.Joined.Reservation
		object.Labels[v2alpha1.LabelReservation] = object.Spec.Reservation.Label(row.ClaimNamespace, row.PodName)
	}
	return object
}

// Holds says why the row's addresses are not its device's, or is an error that [client.IsUnanswered] knows.
func (k *Keeper) Holds(ctx context.Context, row *tables.DRAAllocation) error {
	for _, a := range row.Config.Joined.Addresses {
		want := k.object(row, a.Addr())
		present, err := k.objects.Get(ctx, want.Name)
		if err != nil {
			return fmt.Errorf("look whose address %s is: %w", a.Addr(), client.Unanswered(err))
		}
		if !isOf(present, want) {
			return fmt.Errorf("address %s is claim %s/%s's", a.Addr(), present.Spec.Namespace, present.Spec.Claim.Name)
		}
	}
	return nil
}
