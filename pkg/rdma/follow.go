// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rdma

import (
	"fmt"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// socket is for RDMA devices in one network namespace, as [rtlink.RDMA] is.
type socket interface {
	Exclusive() (bool, error)
	Find(name string) (*netlink.RdmaLink, error)
	Move(device *netlink.RdmaLink, to *netnamespace.Namespace) error
	MakeSoft(name, ifName string) error
	RemoveSoft(name string) error
	Close()
}

// Follower has RDMA devices follow their interfaces.
type Follower struct {
	dial func(*netnamespace.Namespace) (socket, error)
}

// NewFollower returns a Follower for the node's kernel.
func NewFollower() *Follower {
	return &Follower{func(ns *netnamespace.Namespace) (socket, error) { return rtlink.DialRDMA(ns) }}
}

// Leave is called before the interface of the device is moved out of the host's namespace. Soft-RoCE would end with that, some time
// later.
func (f *Follower) Leave(d Device, host *netnamespace.Namespace) error {
	if !d.Soft {
		return nil
	}
	return f.in(host, func(s socket) error {
		if found, err := s.Find(d.Name); found == nil || err != nil {
			return err
		}
		return s.RemoveSoft(d.Name)
	})
}

// Enter has the device in a pod's namespace, where its interface is by now, by the name ifName. It may be repeated. Soft-RoCE is not
// for nodes whose namespaces do not share devices: the kernel makes it in the first one, and does not move it.
func (f *Follower) Enter(d Device, host, pod *netnamespace.Namespace, ifName string) error {
	return f.in(pod, func(inPod socket) error {
		found, err := inPod.Find(d.Name)
		switch {
		case found != nil || err != nil:
			return err // where devices are shared it is seen from everywhere
		case d.Soft:
			return inPod.MakeSoft(d.Name, ifName)
		}
		return f.in(host, func(onHost socket) error {
			found, err := onHost.Find(d.Name)
			switch {
			case err != nil:
				return err
			case found == nil:
				return fmt.Errorf("RDMA device %s is not in the host's network namespace", d.Name)
			}
			return onHost.Move(found, pod)
		})
	})
}

// Return has the device on the host, where its interface is by now, by the name ifName. pod is the namespace that they were in, nil if
// that has ended. It may be repeated. A device that is nowhere, as its NIC's driver for RDMA was unloaded, is no error.
func (f *Follower) Return(d Device, host, pod *netnamespace.Namespace, ifName string) error {
	return f.in(host, func(onHost socket) error {
		found, err := onHost.Find(d.Name)
		switch {
		case found != nil || err != nil:
			return err
		case d.Soft:
			return onHost.MakeSoft(d.Name, ifName)
		case pod == nil:
			return nil // the kernel gives it back by itself
		}
		return f.in(pod, func(inPod socket) error {
			found, err := inPod.Find(d.Name)
			if found == nil || err != nil {
				return err
			}
			return inPod.Move(found, host)
		})
	})
}

func (f *Follower) in(ns *netnamespace.Namespace, do func(socket) error) error {
	s, err := f.dial(ns)
	if err != nil {
		return err
	}
	defer s.Close()
	return do(s)
}

// Mode says whether the network namespaces of the node share RDMA devices (shared) or not (exclusive). It is empty where the kernel
// has none.
func (s Sysfs) Mode() (string, error) {
	if _, err := os.Stat(s.path("class/infiniband")); err != nil {
		return "", nil
	}
	own, err := netnamespace.Open("/proc/thread-self/ns/net")
	if err != nil {
		return "", err
	}
	defer own.Close()
	k, err := rtlink.DialRDMA(own)
	if err != nil {
		return "", err
	}
	defer k.Close()
	if exclusive, err := k.Exclusive(); !exclusive || err != nil {
		return ModeShared, err
	}
	return ModeExclusive, nil
}
