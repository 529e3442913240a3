// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// softRoCE is the kernel's name for RDMA devices that are made of an interface in software.
const softRoCE = "rxe"

// RDMA is a socket for RDMA devices in one network namespace: for what rdma(8) does. To open one has the kernel load its module for
// RDMA.
type RDMA struct {
	handle *netlink.Handle
	netns  string
}

// DialRDMA opens a socket in the namespace, which may be closed afterwards.
func DialRDMA(ns *netnamespace.Namespace) (*RDMA, error) {
	handle, err := netlink.NewHandleAt(netns.NsHandle(ns.FD), unix.NETLINK_RDMA)
	if err != nil {
		return nil, fmt.Errorf("open a socket for RDMA devices in %s: %w", ns.Path, err)
	}
	return &RDMA{handle, ns.Path}, nil
}

// Close closes the socket.
func (r *RDMA) Close() { r.handle.Close() }

// Exclusive says whether an RDMA device is in one network namespace only, instead of being shared by all.
func (r *RDMA) Exclusive() (bool, error) {
	mode, err := r.handle.RdmaSystemGetNetnsMode()
	if err != nil {
		return false, fmt.Errorf("read whether network namespaces share RDMA devices: %w", err)
	}
	return mode == "exclusive", nil
}

// Find returns the RDMA device with the name that is seen in the namespace, nil if there is none.
func (r *RDMA) Find(name string) (found *netlink.RdmaLink, err error) {
	err = retry(func() error {
		devices, err := r.handle.RdmaLinkList()
		for _, d := range devices {
			if d.Attrs.Name == name {
				found = d
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list RDMA devices in %s: %w", r.netns, err)
	}
	return found, nil
}

// Move moves the device out of the namespace. Where devices are shared the kernel refuses that.
func (r *RDMA) Move(device *netlink.RdmaLink, to *netnamespace.Namespace) error {
	if err := r.handle.RdmaLinkSetNsFd(device, uint32(to.FD)); err != nil {
		return fmt.Errorf("move RDMA device %s from %s to %s: %w", device.Attrs.Name, r.netns, to.Path, err)
	}
	return nil
}

// MakeSoft makes a Soft-RoCE device of an interface of the namespace.
func (r *RDMA) MakeSoft(name, ifName string) error {
	if err := r.handle.RdmaLinkAdd(name, softRoCE, ifName); err != nil {
		return fmt.Errorf("make Soft-RoCE device %s of interface %s in %s: %w", name, ifName, r.netns, err)
	}
	return nil
}

// RemoveSoft removes a Soft-RoCE device.
func (r *RDMA) RemoveSoft(name string) error {
	if err := r.handle.RdmaLinkDel(name); err != nil {
		return fmt.Errorf("remove Soft-RoCE device %s in %s: %w", name, r.netns, err)
	}
	return nil
}
