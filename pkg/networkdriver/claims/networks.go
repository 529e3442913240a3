// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"reflect"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Networks looks up the networks that claims name.
type Networks interface {
	// Resolve returns the network of each query, and an error when one cannot be joined.
	Resolve(ctx context.Context, queries []networks.Query) ([]*types.Network, error)
}

// Pools knows what the configured pools let claims ask for.
type Pools interface {
	// ClaimParameters returns the pool's claims field; false for a pool that is not configured.
	ClaimParameters(pool string) (string, bool)
}

// mayAsk says why the claim may not ask what it asks of a device of the pool. What the device class asks may be asked.
func mayAsk(pools Pools, pool string, byClaim types.DeviceConfig) error {
	if byClaim == (types.DeviceConfig{}) {
		return nil
	}
	rule, configured := pools.ClaimParameters(pool)
	switch {
	case !configured:
		return fmt.Errorf("pool %s is not configured on this node any more, so that nothing says what claims may ask of its devices", pool)
	case rule == v2alpha1.ClaimsAny:
		return nil
	case rule == v2alpha1.ClaimsNetworkOnly && (byClaim.Driver != "" || byClaim.Vhost):
		return fmt.Errorf("driver: claims may not have programs drive devices of pool %s (its claims field is %s): leave driver and vhost to the device class, "+
			"allowed are network and podIfName", pool, rule)
	case rule == v2alpha1.ClaimsNetworkOnly && byClaim.Vlan == nil:
		return nil
	case rule == v2alpha1.ClaimsNetworkOnly:
		return fmt.Errorf("vlan: claims may not choose the VLAN of devices of pool %s (its claims field is %s): name a network, allowed are network and podIfName",
			pool, rule)
	default:
		return fmt.Errorf("claims may not have parameters for devices of pool %s (its claims field is %s): their device class says what they are",
			pool, rule)
	}
}

// join completes the configurations of devices by the networks that they name. A device that is prepared keeps the network
// that it was prepared for, whatever has become of that.
func (p *Preparer) join(ctx context.Context, claim *resourceapi.ResourceClaim, devices []*wanted) error {
	var queries []networks.Query
	var places []*wanted
	for _, w := range devices {
		if w.row != nil && !w.row.Releasing {
			w.config = w.row.Config
			continue
		}
		if err := mayAsk(p.Pools, w.pool, w.byClaim); err != nil {
			return fmt.Errorf("request %q: parameters: %w", w.request, err)
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
		places[i].config.Joined = network
	}
	return nil
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
