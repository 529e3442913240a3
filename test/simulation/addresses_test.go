// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// theNetwork is a network of fewer addresses than there are devices for it. Those of IPv4 are of two subnets and of two blocks.
var theNetwork = v2alpha1.CiliumNetworkDriverNetwork{
	ObjectMeta: metav1.ObjectMeta{Name: "storage"},
	Spec: v2alpha1.CiliumNetworkDriverNetworkSpec{
		NamespaceSelector: &v2alpha1.LabelSelector{}, Vlan: 77,
		Subnets: []v2alpha1.NetworkSubnet{
			{CIDR: "192.0.2.0/23", Ranges: []v2alpha1.AddressRange{{From: "192.0.2.254", To: "192.0.3.1"}}},
			{CIDR: "198.51.100.0/29", Gateway: "198.51.100.1", Exclude: []string{"198.51.100.4/30"}},
			{CIDR: "2001:db8::/64", Ranges: []v2alpha1.AddressRange{{From: "2001:db8::fd", To: "2001:db8::102"}}},
		},
	},
}

// chooseUse has the claim be for a program that drives the VF itself, or for its interface, which joins the network or not.
func (s *sim) chooseUse(c *claim, program bool) {
	switch {
	case program:
		c.driver = types.DriverVFIO
	case s.chance(0.6):
		c.network, c.vlan = theNetwork.Name, int(theNetwork.Spec.Vlan)
	}
}

// objects are the networks and addresses of the API server as a process reaches them.
type objects struct{ client }

var (
	_ networks.Reader  = objects{}
	_ networks.Objects = objects{}
)

func (o objects) ListNetworks(ctx context.Context) (all []v2alpha1.CiliumNetworkDriverNetwork, err error) {
	err = o.request(ctx, "list networks", func() error {
		for i := range o.sim.api.networks {
			all = append(all, *o.sim.api.networks[i].DeepCopy())
		}
		return nil
	})
	return all, err
}

func (o objects) NamespaceLabels(context.Context, string) (labels.Set, error) { return nil, nil }

func (o objects) Create(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.request(ctx, "create address "+address.Name, func() error {
		s := o.sim
		if s.api.addresses[address.Name] != nil {
			if s.mutant.takeTaken {
				return nil
			}
			return apierrors.NewAlreadyExists(v2alpha1.Resource(v2alpha1.AddressResource), address.Name)
		}
		made := address.DeepCopy()
		made.UID = kubetypes.UID(s.name("uid-address"))
		s.api.addresses[address.Name] = made
		return nil
	})
}

func (o objects) Get(ctx context.Context, name string) (address *v2alpha1.CiliumNetworkDriverAddress, err error) {
	err = o.request(ctx, "get address "+name, func() error {
		present := o.sim.api.addresses[name]
		if present == nil {
			return apierrors.NewNotFound(v2alpha1.Resource(v2alpha1.AddressResource), name)
		}
		address = present.DeepCopy()
		return nil
	})
	return address, err
}

func (o objects) InBlock(ctx context.Context, network, block string, fresh bool) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	return o.list(ctx, "in block "+block, !fresh, func(a *v2alpha1.CiliumNetworkDriverAddress) bool {
		return (network == "" || a.Labels[v2alpha1.LabelNetwork] == network) && a.Labels[v2alpha1.LabelBlock] == block
	})
}

func (o objects) Reserved(ctx context.Context, network, reservation string) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	return o.list(ctx, "reserved "+reservation, false, func(a *v2alpha1.CiliumNetworkDriverAddress) bool {
		return a.Labels[v2alpha1.LabelNetwork] == network && a.Labels[v2alpha1.LabelReservation] == reservation
	})
}

func (o objects) OfNode(ctx context.Context, node string) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	return o.list(ctx, "of "+node, false, func(a *v2alpha1.CiliumNetworkDriverAddress) bool { return a.Spec.Node == node })
}

// list returns the addresses that are wanted, as the server has them, or in its cache, which is behind at times.
func (o objects) list(ctx context.Context, which string, cached bool, wanted func(*v2alpha1.CiliumNetworkDriverAddress) bool) (
	found []v2alpha1.CiliumNetworkDriverAddress, err error,
) {
	err = o.request(ctx, "list addresses "+which, func() error {
		api := o.sim.api
		addresses := api.sortedAddresses()
		if cached && o.sim.chance(0.5) {
			addresses = api.cached
		} else {
			api.cached = addresses
		}
		for _, a := range addresses {
			if wanted(a) {
				found = append(found, *a.DeepCopy())
			}
		}
		return nil
	})
	return found, err
}

