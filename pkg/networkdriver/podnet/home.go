// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	// The kernel takes a dead namespace apart in the background and then puts its physical links on the host.
	// homecomingTimeout is how long that is waited for, well within the runtime's patience with a hook.
	homecomingTimeout  = 500 * time.Millisecond
	homecomingInterval = 10 * time.Millisecond

	// podFlags are flags that a pod may have set and that no link of the host has: they would change what the next pod
	// sees.
	podFlags = unix.IFF_PROMISC | unix.IFF_ALLMULTI
)

// Detach gives the device's link back to the host and restores what [types.Device.HostState] says: name, alternative
// names, MTU, MAC and up or down; promiscuous modes and XDP programs are taken off. It may be repeated at any time: a
// link that is home and right is left alone.
//
// The link is taken from the namespace at netnsPath. Where that is empty, gone, or without the link, it is looked for
// on the host, where the kernel puts physical links of a dead namespace under some name, and then, for a PCI device, in
// every namespace that can be reached. A link without hardware that is nowhere died with its namespace, and a PCI device
// that is off the bus or has no network driver has no link to give back: both are success. A PCI device whose link is
// not found is [ErrUnreachable].
//
// If another link of the host has taken the name or an alternative name meanwhile, that is no error, since the pod
// cannot mend it: the link gets a name like netdrv0, a warning is logged, [Mover.Misnamed] lists the device, and
// [Mover.Repair] or another Detach renames it when its name is free.
func (m *Mover) Detach(ctx context.Context, netnsPath string, dev types.Device) error {
	if dev.Link().IsZero() {
		return nil
	}
	if err := m.detach(ctx, netnsPath, dev); err != nil {
		return fmt.Errorf("detach device %s: %w", dev.IfName(), err)
	}
	return nil
}

func (m *Mover) detach(ctx context.Context, netnsPath string, dev types.Device) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	host, err := m.openHost()
	if err != nil {
		return err
	}
	defer host.close()
	want := dev.HostState()
	if want.Name == "" {
		want.Name = dev.KernelIfName()
	}
	to := m.homeOf(dev.IfName(), dev.Link(), want)

	if netnsPath != "" {
		found, err := m.takeFrom(host, netnsPath, to)
		if found || err != nil {
			return err
		}
	}
	if found, err := m.restoreOnHost(host, to); found || err != nil {
		return err
	}
	if to.id.PCIAddr == "" {
		m.log.Debug("The link is gone with its network namespace", "device", to.device)
		return nil
	}
	if possible, why := m.canHaveLink(to.id.PCIAddr); !possible {
		m.log.Warn("There is no link to give back", "device", to.device, "reason", why)
		return nil
	}
	for ns := range netnamespace.Reachable(ctx, host.ns.ID) {
		if found, err := m.takeFromNamespace(host, ns, to); found || err != nil {
			return err
		}
	}
	return m.awaitHomecoming(ctx, host, to)
}

// takeFrom brings the link home if it is in the namespace at path.
func (m *Mover) takeFrom(host *side, path string, to home) (found bool, err error) {
	ns, err := netnamespace.Open(path)
	if errors.Is(err, netnamespace.ErrNone) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	defer ns.Close()
	if ns.ID == host.ns.ID {
		return false, nil // looked at anyhow, for this device only
	}
	return m.takeFromNamespace(host, ns, to)
}

func (m *Mover) takeFromNamespace(host *side, ns *netnamespace.Namespace, to home) (found bool, err error) {
	c, err := rtlink.Dial(m.log, ns)
	if err != nil {
		return false, err
	}
	defer c.Close()
	link, err := find(c, to.id)
	if err != nil || link == nil {
		return false, err
	}
	return true, m.bringHome(host, &side{Conn: c, ns: ns}, link, to)
}

