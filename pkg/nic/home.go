// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	// HomecomingTimeout is how long the kernel has to put the hardware of a dead namespace on the host. It takes some
	// tens of milliseconds, or seconds on a node that takes many namespaces apart.
	HomecomingTimeout  = 5 * time.Second
	homecomingInterval = 10 * time.Millisecond
)

// ErrUnreachable is returned by [Place.Fetch] when the link of a device that has one is not to be found.
var ErrUnreachable = errors.New("its link is in no namespace that can be reached")

// Search is what is looked for by [Place.Fetch], and where.
type Search struct {
	ID Identity
	// Want is what the NIC is to be on the host.
	Want State
	// Named are paths of namespaces where it is looked for first. One that is gone, or the host's own, is passed over.
	Named []string
	// Accept, which may be nil, has to take a link of a namespace other than the host's too.
	Accept func(netnamespace.ID, netlink.Link) bool
	// Left is where a NIC without hardware was left, zero if that is not known. It is known again there by its index and kind,
	// whatever else it was made to look like.
	Left Spot
}

// Spot is an interface index in a network namespace.
type Spot struct {
	NS    netnamespace.ID
	Index int
}

// Fetch brings a NIC home and returns its link on the host. Its names and state are for [Place.Restore] to complete; what
// one request can do together with the move is done. A link that is home already is left alone. It returns nil, without
// an error, for a link that does not exist any more, which is logged.
func (p *Place) Fetch(ctx context.Context, s Search) (netlink.Link, error) {
	if link, err := p.FindHinted(s.ID, nil); link != nil || err != nil {
		return link, err
	}
	// What keeps a namespace from being searched is an error only if the NIC is nowhere else.
	var unsearched error
	search := func(ns *netnamespace.Namespace) (netlink.Link, error) {
		link, searched, err := p.takeFrom(ns, s)
		if !searched {
			unsearched, err = errors.Join(unsearched, err), nil
		}
		return link, err
	}
	for _, path := range s.Named {
		if path == "" {
			continue
		}
		ns, err := netnamespace.Open(path)
		if err != nil {
			if !errors.Is(err, netnamespace.ErrNone) {
				unsearched = errors.Join(unsearched, err)
			}
			continue
		}
		var link netlink.Link
		if ns.ID != p.NS.ID {
			link, err = search(ns)
		}
		ns.Close()
		if link != nil || err != nil {
			return link, err
		}
	}
	if link, err := p.Find(s.ID, nil); link != nil || err != nil {
		return link, err
	}
	if s.ID.Physical() {
		if why := p.linkless(s.ID); why != "" {
			p.log.Warn("There is no link to bring home", "nic", s.ID.String(), "reason", why)
			return nil, nil
		}
	}
	for ns := range netnamespace.Reachable(ctx, p.NS.ID) {
		if link, err := search(ns); link != nil || err != nil {
			return link, err
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%w so far: %w", ErrUnreachable, context.Cause(ctx))
	case unsearched != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreachable, unsearched)
	case !s.ID.Physical():
		p.log.Info("The link is gone with the network namespace that it was in", "nic", s.ID.String())
		return nil, nil
	}
	return p.awaitHomecoming(ctx, s.ID)
}

// awaitHomecoming waits for the kernel to put the link of a dead namespace on the host.
func (p *Place) awaitHomecoming(ctx context.Context, id Identity) (netlink.Link, error) {
	ctx, cancel := context.WithTimeout(ctx, HomecomingTimeout)
	defer cancel()
	for {
		if link, err := p.Find(id, nil); link != nil || err != nil {
			return link, err
		}
		if !pause.For(ctx, homecomingInterval) {
			return nil, ErrUnreachable
		}
	}
}

// takeFrom moves the NIC from another namespace to the host, nil if it is not there. searched says whether that is known.
func (p *Place) takeFrom(ns *netnamespace.Namespace, s Search) (home netlink.Link, searched bool, err error) {
	conn, err := rtlink.Dial(p.log, ns)
	if err != nil {
		return nil, false, err
	}
	defer conn.Close()
	from := &Place{Conn: conn, NS: ns, log: p.log}
	link, err := from.Find(s.ID, func(link netlink.Link) bool { return s.Accept == nil || s.Accept(ns.ID, link) })
	if err == nil && link == nil && ns.ID == s.Left.NS {
		link, err = from.findLeft(s)
	}
	if err != nil || link == nil {
		return nil, err == nil, err
	}
	home, err = p.BringHome(from, link, s.ID, s.Want)
	return home, true, err
}

