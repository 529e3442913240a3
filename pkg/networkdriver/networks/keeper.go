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
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
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
	// InBlock returns a network's addresses in the block.
	InBlock(ctx context.Context, network, block string) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// Reserved returns a network's addresses with the reservation, as their label has it.
	Reserved(ctx context.Context, network, reservation string) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// OfNode returns the addresses of the node, those that it has released too.
	OfNode(ctx context.Context, node string) ([]v2alpha1.CiliumNetworkDriverAddress, error)
	// Update changes the object if it is still that of the UID and the resource version; if not, that is an error that
	// [apierrors.IsConflict] or [apierrors.IsNotFound] knows.
	Update(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error
	// Delete removes the object if it is still that of the UID. One that is gone is no error.
	Delete(ctx context.Context, name string, uid kubetypes.UID) error
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
	// returning are objects that are to be given back, or being given back, by their names: whoever is to have such an address again makes
	// another object for it.
	returning map[string]kubetypes.UID
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
	return &Keeper{log: p.Logger, objects: p.Objects, node: p.Node, held: p.Held, waits: p.Waits, returning: map[string]kubetypes.UID{},
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

// takenError says whose a certain address is that was asked for. It counts as [errFull]: there is nothing else to choose from.
type takenError struct {
	addr  netip.Addr
	taker *v2alpha1.CiliumNetworkDriverAddressSpec
}

func (e *takenError) Error() string {
	return fmt.Sprintf("address %s is taken: claim %s/%s has it, for pod %s on node %s", e.addr, e.taker.Namespace, e.taker.Claim.Name, e.taker.Pod.Name, e.taker.Node)
}

func (e *takenError) Is(err error) bool { return err == errFull }

// atOnce is the key of a context's value, see [AtOnce].
type atOnce struct{}

// AtOnce returns a context with which [Keeper.Take] does not wait for an address: others wait for the caller, who
// comes again.
func AtOnce(ctx context.Context) context.Context { return context.WithValue(ctx, atOnce{}, true) }

// Take returns the row with an address of each family that its network offers. note makes a choice durable on the node
// before the API server is asked for it, so that whatever becomes of this call is known. A network that keeps addresses for pods
// gives the pod its own. A network that is full is waited for for a while, and so is an address that the former pod has. When it fails
// nothing is taken.
func (k *Keeper) Take(ctx context.Context, row *tables.DRAAllocation, note func(*tables.DRAAllocation) error) (taken *tables.DRAAllocation, err error) {
	network := row.Config.Joined
	if network == nil || network.Offer == nil {
		return row, nil
	}
	defer func(start time.Time) { k.Metrics.done(start, err) }(time.Now())
	t := &taking{Keeper: k, row: row, note: note, network: network}
	for delay, start := firstWait, time.Now(); ; delay = min(2*delay, lastWait) {
		taken, err := t.takeAll(ctx)
		if err == nil {
			k.setUnreturned(row, false)
			return taken, nil
		}
		waits := errors.Is(err, errFull) || errors.Is(err, errHeld)
		if waits && delay == firstWait {
			k.waits(row, fmt.Sprintf("network %s: %v", row.Config.Network, err))
		}
		if !waits || ctx.Value(atOnce{}) != nil || time.Since(start)+delay > fullPatience || !pause.For(ctx, delay) {
			t.giveBack(context.WithoutCancel(ctx))
			k.later() // the API server may have taken what it did not answer to
			return nil, fmt.Errorf("network %s: %w", row.Config.Network, err)
		}
	}
}

// taking is one call of Take.
type taking struct {
	*Keeper
	row     *tables.DRAAllocation
	note    func(*tables.DRAAllocation) error
	network *types.Network
	addrs   []netip.Prefix
	subnets []types.Subnet
}

func (t *taking) takeAll(ctx context.Context) (*tables.DRAAllocation, error) {
	kept, err := t.kept(ctx)
	if err != nil {
		return nil, err
	}
	for _, ipv4 := range []bool{true, false} {
		if slices.ContainsFunc(t.addrs, func(a netip.Prefix) bool { return a.Addr().Is4() == ipv4 }) {
			continue
		}
		if ok, err := t.takeKept(ctx, kept, ipv4); err != nil {
			return nil, err
		} else if ok {
			continue
		}
		var full []string
		for _, subnet := range t.network.Offer.Subnets {
			if subnet.Prefix.Addr().Is4() != ipv4 {
				continue
			}
			err := t.takeOf(ctx, subnet)
			if err == nil {
				full = nil
				break
			}
			if !errors.Is(err, errFull) || subnet.Certain {
				return nil, err
			}
			full = append(full, subnet.Prefix.String())
		}
		if len(full) > 0 {
			return nil, fmt.Errorf("%w in %s", errFull, strings.Join(full, ", "))
		}
	}
	return t.with(t.addrs, t.subnets), nil
}

// with returns the row with the addresses.
func (t *taking) with(addrs []netip.Prefix, subnets []types.Subnet) *tables.DRAAllocation {
	return t.row.With(func(r *tables.DRAAllocation) { r.Config.Joined = complete(t.network, addrs, subnets) })
}

// takeOf takes an address of the subnet. First comes one by chance; if somebody has that, one that is free in its block, and if
// that is full, in others.
func (t *taking) takeOf(ctx context.Context, subnet types.Subnet) error {
	if subnet.Certain {
		return t.takeCertain(ctx, subnet, subnet.Addresses.Ranges()[0].From())
	}
	seed := fmt.Sprintf("%s/%s/%s/%s", t.row.ClaimUID, t.row.Request, t.row.DeviceName, subnet.Prefix)
	if t.network.Reservation != nil {
		// Two nodes that have not seen each other choose the same for a pod, and one of them has to wait.
		seed = fmt.Sprintf("%s/%s", t.network.Reservation.Label(t.row.ClaimNamespace, t.row.PodName), subnet.Prefix)
	}
	seen := map[netip.Prefix]bool{}
	try := func(block netip.Prefix) (bool, error) {
		if seen[block] {
			return false, nil
		}
		seen[block] = true
		return t.takeInBlock(ctx, subnet, block, seed)
	}
	draw := 0
	for addr := range draws(subnet.Addresses, seed) {
		if draw == 0 {
			if ok, err := t.take(ctx, subnet, addr); ok || err != nil {
				return err
			}
		}
		if ok, err := try(blockOf(addr)); ok || err != nil {
			return err
		}
		if draw++; draw == maxDraws {
			break
		}
	}
	for block := range blocksOf(subnet.Addresses) {
		if len(seen) > maxBlocks {
			break
		}
		if ok, err := try(block); ok || err != nil {
			return err
		}
	}
	return errFull
}

func (t *taking) takeInBlock(ctx context.Context, subnet types.Subnet, block netip.Prefix, seed string) (bool, error) {
	objects, err := t.objects.InBlock(ctx, t.row.Config.Network, v2alpha1.AddressBlock(block.Addr()))
	if err != nil {
		return false, fmt.Errorf("list the addresses in %s: %w", block, err)
	}
	taken := map[netip.Addr]bool{}
	for i := range objects {
		addr, err := netip.ParseAddr(objects[i].Spec.Address)
		if err != nil {
			continue // the schema lets none through
		}
		taken[addr] = true
		if ok, err := t.takeAgain(ctx, subnet, addr, &objects[i]); ok || err != nil {
			return ok, err
		}
	}
	for _, addr := range freeIn(subnet.Addresses, block, taken, seed) {
		if ok, err := t.take(ctx, subnet, addr); ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// takeCertain takes the one address that was asked for.
func (t *taking) takeCertain(ctx context.Context, subnet types.Subnet, addr netip.Addr) error {
	if ok, err := t.take(ctx, subnet, addr); ok || err != nil {
		return err
	}
	present, err := t.objects.Get(ctx, v2alpha1.AddressName(t.row.Config.Network, addr))
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: address %s was only just given back", errFull, addr)
	}
	if err != nil {
		return fmt.Errorf("look whose address %s is: %w", addr, err)
	}
	if ok, err := t.takeAgain(ctx, subnet, addr, present); ok || err != nil {
		return err
	}
	return &takenError{addr, &present.Spec}
}

// takeAgain takes an address whose object is there from an earlier try of the same. It is false for an object that is not,
// and an error for one that is kept for the pod and not released. The comparison says that it returns an object before it looks into
// the journal for the last time, so that it is asked here only after the journal knows.
func (t *taking) takeAgain(ctx context.Context, subnet types.Subnet, addr netip.Addr, object *v2alpha1.CiliumNetworkDriverAddress) (bool, error) {
	want := t.object(t.row, addr)
	switch {
	case !subnet.Addresses.Contains(addr) || object.DeletionTimestamp != nil:
		return false, nil
	case !isOf(object, want) && object.Spec.ReservedAs(&want.Spec):
		return false, heldError(object)
	case !isOf(object, want):
		return false, nil
	}
	if err := t.note(t.with(t.and(subnet, addr))); err != nil {
		return false, err
	}
	if t.isReturning(object.Name) {
		if err := t.objects.Delete(ctx, object.Name, object.UID); err != nil {
			return false, fmt.Errorf("take address %s anew: %w", addr, err)
		}
		return t.take(ctx, subnet, addr)
	}
	t.addrs, t.subnets = t.and(subnet, addr)
	return true, nil
}

// take asks for one address, after the journal knows of it. It is false for one that is taken.
func (t *taking) take(ctx context.Context, subnet types.Subnet, addr netip.Addr) (bool, error) {
	row := t.with(t.and(subnet, addr))
	if err := t.note(row); err != nil {
		return false, err
	}
	crashpoint.Here(crashpoint.AddressBefore)
	err := t.objects.Create(ctx, t.object(row, addr))
	crashpoint.Here(crashpoint.AddressAfter)
	if apierrors.IsAlreadyExists(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("take address %s: %w", addr, err)
	}
	t.addrs, t.subnets = t.and(subnet, addr)
	return true, nil
}

// and returns what is taken, and one more.
func (t *taking) and(subnet types.Subnet, addr netip.Addr) ([]netip.Prefix, []types.Subnet) {
	return append(slices.Clone(t.addrs), netip.PrefixFrom(addr, subnet.Prefix.Bits())), append(slices.Clone(t.subnets), subnet)
}

// giveBack gives back what a call that failed has taken.
func (t *taking) giveBack(ctx context.Context) {
	if len(t.addrs) > 0 {
		t.Return(ctx, t.with(t.addrs, t.subnets))
	}
}

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

// Return gives the row's addresses back, whose device is free: now, or, where that fails, later. It is for the owner of the row.
func (k *Keeper) Return(ctx context.Context, row *tables.DRAAllocation) {
	if row.Config.Joined == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, returnTimeout)
	defer cancel()
	for _, a := range row.Config.Joined.Addresses {
		want := k.object(row, a.Addr())
		present, err := k.objects.Get(ctx, want.Name)
		if apierrors.IsNotFound(err) || err == nil && !isOf(present, want) {
			continue
		}
		if err == nil {
			err = k.give(ctx, present)
			crashpoint.Here(crashpoint.AddressReturned)
		}
		if err == nil {
			k.log.Debug("Address is given back", "network", row.Config.Network, "address", a.Addr(), "claim", row.Claim())
			continue
		}
		k.log.Warn("Address could not be given back, trying again", "network", row.Config.Network, "address", a.Addr(), "claim", row.Claim(), "error", err)
		k.setUnreturned(row, true)
		k.later()
	}
}

func (k *Keeper) setUnreturned(row *tables.DRAAllocation, unreturned bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := (claimDevice{row.ClaimUID, row.DeviceName}); unreturned {
		k.unreturned[d] = true
	} else {
		delete(k.unreturned, d)
	}
}

// prune forgets which devices had addresses to give back that are not among the objects any more.
func (k *Keeper) prune(objects []v2alpha1.CiliumNetworkDriverAddress) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.unreturned, func(d claimDevice, _ bool) bool {
		return !slices.ContainsFunc(objects, func(o v2alpha1.CiliumNetworkDriverAddress) bool {
			return o.Spec.State != v2alpha1.AddressReleased && o.Spec.Claim.UID == string(d.claim) && o.Spec.Device == d.device
		})
	})
}

