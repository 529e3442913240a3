// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
)

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
			k.setUnreturned(row, true) // the API server may have taken what it did not answer to, and the journal may keep what it is told to forget
			k.later()
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
	// blocks are the addresses of all networks in blocks, as this try has read them, which is after the network was read.
	blocks map[string][]v2alpha1.CiliumNetworkDriverAddress
}

func (t *taking) takeAll(ctx context.Context) (*tables.DRAAllocation, error) {
	t.blocks = map[string][]v2alpha1.CiliumNetworkDriverAddress{}
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
	seen, taken := map[netip.Prefix]bool{}, map[netip.Addr]bool{}
	try := func(block netip.Prefix) (bool, error) {
		if seen[block] {
			return false, nil
		}
		seen[block] = true
		return t.takeInBlock(ctx, subnet, block, seed, taken)
	}
	draw := 0
	for addr := range draws(subnet.Addresses, seed) {
		if draw == 0 {
			if ok, err := t.take(ctx, subnet, addr); ok || err != nil {
				return err
			}
			taken[addr] = true
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

// takeInBlock takes an address of the block, none of those that are known to be taken.
func (t *taking) takeInBlock(ctx context.Context, subnet types.Subnet, block netip.Prefix, seed string, taken map[netip.Addr]bool) (bool, error) {
	// An answer that is behind costs a try more at worst, but for an address that is kept for the pod: the pod waits for that.
	fresh := t.network.Reservation != nil
	objects, err := t.objects.InBlock(ctx, t.row.Config.Network, v2alpha1.AddressBlock(block.Addr()), fresh)
	if err != nil {
		return false, fmt.Errorf("list the addresses in %s: %w", block, err)
	}
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
// and an error for one that is kept for the pod and not released. The object may be gone by now, or be about to go: by the comparison,
// the operator, or a request of that try that nobody waits for any more. So another one is made, which no such request is about.
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
	if err := t.objects.Delete(ctx, object); err != nil && !apierrors.IsConflict(err) { // that would be another one's by now
		return false, fmt.Errorf("take address %s anew: %w", addr, err)
	}
	return t.take(ctx, subnet, addr)
}

// take asks for one address, after the journal knows of it. It is false for one that is taken.
func (t *taking) take(ctx context.Context, subnet types.Subnet, addr netip.Addr) (bool, error) {
	if t.network.Offer.Unjudged {
		if err := t.usedElsewhere(ctx, addr); err != nil {
			if subnet.Certain || !errors.Is(err, errUsed) {
				return false, err
			}
			return false, nil
		}
	}
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

// errUsed is that of an address that a device has from another network.
var errUsed = errors.New("is used")

// usedElsewhere returns an error where a device has the address from another network, in the same VLAN. Names of objects do not show
// that. The operator looks for it, once it knows a network; a network that is not there any more is nobody else's to look for.
func (t *taking) usedElsewhere(ctx context.Context, addr netip.Addr) error {
	block := v2alpha1.AddressBlock(addr)
	objects, known := t.blocks[block]
	if !known {
		var err error
		if objects, err = t.objects.InBlock(ctx, "", block, true); err != nil {
			return fmt.Errorf("look whether devices have address %s from another network: %w", addr, err)
		}
		t.blocks[block] = objects
	}
	for i := range objects {
		spec := &objects[i].Spec
		other, err := netip.ParseAddr(spec.Address)
		if err == nil && other == addr && spec.Network != t.row.Config.Network && spec.State == v2alpha1.AddressInUse && int(spec.Vlan) == t.network.VLAN {
			return fmt.Errorf("address %s %w by pod %s/%s on node %s, which has it from network %s", addr, errUsed, spec.Namespace, spec.Pod.Name, spec.Node, spec.Network)
		}
	}
	return nil
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