// findLeft returns the link at the spot where a NIC without hardware was left.
func (p *Place) findLeft(s Search) (netlink.Link, error) {
	if s.Left.Index <= 0 || s.ID.Physical() || s.ID.Device != "" {
		return nil, nil
	}
	link, err := p.ByIndex(s.Left.Index)
	if err != nil || link == nil || kindOf(link) != s.ID.Kind || link.Attrs().ParentDev != "" {
		return nil, err
	}
	return link, nil
}

// BringHome moves a link of another namespace to the host with one request, and as much of the state as that can do. What
// the request did not do is for [Place.Restore].
func (p *Place) BringHome(from *Place, link netlink.Link, id Identity, want State) (netlink.Link, error) {
	attrs := link.Attrs()
	if err := from.removeStacked(attrs.Index); err != nil {
		return nil, err
	}
	// Names that the pod gave must neither stop the move nor arrive on the host.
	for _, alt := range attrs.AltNames {
		if !slices.Contains(want.AltNames, alt) {
			if err := from.RemoveAltName(attrs.Index, alt); err != nil {
				return nil, err
			}
		}
	}
	if err := from.removeXDP(link, want); err != nil && !errors.Is(err, unix.EBUSY) { // Restore says that it stays
		return nil, err
	}
	move := Difference(link, want)
	var err error
	if move.Name, err = p.nameForArrival(want.Name); err != nil {
		return nil, err
	}
	move.To = p.NS
	move.Mask |= unix.IFF_UP // the kernel takes a link down that moves
	err = from.Change(attrs.Index, move)
	if errors.Is(err, unix.EEXIST) {
		if _, altErr := from.RemoveTakenAltNames(p, link); altErr != nil {
			return nil, altErr
		}
	}
	if err != nil {
		// The kernel stops at what it does not take. What remains to be done is done on the host, the move is not left.
		if here, lookErr := from.ByIndex(attrs.Index); lookErr == nil && here != nil && id.MatchesAtHome(here) {
			if err := from.Change(attrs.Index, rtlink.Change{To: p.NS, Name: StandIn}); err != nil {
				return nil, fmt.Errorf("move link %q from %s to the host: %w", attrs.Name, from.NS.Path, err)
			}
		}
	}
	home, err := p.Find(id, nil)
	if err == nil && home == nil {
		err = fmt.Errorf("link %q is not on the host after its move from %s", attrs.Name, from.NS.Path)
	}
	return home, err
}

// stackedKinds are the links that live on another one, whose frames they send and receive. A peer of a veth does not.
var stackedKinds = []string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"}

// removeStacked deletes what the pod has stacked on a link. It would stay in the pod's namespace, for as long as that is
// held by anybody, and go on sending and receiving through the NIC, whoever has that by then.
func (p *Place) removeStacked(index int) error {
	links, err := p.List()
	if err != nil {
		return err
	}
	for _, link := range links {
		attrs := link.Attrs()
		if attrs.ParentIndex != index || attrs.NetNsID >= 0 || !slices.Contains(stackedKinds, link.Type()) {
			continue
		}
		if err := p.Delete(attrs.Index); err != nil {
			return fmt.Errorf("delete link %q, which is stacked on the NIC in %s: %w", attrs.Name, p.NS.Path, err)
		}
		p.log.Info("A link that the pod had stacked on the NIC is deleted", "interface", attrs.Name, "kind", link.Type())
	}
	return nil
}

// nameForArrival returns the name or pattern that a link is given that comes from elsewhere.
func (p *Place) nameForArrival(want string) (string, error) {
	if ValidateName(want) != nil {
		return StandIn, nil
	}
	other, err := p.ByName(want)
	if err != nil {
		return "", err
	}
	if other != nil {
		return StandIn, nil
	}
	return want, nil
}

// RemoveTakenAltNames removes those alternative names of a link here that another link has there.
func (p *Place) RemoveTakenAltNames(there *Place, link netlink.Link) (removed bool, err error) {
	index := link.Attrs().Index
	if here, err := p.ByIndex(index); err != nil || here == nil || here.Attrs().Name != link.Attrs().Name {
		return false, err // it has moved: what is found there would be the link itself
	}
	for _, alt := range link.Attrs().AltNames {
		other, err := there.ByName(alt)
		if err != nil {
			return removed, err
		}
		if other == nil {
			continue
		}
		if err := p.RemoveAltName(index, alt); err != nil {
			return removed, err
		}
		removed = true
	}
	return removed, nil
}
