// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"errors"
	"fmt"
	"math"
	"net/netip"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

// maxVLANPriority is the highest priority of a VLAN's tag (802.1p).
const maxVLANPriority = 7

// maxMTU is the highest MTU of the API.
const maxMTU = 65535

// Network is what a device's link is on a network.
type Network struct {
	// VLAN is the VLAN id, 0 for none.
	VLAN int `json:"vlan,omitempty"`
	// VLANPriority is the priority in the tag, 0 to 7.
	VLANPriority int `json:"vlanPriority,omitempty"`
	// VLANProtocol is the tag's protocol as the API names it, empty for 802.1Q.
	VLANProtocol string `json:"vlanProtocol,omitempty"`
	// MTU is that of the link in the pod in bytes, 0 for what the device has.
	MTU int `json:"mtu,omitempty"`
	// VF are the rights of a VF.
	VF VFRights `json:"vf,omitzero"`
	// Interface are settings of the link in the pod.
	Interface InterfaceSettings `json:"interface,omitzero"`
	// Addresses are the device's own, with the prefix length of their subnets: one of each family at most.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// Lacks is the family that the network has subnets of, though none for the device's node; empty for none. The device has no address
	// of it.
	Lacks Family `json:"lacks,omitempty"`
	// Routes are those to set in the pod, beside those to the addresses' subnets.
	Routes []Route `json:"routes,omitempty"`
	// PolicyRouting says that what is sent from the addresses goes by a table of the device's own, which has the routes.
	PolicyRouting bool `json:"policyRouting,omitempty"`
	// Reservation says which device of its pod this is, for a network that keeps the addresses for the next pod of the name; nil for
	// one that does not.
	Reservation *v2alpha1.AddressReservation `json:"reservation,omitempty"`
	// Offer is what the addresses are chosen from; nil when they are chosen, or there are none. It is not stored.
	Offer *Offer `json:"-"`
}

// Family is IPv4 or IPv6, as people write them.
type Family string

const (
	IPv4 Family = "IPv4"
	IPv6 Family = "IPv6"
)

// FamilyOf returns the family of an address.
func FamilyOf(addr netip.Addr) Family {
	if addr.Is4() {
		return IPv4
	}
	return IPv6
}

// Route is a route in a pod.
type Route struct {
	// To is the destination, with no bit set beyond its prefix length.
	To netip.Prefix `json:"to"`
	// Via is the next hop, of the same family.
	Via netip.Addr `json:"via"`
	// Metric is the route's priority, 0 for the kernel's default.
	Metric int `json:"metric,omitempty"`
}

// Offer is what a network has for the devices of one node.
type Offer struct {
	// Subnets are in the order in which they are tried.
	Subnets []Subnet
	// Routes are those of the network. One without a next hop goes by the gateway of the device's subnet, and one whose
	// next hop is in another subnet than the device's is left out.
	Routes []Route
	// Derive says which routes to derive from IPv4 addresses; nil for none.
	Derive *policyroute.Config
	// Reserve says that the addresses are kept for the next pod of the name.
	Reserve bool
	// Unjudged says that devices may use addresses of it from another network, without the operator's having said so: it has not looked at the
	// network as it is, or another network has some of them on the same wire.
	Unjudged bool
}

// Subnet is a subnet with what of it is given out.
type Subnet struct {
	Prefix    netip.Prefix
	Addresses *netipx.IPSet
	// Gateway is the zero value for none.
	Gateway netip.Addr
	// Certain says that the set is the one address that was asked for.
	Certain bool
}

// Route returns the route of a network as a device with an address of the subnet gets it; false for none.
func (s Subnet) Route(r Route) (Route, bool) {
	if !r.Via.IsValid() && s.Prefix.Addr().Is4() == r.To.Addr().Is4() {
		r.Via = s.Gateway
	}
	return r, r.Via.IsValid() && s.Prefix.Contains(r.Via)
}

