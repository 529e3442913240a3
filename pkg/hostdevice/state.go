// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/utils"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// nicState is what a NIC has on the host, and gets back.
type nicState struct {
	Name     string   `json:"name"`
	Alias    string   `json:"alias,omitempty"`
	AltNames []string `json:"altNames,omitempty"`
	// MTU in bytes, 0 for unknown.
	MTU int `json:"mtu"`
	// MAC is the hardware address in colon notation, empty for unknown.
	MAC      string `json:"mac,omitempty"`
	Up       bool   `json:"up"`
	Promisc  bool   `json:"promisc,omitempty"`
	AllMulti bool   `json:"allMulticast,omitempty"`
	NoARP    bool   `json:"noARP,omitempty"`
	// XDP is the ID of the XDP program that the host runs on it, 0 for none.
	XDP uint32 `json:"xdpProgram,omitempty"`
	// Addresses are in the kernel's order: the first of an IPv4 network is its primary one.
	Addresses []address `json:"addresses,omitempty"`
}

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

// state reads what a NIC has.
func (s *side) state(link netlink.Link) (nicState, error) {
	attrs := link.Attrs()
	st := nicState{
		Name: attrs.Name, Alias: attrs.Alias, AltNames: attrs.AltNames, MTU: attrs.MTU, MAC: attrs.HardwareAddr.String(),
		Up: isUp(link), Promisc: attrs.RawFlags&unix.IFF_PROMISC != 0,
		AllMulti: attrs.RawFlags&unix.IFF_ALLMULTI != 0, NoARP: attrs.RawFlags&unix.IFF_NOARP != 0,
	}
	if attrs.Xdp != nil && attrs.Xdp.Attached {
		st.XDP = attrs.Xdp.ProgId
	}
	addrs, err := s.addresses(attrs.Index)
	if err != nil {
		return nicState{}, err
	}
	for _, a := range addrs {
		if a, ok := addressOf(a); ok {
			st.Addresses = append(st.Addresses, a)
		}
	}
	return st, nil
}

// validate refuses what the kernel could not have reported, since the state comes from a file.
func (st nicState) validate() error {
	if err := utils.ValidateInterfaceName(st.Name); err != nil {
		return fmt.Errorf("name %.64q: %s", st.Name, err.Msg)
	}
	if st.MTU < 0 || len(st.Alias) > 255 {
		return fmt.Errorf("MTU %d or alias of %d bytes", st.MTU, len(st.Alias))
	}
	if _, err := net.ParseMAC(st.MAC); st.MAC != "" && err != nil {
		return err
	}
	for _, name := range st.AltNames {
		if name == "" || len(name) >= 128 {
			return fmt.Errorf("alternative name of %d bytes", len(name))
		}
	}
	for _, a := range st.Addresses {
		switch {
		case !a.Local.IsValid() || a.Local.Is4In6() || a.Local.Zone() != "":
			return fmt.Errorf("address %s", a.Local)
		case a.PrefixLen < 0 || a.PrefixLen > a.Local.BitLen():
			return fmt.Errorf("address %s: prefix length %d", a.Local, a.PrefixLen)
		case a.Peer.IsValid() && (a.Peer.BitLen() != a.Local.BitLen() || a.Peer.Zone() != ""):
			return fmt.Errorf("address %s: peer %s", a.Local, a.Peer)
		case a.Broadcast.IsValid() && !a.Broadcast.Is4():
			return fmt.Errorf("address %s: broadcast %s", a.Local, a.Broadcast)
		case len(a.Label) > 15 || a.Scope < 0 || a.Scope > 255 || a.Flags&^settableFlags != 0:
			return fmt.Errorf("address %s: label %.64q, scope %d or flags %#x", a.Local, a.Label, a.Scope, a.Flags)
		}
	}
	return nil
}

