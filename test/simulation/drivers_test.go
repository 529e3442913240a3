// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// ownDriver makes the interface of a VF.
	ownDriver = "igbvf"
	// userspaceVF is the VF that the node has bound to vfio-pci, whoever has it.
	userspaceVF = vfCount - 1
	// firstGroup is the lowest number of an IOMMU group.
	firstGroup = 10
	// vfioNode is the node beside those of groups.
	vfioNode = "/dev/vfio/vfio"
	// othersDriver is one that somebody else wants to have.
	othersDriver = "pci-stub"
)

// drivers is what the kernel has of a VF's drivers.
type drivers struct {
	// ofNode is the driver that the node has for it whenever it is made.
	ofNode string
	// driver is the one that is bound, override the only one that may be; empty for none, and for any.
	driver, override string
	// bindings counts what was bound to it: who has opened its node has it until the next.
	bindings int
	// iommuGroup is the number of its IOMMU group, by which its node is called. The kernel uses numbers again.
	iommuGroup int
	// crowded is true while something else in the group is in use.
	crowded bool
	// lentMAC is the address that the PF has fixed for it.
	lentMAC string
}

// make is what a new VF has.
func (d *drivers) make() {
	d.driver, d.override, d.lentMAC = d.ofNode, d.overrideOfNode(), ""
	d.bindings++
}

// overrideOfNode is how the node has its choice of another driver than the VF's own.
func (d *drivers) overrideOfNode() string {
	if d.ofNode == ownDriver {
		return ""
	}
	return d.ofNode
}

// home says whether all is as it was before any claim had the VF.
func (d *drivers) home() bool {
	return d.driver == d.ofNode && d.override == d.overrideOfNode() && d.lentMAC == ""
}

func (d *drivers) describe() string {
	return fmt.Sprintf("driver %q, only %q, group %d, lent %q", d.driver, d.override, d.iommuGroup, d.lentMAC)
}

// group gives the VF the lowest number of an IOMMU group that no other has.
func (k *kernel) group(v *vf) {
	v.iommuGroup = 0
	for n := firstGroup; v.iommuGroup == 0; n++ {
		if !slices.ContainsFunc(k.vfs, func(o *vf) bool { return o.present && o.iommuGroup == n }) {
			v.iommuGroup = n
		}
	}
}

// bindOwn binds the VF's own driver, which makes an interface.
func (v *vf) bindOwn() {
	v.driver, v.netns, v.ifName, v.addresses = ownDriver, "", v.hostName(), nil
	v.links++
	v.bindings++
	v.mac = v.permanentMAC()
	if v.lentMAC != "" {
		v.mac = v.lentMAC
	}
}

// node returns the VF that programs reach by the path, nil for none.
func (k *kernel) node(path string) *vf {
	for _, v := range k.vfs {
		if v.present && v.driver == types.DriverVFIO && path == v.node() {
			return v
		}
	}
	return nil
}

func (v *vf) node() string { return fmt.Sprintf("/dev/vfio/%d", v.iommuGroup) }

// rebindable says why the driver cannot be bound to the VF.
func (v *vf) rebindable(driver string) error {
	switch {
	case v.crowded:
		return fmt.Errorf("its IOMMU group %d also has something else", v.iommuGroup)
	case v.driver != driver && v.override != "":
		return fmt.Errorf("driver_override says %q, which somebody else has set", v.override)
	}
	return nil
}

// opened is what a container has of a VF: its node, as long as the driver that made it stays bound.
type opened struct {
	vf      *vf
	binding int
}

func (o opened) still() bool {
	return o.vf.present && o.vf.driver == types.DriverVFIO && o.vf.bindings == o.binding
}

// open returns what a container with the nodes has opened.
func (k *kernel) open(nodes []string) (all []opened, err error) {
	for _, path := range nodes {
		if path == vfioNode {
			continue
		}
		v := k.node(path)
		if v == nil {
			return nil, fmt.Errorf("%s: no such file or directory", path)
		}
		all = append(all, opened{v, v.bindings})
	}
	return all, nil
}

