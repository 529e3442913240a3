// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// errHeld says that the address which is kept for the pod is not released yet.
var errHeld = errors.New("is not released yet")

// heldError names who has the address, and what to do if that never ends.
func heldError(object *v2alpha1.CiliumNetworkDriverAddress) error {
	spec := &object.Spec
	return fmt.Errorf("address %s is kept for the pod and %w: node %s has it for claim %s/%s; if that node is gone for good, delete the Node or taint it "+
		"node.kubernetes.io/out-of-service", spec.Address, errHeld, spec.Node, spec.Namespace, spec.Claim.Name)
}

// isOf says whether the address is in use by whom the other object names.
func isOf(present, other *v2alpha1.CiliumNetworkDriverAddress) bool {
	return present.Spec.State != v2alpha1.AddressReleased && present.Spec.Holder() == other.Spec.Holder()
}

// give gives an address back that no device has: one that is reserved stays, released, and others can have any other. It is an
// error that somebody has changed the object.
func (k *Keeper) give(ctx context.Context, present *v2alpha1.CiliumNetworkDriverAddress) error {
	if !present.Spec.IsReserved() {
		return k.objects.Delete(ctx, present)
	}
	released := present.DeepCopy()
	released.Spec.State, released.Spec.ReleasedAt = v2alpha1.AddressReleased, metav1.Now()
	err := k.objects.Update(ctx, released)
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// kept returns the addresses that are kept for the device, of a network that keeps any.
func (t *taking) kept(ctx context.Context) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	if t.network.Reservation == nil {
		return nil, nil
	}
	kept, err := t.objects.Reserved(ctx, t.row.Config.Network, t.network.Reservation.Label(t.row.ClaimNamespace, t.row.PodName))
	if err != nil {
		return nil, fmt.Errorf("list the addresses that are kept for the pod: %w", err)
	}
	// More than one of a subnet there are when two nodes took one at the same time: the last that the pod had comes first.
	slices.SortStableFunc(kept, func(a, b v2alpha1.CiliumNetworkDriverAddress) int {
		return b.Spec.ReleasedAt.Compare(a.Spec.ReleasedAt.Time)
	})
	return kept, nil
}

// takeKept takes of the addresses that are kept for the device one of the family. It is false if there is none that is for this node.
func (t *taking) takeKept(ctx context.Context, kept []v2alpha1.CiliumNetworkDriverAddress, ipv4 bool) (bool, error) {
	held := -1
	for i := range kept {
		addr, err := netip.ParseAddr(kept[i].Spec.Address)
		if err != nil || addr.Is4() != ipv4 || kept[i].DeletionTimestamp != nil {
			continue
		}
		s := slices.IndexFunc(t.network.Offer.Subnets, func(s types.Subnet) bool { return s.Addresses.Contains(addr) })
		want := t.object(t.row, addr)
		switch {
		case s < 0 || !kept[i].Spec.ReservedAs(&want.Spec):
		case isOf(&kept[i], want):
			return t.takeAgain(ctx, t.network.Offer.Subnets[s], addr, &kept[i])
		case kept[i].Spec.State == v2alpha1.AddressReleased:
			return true, t.takeOver(ctx, t.network.Offer.Subnets[s], addr, &kept[i])
		default:
			held = i
		}
	}
	if held >= 0 {
		return false, heldError(&kept[held])
	}
	return false, nil
}

// takeOver takes an address that is released, after the journal knows of it. The object as it was read decides: of two that try it
// one succeeds, and the other one waits for that.
func (t *taking) takeOver(ctx context.Context, subnet types.Subnet, addr netip.Addr, released *v2alpha1.CiliumNetworkDriverAddress) error {
	row := t.with(t.and(subnet, addr))
	if err := t.note(row); err != nil {
		return err
	}
	taken := released.DeepCopy()
	taken.Spec = t.object(row, addr).Spec
	err := t.objects.Update(ctx, taken)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return heldError(released)
	}
	if err != nil {
		return fmt.Errorf("take address %s over: %w", addr, err)
	}
	t.addrs, t.subnets = t.and(subnet, addr)
	return nil
}
