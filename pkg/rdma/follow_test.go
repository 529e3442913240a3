// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rdma

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
)

// fakeKernel has RDMA devices and records what is done to them. Its rules are those of drivers/infiniband/core: shared devices are seen
// from everywhere and cannot be moved, others are seen where they are, and one of a namespace that ends is in the first one again.
type fakeKernel struct {
	exclusive bool
	// devices are the namespaces that devices are in, by name.
	devices map[string]*netnamespace.Namespace
	changes []string
	refuse  error
}

func (k *fakeKernel) follower() *Follower {
	return &Follower{func(ns *netnamespace.Namespace) (socket, error) { return fakeSocket{k, ns}, nil }}
}

func (k *fakeKernel) took() []string {
	changes := k.changes
	k.changes = nil
	return changes
}

type fakeSocket struct {
	*fakeKernel
	in *netnamespace.Namespace
}

func (s fakeSocket) Exclusive() (bool, error) { return s.exclusive, nil }

func (s fakeSocket) Find(name string) (*netlink.RdmaLink, error) {
	if at := s.devices[name]; at == nil || s.exclusive && at != s.in {
		return nil, nil
	}
	return &netlink.RdmaLink{Attrs: netlink.RdmaLinkAttrs{Name: name}}, nil
}

func (s fakeSocket) Move(d *netlink.RdmaLink, to *netnamespace.Namespace) error {
	if !s.exclusive {
		return errors.New("operation not supported")
	}
	s.changes = append(s.changes, fmt.Sprintf("%s from %s to %s", d.Attrs.Name, s.in.Path, to.Path))
	if s.refuse == nil {
		s.devices[d.Attrs.Name] = to
	}
	return s.refuse
}

func (s fakeSocket) MakeSoft(name, ifName string) error {
	s.changes = append(s.changes, fmt.Sprintf("make %s of %s in %s", name, ifName, s.in.Path))
	s.devices[name] = s.in
	return nil
}

func (s fakeSocket) RemoveSoft(name string) error {
	s.changes = append(s.changes, "remove "+name)
	delete(s.devices, name)
	return nil
}

func (s fakeSocket) Close() {}

var (
	host = &netnamespace.Namespace{Path: "host"}
	pod  = &netnamespace.Namespace{Path: "pod"}
)

// Where namespaces share devices a NIC's stays where it is.
func TestSharedStays(t *testing.T) {
	k := &fakeKernel{devices: map[string]*netnamespace.Namespace{"mlx5_3": host}}
	f, d := k.follower(), Device{Name: "mlx5_3"}
	require.NoError(t, f.Leave(d, host))
	require.NoError(t, f.Enter(d, host, pod, "net1"))
	require.NoError(t, f.Return(d, host, pod, "ens1f0v0"))
	require.Empty(t, k.took())
}

// Where they do not, it goes with its interface and comes back with it; each may be repeated.
func TestExclusiveMoves(t *testing.T) {
	k := &fakeKernel{exclusive: true, devices: map[string]*netnamespace.Namespace{"mlx5_3": host}}
	f, d := k.follower(), Device{Name: "mlx5_3"}
	require.NoError(t, f.Leave(d, host))
	for _, want := range [][]string{{"mlx5_3 from host to pod"}, nil} {
		require.NoError(t, f.Enter(d, host, pod, "net1"))
		require.Equal(t, want, k.took())
	}
	for _, want := range [][]string{{"mlx5_3 from pod to host"}, nil} {
		require.NoError(t, f.Return(d, host, pod, "ens1f0v0"))
		require.Equal(t, want, k.took())
	}
	// A namespace that has ended has given it back.
	require.NoError(t, f.Return(d, host, nil, "ens1f0v0"))

	k.refuse = errors.New("refused")
	require.ErrorIs(t, f.Enter(d, host, pod, "net1"), k.refuse)
	require.Same(t, host, k.devices["mlx5_3"])

	// It may be in a third one, which a privileged pod has made, or gone with its NIC's module.
	k.devices["mlx5_3"] = &netnamespace.Namespace{Path: "third"}
	require.EqualError(t, f.Enter(d, host, pod, "net1"), "RDMA device mlx5_3 is not in the host's network namespace")
	require.NoError(t, f.Return(d, host, pod, "ens1f0v0"))
}

// Soft-RoCE does not outlive the move of its interface: it is made anew in the pod for a claim that asks for it, and on the host
// whether or not one did.
func TestSoftIsMadeAnew(t *testing.T) {
	k := &fakeKernel{devices: map[string]*netnamespace.Namespace{"rxe0": host}}
	f, d := k.follower(), Device{Name: "rxe0", Soft: true}
	for _, want := range [][]string{{"remove rxe0"}, nil} {
		require.NoError(t, f.Leave(d, host))
		require.Equal(t, want, k.took())
	}
	for _, want := range [][]string{{"make rxe0 of net1 in pod"}, nil} {
		require.NoError(t, f.Enter(d, host, pod, "net1"))
		require.Equal(t, want, k.took())
	}
	delete(k.devices, "rxe0") // the interface has left
	for _, want := range [][]string{{"make rxe0 of ens1f0v0 in host"}, nil} {
		require.NoError(t, f.Return(d, host, nil, "ens1f0v0"))
		require.Equal(t, want, k.took())
	}
}
