// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

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

// later has the node's addresses compared with its devices soon.
func (k *Keeper) later() {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.more)
	k.more = make(chan struct{})
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
		err := k.compare(ctx)
		if err != nil {
			k.log.Warn("The node's addresses cannot be compared with its devices, trying again", "after", delay, "error", err)
		}
		if err != nil || k.hasUnreturned() {
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
	// Whoever takes it meanwhile makes another object.
	if err := k.give(ctx, object); err != nil {
		return err
	}
	k.log.Info("Address that no device has any more is given back", "network", object.Spec.Network, "address", object.Spec.Address,
		"claim", object.Spec.Namespace+"/"+object.Spec.Claim.Name)
	return nil
}