// areNodesOf is what the hook sees: whether the nodes are those of the devices in a container's environment.
func (k *kernel) areNodesOf(nodes, env []string) bool {
	var own []string
	for _, variable := range env {
		name, addresses, _ := strings.Cut(variable, "=")
		for _, v := range k.vfs {
			if strings.HasPrefix(name, "PCIDEVICE_") && slices.Contains(strings.Split(addresses, ","), v.name) {
				own = append(own, v.node())
			}
		}
	}
	return !slices.ContainsFunc(nodes, func(node string) bool { return node != vfioNode && !slices.Contains(own, node) })
}

// users are the containers that run and have the VF.
func (s *sim) users(v *vf) (users []*container) {
	for _, sb := range s.runtime.sandboxes {
		for _, c := range sb.containers {
			if sb.ready && slices.ContainsFunc(c.opened, func(o opened) bool { return o.vf == v && o.still() }) {
				users = append(users, c)
			}
		}
	}
	return users
}

// lose takes the VF away from programs, which end some time later.
func (s *sim) lose(v *vf) {
	for _, c := range s.users(v) {
		sb := c.sandbox
		s.after("container "+c.name+" of "+sb.pod.name+", which has lost "+v.name+", dies", span{time.Millisecond, 10 * time.Second}, func() {
			if c.sandbox == sb && slices.Contains(sb.containers, c) {
				s.runtime.exit(c)
			}
		})
	}
}

var _ types.Exposed = &device{}

// Exposes implements [types.Exposed].
func (d *device) Exposes(cfg types.DeviceConfig) bool { return cfg.Driver != "" }

// Exposure implements [types.Exposed].
func (d *device) Exposure(types.DeviceConfig) (types.Exposure, error) {
	return types.Exposure{Address: d.Name, Nodes: []string{vfioNode, fmt.Sprintf("/dev/vfio/%d", d.Group)}}, nil
}

// What follows is how package sriov binds drivers, in its steps.

// change goes on with the work when the context has ended, and the next change of the VF waits for it.
func (w *world) change(ctx context.Context, device string, work func(context.Context) error) error {
	unlock, err := w.drivers.Lock(ctx, device)
	if err != nil {
		return err
	}
	result := make(chan error, 1)
	go func() {
		defer unlock()
		result <- work(context.WithoutCancel(ctx))
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return fmt.Errorf("its driver is still being changed: %w", ctx.Err())
	}
}

// bindAway binds the driver of the claim.
func (w *world) bindAway(ctx context.Context, d *device, driver string) error {
	v, bound := w.sim.kernel.vf(d.Name), false
	err := w.ask(ctx, "look at the driver of "+d.Name, nil, func() error {
		switch {
		case !v.present:
			return errors.New("the device is gone")
		case v.driver == driver:
			bound = true
			return nil
		case !d.Original.Rebound:
			return fmt.Errorf("the VF had %s bound to it and now has %q", driver, v.driver)
		case v.crowded:
			return v.rebindable(driver)
		}
		w.away[d.Name] = true
		return nil
	})
	if bound || err != nil {
		return err
	}
	return w.change(ctx, d.Name, func(ctx context.Context) error {
		err := w.ask(ctx, "choose the driver of "+d.Name, nil, func() error {
			if v.override != "" && v.override != driver {
				return fmt.Errorf("driver_override says %q, which somebody else has set", v.override)
			}
			return v.choose(driver)
		})
		if err == nil {
			err = w.unbind(ctx, v)
		}
		if err == nil {
			err = w.bind(ctx, v, driver)
		}
		return err
	})
}