// bringHome moves a link of another namespace to the host with one request, and then sees to what that did not do.
func (m *Mover) bringHome(host, from *side, link netlink.Link, to home) error {
	attrs := link.Attrs()
	// Names that the pod gave must neither stop the move nor arrive on the host.
	for _, alt := range attrs.AltNames {
		if !slices.Contains(to.want.AltNames, alt) {
			if err := from.RemoveAltName(attrs.Index, alt); err != nil {
				return err
			}
		}
	}
	m.stripXDP(from, link, to)
	name := to.want.Name
	if name == "" {
		name = attrs.Name
	}
	if other, err := host.ByName(name); err != nil {
		return err
	} else if other != nil || !validName(name) {
		name = standInName
	}
	move := difference(link, to)
	move.To, move.Name = host.ns, name
	move.Mask |= unix.IFF_UP // the kernel takes a link down that moves
	err := from.Change(attrs.Index, move)
	if errors.Is(err, unix.EEXIST) {
		if _, altErr := removeTakenAltNames(from, host, link); altErr != nil {
			return altErr
		}
	}
	if err != nil {
		// The kernel stops at what it does not take. What remains to be done is done on the host, the move is not left.
		if here, lookErr := from.ByIndex(attrs.Index); lookErr == nil && here != nil && is(here, to.id) {
			if err := from.Change(attrs.Index, rtlink.Change{To: host.ns, Name: standInName}); err != nil {
				return fmt.Errorf("move link %q from %s to the host: %w", attrs.Name, from.ns.Path, err)
			}
		}
	}
	found, err := m.restoreOnHost(host, to)
	if err == nil && !found {
		err = fmt.Errorf("link %q is not on the host after its move from %s", attrs.Name, from.ns.Path)
	}
	return err
}

// stripXDP takes a pod's programs off. One that cannot be taken off goes when the pod's processes do.
func (m *Mover) stripXDP(at *side, link netlink.Link, to home) {
	if err := at.RemoveXDP(link); err != nil {
		m.log.Warn("An XDP program stays on the link", "device", to.device, "interface", link.Attrs().Name, "error", err)
	}
}

// undo is what Attach does when it fails.
func (m *Mover) undo(host, pod *side, to home) error {
	link, err := find(pod.Conn, to.id)
	if err != nil {
		return err
	}
	if link != nil {
		return m.bringHome(host, pod, link, to)
	}
	found, err := m.restoreOnHost(host, to)
	if err == nil && !found {
		err = ErrLinkGone
	}
	return err
}

