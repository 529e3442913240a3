// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// verbed is a link with an RDMA device.
type verbed struct{ device }

func (verbed) RDMADevice() rdma.Device { return rdma.Device{Name: "mlx5_3"} }

// followed records what RDMA devices are told about their links.
type followed struct {
	calls []string
	enter error
}

func (f *followed) Leave(d rdma.Device, _ *netnamespace.Namespace) error {
	f.calls = append(f.calls, "leave "+d.Name)
	return nil
}

func (f *followed) Enter(d rdma.Device, host, pod *netnamespace.Namespace, ifName string) error {
	f.calls = append(f.calls, "enter "+d.Name+" "+ifName)
	return f.enter
}

func (f *followed) Return(d rdma.Device, host, pod *netnamespace.Namespace, ifName string) error {
	where := "nowhere"
	if pod != nil {
		where = "pod"
	}
	f.calls = append(f.calls, "return "+d.Name+" from "+where+" "+ifName)
	return nil
}

func (f *followed) took() []string {
	calls := f.calls
	f.calls = nil
	return calls
}

// An RDMA device follows its link into the pod if the claim asks for it, and comes home with it in any case: after the pod, after
// the pod's namespace, and after an attach that failed.
func TestRDMAFollows(t *testing.T) {
	f := setup(t)
	follower := &followed{}
	f.Mover = New(slog.New(f.requests), Config{HostNetNS: f.host.path, Sysfs: t.TempDir(), RDMA: follower})
	plain := f.host.addLink("v0")
	dev := verbed{plain}
	cfg := types.DeviceConfig{PodIfName: "net1", RDMA: true}

	_, err := f.Attach(f.ctx, f.pod.path, dev, cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"leave mlx5_3", "enter mlx5_3 net1"}, follower.took())
	_, err = f.Attach(f.ctx, f.pod.path, dev, cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"enter mlx5_3 net1"}, follower.took(), "of a link that is there already")
	for _, path := range []string{f.pod.path, "", "/nonexistent", f.host.path} {
		require.NoError(t, f.Detach(f.ctx, path, dev))
		require.Equal(t, []string{"return mlx5_3 from " + map[bool]string{true: "pod", false: "nowhere"}[path == f.pod.path] + " v0"}, follower.took())
	}

	_, err = f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{})
	require.NoError(t, err)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, dev))
	require.Equal(t, []string{"leave mlx5_3", "return mlx5_3 from pod v0"}, follower.took(), "a claim that does not ask for it")

	follower.enter = errors.New("operation not supported")
	_, err = f.Attach(f.ctx, f.pod.path, dev, cfg)
	require.ErrorIs(t, err, follower.enter)
	require.Equal(t, []string{"leave mlx5_3", "enter mlx5_3 net1", "return mlx5_3 from pod v0"}, follower.took())
	f.host.requireHome(plain)

	_, err = f.Attach(f.ctx, f.pod.path, plain, types.DeviceConfig{})
	require.NoError(t, err)
	require.NoError(t, f.Detach(f.ctx, f.pod.path, plain))
	require.Empty(t, follower.took(), "a link without one")
}