// InterfaceSettings are those that the API has of an interface in a pod. What is nil stays as it is in the pod, but for
// AcceptRA, which is 0 then.
type InterfaceSettings struct {
	ARPIgnore   *int  `json:"arpIgnore,omitempty"`
	ARPAnnounce *int  `json:"arpAnnounce,omitempty"`
	RPFilter    *int  `json:"rpFilter,omitempty"`
	Forwarding  *bool `json:"forwarding,omitempty"`
	AcceptRA    *int  `json:"acceptRA,omitempty"`
}

// maxInterfaceSetting is the highest value of any of them.
const maxInterfaceSetting = 8

func (s InterfaceSettings) check() error {
	for _, setting := range []struct {
		field string
		value *int
	}{{"arpIgnore", s.ARPIgnore}, {"arpAnnounce", s.ARPAnnounce}, {"rpFilter", s.RPFilter}, {"acceptRA", s.AcceptRA}} {
		if setting.value != nil && (*setting.value < 0 || *setting.value > maxInterfaceSetting) {
			return fmt.Errorf("%s: %d is not in 0..%d", setting.field, *setting.value, maxInterfaceSetting)
		}
	}
	return nil
}

// VFRights are what a PF lets a VF do, and limits it to. What is not set stays as it is.
type VFRights struct {
	Trust      *bool  `json:"trust,omitempty"`
	SpoofCheck *bool  `json:"spoofCheck,omitempty"`
	LinkState  string `json:"linkState,omitempty"` // as the API names it
	// MinTxRate and MaxTxRate are in Mbit/s, 0 for none.
	MinTxRate *int `json:"minTxRate,omitempty"`
	MaxTxRate *int `json:"maxTxRate,omitempty"`
}

// IsZero says whether none is set.
func (r VFRights) IsZero() bool { return r == VFRights{} }

// Of returns those of the rights that the others, which are wanted, change. The two rates are set together.
func (r VFRights) Of(wanted VFRights) VFRights {
	if wanted.Trust == nil {
		r.Trust = nil
	}
	if wanted.SpoofCheck == nil {
		r.SpoofCheck = nil
	}
	if wanted.LinkState == "" {
		r.LinkState = ""
	}
	if wanted.MinTxRate == nil && wanted.MaxTxRate == nil {
		r.MinTxRate, r.MaxTxRate = nil, nil
	}
	return r
}

// Tag is the VLAN tag that a PF puts on a VF's frames and takes off. The zero value is none.
type Tag struct {
	// VLAN is the VLAN id, 0 for none.
	VLAN int
	// Priority is the priority in the tag, 0 to 7.
	Priority int
	// Protocol is the tag's protocol as the API names it, empty for 802.1Q.
	Protocol string
}

// Tag returns the tag to configure.
func (c DeviceConfig) Tag() Tag {
	switch {
	case c.Joined != nil:
		return Tag{VLAN: c.Joined.VLAN, Priority: c.Joined.VLANPriority, Protocol: c.Joined.VLANProtocol}
	case c.Vlan != nil:
		return Tag{VLAN: *c.Vlan}
	default:
		return Tag{}
	}
}

// Rights returns the rights to give to a VF.
func (c DeviceConfig) Rights() VFRights {
	if c.Joined == nil {
		return VFRights{}
	}
	return c.Joined.VF
}

// MTU returns the MTU that the link is to have in the pod in bytes, 0 for what the device has.
func (c DeviceConfig) MTU() int {
	if c.Joined == nil {
		return 0
	}
	return c.Joined.MTU
}

// CheckLinkless says what of the network a device without an interface cannot have: VLAN and rights are the PF's to keep,
// and all else an interface's.
func (c DeviceConfig) CheckLinkless() error {
	n := c.Joined
	switch {
	case n == nil:
		return nil
	case n.Offer != nil || len(n.Addresses) > 0:
		return fmt.Errorf("network: %s has subnets, and the device no interface that could have an address; use a network with neither subnets nor routes", c.Network)
	case n.MTU != 0 || n.Interface != (InterfaceSettings{}):
		return fmt.Errorf("network: %s has an mtu or settings of interfaces, and the device no interface that could have them", c.Network)
	}
	return nil
}

