// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

// add moves the NIC into the container. When it fails, the NIC is home again, or the error says where it is.
func (c *call) add(ctx context.Context) (types.Result, error) {
	started := time.Now()
	host, err := c.openHost()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	pod, err := c.openPod(host)
	if err != nil {
		return nil, err
	}
	defer pod.Close()

	selector := selector{host: host, sysfs: c.sysfs}
	chosen, err := c.choose(selector)
	if err != nil {
		return nil, err
	}
	if chosen.link == nil {
		if err := c.refuseOwned(c.conf.deviceID); err != nil {
			return nil, err
		}
		c.log.Info("The device has no network interface, only its configuration is passed on", "driver", chosen.driver)
		result, err := c.delegateAdd(ctx, "", nil, nil)
		if err != nil {
			// The sub-plugin has a list of userspace drivers of its own.
			return nil, fmt.Errorf("device %s, which is bound to %s and has no network interface: %w", c.conf.deviceID, chosen.driver, err)
		}
		return result, nil
	}
	key := host.Identify(chosen.link).Key()
	lock, err := c.store.lock(ctx, key)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := c.settle(ctx, host, host.Identify(chosen.link)); err != nil {
		return nil, err
	}
	// While the lock was waited for, the NIC may have gone or come back.
	if chosen, err = c.choose(selector); err != nil {
		return nil, err
	}
	link := chosen.link
	if link == nil || host.Identify(link).Key() != key {
		return nil, errorf(types.ErrTryAgainLater, "NIC %s became another one while it was waited for", key)
	}
	if !c.conf.allowNodeNetwork {
		if err := refuseNodeNetwork(host, link, c.node); err != nil {
			return nil, err
		}
	}
	if taken, err := pod.ByName(c.args.IfName); err != nil {
		return nil, err
	} else if taken != nil {
		return nil, errorf(types.ErrInvalidEnvironmentVariables, "interface name %s is taken in the container", c.args.IfName)
	}

	state, err := readState(host, link)
	if err != nil {
		return nil, err
	}
	settings, err := host.Settings(link)
	if err != nil {
		return nil, err
	}
	// What could not come back does not leave.
	id := host.Identify(link)
	if err = state.validate(); err == nil {
		_, err = host.Find(id, nil)
	}
	if err != nil {
		return nil, errorf(types.ErrInvalidNetworkConfig, "NIC %q could not be brought home: %w", link.Attrs().Name, err)
	}
	ipam, routes := c.addressing(state)
	rec := &record{
		Version: recordVersion, Network: c.conf.name, ContainerID: c.args.ContainerID, IfName: c.args.IfName,
		BootID: c.boot, Recorded: sinceBoot(), NetNS: c.args.Netns, NetNSID: pod.NS.ID, State: state,
		Settings: settings,
	}
	rec.setNIC(id, link)
	for _, r := range routes {
		rec.Routes = append(rec.Routes, recordedRoute{From: r.From, Dst: r.Dst, Via: r.NextHop})
	}
	if err := c.own(rec); err != nil {
		return nil, err
	}
	if err := c.store.save(rec); err != nil {
		return nil, errors.Join(errorf(types.ErrIOFailure, "%w", err), c.disown(key))
	}
	delegated := time.Now()
	result, err := c.delegateAdd(ctx, state.Name, ipam, lock)
	subPluginTook := time.Since(delegated)
	if err == nil {
		err = c.verify(pod, rec)
	}
	if err != nil {
		if homeErr := c.end(ctx, host, rec); homeErr != nil {
			return nil, fmt.Errorf("%w; undoing it failed too: %w", err, homeErr)
		}
		return nil, err
	}
	c.log.Info("The NIC is in the container", "nic", rec.NIC.String(), "addresses", len(state.Addresses),
		"routes", len(routes), "took", time.Since(started), "subPluginTook", subPluginTook)
	return result, nil
}

// choose finds the NIC; if it is not on the host, the error says which container has it.
func (c *call) choose(s selector) (choice, error) {
	chosen, err := s.choose(c.conf)
	if err == nil {
		return chosen, nil
	}
	if c.conf.deviceID != "" {
		// The driver may have moved it into a pod.
		err = errors.Join(err, c.refuseOwned(c.conf.deviceID))
	}
	holder, listErr := c.holder(func(id nic.Identity) bool {
		return (c.conf.deviceID != "" && id.Device == c.conf.deviceID) || (c.conf.device != "" && id.Name == c.conf.device) ||
			(c.conf.hwAddr != nil && id.MAC == c.conf.hwAddr.String())
	})
	if listErr == nil && holder != nil && holder.BootID == c.boot {
		return choice{}, fmt.Errorf("%w; container %s has it as %s", err, holder.ContainerID, holder.IfName)
	}
	return choice{}, err
}

