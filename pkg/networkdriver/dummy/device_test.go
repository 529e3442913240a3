// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dummy

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// scripted are links that are what the test says, for what needs no kernel.
type scripted struct {
	present []link
	err     error
	events  chan struct{}
}

func (s *scripted) list() ([]link, error)            { return s.present, s.err }
func (s *scripted) create(string, int) (link, error) { return link{}, errors.ErrUnsupported }
func (s *scripted) delete(string) error              { return errors.ErrUnsupported }

func (s *scripted) watch(ctx context.Context, notify func()) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.events:
			notify()
		}
	}
}

func newManager(cfg *v2alpha1.DummyDeviceManagerConfig, links links) *Manager {
	m := New(slog.New(slog.DiscardHandler), cfg)
	m.links = links
	return m
}

func TestCount(t *testing.T) {
	for _, c := range []struct {
		cfg      *v2alpha1.DummyDeviceManagerConfig
		devices  int
		problems int
	}{
		{nil, 0, 0},
		{&v2alpha1.DummyDeviceManagerConfig{Count: 3}, 0, 0},
		{&v2alpha1.DummyDeviceManagerConfig{Enabled: true}, 0, 0},
		{&v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: 3}, 3, 0},
		{&v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: MaxCount}, MaxCount, 0},
		{&v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: MaxCount + 1}, 0, 1},
		{&v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: -1}, 0, 1},
	} {
		s, err := newManager(c.cfg, &scripted{}).scan()
		require.NoError(t, err)
		require.Len(t, s.Devices, c.devices, "%+v", c.cfg)
		require.Len(t, s.Problems, c.problems, "%+v", c.cfg)
		for _, p := range s.Problems {
			require.Equal(t, "dummy.count", p.Field)
			require.Contains(t, p.Message, "is not in 0..1024")
		}
		names := map[string]bool{}
		for _, d := range s.Devices {
			names[d.IfName()] = true
		}
		require.Len(t, names, c.devices)
	}
}

func TestScanThatFails(t *testing.T) {
	cfg := &v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: 2}
	fails := &scripted{err: errors.New("no memory")}
	err := newManager(cfg, fails).Run(t.Context(), func(types.Snapshot) { t.Error("published") })
	require.ErrorContains(t, err, "no memory")
}

func TestPublishedOnChangeOnly(t *testing.T) {
	links := &scripted{events: make(chan struct{})}
	m := newManager(&v2alpha1.DummyDeviceManagerConfig{Enabled: true, Count: 2}, links)
	ctx, cancel := context.WithCancel(t.Context())
	published, ended := make(chan types.Snapshot, 10), make(chan error)
	go func() { ended <- m.Run(ctx, func(s types.Snapshot) { published <- s }) }()
	require.Len(t, (<-published).Devices, 2)
	// Each event is taken when the scan for the one before is over.
	for range 3 {
		select {
		case links.events <- struct{}{}:
		case <-time.After(wait):
			require.Fail(t, "events are not read")
		}
	}
	cancel()
	require.NoError(t, <-ended)
	require.Empty(t, published)
}

func TestMatch(t *testing.T) {
	type filter = v2alpha1.CiliumNetworkDriverDeviceFilter
	dev := &device{name: "dummy1"}
	for _, c := range []struct {
		filter *filter
		want   bool
	}{
		{nil, false},
		{&filter{}, true},
		{&filter{DeviceManagers: []string{"sr-iov", "dummy"}}, true},
		{&filter{DeviceManagers: []string{"sr-iov"}}, false},
		{&filter{IfNames: []string{"dummy0", "dummy1"}}, true},
		{&filter{IfNames: []string{"dummy10"}}, false},
		{&filter{IfNames: []string{"dummy1"}, DeviceManagers: []string{"sr-iov"}}, false},
		{&filter{PfNames: []string{"eth0"}}, true},
		{&filter{ParentIfNames: []string{"eth0"}}, false},
		{&filter{PciAddrs: []string{"0000:03:00.1"}}, false},
		{&filter{VendorIDs: []string{"0x8086"}}, false},
		{&filter{DeviceIDs: []string{"0x10ca"}}, false},
		{&filter{Drivers: []string{"dummy"}}, false},
	} {
		require.Equal(t, c.want, dev.Match(c.filter), "%+v", c.filter)
	}
}