func (k *Keeper) hasUnreturned() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.unreturned) > 0
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

// later has the node's addresses compared with its devices soon.
func (k *Keeper) later() {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.more)
	k.more = make(chan struct{})
}

func (k *Keeper) isReturning(name string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, returning := k.returning[name]
	return returning
}

// Run gives back, until the context ends, what no device of the node has: what an earlier life of the agent left, and what could
// not be given back at once. The journal has to be complete.
func (k *Keeper) Run(ctx context.Context) error {
	delay := firstRetry
	for {
		k.mu.Lock()
		more := k.more
		k.mu.Unlock()
		wait := checkInterval
		if err := k.compare(ctx); err != nil {
			k.log.Warn("The node's addresses cannot be compared with its devices, trying again", "after", delay, "error", err)
			wait, delay = delay, min(2*delay, lastRetry)
		} else if k.hasUnreturned() {
			wait, delay = delay, min(2*delay, lastRetry)
		} else {
			delay = firstRetry
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-more:
			if !pause.For(ctx, firstRetry) {
				return nil
			}
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// compare gives back the node's addresses that no device of it has, and takes those again that somebody has given back although a
// device has them.
func (k *Keeper) compare(ctx context.Context) error {
	objects, err := k.objects.OfNode(ctx, k.node)
	if err != nil {
		return err
	}
	k.prune(objects)
	var errs []error
	names := map[string]bool{}
	for i := range objects {
		names[objects[i].Name] = objects[i].Spec.State != v2alpha1.AddressReleased
	}
	for _, row := range k.held() {
		// One that is being set up has not got its address yet, and one that is being given back may have returned it.
		if row.Config.Joined == nil || row.Releasing {
			continue
		}
		for _, a := range row.Config.Joined.Addresses {
			if object := k.object(row, a.Addr()); !names[object.Name] {
				errs = append(errs, k.makeAgain(ctx, object))
			}
		}
	}
	for _, object := range objects {
		if err := k.returnUnused(ctx, &object); err != nil {
			errs = append(errs, fmt.Errorf("give address %s of network %s back: %w", object.Spec.Address, object.Spec.Network, err))
		}
	}
	return errors.Join(errs...)
}

// makeAgain makes the object of an address that a device has. If another one has got the address meanwhile, both may use it.
func (k *Keeper) makeAgain(ctx context.Context, object *v2alpha1.CiliumNetworkDriverAddress) error {
	log := k.log.With("network", object.Spec.Network, "address", object.Spec.Address, "claim", object.Spec.Namespace+"/"+object.Spec.Claim.Name,
		"pod", object.Spec.Namespace+"/"+object.Spec.Pod.Name)
	err := k.objects.Create(ctx, object)
	if err == nil {
		log.Warn("Address of a device was given back by somebody else, and is taken again")
		return nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("take address %s of network %s again: %w", object.Spec.Address, object.Spec.Network, err)
	}
	present, err := k.objects.Get(ctx, object.Name)
	if err == nil && present.Spec.Holder() == object.Spec && present.Spec.State == v2alpha1.AddressReleased {
		object.UID, object.ResourceVersion = present.UID, present.ResourceVersion
		if err := k.objects.Update(ctx, object); err != nil {
			return fmt.Errorf("take address %s of network %s again: %w", object.Spec.Address, object.Spec.Network, err)
		}
		log.Warn("Address of a device was given back by somebody else, and is taken again")
		return nil
	}
	if err == nil && !isOf(present, object) {
		log.Error("Address of a device was given back by somebody else, and another device has it too; delete one of the pods",
			"otherNode", present.Spec.Node, "otherPod", present.Spec.Namespace+"/"+present.Spec.Pod.Name)
	}
	return nil
}

func (k *Keeper) returnUnused(ctx context.Context, object *v2alpha1.CiliumNetworkDriverAddress) error {
	addr, err := netip.ParseAddr(object.Spec.Address)
	if err != nil {
		return err
	}
	if object.Spec.State == v2alpha1.AddressReleased || k.mayBeUsed(object, addr) {
		return nil
	}
	k.setReturning(object.Name, object.UID)
	defer k.setReturning(object.Name, "")
	// Whoever takes it from now on makes another object; who has taken it before is in the journal.
	if k.mayBeUsed(object, addr) {
		return nil
	}
	if err := k.give(ctx, object); err != nil {
		return err
	}
	k.log.Info("Address that no device has any more is given back", "network", object.Spec.Network, "address", object.Spec.Address,
		"claim", object.Spec.Namespace+"/"+object.Spec.Claim.Name)
	return nil
}

// setReturning notes that the object is being given back; no UID takes that back.
func (k *Keeper) setReturning(name string, uid kubetypes.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if uid == "" {
		delete(k.returning, name)
	} else {
		k.returning[name] = uid
	}
}