// settle ends attachments of the NIC that nobody has ended: it is on the host, so none of them is at work. That way
// what is recorded next is the NIC's own state, and not what an interrupted call has left. The caller holds the lock.
func (c *call) settle(ctx context.Context, host *nic.Place, id nic.Identity) error {
	records, _, err := c.store.list()
	if err != nil {
		return err
	}
	for _, r := range records {
		same, own := r.NIC.Key() == id.Key(), r.attachment() == c.attachment() && r.BootID == c.boot
		if !same && !own {
			continue
		}
		link, err := host.Find(r.NIC, nil)
		if err != nil {
			return err
		}
		switch {
		case same && link != nil:
			c.log.Info("An attachment that was not ended is ended first", "nic", id.String(),
				"oldContainerID", r.ContainerID, "oldInterface", r.IfName)
			if err := c.end(ctx, host, r); err != nil {
				return err
			}
		case own:
			return errorf(types.ErrInvalidEnvironmentVariables, "container %s has NIC %s as %s already",
				r.ContainerID, r.NIC, r.IfName)
		}
	}
	return nil
}

// addressing decides what the NIC gets in the container. Nil leaves the configuration as it is.
func (c *call) addressing(state hostState) (*ipamConfig, []policyroute.Route) {
	if c.conf.alone != "" {
		c.log.Warn("No policy routes: one of the two fields alone has no effect", "given", c.conf.alone,
			"needed", []string{fieldOffset, fieldPrefixLen})
	}
	if c.conf.ipamType != "" {
		if c.conf.routes != nil {
			c.log.Warn("No policy routes: the configuration has an IPAM plugin of its own, whose routes count",
				"ipam", c.conf.ipamType)
		}
		return nil, nil
	}
	var kept []address
	for _, a := range state.Addresses {
		if a.forPod() {
			kept = append(kept, a)
		}
	}
	var routes []policyroute.Route
	if c.conf.routes != nil {
		var skips []policyroute.Skip
		routes, skips = policyroute.Derive(*c.conf.routes, forRoutes(kept))
		for _, s := range skips {
			c.log.Warn("No policy route for an address", "address", s.Address.String(), "reason", s.Reason)
		}
		if len(routes)+len(skips) == 0 {
			c.log.Warn("No policy routes: the NIC has no IPv4 address", "nic", state.Name)
		}
		for _, r := range routes {
			c.log.Debug("Policy route", "from", r.From, "route", r.String())
		}
	}
	for _, a := range kept {
		prefix, onLink := a.inPod()
		if slices.ContainsFunc(routes, func(r policyroute.Route) bool { return r.From == a.Local && !prefix.Contains(r.NextHop) }) {
			c.log.Warn("The next hop is not in the address's own network: sbr does not copy such a route",
				"address", a.Local, "network", onLink)
		}
	}
	if c.conf.useInterfaceNetwork {
		kept = nil // the sub-plugin keeps them itself
	}
	return staticConfig(kept, routes), routes
}

// delegateAdd calls the sub-plugin, which inherits the lock.
func (c *call) delegateAdd(ctx context.Context, device string, ipam *ipamConfig, lock *os.File) (types.Result, error) {
	conf, err := c.conf.forSubPlugin(device, ipam)
	if err != nil {
		return nil, err
	}
	c.log.Debug("Calling the sub-plugin", "plugin", subPlugin, "configuration", string(conf))
	out, err := c.exec(lock).run(ctx, "ADD", subPlugin, conf)
	if err != nil {
		return nil, err
	}
	result, err := version.NewResult(c.conf.cniVersion, out)
	if err != nil {
		return nil, errorf(types.ErrDecodingFailure, "result of %s: %w", subPlugin, err)
	}
	return result, nil
}

// verify says whether the NIC is in the container under its name, and records as what.
func (c *call) verify(pod *nic.Place, rec *record) error {
	link, err := pod.ByName(c.args.IfName)
	if err != nil {
		return err
	}
	if link == nil || !rec.NIC.Matches(link) {
		return fmt.Errorf("sub-plugin %s said that it moved NIC %s, but the container has no such NIC as %s", subPlugin, rec.NIC, c.args.IfName)
	}
	if rec.NIC.Physical() {
		return nil // its hardware tells it
	}
	rec.PodIndex = link.Attrs().Index
	if err := c.store.save(rec); err != nil {
		return errorf(types.ErrIOFailure, "%w", err)
	}
	return nil
}