func (o objects) Update(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.request(ctx, "update address "+address.Name, func() error {
		present := o.sim.api.addresses[address.Name]
		switch {
		case present == nil:
			return apierrors.NewNotFound(v2alpha1.Resource(v2alpha1.AddressResource), address.Name)
		case present.UID != address.UID || present.ResourceVersion != address.ResourceVersion:
			return apierrors.NewConflict(v2alpha1.Resource(v2alpha1.AddressResource), address.Name, errors.New("it was changed"))
		}
		changed := address.DeepCopy()
		changed.ResourceVersion = o.sim.name("version")
		o.sim.api.addresses[address.Name] = changed
		return nil
	})
}

func (o objects) Delete(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.request(ctx, "delete address "+address.Name+" "+string(address.UID), func() error {
		present := o.sim.api.addresses[address.Name]
		if present != nil && (present.UID != address.UID || present.ResourceVersion != address.ResourceVersion) {
			return apierrors.NewConflict(v2alpha1.Resource(v2alpha1.AddressResource), address.Name, errors.New("it was changed"))
		}
		delete(o.sim.api.addresses, address.Name)
		return nil
	})
}

func (a *apiServer) sortedAddresses() []*v2alpha1.CiliumNetworkDriverAddress {
	return slices.SortedFunc(maps.Values(a.addresses), func(x, y *v2alpha1.CiliumNetworkDriverAddress) int { return cmp.Compare(x.Name, y.Name) })
}

// use is an address that a pod can send from.
type use struct {
	addr         netip.Addr
	node, device string
	claims       []kubetypes.UID // the pod's, one of which has the device
}

func (u use) String() string { return fmt.Sprintf("%s of %s, claim %v", u.device, u.node, u.claims) }

// uses are the addresses in use everywhere.
func (s *sim) uses() []use {
	var uses []use
	add := func(node, device string, addresses []netip.Prefix, claims ...kubetypes.UID) {
		for _, a := range addresses {
			uses = append(uses, use{a.Addr(), node, device, claims})
		}
	}
	for _, v := range s.kernel.vfs {
		if ns := s.kernel.namespaces[v.netns]; v.hasLink() && ns != nil {
			var claims []kubetypes.UID
			for _, c := range ns.pod.claims {
				claims = append(claims, c.uid)
			}
			add(nodeName, v.name, v.addresses, claims...)
		}
	}
	for _, n := range s.others {
		for _, link := range sortedRows(n.links) {
			add(n.name, link.DeviceName, link.Config.Joined.Addresses, link.ClaimUID)
		}
	}
	return uses
}

// checkAddresses: nobody can use an address that another one can use too, and who can is whom the API server has the address for.
func (s *sim) checkAddresses() {
	first := map[netip.Addr]use{}
	for _, u := range s.uses() {
		other, taken := first[u.addr]
		if taken {
			s.fail("address %s is that of %s, and of %s", u.addr, other, u)
		}
		first[u.addr] = u
		object := s.api.addresses[v2alpha1.AddressName(theNetwork.Name, u.addr)]
		switch {
		case object == nil:
			s.fail("address %s of %s is nobody's by the API server", u.addr, u)
		case object.Spec.Node != u.node || object.Spec.Device != u.device || !slices.Contains(u.claims, kubetypes.UID(object.Spec.Claim.UID)):
			s.fail("address %s of %s is that of %s of %s, claim %s, by the API server", u.addr, u, object.Spec.Device, object.Spec.Node, object.Spec.Claim.UID)
		}
	}
}

// owedAddresses returns which addresses are not as they should be when everything has been at rest for long.
func (s *sim) owedAddresses(allotted map[string]*claim) []string {
	var owed []string
	say := func(format string, args ...any) { owed = append(owed, fmt.Sprintf(format, args...)) }
	for _, a := range s.api.sortedAddresses() {
		if c := allotted[a.Spec.Device]; a.Spec.Node != nodeName || c == nil || string(c.uid) != a.Spec.Claim.UID {
			say("address %s is that of %s of %s, claim %s", a.Name, a.Spec.Device, a.Spec.Node, a.Spec.Claim.UID)
		}
	}
	for _, v := range s.kernel.vfs {
		if c := allotted[v.name]; c != nil && c.network != "" && s.kernel.namespaces[v.netns] != nil && len(v.addresses) != 2 {
			say("%s of claim %s has addresses %v", v, c.name, v.addresses)
		}
	}
	for _, n := range s.others {
		if n.agent == nil || len(n.pods)+len(n.journal)+len(n.links) > 0 {
			say("%s has %d pods, %d links in them and %d entries in its journal", n.name, len(n.pods), len(n.links), len(n.journal))
		}
	}
	return owed
}
