// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// Limits of the schema of networks.
const (
	maxVLAN          = 4094
	maxVLANPriority  = 7
	minMTU, maxMTU   = 68, 65535
	minMTUWithIPv6   = 1280
	maxARPIgnore     = 8
	maxARPAnnounce   = 2
	maxRPFilter      = 2
	maxAcceptRA      = 2
	maxSubnets       = 8
	maxRanges        = 16
	maxExcluded      = 64
	maxRoutes        = 32
	maxDerivedPrefix = 32
	maxNextHopOffset = math.MaxUint32
	minRetain        = time.Second
	maxRetain        = 8760 * time.Hour
)

// What the schema's rules on networks say when they are broken, also said here.
const (
	networkNameMessage = "the name of a network must have at most 63 characters and no dot"
	priorityMessage    = "a priority is part of a VLAN's tag: the network needs a vlan, or no vlanPriority"
	protocolMessage    = "a protocol is that of a VLAN's tag: the network needs a vlan, or no vlanProtocol"
	rateMessage        = "must not be more than maxTxRate"
	mtuMessage         = "must be at least 1280 in a network with IPv6"
	subnetMessage      = "must be a subnet with no bit set beyond the prefix length, in canonical form: for example 192.0.2.0/24 or 2001:db8::/64"
	addressMessage     = "must be an address in canonical form"
	excludeMessage     = "must be an address or a subnet in canonical form"
	overlapMessage     = "two subnets of a network must not overlap"
	gatewayMessage     = "must be an address of the subnet"
	noGatewayMessage   = "a subnet of one address has no gateway"
	rangeMessage       = "a range must be in the subnet"
	familyMessage      = "must be of the family of to"
	nextHopMessage     = "a route without via needs a subnet of its family with a gateway"
	noReuseMessage     = "there is no address to use again without subnets"
	noSubnetsMessage   = "there is nothing to route by without subnets"
)

// vlanProtocols and linkStates are what a network may name.
var (
	vlanProtocols = []string{VlanProtocol8021Q, VlanProtocol8021ad}
	linkStates    = []string{LinkStateAuto, LinkStateEnable, LinkStateDisable}
	reuseModes    = []string{AddressReuseNone, AddressReusePodName}
)

// Validate returns what is wrong with a network, or nil. The error names every
// field at fault and what it may hold. It also says what the schema's rules
// cannot: that a range is reversed, a next hop in no subnet, or nothing is
// left to give out.
func (n *CiliumNetworkDriverNetwork) Validate() error {
	var errs field.ErrorList
	if utf8.RuneCountInString(n.Name) > maxDomainLength || strings.Contains(n.Name, ".") {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), n.Name, networkNameMessage))
	}
	return append(errs, n.Spec.validate(field.NewPath("spec"))...).ToAggregate()
}

func (s *CiliumNetworkDriverNetworkSpec) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.NamespaceSelector == nil {
		errs = append(errs, field.Required(path.Child("namespaceSelector"), ""))
	} else {
		errs = s.NamespaceSelector.validate(path.Child("namespaceSelector"))
	}
	errs = append(errs, validateSet(path.Child("pools"), s.Pools, maxPools, domainFormat.validate)...)
	errs = append(errs, validateRange(path.Child("vlan"), s.Vlan, 0, maxVLAN)...)
	errs = append(errs, validateRange(path.Child("vlanPriority"), s.VlanPriority, 0, maxVLANPriority)...)
	if s.VlanPriority > 0 && s.Vlan == 0 {
		errs = append(errs, field.Invalid(path.Child("vlanPriority"), s.VlanPriority, priorityMessage))
	}
	switch s.VlanProtocol {
	case "", VlanProtocol8021Q:
	case VlanProtocol8021ad:
		if s.Vlan == 0 {
			errs = append(errs, field.Invalid(path.Child("vlanProtocol"), s.VlanProtocol, protocolMessage))
		}
	default:
		errs = append(errs, field.NotSupported(path.Child("vlanProtocol"), s.VlanProtocol, vlanProtocols))
	}
	if s.MTU != 0 {
		errs = append(errs, validateRange(path.Child("mtu"), s.MTU, minMTU, maxMTU)...)
	}
	if s.VF != nil {
		errs = append(errs, s.VF.validate(path.Child("vf"))...)
	}
	if s.Interface != nil {
		errs = append(errs, s.Interface.validate(path.Child("interface"))...)
	}
	return append(errs, s.validateAddressing(path)...)
}

func (i *NetworkInterface) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, setting := range []struct {
		field   string
		value   *int32
		highest int32
	}{
		{"arpIgnore", i.ARPIgnore, maxARPIgnore}, {"arpAnnounce", i.ARPAnnounce, maxARPAnnounce}, {"rpFilter", i.RPFilter, maxRPFilter},
		{"acceptRA", i.AcceptRA, maxAcceptRA},
	} {
		errs = append(errs, validateRange(path.Child(setting.field), ptr.Deref(setting.value, 0), 0, setting.highest)...)
	}
	return errs
}

