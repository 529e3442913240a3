// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// BenchmarkAttachDetach moves a link into a pod and back, each time followed by the same two moves by bare requests on
// sockets that are open already. One run gives both times and their ratio; most of either is the kernel's waiting for
// its readers (synchronize_net), which varies from run to run.
func BenchmarkAttachDetach(b *testing.B) {
	f := setup(b)
	f.Mover = New(slog.New(slog.DiscardHandler), f.cfg)
	dev := f.host.addLink("v0")
	bare := f.bare(b)
	var ours, theirs time.Duration
	for b.Loop() {
		start := time.Now()
		if _, err := f.Attach(f.ctx, f.pod.path, dev, types.DeviceConfig{PodIfName: "net1"}); err != nil {
			b.Fatal(err)
		}
		if err := f.Detach(f.ctx, f.pod.path, dev); err != nil {
			b.Fatal(err)
		}
		half := time.Now()
		bare(dev.id.Index)
		ours, theirs = ours+half.Sub(start), theirs+time.Since(half)
	}
	b.ReportMetric(float64(ours.Nanoseconds())/float64(b.N), "attach+detach-ns/op")
	b.ReportMetric(float64(theirs.Nanoseconds())/float64(b.N), "bare-ns/op")
	b.ReportMetric(float64(ours)/float64(theirs), "ratio")
}

// BenchmarkAddresses attaches a link with two addresses, four routes and two rules, each time followed by one without. One run
// gives both times and their ratio.
func BenchmarkAddresses(b *testing.B) {
	f := setup(b)
	f.Mover = New(slog.New(slog.DiscardHandler), f.cfg)
	dev := f.host.addLink("v0")
	require.NoError(b, f.host.LinkSetUp(f.host.link(dev.peer)))
	with := withAddresses(true, route("10.0.0.0/8", "192.0.2.1", 0), route("0.0.0.0/0", "192.0.2.2", 0), route("2001:db8:1::/48", "2001:db8::1", 0), route("::/0", "2001:db8::1", 0))
	attach := func(config types.DeviceConfig) time.Duration {
		start := time.Now()
		if _, err := f.Attach(f.ctx, f.pod.path, dev, config); err != nil {
			b.Fatal(err)
		}
		took := time.Since(start)
		if err := f.Detach(f.ctx, f.pod.path, dev); err != nil {
			b.Fatal(err)
		}
		if err := f.Tidy(f.pod.path, config); err != nil {
			b.Fatal(err)
		}
		return took
	}
	var ours, plain time.Duration
	for b.Loop() {
		ours += attach(with)
		plain += attach(types.DeviceConfig{PodIfName: "net1"})
	}
	b.ReportMetric(float64(ours.Nanoseconds())/float64(b.N), "with-ns/op")
	b.ReportMetric(float64(plain.Nanoseconds())/float64(b.N), "without-ns/op")
	b.ReportMetric(float64(ours)/float64(plain), "ratio")
}

// BenchmarkBareNetlink is the two moves alone.
func BenchmarkBareNetlink(b *testing.B) {
	f := setup(b)
	dev := f.host.addLink("v0")
	bare := f.bare(b)
	for b.Loop() {
		bare(dev.id.Index)
	}
}

// bare returns a function that moves the link in and back by two requests.
func (f *fixture) bare(b *testing.B) func(index int) {
	b.Helper()
	host, pod := f.host.dial(), f.pod.dial()
	hostNS, err := netnamespace.Open(f.host.path)
	require.NoError(b, err)
	podNS, err := netnamespace.Open(f.pod.path)
	require.NoError(b, err)
	b.Cleanup(func() {
		host.Close()
		pod.Close()
		hostNS.Close()
		podNS.Close()
	})
	return func(index int) {
		if err := host.Change(index, rtlink.Change{To: podNS, Name: "net1", Flags: unix.IFF_UP, Mask: unix.IFF_UP}); err != nil {
			b.Fatal(err)
		}
		if err := pod.Change(index, rtlink.Change{To: hostNS, Name: "v0", Mask: unix.IFF_UP}); err != nil {
			b.Fatal(err)
		}
	}
}
