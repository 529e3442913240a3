// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	// The kernel takes a dead namespace apart in the background and then puts its hardware NICs on the host.
	homecomingTimeout  = 5 * time.Second
	homecomingInterval = 20 * time.Millisecond
	// maxRefusals is how often the end of an attachment is tried whose NIC is on the host and cannot be made what it was,
	// for example because another link has its name. After that it stays as it is, so that the pod can go.
	maxRefusals = 3
)

// end brings the NIC of an attachment home, restores it and forgets the attachment. It can be repeated, and goes on from
// where things are. The caller holds the NIC's lock.
func (c *call) end(ctx context.Context, host *side, r *record) error {
	if r.BootID != c.boot {
		c.log.Info("The attachment is from before a reboot, which has brought the NIC home", "nic", r.NIC.String())
		return c.store.remove(r.attachment())
	}
	link, err := c.fetch(ctx, host, r)
	if err != nil {
		return err
	}
	if link == nil {
		return c.store.remove(r.attachment())
	}
	problem := host.restore(link, r.State, r.elapsed(sinceBoot()))
	// Success is claimed for what the kernel says, not for what was asked for.
	if link, err = find(host.Conn, r.NIC.matchesAtHome); err != nil {
		return err
	}
	if link == nil {
		return fmt.Errorf("NIC %s is not on the host any more after it was restored", r.NIC)
	}
	name := link.Attrs().Name
	if name != r.State.Name {
		problem = errors.Join(problem, fmt.Errorf("another link is called %s", r.State.Name))
	}
	if problem != nil {
		if r.Refusals++; r.Refusals < maxRefusals {
			return errors.Join(errorf(types.ErrTryAgainLater, "NIC %s is on the host as %s, but not as it was: %w", r.NIC, name, problem),
				c.store.save(r))
		}
		c.log.Warn("The NIC is home and stays as it is, since it cannot be made what it was", "nic", r.NIC.String(),
			"interface", name, "error", problem)
	}
	c.log.Info("The NIC is home", "nic", r.NIC.String())
	return c.store.remove(r.attachment())
}

// fetch returns the NIC on the host, from wherever it is. It returns nil for one that does not exist any more.
func (c *call) fetch(ctx context.Context, host *side, r *record) (netlink.Link, error) {
	link, err := find(host.Conn, r.NIC.matchesAtHome)
	if link != nil || err != nil {
		return link, err
	}
	// The record's path may lead elsewhere by now, and so may the runtime's; what is taken is this NIC only.
	for _, path := range []string{r.NetNS, c.args.Netns} {
		if path == "" {
			continue
		}
		ns, err := netnamespace.Open(path)
		if errors.Is(err, netnamespace.ErrNone) {
			continue
		} else if err != nil {
			c.log.Warn("A namespace cannot be searched for the NIC", "netns", path, "error", err)
			continue
		}
		link, err := c.takeFrom(host, ns, r)
		ns.Close()
		if link != nil || err != nil {
			return link, err
		}
	}
	for ns := range netnamespace.Reachable(ctx, host.ns.ID) {
		if link, err := c.takeFrom(host, ns, r); link != nil || err != nil {
			return link, err
		}
	}
	if !r.NIC.physical() {
		// A link without hardware dies with the namespace that it is in.
		c.log.Warn("The NIC is gone with the namespace that it was in", "nic", r.NIC.String())
		return nil, nil
	}
	return c.awaitHomecoming(ctx, host, r)
}

// takeFrom moves the NIC from a namespace to the host, nil if it is not there.
func (c *call) takeFrom(host *side, ns *netnamespace.Namespace, r *record) (netlink.Link, error) {
	if ns.ID == host.ns.ID {
		return nil, nil
	}
	from, err := rtlink.Dial(c.log, ns)
	if err != nil {
		c.log.Warn("A namespace cannot be searched for the NIC", "netns", ns.Path, "error", err)
		return nil, nil
	}
	defer from.Close()
	is := r.NIC.matchesAtHome
	if ns.ID != r.NetNSID {
		// The sub-plugin leaves the name in the alias. A NIC without it was moved by somebody else since.
		is = func(link netlink.Link) bool { return r.NIC.matches(link) && link.Attrs().Alias == r.NIC.Name }
	}
	link, err := find(from, is)
	if link == nil || err != nil {
		return nil, err
	}
	if err := sendHome(from, host, link, r.State); err != nil {
		return nil, fmt.Errorf("NIC %s is in %s as %s: %w", r.NIC, ns.Path, link.Attrs().Name, err)
	}
	if link, err = find(host.Conn, r.NIC.matchesAtHome); err == nil && link == nil {
		err = fmt.Errorf("NIC %s is not on the host after its move from %s", r.NIC, ns.Path)
	}
	return link, err
}

// sendHome moves a link to the host under the name it had, or under a stand-in if another link there has that.
func sendHome(from *rtlink.Conn, host *side, link netlink.Link, want nicState) error {
	// Alternative names travel with a link. Neither those that the pod gave may arrive, nor may one keep the link from
	// moving because another link of the host has it.
	for _, alt := range link.Attrs().AltNames {
		other, err := host.ByName(alt)
		if err != nil {
			return err
		}
		if other != nil || !slices.Contains(want.AltNames, alt) {
			if err := from.RemoveAltName(link.Attrs().Index, alt); err != nil {
				return err
			}
		}
	}
	name, err := host.freeName(want.Name)
	if err != nil {
		return err
	}
	return from.Change(link.Attrs().Index, rtlink.Change{To: host.ns, Name: name})
}

// awaitHomecoming waits for the kernel to put the NIC of a dead namespace on the host.
func (c *call) awaitHomecoming(ctx context.Context, host *side, r *record) (netlink.Link, error) {
	if why := c.unplugged(r.NIC); why != "" {
		c.log.Warn("There is no NIC to bring home", "nic", r.NIC.String(), "reason", why)
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, homecomingTimeout)
	defer cancel()
	tick := time.NewTicker(homecomingInterval)
	defer tick.Stop()
	for {
		link, err := find(host.Conn, r.NIC.matchesAtHome)
		if link != nil || err != nil {
			return link, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errorf(types.ErrTryAgainLater, "NIC %s is neither on the host nor in a namespace that can be reached; it was last moved to %s",
				r.NIC, r.NetNS)
		}
	}
}

// unplugged says why a hardware NIC does not exist any more, empty if it may.
func (c *call) unplugged(id identity) string {
	if id.Bus != "pci" {
		return ""
	}
	dir := filepath.Join(c.sysfs, "bus/pci/devices", id.Device)
	if _, err := os.Stat(filepath.Dir(dir)); err != nil {
		return "" // sysfs cannot be read, so that nothing is known
	}
	if _, err := os.Stat(dir); os.IsNotExist(err) {
		return "the device is not on the PCI bus any more"
	}
	driver, err := os.Readlink(filepath.Join(dir, "driver"))
	if os.IsNotExist(err) {
		return "the device has no driver"
	}
	if name := filepath.Base(driver); slices.Contains(userspaceDrivers, name) {
		return "the device is bound to " + name
	}
	return ""
}