// restore makes a NIC of the namespace what it was, elapsed seconds after that was read. It changes only what differs,
// so that it can be repeated, and goes on after a failure. Addresses that were added since stay. A name that another
// link has is not an error here; what it is called then is for the caller to look at.
func (s *side) restore(link netlink.Link, want nicState, elapsed uint32) error {
	attrs := link.Attrs()
	index := attrs.Index
	var errs []error
	try := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	name, err := s.nameFor(link, want.Name)
	try("look at names", err)
	mac, _ := net.ParseMAC(want.MAC)
	newMAC := len(mac) == len(attrs.HardwareAddr) && !slices.Equal(mac, attrs.HardwareAddr)
	up := isUp(link)
	if up && (name != "" || newMAC) {
		// Not every kernel and driver changes these while a NIC is up.
		try("take down", s.Change(index, rtlink.Change{Mask: unix.IFF_UP}))
		up = false
	}
	if name != "" {
		try("rename to "+name, s.Change(index, rtlink.Change{Name: name}))
	}
	if attrs.Alias != want.Alias {
		try("set alias", s.handle.LinkSetAlias(device(index), want.Alias))
	}
	if newMAC {
		try("set MAC "+want.MAC, s.Change(index, rtlink.Change{MAC: mac}))
	}
	if want.MTU > 0 && attrs.MTU != want.MTU {
		try(fmt.Sprint("set MTU ", want.MTU), s.Change(index, rtlink.Change{MTU: want.MTU}))
	}
	have := attrs.RawFlags & stateFlags
	if !up {
		have &^= unix.IFF_UP
	}
	if want.flags() != have {
		try("set flags", s.Change(index, rtlink.Change{Flags: want.flags(), Mask: stateFlags}))
	}
	if xdp := attrs.Xdp; xdp != nil && xdp.Attached && xdp.ProgId != want.XDP {
		// A program of the pod's must not see the host's packets.
		if err := s.RemoveXDP(link); !errors.Is(err, unix.EBUSY) { // one that a process holds goes with that
			try("keep XDP programs off the host", err)
		}
	}
	for _, alt := range attrs.AltNames {
		if !slices.Contains(want.AltNames, alt) {
			try("restore names", s.RemoveAltName(index, alt))
		}
	}
	for _, alt := range want.AltNames {
		if !slices.Contains(attrs.AltNames, alt) {
			// Another link may have it by now, which is that link's good right.
			if err := s.AddAltName(index, alt); !errors.Is(err, unix.EEXIST) {
				try("restore names", err)
			}
		}
	}
	errs = append(errs, s.restoreAddresses(index, want.Addresses, elapsed)...)
	return errors.Join(errs...)
}

// stateFlags are the flags of a NIC that it gets back.
const stateFlags = unix.IFF_UP | unix.IFF_PROMISC | unix.IFF_ALLMULTI | unix.IFF_NOARP

func (st nicState) flags() (flags uint32) {
	for _, f := range []struct {
		set  bool
		flag uint32
	}{{st.Up, unix.IFF_UP}, {st.Promisc, unix.IFF_PROMISC}, {st.AllMulti, unix.IFF_ALLMULTI}, {st.NoARP, unix.IFF_NOARP}} {
		if f.set {
			flags |= f.flag
		}
	}
	return flags
}

// restoreAddresses adds the addresses that are missing.
func (s *side) restoreAddresses(index int, want []address, elapsed uint32) (errs []error) {
	list, err := s.addresses(index)
	if err != nil {
		return []error{err}
	}
	var have []address
	for _, a := range list {
		if a, ok := addressOf(a); ok {
			have = append(have, a)
		}
	}
	for _, a := range inOrderOfAdding(want) {
		if a.Temporary || slices.ContainsFunc(have, a.same) {
			continue
		}
		out, alive := a.toKernel(elapsed)
		if !alive {
			continue
		}
		// A link that is down has no link-local address of the kernel's own making; one that comes up makes it meanwhile.
		if err := s.handle.AddrAdd(device(index), &out); err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("add address %s/%d: %w", a.Local, a.PrefixLen, err))
		}
	}
	return errs
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

// standIn names NICs whose name on the host another link has; the kernel puts the lowest free number in.
const standIn = "amdnic%d"

// nameFor returns the name or pattern that a link of the namespace is to be given, empty to leave it as it is.
func (s *side) nameFor(link netlink.Link, want string) (string, error) {
	if link.Attrs().Name == want {
		return "", nil
	}
	other, err := s.ByName(want)
	switch {
	case err != nil:
		return "", err
	case other == nil:
		return want, nil
	case other.Attrs().Index != link.Attrs().Index:
		return "", nil
	}
	// It is an alternative name of the link itself, which somebody gave it while it had another name.
	link.Attrs().AltNames = slices.DeleteFunc(link.Attrs().AltNames, func(alt string) bool { return alt == want })
	return want, s.RemoveAltName(link.Attrs().Index, want)
}

// freeName returns the name that a link coming to the namespace is to be given.
func (s *side) freeName(want string) (string, error) {
	other, err := s.ByName(want)
	if err != nil {
		return "", err
	}
	if other != nil {
		return standIn, nil
	}
	return cmp.Or(want, standIn), nil
}