func (v *NetworkVF) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if v.LinkState != "" && !slices.Contains(linkStates, v.LinkState) {
		errs = append(errs, field.NotSupported(path.Child("linkState"), v.LinkState, linkStates))
	}
	minRate, maxRate := ptr.Deref(v.MinTxRate, 0), ptr.Deref(v.MaxTxRate, 0)
	errs = append(errs, validateRange(path.Child("minTxRate"), minRate, 0, math.MaxInt32)...)
	errs = append(errs, validateRange(path.Child("maxTxRate"), maxRate, 0, math.MaxInt32)...)
	if maxRate > 0 && minRate > maxRate {
		errs = append(errs, field.Invalid(path.Child("minTxRate"), minRate, rateMessage))
	}
	return errs
}

// validateAddressing is about subnets and routes.
func (s *CiliumNetworkDriverNetworkSpec) validateAddressing(path *field.Path) field.ErrorList {
	subnets := path.Child("subnets")
	errs := validateLength(subnets, len(s.Subnets), maxSubnets)
	var cidrs []netip.Prefix
	gateways := map[bool]bool{} // by whether the subnet is one of IPv4
	for i := range s.Subnets {
		if invalid := s.Subnets[i].validate(subnets.Index(i)); len(invalid) > 0 {
			errs = append(errs, invalid...)
		} else if set, err := s.Addresses(i); err != nil {
			errs = append(errs, field.Invalid(subnets.Index(i), s.Subnets[i].CIDR, err.Error()))
		} else if len(set.Ranges()) == 0 {
			errs = append(errs, field.Invalid(subnets.Index(i), s.Subnets[i].CIDR, "has no address that could be given out"))
		}
		cidr, err := parseSubnet(s.Subnets[i].CIDR)
		if err != nil {
			continue
		}
		for _, other := range cidrs {
			if other.Overlaps(cidr) {
				errs = append(errs, field.Invalid(subnets, s.Subnets[i].CIDR, fmt.Sprintf("%s: %s has addresses of it too", overlapMessage, other)))
			}
		}
		cidrs = append(cidrs, cidr)
		gateways[cidr.Addr().Is4()] = gateways[cidr.Addr().Is4()] || s.Subnets[i].Gateway != ""
		if s.MTU != 0 && s.MTU < minMTUWithIPv6 && !cidr.Addr().Is4() {
			errs = append(errs, field.Invalid(path.Child("mtu"), s.MTU, mtuMessage))
		}
	}
	if r := s.AddressReuse; r != nil {
		reuse := path.Child("addressReuse")
		if !slices.Contains(reuseModes, r.Mode) {
			errs = append(errs, field.NotSupported(reuse.Child("mode"), r.Mode, reuseModes))
		} else if r.Mode != AddressReuseNone && len(s.Subnets) == 0 {
			errs = append(errs, field.Invalid(reuse, r.Mode, noReuseMessage))
		}
		if retain, err := time.ParseDuration(r.Retain); r.Retain != "" && (err != nil || retain < minRetain || retain > maxRetain) {
			errs = append(errs, field.Invalid(reuse.Child("retain"), r.Retain, "must be 1s to 8760h"))
		}
	}
	routes := path.Child("routes")
	errs = append(errs, validateLength(routes, len(s.Routes), maxRoutes)...)
	type key struct {
		to     string
		metric int32
	}
	seen := map[key]bool{}
	for i, r := range s.Routes {
		route := routes.Index(i)
		if seen[key{r.To, r.Metric}] {
			errs = append(errs, field.Duplicate(route, r.To))
		}
		seen[key{r.To, r.Metric}] = true
		errs = append(errs, validateRange(route.Child("metric"), r.Metric, 0, math.MaxInt32)...)
		to, err := parseSubnet(r.To)
		if err != nil {
			errs = append(errs, field.Invalid(route.Child("to"), r.To, subnetMessage))
			continue
		}
		if r.Via == "" {
			if !gateways[to.Addr().Is4()] {
				errs = append(errs, field.Invalid(routes, r.To, nextHopMessage))
			}
			continue
		}
		via, err := parseAddress(r.Via)
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(route.Child("via"), r.Via, addressMessage))
		case via.Is4() != to.Addr().Is4():
			errs = append(errs, field.Invalid(route.Child("via"), r.Via, familyMessage))
		case !slices.ContainsFunc(cidrs, func(c netip.Prefix) bool { return c.Contains(via) }):
			errs = append(errs, field.Invalid(route.Child("via"), r.Via, "must be in one of the network's subnets"))
		}
	}
	if p := s.PolicyRouting; p != nil {
		policy := path.Child("policyRouting")
		if len(s.Subnets) == 0 {
			errs = append(errs, field.Invalid(policy, "", noSubnetsMessage))
		}
		if d := p.Derive; d != nil {
			if d.NexthopNetAddrOffset < 0 || d.NexthopNetAddrOffset > maxNextHopOffset {
				errs = append(errs, field.Invalid(policy.Child("derive", "nexthopNetAddrOffset"), d.NexthopNetAddrOffset, fmt.Sprintf("must be 0 to %d", int64(maxNextHopOffset))))
			}
			errs = append(errs, validateRange(policy.Child("derive", "routeDstPrefixLen"), d.RouteDstPrefixLen, 0, maxDerivedPrefix)...)
		}
	}
	return errs
}

