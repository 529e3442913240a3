// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic"
)

// del ends an attachment. Whatever is gone already is no failure.
func (c *call) del(ctx context.Context) error {
	// The library would fail each call whose namespace is the host's. Nothing is done there by a name that the
	// runtime gives.
	c.args.NetnsOverride = "TRUE"
	host, err := c.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	return errors.Join(c.endAttachment(ctx, host, c.attachment()), c.ipam(ctx, "DEL"))
}

// endAttachment ends one attachment by its record, or without one by what can be told.
func (c *call) endAttachment(ctx context.Context, host *nic.Place, a attachment) error {
	rec, err := c.store.load(a)
	var broken *brokenError
	switch {
	case errors.As(err, &broken):
		c.log.Warn("The attachment's record cannot be read, and is made anew from what there is", "error", err)
	case err != nil:
		return errorf(types.ErrIOFailure, "%w", err)
	}
	if rec == nil {
		if rec, err = c.reconstruct(host); err != nil {
			return err
		}
		if rec == nil {
			c.log.Debug("There is nothing to end")
			return errors.Join(c.store.remove(a), c.disownUnrecorded(ctx))
		}
	}
	lock, err := c.store.lock(ctx, rec.NIC.Key())
	if err != nil {
		return err
	}
	defer lock.Close()
	// While the lock was waited for, the attachment may have been ended, and the NIC be another's.
	switch again, err := c.store.load(a); {
	case errors.As(err, &broken), again == nil && err == nil && !rec.recorded():
		holder, err := c.holder(func(id nic.Identity) bool { return id.Key() == rec.NIC.Key() })
		if err != nil {
			return err
		}
		if holder != nil {
			c.log.Info("The NIC is another attachment's", "nic", rec.NIC.String(), "holder", holder.ContainerID)
			return c.store.remove(a)
		}
		// So that the next call goes on if this one is interrupted.
		rec.Recorded = sinceBoot()
		if err := c.store.save(rec); err != nil {
			return errorf(types.ErrIOFailure, "%w", err)
		}
	case err != nil:
		return errorf(types.ErrIOFailure, "%w", err)
	case again == nil:
		return nil
	case again.NIC.Key() != rec.NIC.Key():
		return errorf(types.ErrTryAgainLater, "the attachment is of another NIC by now")
	default:
		rec = again
	}
	return c.end(ctx, host, rec)
}

// recorded says whether the record has been written.
func (r *record) recorded() bool { return r.Recorded != 0 }

// reconstruct makes the record of an attachment that has none that can be read: it was made by another version, or the
// file is damaged. It takes the one NIC in the container that the configuration chooses, or one on the host that a dead
// namespace has left under the container's name; nil if there is none. The addresses are those that the NIC has in the
// container, and those of the runtime's last result.
func (c *call) reconstruct(host *nic.Place) (*record, error) {
	places := []*nic.Place{host}
	if c.args.Netns != "" {
		pod, err := nic.Open(c.log, c.args.Netns, "")
		switch {
		case errors.Is(err, netnamespace.ErrNone): // its NICs are on the host
		case err != nil:
			return nil, err
		case pod.NS.ID == host.NS.ID:
			pod.Close()
			c.log.Warn("The container's namespace is the host's own, and is not looked at as the container's", "netns", c.args.Netns)
		default:
			defer pod.Close()
			places = append(places, pod)
		}
	}
	for _, place := range places {
		links, err := place.List()
		if err != nil {
			return nil, err
		}
		for _, link := range links {
			name, ok := c.homeName(place, link, place == host)
			if !ok {
				continue
			}
			state, err := readState(place, link)
			if err != nil {
				return nil, err
			}
			return c.reconstructed(place, link, name, state), nil
		}
	}
	return nil, nil
}

