// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic"
)

// maxRefusals is how often the end of an attachment is tried whose NIC is on the host and cannot be made what it was, for
// example because another link has its name. After that it stays as it is, so that the pod can go.
const maxRefusals = 3

// end brings the NIC of an attachment home, restores it and forgets the attachment. It can be repeated, and goes on from
// where things are. The caller holds the NIC's lock.
func (c *call) end(ctx context.Context, host *nic.Place, r *record) error {
	if r.BootID != c.boot {
		c.log.Info("The attachment is from before a reboot, which has brought the NIC home", "nic", r.NIC.String())
		return c.forget(r)
	}
	// The record's path may lead elsewhere by now, and so may the runtime's; what is taken is this NIC only.
	link, err := host.Fetch(ctx, nic.Search{
		ID: r.NIC, Want: r.State.State, Named: []string{r.NetNS, c.args.Netns}, Accept: r.accepts,
		Left: nic.Spot{NS: r.NetNSID, Index: r.PodIndex},
	})
	switch {
	case errors.Is(err, nic.ErrUnreachable):
		return errorf(types.ErrTryAgainLater, "bring home NIC %s, which was last moved to %s: %w", r.NIC, r.NetNS, err)
	case err != nil:
		return fmt.Errorf("bring home NIC %s: %w", r.NIC, err)
	case link == nil:
		return c.forget(r)
	}
	index := link.Attrs().Index
	_, problem := host.Restore(link, r.State.State)
	problem = errors.Join(problem, restoreAddresses(host, index, r.State.Addresses, r.elapsed(sinceBoot())))
	// Success is claimed for what the kernel says, not for what was asked for.
	if link, err = host.ByIndex(index); err == nil && link != nil {
		problem = errors.Join(problem, host.PutBack(link, r.Settings))
	}
	if err != nil {
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
	return c.forget(r)
}

// accepts says whether a link that looks like the NIC is taken from a namespace. The sub-plugin leaves the name in the alias:
// a NIC without it that is not where it was moved to was moved by somebody else since.
func (r *record) accepts(ns netnamespace.ID, link netlink.Link) bool {
	return ns == r.NetNSID || r.NIC.Matches(link) && link.Attrs().Alias == r.NIC.Name
}
