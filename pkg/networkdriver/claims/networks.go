// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/cilium/networkdriver/api/v2alpha1"
	apiclient "github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Networks looks up the networks that claims name.
type Networks interface {
	// Resolve returns the network of each query, and an error when one cannot be joined.
	Resolve(ctx context.Context, queries []networks.Query) ([]*types.Network, error)
}

// Pools knows the configured pools.
type Pools interface {
	// Of returns the pool that the device is offered in, given the device's rows; empty for none.
	Of(device *tables.DRADevice, rows iter.Seq[*tables.DRAAllocation]) string
	// ClaimParameters returns the pool's claims field; false for a pool that is not configured.
	ClaimParameters(pool string) (string, bool)
}

// mayAsk says why the claim may not ask what it asks of a device of the pool. What the device class asks may be asked.
func mayAsk(pools Pools, pool string, byClaim types.DeviceConfig) error {
	if byClaim.IsZero() {
		return nil
	}
	byHand := byClaim.ByHand()
	rule, configured := pools.ClaimParameters(pool)
	switch {
	case !configured:
		return fmt.Errorf("pool %s is not configured on this node any more, so that nothing says what claims may ask of its devices", pool)
	case rule == v2alpha1.ClaimsAny:
		return nil
	case rule == v2alpha1.ClaimsNetworkOnly && (byClaim.Driver != "" || byClaim.Vhost || byClaim.RDMA):
		return fmt.Errorf("driver: claims may not have programs drive devices of pool %s (its claims field is %s): leave driver, rdma and vhost to the device class, "+
			"allowed are network, addresses of it and podIfName", pool, rule)
	case rule == v2alpha1.ClaimsNetworkOnly && byHand == "":
		return nil
	case rule == v2alpha1.ClaimsNetworkOnly:
		what := map[string]string{"vlan": "VLAN", "addresses": "addresses", "routes": "routes"}[byHand]
		return fmt.Errorf("%s: claims may not choose the %s of devices of pool %s (its claims field is %s): name a network, "+
			"allowed are network, addresses of it and podIfName", byHand, what, pool, rule)
	default:
		return fmt.Errorf("claims may not have parameters for devices of pool %s (its claims field is %s): their device class says what they are",
			pool, rule)
	}
}

// permission judges what claims ask for. It reads each device class once.
type permission struct {
	pools   Pools
	classes Classes
	driver  string
	read    map[string]*resourceapi.DeviceClass
}

func newPermission(pools Pools, classes Classes, driver string) *permission {
	return &permission{pools, classes, driver, map[string]*resourceapi.DeviceClass{}}
}

// check says why a device of the pool may not be given what is asked of it. Where the pool limits claims, what the claim's allocation has
// from the device class must be what that class says: whoever may write the claim's status may write allocations.
func (p *permission) check(ctx context.Context, pool string, asked Asked) error {
	if err := mayAsk(p.pools, pool, asked.ByClaim); err != nil {
		return fmt.Errorf("parameters: %w", err)
	}
	if rule, _ := p.pools.ClaimParameters(pool); rule == v2alpha1.ClaimsAny || len(asked.FromClass) == 0 {
		return nil
	}
	class := p.read[asked.Class]
	if class == nil {
		var err error
		if class, err = p.classes.GetClass(ctx, asked.Class); err != nil {
			return fmt.Errorf("parameters from the device class: %w", apiclient.Unanswered(err))
		}
		p.read[asked.Class] = class
	}
	for _, raw := range asked.FromClass {
		if !slices.ContainsFunc(class.Spec.Config, func(c resourceapi.DeviceClassConfiguration) bool {
			return c.Opaque != nil && c.Opaque.Driver == p.driver && sameJSON(c.Opaque.Parameters.Raw, raw)
		}) {
			return fmt.Errorf("parameters from the device class: %.64q is in the claim's allocation, and device class %s does not have it: the class "+
				"was changed since, or the allocation is not the scheduler's; delete the pods that use the claim, so that it is allocated anew", raw, asked.Class)
		}
	}
	return nil
}

// join completes the configurations of devices by the networks that they name. A device that is prepared keeps the network
// that it was prepared for, whatever has become of that.
func (p *Preparer) join(ctx context.Context, claim *resourceapi.ResourceClaim, devices []*wanted) error {
	var queries []networks.Query
	var places []*wanted
	permission := newPermission(p.Pools, p.Classes, p.DriverName)
	for _, w := range devices {
		if w.row != nil && !w.row.Releasing {
			w.config = w.row.Config
			continue
		}
		if err := permission.check(ctx, w.pool, w.asked); err != nil {
			return fmt.Errorf("request %q: %w", w.request, err)
		}
		if w.config.Network != "" {
			queries = append(queries, networks.Query{Network: w.config.Network, Namespace: claim.Namespace, Pool: w.pool})
			places = append(places, w)
		}
	}
	if len(queries) == 0 {
		return nil
	}
	found, err := p.Networks.Resolve(ctx, queries)
	if err != nil {
		return err
	}
	for i, network := range found {
		w := places[i]
		if network.Offer != nil && network.Offer.Reserve {
			network.Reservation = &v2alpha1.AddressReservation{Claim: nameInPod(claim), Request: resourceclaim.BaseRequestRef(w.request), Ordinal: w.ordinal}
		}
		if w.config.Joined, err = networks.Choose(network, w.config.Addresses); err != nil {
			return permanentError{fmt.Errorf("request %q: network %s: parameters: %w", w.request, w.config.Network, err)}
		}
	}
	return nil
}

// nameInPod is what the claim is for the pod, and for the next pod of the name too: one that is made for each pod from a template has a
// name of its own each time.
func nameInPod(claim *resourceapi.ResourceClaim) string {
	return cmp.Or(claim.Annotations[resourceapi.PodResourceClaimAnnotation], claim.Name)
}

// splitChanged returns the rows of devices that were to be prepared for something else than they are now, as networks change:
// they are freed by what they were prepared for.
func splitChanged(devices []*wanted) (changed []*tables.DRAAllocation) {
	for _, w := range devices {
		if w.row != nil && w.row.Releasing && !reflect.DeepEqual(w.row.Config, w.config) {
			changed = append(changed, w.row)
			w.row = nil
		}
	}
	return changed
}
