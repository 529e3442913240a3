// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/nic"
)

// address is an address as the kernel has it.
type address struct {
	// Local is the NIC's own address.
	Local netip.Addr `json:"local"`
	// Peer is the other end of a point-to-point link, if there is one.
	Peer netip.Addr `json:"peer,omitzero"`
	// PrefixLen belongs to Peer if there is one.
	PrefixLen int        `json:"prefixLen"`
	Broadcast netip.Addr `json:"broadcast,omitzero"`
	Label     string     `json:"label,omitempty"`
	// Scope is one of rtnetlink(7): 0 is global, 253 the link.
	Scope int `json:"scope"`
	// Flags are those of if_addr.h that whoever adds an address may set.
	Flags int `json:"flags,omitempty"`
	// Temporary marks an IPv6 address that the kernel makes and replaces by itself (RFC 8981).
	Temporary bool `json:"temporary,omitempty"`
	// Valid and Preferred are seconds that were left when the address was read; forever means what it says.
	Valid     uint32 `json:"validLifetime"`
	Preferred uint32 `json:"preferredLifetime"`
}

const (
	forever = ^uint32(0) // INFINITY_LIFE_TIME of linux/if_addr.h
	// settableFlags are those that the kernel does not derive by itself.
	settableFlags = unix.IFA_F_NODAD | unix.IFA_F_HOMEADDRESS | unix.IFA_F_MANAGETEMPADDR | unix.IFA_F_NOPREFIXROUTE |
		unix.IFA_F_MCAUTOJOIN
)

// forPod says whether the pod keeps the address. An IPv6 address that is not global is the kernel's business, and a
// temporary one would not be renewed.
func (a address) forPod() bool {
	return a.Local.Is4() || (a.Scope == unix.RT_SCOPE_UNIVERSE && !a.Temporary)
}

// same says whether two addresses are one to the kernel: it has each once.
func (a address) same(b address) bool {
	return a.Local == b.Local && a.Peer == b.Peer && a.PrefixLen == b.PrefixLen
}

func addressOf(a netlink.Addr) (address, bool) {
	local, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return address{}, false
	}
	out := address{
		Local: local.Unmap(), Label: a.Label, Scope: a.Scope, Flags: a.Flags & settableFlags,
		Valid: uint32(a.ValidLft), Preferred: uint32(a.PreferedLft),
	}
	out.PrefixLen, _ = a.Mask.Size()
	if a.Peer != nil {
		if peer, ok := netip.AddrFromSlice(a.Peer.IP); ok {
			out.Peer = peer.Unmap()
			out.PrefixLen, _ = a.Peer.Mask.Size()
		}
	}
	if broadcast, ok := netip.AddrFromSlice(a.Broadcast); ok {
		out.Broadcast = broadcast.Unmap()
	}
	out.Temporary = local.Is6() && !local.Is4In6() && a.Flags&unix.IFA_F_TEMPORARY != 0
	return out, true
}

// toKernel is the address with the lifetimes that are left after some seconds; false when it has ended by then.
func (a address) toKernel(elapsed uint32) (netlink.Addr, bool) {
	bits := a.Local.BitLen()
	out := netlink.Addr{
		IPNet: &net.IPNet{IP: a.Local.AsSlice(), Mask: net.CIDRMask(a.PrefixLen, bits)},
		Label: a.Label, Flags: a.Flags, Scope: a.Scope,
	}
	if a.Peer.IsValid() {
		out.IPNet.Mask = net.CIDRMask(bits, bits)
		out.Peer = &net.IPNet{IP: a.Peer.AsSlice(), Mask: net.CIDRMask(a.PrefixLen, bits)}
	}
	if a.Local.Is4() {
		// The library makes up a broadcast address unless it is told that there is none.
		out.Broadcast = net.IPv4zero
		if a.Broadcast.IsValid() {
			out.Broadcast = a.Broadcast.AsSlice()
		}
	}
	left := func(lifetime uint32) uint32 {
		if lifetime == forever {
			return forever
		}
		return lifetime - min(lifetime, elapsed)
	}
	out.ValidLft, out.PreferedLft = int(left(a.Valid)), int(left(a.Preferred))
	return out, out.ValidLft > 0
}

// addressesOf returns the addresses of a link, in the kernel's order.
func addressesOf(in *nic.Place, index int) ([]address, error) {
	list, err := in.Addrs(index)
	if err != nil {
		return nil, err
	}
	var addrs []address
	for _, a := range list {
		if a, ok := addressOf(a); ok {
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

// validate refuses what the kernel could not have reported.
func (a address) validate() error {
	switch {
	case !a.Local.IsValid() || a.Local.Is4In6() || a.Local.Zone() != "":
		return fmt.Errorf("address %s", a.Local)
	case a.PrefixLen < 0 || a.PrefixLen > a.Local.BitLen():
		return fmt.Errorf("address %s: prefix length %d", a.Local, a.PrefixLen)
	case a.Peer.IsValid() && (a.Peer.BitLen() != a.Local.BitLen() || a.Peer.Zone() != ""):
		return fmt.Errorf("address %s: peer %s", a.Local, a.Peer)
	case a.Broadcast.IsValid() && !a.Broadcast.Is4():
		return fmt.Errorf("address %s: broadcast %s", a.Local, a.Broadcast)
	case len(a.Label) > nic.MaxNameLen || a.Scope < 0 || a.Scope > 255 || a.Flags&^settableFlags != 0:
		return fmt.Errorf("address %s: label %.64q, scope %d or flags %#x", a.Local, a.Label, a.Scope, a.Flags)
	}
	return nil
}

// restoreAddresses adds those addresses that a link lacks, with the lifetimes that are left after some seconds. It goes
// on after a failure. Addresses that were added since stay.
func restoreAddresses(in *nic.Place, index int, want []address, elapsed uint32) error {
	have, err := addressesOf(in, index)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range inOrderOfAdding(want) {
		if a.Temporary || slices.ContainsFunc(have, a.same) {
			continue
		}
		out, alive := a.toKernel(elapsed)
		if !alive {
			continue
		}
		// A link that is down has no link-local address of the kernel's own making; one that comes up makes it meanwhile.
		if err := in.AddAddr(index, &out); err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("add address %s/%d: %w", a.Local, a.PrefixLen, err))
		}
	}
	return errors.Join(errs...)
}

// inOrderOfAdding orders addresses so that the kernel lists them as they are: it lists the IPv4 address first that came
// first, which is its network's primary one, but the IPv6 address first that came last.
func inOrderOfAdding(addrs []address) []address {
	var four, six []address
	for _, a := range addrs {
		if a.Local.Is4() {
			four = append(four, a)
		} else {
			six = append(six, a)
		}
	}
	slices.Reverse(six)
	return append(four, six...)
}
