// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/rtlink"
)

// Restore makes a link of the namespace what the state says, and sends nothing if it is that. It goes on after a failure
// with what else there is to restore. taken are names of the state that other links have by now: that is no error, since
// it is those links' good right. The link has a stand-in for its name then, and Restore can be repeated.
func (p *Place) Restore(link netlink.Link, want State) (taken []string, err error) {
	attrs := link.Attrs()
	todo := Difference(link, want)
	var errs []error
	if err := p.removeXDP(link, want); errors.Is(err, unix.EBUSY) {
		p.log.Warn("An XDP program stays on the link until the process that holds it ends", "interface", attrs.Name, "error", err)
	} else {
		errs = append(errs, err)
	}
	for _, alt := range attrs.AltNames {
		// One that is the name to be restored would keep the link from getting it.
		if !slices.Contains(want.AltNames, alt) {
			errs = append(errs, p.RemoveAltName(attrs.Index, alt))
		}
	}
	if want.Name != "" && attrs.Name != want.Name {
		if todo.Name, err = p.nameFor(link, want.Name); err != nil {
			errs = append(errs, err)
		}
		if todo.Name != want.Name {
			taken = append(taken, want.Name)
		}
	}
	for _, err := range p.applyAll(link, todo) {
		if todo.Name == want.Name && errors.Is(err, unix.EEXIST) {
			// Somebody has taken the name since nameFor looked.
			taken = append(taken, want.Name)
			err = nil
			if !IsStandIn(attrs.Name) {
				up := (todo.Flags&todo.Mask | attrs.RawFlags&^todo.Mask) & unix.IFF_UP
				err = p.ChangeInPlace(attrs.Index, rtlink.Change{Name: StandIn, Flags: up})
			}
		}
		errs = append(errs, err)
	}
	for _, alt := range want.AltNames {
		if slices.Contains(attrs.AltNames, alt) {
			continue
		}
		if err := p.AddAltName(attrs.Index, alt); errors.Is(err, unix.EEXIST) {
			taken = append(taken, alt)
		} else {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return taken, fmt.Errorf("restore link %q: %w", attrs.Name, err)
	}
	return taken, nil
}

// removeXDP takes a program off that is not the host's. The error wraps EBUSY for one that stays since a process holds it.
func (p *Place) removeXDP(link netlink.Link, want State) error {
	xdp := link.Attrs().Xdp
	if xdp == nil || !xdp.Attached || xdp.ProgId == want.XDP {
		return nil
	}
	return p.RemoveXDP(link)
}

// nameFor returns the name that a link of the namespace is to get: the wanted one, or if another link has that, a stand-in,
// or none if it has one already.
func (p *Place) nameFor(link netlink.Link, want string) (string, error) {
	other, err := p.ByName(want)
	switch {
	case err != nil:
		return "", err
	case ValidateName(want) == nil && (other == nil || other.Attrs().Index == link.Attrs().Index):
		return want, nil
	case IsStandIn(link.Attrs().Name):
		return "", nil
	}
	return StandIn, nil
}

// ChangeInPlace makes a change that some kernels and drivers refuse while the link is up.
func (p *Place) ChangeInPlace(index int, ch rtlink.Change) error {
	err := p.Change(index, ch)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	if downErr := p.Change(index, rtlink.Change{Mask: unix.IFF_UP}); downErr != nil {
		return err
	}
	ch.Mask |= unix.IFF_UP
	return p.Change(index, ch)
}

// applyAll makes a change as one, or if the kernel does not take that, as much of it as it takes.
func (p *Place) applyAll(link netlink.Link, ch rtlink.Change) []error {
	if ch.IsZero() {
		return nil
	}
	index := link.Attrs().Index
	// A name is changed and other things are done to a link that is down, and the state is what it ends with.
	ch.Flags |= link.Attrs().RawFlags & unix.IFF_UP &^ ch.Mask
	if p.ChangeInPlace(index, ch) == nil {
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
		{"alias", rtlink.Change{Alias: ch.Alias}},
		{"group", rtlink.Change{Group: ch.Group}},
		{"length of the transmit queue", rtlink.Change{TxQLen: ch.TxQLen}},
		{"sizes of large packets", rtlink.Change{Sizes: ch.Sizes}},
		{"flags", rtlink.Change{Flags: ch.Flags, Mask: ch.Mask}},
	} {
		if part.IsZero() {
			continue
		}
		part.Flags = ch.Flags
		if err := p.ChangeInPlace(index, part.Change); err != nil {
			errs = append(errs, fmt.Errorf("set %s: %w", part.what, err))
		}
	}
	return errs
}