// restoreOnHost makes the device's link on the host what it was, and sends nothing if it is.
func (m *Mover) restoreOnHost(host *side, to home) (found bool, err error) {
	link, err := m.findOnHost(host, to.id)
	if err != nil || link == nil {
		return false, err
	}
	attrs := link.Attrs()
	var errs []error
	var todo rtlink.Change
	if !to.namesOnly {
		todo = difference(link, to)
		m.stripXDP(host, link, to)
	}
	for _, alt := range attrs.AltNames {
		if !slices.Contains(to.want.AltNames, alt) {
			errs = append(errs, host.RemoveAltName(attrs.Index, alt))
		}
	}
	var taken []string
	if to.want.Name != "" && attrs.Name != to.want.Name {
		if todo.Name, err = nameFor(host, link, to.want.Name); err != nil {
			errs = append(errs, err)
		}
		if todo.Name != to.want.Name {
			taken = append(taken, to.want.Name)
		}
	}
	for _, err := range host.applyAll(link, todo) {
		if todo.Name == to.want.Name && errors.Is(err, unix.EEXIST) {
			// Somebody has taken the name since nameFor looked.
			taken = append(taken, to.want.Name)
			err = nil
			if !isStandIn(attrs.Name) {
				up := (todo.Flags&todo.Mask | attrs.RawFlags&^todo.Mask) & unix.IFF_UP
				err = host.changeInPlace(attrs.Index, rtlink.Change{Name: standInName, Flags: up})
			}
		}
		errs = append(errs, err)
	}
	for _, alt := range to.want.AltNames {
		if slices.Contains(attrs.AltNames, alt) {
			continue
		}
		err := host.AddAltName(attrs.Index, alt)
		if errors.Is(err, unix.EEXIST) {
			taken = append(taken, alt)
		} else {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return true, fmt.Errorf("restore link %q on the host: %w", attrs.Name, err)
	}
	m.noteNames(to, taken)
	return true, nil
}

// nameFor returns the name that a link of the host is to get: the wanted one, or if another link has that, a stand-in,
// or none if it has one already.
func nameFor(host *side, link netlink.Link, want string) (string, error) {
	other, err := host.ByName(want)
	switch {
	case err != nil:
		return "", err
	case validName(want) && (other == nil || other.Attrs().Index == link.Attrs().Index):
		return want, nil
	case isStandIn(link.Attrs().Name):
		return "", nil
	}
	return standInName, nil
}

// validName refuses what the kernel would not take or take for a pattern. The state comes from a record that others may
// have written.
func validName(name string) bool {
	return name != "" && len(name) <= types.MaxIfNameLen && name != "." && name != ".." &&
		!strings.ContainsAny(name, "/:% \t\n\v\f\r")
}

// difference is what has to be changed of a link but for its name.
func difference(link netlink.Link, to home) rtlink.Change {
	attrs := link.Attrs()
	var ch rtlink.Change
	if to.want.MTU > 0 && attrs.MTU != to.want.MTU {
		ch.MTU = to.want.MTU
	}
	mac, err := net.ParseMAC(to.want.MAC)
	if err == nil && len(mac) == len(attrs.HardwareAddr) && !slices.Equal(mac, attrs.HardwareAddr) {
		ch.MAC = mac
	}
	ch.Mask = attrs.RawFlags & podFlags
	if to.id.PCIAddr != "" {
		ch.Mask |= attrs.RawFlags & unix.IFF_NOARP // as it comes with Ethernet hardware
	}
	if to.want.Up != (attrs.RawFlags&unix.IFF_UP != 0) {
		ch.Mask |= unix.IFF_UP
	}
	if to.want.Up {
		ch.Flags = unix.IFF_UP
	}
	return ch
}

// changeInPlace makes a change that some kernels and drivers refuse while the link is up.
func (s *side) changeInPlace(index int, ch rtlink.Change) error {
	err := s.Change(index, ch)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	if downErr := s.Change(index, rtlink.Change{Mask: unix.IFF_UP}); downErr != nil {
		return err
	}
	ch.Mask |= unix.IFF_UP
	return s.Change(index, ch)
}

// applyAll makes a change as one, or if the kernel does not take that, as much of it as it takes.
func (s *side) applyAll(link netlink.Link, ch rtlink.Change) []error {
	if ch.IsZero() {
		return nil
	}
	index := link.Attrs().Index
	// A name is changed and other things are done to a link that is down, and the state is what it ends with.
	ch.Flags |= link.Attrs().RawFlags & unix.IFF_UP &^ ch.Mask
	if s.changeInPlace(index, ch) == nil {
		return nil
	}
	var errs []error
	for _, part := range []struct {
		what string
		rtlink.Change
	}{
		{"MAC " + ch.MAC.String(), rtlink.Change{MAC: ch.MAC}},
		{fmt.Sprint("MTU ", ch.MTU), rtlink.Change{MTU: ch.MTU}},
		{"name " + ch.Name, rtlink.Change{Name: ch.Name}},
		{"flags", rtlink.Change{Flags: ch.Flags, Mask: ch.Mask}},
	} {
		if part.IsZero() {
			continue
		}
		part.Flags = ch.Flags
		if err := s.changeInPlace(index, part.Change); err != nil {
			errs = append(errs, fmt.Errorf("set %s: %w", part.what, err))
		}
	}
	return errs
}

// awaitHomecoming waits for the kernel to put the link of a dead namespace on the host.
func (m *Mover) awaitHomecoming(ctx context.Context, host *side, to home) error {
	ctx, cancel := context.WithTimeout(ctx, homecomingTimeout)
	defer cancel()
	tick := time.NewTicker(homecomingInterval)
	defer tick.Stop()
	for {
		if found, err := m.restoreOnHost(host, to); found || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ErrUnreachable
		case <-tick.C:
		}
	}
}