func (s *NetworkSubnet) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.NodeSelector != nil {
		errs = (&LabelSelector{MatchLabels: s.NodeSelector.MatchLabels}).validate(path.Child("nodeSelector"))
	}
	errs = append(errs, validateLength(path.Child("ranges"), len(s.Ranges), maxRanges)...)
	errs = append(errs, validateSet(path.Child("exclude"), s.Exclude, maxExcluded, func(path *field.Path, value string) field.ErrorList {
		if _, err := parseExcluded(value); err != nil {
			return field.ErrorList{field.Invalid(path, value, excludeMessage)}
		}
		return nil
	})...)
	cidr, err := parseSubnet(s.CIDR)
	if err != nil {
		return append(errs, field.Invalid(path.Child("cidr"), s.CIDR, subnetMessage))
	}
	if a := cidr.Addr(); a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() {
		errs = append(errs, field.Invalid(path.Child("cidr"), s.CIDR, "must be a subnet of unicast addresses, not of the loopback interface or of a link"))
	}
	if s.Gateway != "" {
		gateway, err := parseAddress(s.Gateway)
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(path.Child("gateway"), s.Gateway, addressMessage))
		case cidr.IsSingleIP():
			errs = append(errs, field.Invalid(path.Child("gateway"), s.Gateway, noGatewayMessage))
		case !cidr.Contains(gateway):
			errs = append(errs, field.Invalid(path.Child("gateway"), s.Gateway, gatewayMessage))
		case gateway.Is4() && cidr.Bits() < 31 && (gateway == cidr.Addr() || gateway == netipx.PrefixLastIP(cidr)):
			errs = append(errs, field.Invalid(path.Child("gateway"), s.Gateway, "must be a host of the subnet, not its first or last address"))
		}
	}
	for i, r := range s.Ranges {
		at := path.Child("ranges").Index(i)
		from, fromErr := parseAddress(r.From)
		to, toErr := parseAddress(r.To)
		if fromErr != nil {
			errs = append(errs, field.Invalid(at.Child("from"), r.From, addressMessage))
		}
		if toErr != nil {
			errs = append(errs, field.Invalid(at.Child("to"), r.To, addressMessage))
		}
		switch {
		case fromErr != nil || toErr != nil:
		case !cidr.Contains(from) || !cidr.Contains(to):
			errs = append(errs, field.Invalid(path.Child("ranges"), r.From+" to "+r.To, rangeMessage))
		case to.Less(from):
			errs = append(errs, field.Invalid(at, r.From+" to "+r.To, "must begin with its lower end"))
		}
	}
	if len(errs) > 0 {
		return errs
	}
	return nil
}

// parseSubnet takes the form that the API takes, which each subnet has one of.
func parseSubnet(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(s)
	if err == nil && (prefix.Masked().String() != s || prefix.Addr().Is4In6()) {
		err = fmt.Errorf("%q is not %s", s, prefix.Masked())
	}
	return prefix, err
}

// parseAddress takes the form that the API takes, which each address has one of.
func parseAddress(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err == nil && (addr.String() != s || addr.Zone() != "" || addr.Is4In6()) {
		err = fmt.Errorf("%q is not %s", s, addr)
	}
	return addr, err
}

// parseExcluded takes an address for the subnet of that address.
func parseExcluded(s string) (netip.Prefix, error) {
	if addr, err := parseAddress(s); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	return parseSubnet(s)
}

// KeepFor returns how long the network, which is valid, keeps an address for
// its pod after it was released; 0 for a network that does not.
func (s *CiliumNetworkDriverNetworkSpec) KeepFor() time.Duration {
	if s.AddressReuse == nil || s.AddressReuse.Mode != AddressReusePodName {
		return 0
	}
	retain, err := time.ParseDuration(s.AddressReuse.Retain)
	if err != nil {
		return DefaultAddressRetain // left out
	}
	return retain
}
