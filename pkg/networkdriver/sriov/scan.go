// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// scan finds all VFs. One VF that cannot be read or cannot serve is left out with the reason; the others stay. An error
// means that nothing can be said.
func (m *Manager) scan() (types.Snapshot, error) {
	nodeIPs, _ := m.nodeIPs()
	view, err := m.kernel.HostNetwork(nodeIPs)
	if err != nil {
		return types.Snapshot{}, fmt.Errorf("read the node's own network: %w", err)
	}
	addrs, err := m.sysfs.pciAddrs()
	if err != nil {
		return types.Snapshot{}, err
	}
	var s types.Snapshot
	pfs := map[string]*physFn{}
	for _, addr := range addrs {
		vf, err := m.sysfs.virtFn(addr, pfs)
		if errors.Is(err, errNotVF) || errors.Is(err, errGone) {
			continue
		}
		reason, fault := "", types.Fault{}
		switch {
		case err != nil:
			reason = fmt.Sprintf("cannot be read: %v", err)
		case !strings.HasPrefix(vf.class, ethernetClass):
			continue
		default:
			if was := m.drivers.foundAs(addr); was != nil && vf.pf.ifName != "" && !was.isSucceeded() {
				s.Devices = append(s.Devices, m.device(vf).Merge(was))
				continue
			}
			fault = vf.unusable()
			reason = fault.Message
		}
		if reason == "" && vf.netdev != nil {
			if own := view.Reason(vf.netdev.index); own != "" {
				reason = fmt.Sprintf("its interface %s is part of the node's own network: it %s", vf.netdev.name, own)
			}
		}
		if reason == "" && vf.linkMissing() && (m.prepared == nil || !m.prepared(nameOf(addr))) {
			reason = fmt.Sprintf("its interface is not in the host's network namespace although the driver %s is bound", vf.driver)
			fault = types.Fault{Cause: types.CauseLinkMissing, Of: types.OfVF}
		}
		if reason != "" {
			s.Skipped = append(s.Skipped, types.Skipped{Device: nameOf(addr), Reason: reason, Cause: fault.Cause, Of: fault.Of})
			continue
		}
		s.Devices = append(s.Devices, m.device(vf))
	}
	return s, nil
}

// unusable says why the VF cannot serve anyone; without a cause it can.
func (v *virtFn) unusable() types.Fault {
	switch {
	case v.driver == "":
		return noDriver()
	case v.pf.ifName == "":
		return noInterface(v.pf.addr)
	}
	return types.Fault{}
}

func noDriver() types.Fault {
	return types.Fault{Cause: types.CauseDriverGone, Of: types.OfVF, Message: "no driver is bound to it"}
}

func noInterface(pfAddr string) types.Fault {
	return types.Fault{Cause: types.CauseLinkMissing, Of: types.OfPF,
		Message: fmt.Sprintf("its physical function %s has no interface in the host's network namespace", pfAddr)}
}

// linkMissing is true for a VF whose driver makes an interface that is not in the host's namespace. It is in a pod, or
// the driver failed to start.
func (v *virtFn) linkMissing() bool {
	return v.netdev == nil && !nic.IsUserspaceDriver(v.driver)
}

// device describes the VF as a device that is not prepared.
func (m *Manager) device(v *virtFn) *Device {
	d := &Device{
		Addr:     v.addr,
		PFName:   v.pf.ifName,
		VFID:     v.id,
		Vendor:   v.vendor,
		DeviceID: v.deviceID,
		Driver:   v.driver,
		manager:  m,
	}
	d.LinkSpeed = m.speeds.note(v.pf.addr, v.pf.speed)
	if v.netdev != nil {
		d.KernelIfaceName, d.MTU, d.MAC = v.netdev.name, v.netdev.mtu, v.netdev.mac
	}
	// These say no when the answer is unknown, which is no reason to hide the device: the attribute is left out.
	d.IOMMUGroup, _ = m.sysfs.iommuGroup(v.addr)
	d.rdma, _ = m.rdma.Of(v.addr, d.KernelIfaceName)
	root := deviceattribute.WithFSFromRoot(m.sysfs.root)
	if attr, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(v.addr, root); err == nil {
		d.PCIeRoot = *attr.Value.StringValue
	}
	if attr, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(v.addr, deviceattribute.ScalarAttribute, root); err == nil {
		d.NUMANode = attr.Value.IntValue
	}
	return d
}