// checkNetwork refuses a network that is named and not looked up, and the other way round.
func (c DeviceConfig) checkNetwork() error {
	switch {
	case c.Joined == nil && c.Network == "":
		return nil
	case c.Joined == nil:
		return fmt.Errorf("joined: is missing although the network %.64q is named", c.Network)
	case c.Network == "":
		return errors.New("joined: is set although no network is named")
	}
	if err := ValidateNetworkName(c.Network); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	if err := c.Joined.check(); err != nil {
		return fmt.Errorf("joined.%w", err)
	}
	return nil
}

// ValidateNetworkName checks the name of a network: the API server knows it by a DNS label.
func ValidateNetworkName(name string) error {
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
		return fmt.Errorf("%.64q is not the name of a network: at most 63 lower case letters, digits and '-', beginning and ending with "+
			"a letter or digit, are allowed", name)
	}
	return nil
}

func (n *Network) check() error {
	switch {
	case n.VLAN < 0 || n.VLAN > MaxVLAN:
		return fmt.Errorf("vlan: %d is not in 0..%d", n.VLAN, MaxVLAN)
	case n.VLANPriority < 0 || n.VLANPriority > maxVLANPriority:
		return fmt.Errorf("vlanPriority: %d is not in 0..%d", n.VLANPriority, maxVLANPriority)
	case n.VLANProtocol != "" && n.VLANProtocol != v2alpha1.VlanProtocol8021ad:
		return fmt.Errorf("vlanProtocol: %.64q is not %s", n.VLANProtocol, v2alpha1.VlanProtocol8021ad)
	case n.VLAN == 0 && (n.VLANPriority != 0 || n.VLANProtocol != ""):
		return errors.New("vlan: is missing although priority or protocol of a tag are set")
	case n.MTU < 0 || n.MTU > maxMTU:
		return fmt.Errorf("mtu: %d is not in 0..%d", n.MTU, maxMTU)
	}
	if err := n.VF.Check(); err != nil {
		return fmt.Errorf("vf.%w", err)
	}
	if err := n.Interface.check(); err != nil {
		return fmt.Errorf("interface.%w", err)
	}
	return n.checkAddresses()
}

// Limits of what a network gives a device: an address of each family, and the routes of the API with a derived one.
const maxAddresses, maxRoutes = 2, 33

func (n *Network) checkAddresses() error {
	if len(n.Addresses) > maxAddresses {
		return fmt.Errorf("addresses: there are %d, at most %d are given", len(n.Addresses), maxAddresses)
	}
	for i, a := range n.Addresses {
		if !a.IsValid() || a.Addr().Is4In6() || a.Addr().Zone() != "" {
			return fmt.Errorf("addresses[%d]: is not an address with a prefix length", i)
		}
	}
	if n.Lacks != "" && n.Lacks != IPv4 && n.Lacks != IPv6 {
		return fmt.Errorf("lacks: %.64q is neither %s nor %s", n.Lacks, IPv4, IPv6)
	}
	if len(n.Routes) > maxRoutes {
		return fmt.Errorf("routes: there are %d, at most %d are set", len(n.Routes), maxRoutes)
	}
	for i, r := range n.Routes {
		if !r.To.IsValid() || r.To != r.To.Masked() || !r.Via.IsValid() || r.To.Addr().Is4() != r.Via.Is4() || r.Via.Zone() != "" || r.Metric < 0 || r.Metric > math.MaxInt32 {
			return fmt.Errorf("routes[%d]: is not a route", i)
		}
	}
	return nil
}

// Check refuses what no PF has. The error begins with the field's name.
func (r VFRights) Check() error {
	switch r.LinkState {
	case "", v2alpha1.LinkStateAuto, v2alpha1.LinkStateEnable, v2alpha1.LinkStateDisable:
	default:
		return fmt.Errorf("linkState: %.64q is not a state", r.LinkState)
	}
	for _, rate := range []struct {
		field string
		mbits *int
	}{{"minTxRate", r.MinTxRate}, {"maxTxRate", r.MaxTxRate}} {
		if rate.mbits != nil && (*rate.mbits < 0 || *rate.mbits > math.MaxInt32) {
			return fmt.Errorf("%s: %d is not in 0..%d", rate.field, *rate.mbits, math.MaxInt32)
		}
	}
	return nil
}