// bindBack binds the driver that the device was found with.
func (w *world) bindBack(ctx context.Context, d *device) (*device, error) {
	if d.Original == nil || !d.Original.Rebound {
		return d, nil
	}
	home, original := *d, *d.Original
	original.Rebound, home.Original = false, &original
	v, done, lent := w.sim.kernel.vf(d.Name), false, false
	err := w.ask(ctx, "look at the driver of "+d.Name, nil, func() error {
		lent = v.lentMAC != "" && !w.sim.mutant.keepMAC
		done = !v.present || v.driver == d.Driver && v.override == "" && !lent
		if !done {
			w.away[d.Name] = true
		}
		return nil
	})
	if done || err != nil {
		return &home, err
	}
	err = w.change(ctx, d.Name, func(ctx context.Context) error {
		err := w.ask(ctx, "have any driver fit "+d.Name, nil, func() error {
			if v.override != types.DriverVFIO {
				return nil
			}
			return v.choose("")
		})
		if err == nil {
			err = w.unbind(ctx, v)
		}
		return err
	})
	if err == nil && lent {
		err = w.ask(ctx, "clear the address of "+d.Name, nil, func() error {
			v.lentMAC = ""
			return nil
		})
	}
	if err == nil {
		err = w.change(ctx, d.Name, func(ctx context.Context) error { return w.bind(ctx, v, d.Driver) })
	}
	if err == nil {
		err = w.ask(ctx, "await the interface of "+d.Name, nil, func() error {
			if !v.hasLink() {
				return errors.New("the driver has made no interface")
			}
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("bind the driver %s back: %w", d.Driver, err)
	}
	return &home, nil
}

func (w *world) unbind(ctx context.Context, v *vf) error {
	return w.ask(ctx, "unbind "+v.name, nil, func() error {
		for _, c := range w.sim.users(v) {
			w.sim.fail("%s is taken from container %s of pod %s, which runs", v, c.name, c.sandbox.pod.name)
		}
		if ns := w.sim.kernel.namespaces[v.netns]; v.hasLink() && ns != nil {
			w.sim.fail("the driver of %s is unbound, which is in pod %s", v, ns.pod.name)
		}
		v.driver = ""
		v.bindings++
		return nil
	})
}

func (w *world) bind(ctx context.Context, v *vf, driver string) error {
	return w.ask(ctx, "bind "+driver+" to "+v.name, nil, func() error {
		switch {
		case !v.present:
			return errors.New("the device is gone")
		case v.driver == driver:
			return nil
		case v.driver != "" || v.override != "" && v.override != driver:
			return fmt.Errorf("bind the driver %s: it does not take it", driver)
		case driver == ownDriver:
			v.bindOwn()
		default:
			v.driver = driver
			v.bindings++
		}
		return nil
	})
}

// choose has only the driver fit, or any.
func (v *vf) choose(driver string) error {
	if !v.present {
		return errors.New("the device is gone")
	}
	v.override = driver
	return nil
}

// checkOpened: whoever has a VF's node has a claim to the VF, and nobody else has it. It is in the claim's VLAN, or is put back.
func (s *sim) checkOpened() {
	for _, v := range s.kernel.vfs {
		var pods []string
		for _, ctr := range s.users(v) {
			p := ctr.sandbox.pod
			c := s.claimIn(p, v.name)
			switch {
			case c == nil:
				s.fail("container %s of pod %s has %s, to which the pod has no claim", ctr.name, p.name, v)
			case !slices.Contains(ctr.claims, c):
				s.fail("container %s of pod %s has %s, and does not list claim %s", ctr.name, p.name, v, c.name)
			case v.vlan != c.vlan && s.unrepaired(v):
				s.fail("container %s of pod %s has %s in another VLAN than %d of claim %s, and it is not repaired", ctr.name, p.name, v, c.vlan, c.name)
			}
			pods = append(pods, p.name)
		}
		if slices.Sort(pods); len(slices.Compact(pods)) > 1 {
			s.fail("%s is in several pods: %s", v, strings.Join(pods, ", "))
		}
	}
}

// has says whether the container has what its claim is for of the VF.
func (s *sim) has(ctr *container, c *claim, v *vf) bool {
	if c.driver == "" {
		return v.hasLink() && (v.netns == ctr.sandbox.netns || v.netns == ctr.sandbox.netns+"-own")
	}
	return v.vlan == c.vlan && slices.ContainsFunc(ctr.opened, func(o opened) bool { return o.vf == v && o.still() })
}

// needs are the numbers of devices by what they can be used for.
type needs struct {
	// links need an interface, programs need vfio-pci.
	links, programs int
}

func (n *needs) add(c *claim, more int) {
	if c.driver == "" {
		n.links += more
	} else {
		n.programs += more
	}
}

// met says whether the devices are enough.
func (n needs) met(k *kernel, free []string) bool {
	virtual, userspace, both := 0, 0, 0
	for _, name := range free {
		switch v := k.vf(name); {
		case v.virtual:
			virtual++
		case v.ofNode != ownDriver:
			userspace++
		default:
			both++
		}
	}
	return max(0, n.links-virtual)+max(0, n.programs-userspace) <= both
}

// suits says whether the VF is one that the claim selects.
func (c *claim) suits(v *vf) bool {
	if c.driver == "" {
		return v.ofNode == ownDriver
	}
	return !v.virtual
}