func TestValidate(t *testing.T) {
	dev := &device{name: "dummy1"}
	require.NoError(t, dev.Validate(types.DeviceConfig{PodIfName: "net1"}))
	for _, vlan := range []int{0, 7} {
		cfg := types.DeviceConfig{Vlan: &vlan}
		require.ErrorContains(t, dev.Validate(cfg), "vlan")
		_, err := dev.Setup(t.Context(), cfg)
		require.ErrorContains(t, err, "vlan", "nothing is touched")
	}
}

func TestAttributes(t *testing.T) {
	fresh := &device{name: "dummy1", mtu: defaultMTU}
	attrs := fresh.Attrs()
	require.Len(t, attrs, 3)
	require.Equal(t, "dummy1", *attrs["ifName"].StringValue)
	require.Equal(t, "dummy1", *attrs["kernelIfName"].StringValue)
	require.EqualValues(t, 1500, *attrs["mtu"].IntValue)

	prepared := &device{name: "dummy1", index: 7, mtu: 1500, mac: "02:00:00:00:00:01"}
	require.Equal(t, "02:00:00:00:00:01", *prepared.Attrs()["mac"].StringValue)

	merged := fresh.Merge(prepared)
	require.Equal(t, prepared.Attrs(), merged.Attrs(), "a prepared device is published with what its link was made with")
	require.Zero(t, merged.HostState(), "the row of the inventory is not prepared")
	require.Equal(t, fresh.Link(), merged.Link())
	other := &device{name: "dummy2", mtu: defaultMTU}
	require.Same(t, other, other.Merge(prepared), "another device's state is not taken")
}

func TestRestore(t *testing.T) {
	m := newManager(nil, &scripted{})
	dev := &device{links: m.links, name: "dummy1", index: 7, mtu: 1500, mac: "02:00:00:00:00:01"}
	raw, err := json.Marshal(dev)
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"dummy1","ifIndex":7,"mtu":1500,"mac":"02:00:00:00:00:01"}`, string(raw))
	restored, err := m.RestoreDevice(raw)
	require.NoError(t, err)
	require.Equal(t, dev, restored)

	fresh, err := json.Marshal(&device{name: "dummy1"})
	require.NoError(t, err)
	for _, bad := range []string{
		"", "null", "[]", "{}", `"dummy1"`, string(fresh), string(raw) + "{}",
		`{"name":"dummy1","ifIndex":7,"mtu":1500,"mac":"02:00:00:00:00:01","path":"/etc"}`,
		strings.Replace(string(raw), "dummy1", "eth0", 1),
		strings.Replace(string(raw), "dummy1", "dummy1024", 1),
		strings.Replace(string(raw), "dummy1", "dummy01", 1),
		strings.Replace(string(raw), "dummy1", "dummy-1", 1),
		strings.Replace(string(raw), "dummy1", "dummy", 1),
		strings.Replace(string(raw), "dummy1", "dummy1/../eth0", 1),
		strings.Replace(string(raw), ":7", ":0", 1),
		strings.Replace(string(raw), ":7", ":-7", 1),
		strings.Replace(string(raw), ":7", ":4294967297", 1),
		strings.Replace(string(raw), ":7", `:"7"`, 1),
		strings.Replace(string(raw), ":7", ":7.5", 1),
		strings.Replace(string(raw), ":1500", ":0", 1),
		strings.Replace(string(raw), ":1500", ":99999999", 1),
		strings.Replace(string(raw), "02:00:00:00:00:01", "", 1),
		strings.Replace(string(raw), "02:00:00:00:00:01", "02:00:00:00:00:00:00:01", 1),
		strings.Replace(string(raw), "02:00:00:00:00:01", "02-00-00-00-00-01", 1),
		strings.Replace(string(raw), "02:00:00:00:00:01", "nonsense", 1),
	} {
		_, err := m.RestoreDevice([]byte(bad))
		require.Error(t, err, bad)
	}
}

func FuzzRestoreDevice(f *testing.F) {
	f.Add([]byte(`{"name":"dummy1","ifIndex":7,"mtu":1500,"mac":"02:00:00:00:00:01"}`))
	f.Add([]byte(`{"name":"eth0"}`))
	m := newManager(nil, &scripted{})
	f.Fuzz(func(t *testing.T, data []byte) {
		dev, err := m.RestoreDevice(data)
		if err != nil {
			return
		}
		if !validName(dev.IfName()) || dev.Link().Index <= 0 || dev.HostState().MTU <= 0 {
			t.Errorf("%q restores %+v", data, dev)
		}
		raw, err := json.Marshal(dev)
		require.NoError(t, err)
		again, err := m.RestoreDevice(raw)
		require.NoError(t, err)
		require.Equal(t, dev, again)
	})
}