// homeName says whether a link is the one that the configuration chooses, and what it is called at home.
func (c *call) homeName(place *nic.Place, link netlink.Link, onHost bool) (string, bool) {
	attrs := link.Attrs()
	// The sub-plugin keeps the name in the alias.
	marked := attrs.Name == c.args.IfName && attrs.Alias != "" && nic.ValidateName(attrs.Alias) == nil
	if onHost && (!marked || attrs.Alias == attrs.Name) {
		return "", false
	}
	var chosen bool
	switch {
	case c.conf.deviceID != "":
		chosen = attrs.ParentDev == c.conf.deviceID
	case c.conf.hwAddr != nil:
		chosen = attrs.HardwareAddr.String() == c.conf.hwAddr.String()
	case c.conf.kernelPath != "":
		chosen = attrs.ParentDev == path.Base(c.conf.kernelPath)
	case c.conf.device != "":
		// Earlier versions left the name. A container may have a virtual link that is called the same.
		chosen = marked && attrs.Alias == c.conf.device || attrs.Name == c.conf.device && place.Identify(link).Physical()
	}
	switch {
	case marked:
		return attrs.Alias, chosen
	case c.conf.device != "":
		return c.conf.device, chosen
	}
	return attrs.Name, chosen
}

func (c *call) reconstructed(place *nic.Place, link netlink.Link, name string, state hostState) *record {
	kept := state.Addresses[:0:0]
	for _, a := range append(state.Addresses, c.prevAddresses()...) {
		if a.forPod() && !slices.ContainsFunc(kept, a.same) {
			a.Label = "" // it has the container's name in it
			kept = append(kept, a)
		}
	}
	state.Name, state.Alias, state.AltNames, state.Addresses = name, new(string), nil, kept
	state.Up, state.Promisc, state.AllMulti = len(kept) > 0, false, false
	rec := &record{
		Version: recordVersion, Network: c.conf.name, ContainerID: c.args.ContainerID, IfName: c.args.IfName,
		BootID: c.boot, NetNS: place.NS.Path, NetNSID: place.NS.ID, State: state,
	}
	rec.setNIC(place.Identify(link), link)
	rec.NIC.Name = name
	return rec
}

// prevAddresses are the addresses of the attachment's result, which the runtime passes back.
func (c *call) prevAddresses() (addrs []address) {
	if c.conf.prevResult == nil {
		return nil
	}
	result, err := c.previousResult()
	if err != nil {
		c.log.Warn("The previous result cannot be read", "error", err)
		return nil
	}
	for _, ip := range result.IPs {
		if a, ok := addressOf(netlink.Addr{IPNet: &ip.Address}); ok {
			a.Valid, a.Preferred = forever, forever
			if a.Local.Is4() && a.PrefixLen < 31 {
				a.Broadcast = broadcastOf(ip.Address)
			}
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// broadcastOf is the last address of an IPv4 network, which the sub-plugin uses too.
func broadcastOf(n net.IPNet) netip.Addr {
	last := slices.Clone(n.IP.To4())
	for i := range last {
		last[i] |= ^n.Mask[len(n.Mask)-len(last)+i]
	}
	addr, _ := netip.AddrFromSlice(last)
	return addr
}

func (c *call) previousResult() (*current.Result, error) {
	result, err := version.NewResult(c.conf.cniVersion, c.conf.prevResult)
	if err != nil {
		return nil, errorf(types.ErrDecodingFailure, "prevResult: %w", err)
	}
	converted, err := current.NewResultFromResult(result)
	if err != nil {
		return nil, errorf(types.ErrDecodingFailure, "prevResult: %w", err)
	}
	return converted, nil
}

// gc ends the network's attachments that the runtime does not know any more.
func (c *call) gc(ctx context.Context) error {
	if !c.conf.hasAttachments {
		return errorf(types.ErrInvalidNetworkConfig, "network %q: %s is missing: without the list of what is valid, nothing is freed",
			c.conf.name, fieldAttachments)
	}
	valid := map[attachment]bool{}
	for _, a := range c.conf.validAttachments {
		valid[attachment{a.ContainerID, a.IfName}] = true
	}
	host, err := c.openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	records, broken, err := c.store.list()
	if err != nil {
		return err
	}
	for _, err := range broken {
		c.log.Warn("A record cannot be read", "error", err)
	}
	var errs []error
	for _, r := range records {
		if r.Network != c.conf.name || valid[r.attachment()] {
			continue
		}
		c.log.Info("An attachment is freed", "nic", r.NIC.String(), "oldContainerID", r.ContainerID, "oldInterface", r.IfName)
		if err := c.endAttachment(ctx, host, r.attachment()); err != nil {
			errs = append(errs, fmt.Errorf("free interface %s of container %s: %w", r.IfName, r.ContainerID, err))
		}
	}
	return errors.Join(append(errs, c.store.sweep(), c.disownUnrecorded(ctx), c.ipam(ctx, "GC"))...)
}
