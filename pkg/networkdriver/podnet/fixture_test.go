// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package podnet

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

// device is a prepared device that podnet is asked to move. Of a device it looks at identity and host state only.
type device struct {
	name string
	peer string // the other end of the link, which stays
	id   nic.Identity
	host nic.State
}

func (d device) IfName() string                                                   { return d.name }
func (d device) KernelIfName() string                                             { return d.host.Name }
func (d device) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute { return nil }
func (d device) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool             { return false }
func (d device) Link() nic.Identity                                               { return d.id }
func (d device) HostState() nic.State                                             { return d.host }
func (d device) Validate(types.DeviceConfig) error                                { return nil }
func (d device) Setup(context.Context, types.DeviceConfig) (types.Device, error)  { return d, nil }
func (d device) Free(context.Context, types.DeviceConfig) error                   { return nil }
func (d device) Merge(types.Device) types.Device                                  { return d }
func (d device) MarshalJSON() ([]byte, error)                                     { return json.Marshal(d.name) }

// testNS is a network namespace made for a test, with a netlink handle of the library, so that what podnet did is seen
// by other means than its own.
type testNS struct {
	*netlink.Handle
	tb    testing.TB
	path  string
	links int // made so far
}

// newNS makes a namespace that its path alone keeps alive.
func newNS(tb testing.TB) *testNS {
	tb.Helper()
	path := testenv.NetNS(tb)
	ns := &testNS{tb: tb, path: path}
	tb.Cleanup(func() { ns.die() })
	handle, err := netns.GetFromPath(path)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, handle.Close()) }()
	ns.Handle, err = netlink.NewHandleAt(handle, unix.NETLINK_ROUTE)
	require.NoError(tb, err)
	return ns
}

// die lets go of the namespace. What a socket in it keeps alive is closed too.
func (ns *testNS) die() {
	if ns.Handle != nil {
		ns.Close()
		ns.Handle = nil
	}
	if err := unix.Unmount(ns.path, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
		ns.tb.Errorf("unmount %s: %v", ns.path, err)
	}
}

// dial opens a socket for requests that the library does not make in another namespace.
func (ns *testNS) dial() *rtlink.Conn {
	ns.tb.Helper()
	opened, err := netnamespace.Open(ns.path)
	require.NoError(ns.tb, err)
	defer opened.Close()
	c, err := rtlink.Dial(slog.New(slog.DiscardHandler), opened)
	require.NoError(ns.tb, err)
	return c
}

// addLink makes a link that exists once, with an alias by which it is recognised.
func (ns *testNS) addLink(name string) device {
	ns.tb.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	peer := numbered("peer-", ns.links)
	ns.links++
	require.NoError(ns.tb, ns.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer}))
	alias := peer + " of " + ns.path
	require.NoError(ns.tb, ns.LinkSetAlias(ns.link(name), alias))
	d := device{name: name, peer: peer, id: nic.Identity{Kind: "veth", Index: ns.link(name).Attrs().Index, Alias: alias}}
	return ns.prepared(d, name)
}

// prepared returns the device with the state its link has now.
func (ns *testNS) prepared(d device, name string) device {
	ns.tb.Helper()
	d.host = nic.Read(ns.link(name))
	return d
}

func (ns *testNS) link(name string) netlink.Link {
	ns.tb.Helper()
	link, err := ns.LinkByName(name)
	require.NoError(ns.tb, err, "link %s", name)
	return link
}

// names returns all links but lo and the peers of the test's own links.
func (ns *testNS) names() []string {
	ns.tb.Helper()
	links, err := ns.LinkList()
	require.NoError(ns.tb, err)
	names := []string{}
	for _, l := range links {
		if name := l.Attrs().Name; name != "lo" && !strings.HasPrefix(name, "peer-") {
			names = append(names, name)
		}
	}
	return names
}

// standIn returns the name of the link that could not have its own.
func (ns *testNS) standIn() string {
	ns.tb.Helper()
	i := slices.IndexFunc(ns.names(), nic.IsStandIn)
	require.GreaterOrEqual(ns.tb, i, 0, "no stand-in among %q", ns.names())
	return ns.names()[i]
}

// requireHome checks that a device's link is on the host as it was.
func (ns *testNS) requireHome(d device) {
	ns.tb.Helper()
	link := ns.link(d.host.Name)
	require.True(ns.tb, d.id.Matches(link), "%s is another link", d.host.Name)
	now := nic.Read(link)
	require.ElementsMatch(ns.tb, d.host.AltNames, now.AltNames, "alternative names")
	now.AltNames = d.host.AltNames
	require.Equal(ns.tb, d.host, now)
}

// requests counts what a Mover sends to the kernel, as it says in its debug log.
type requests struct {
	slog.Handler
	mu   *sync.Mutex // guards sent
	sent *[]string
}

func (r requests) Enabled(context.Context, slog.Level) bool { return true }

func (r requests) Handle(_ context.Context, rec slog.Record) error {
	if rec.Message == "rtnetlink request" {
		r.mu.Lock()
		defer r.mu.Unlock()
		rec.Attrs(func(a slog.Attr) bool {
			if a.Key == "request" {
				*r.sent = append(*r.sent, a.Value.String())
			}
			return true
		})
	}
	return nil
}

func (r requests) WithAttrs([]slog.Attr) slog.Handler { return r }

// changes returns the requests since the last call that changed something.
func (r requests) changes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	changes := []string{}
	for _, name := range *r.sent {
		if !strings.HasPrefix(name, "RTM_GET") {
			changes = append(changes, name)
		}
	}
	*r.sent = nil
	return changes
}

type fixture struct {
	*Mover
	ctx       context.Context
	host, pod *testNS
	requests  requests
}

func setup(tb testing.TB) *fixture {
	tb.Helper()
	f := &fixture{ctx: context.Background(), host: newNS(tb), pod: newNS(tb)}
	f.requests = requests{mu: &sync.Mutex{}, sent: &[]string{}}
	f.Mover = New(slog.New(f.requests), Config{HostNetNS: f.host.path, Sysfs: tb.TempDir()})
	return f
}

// Attach moves the link that the device has now.
func (f *fixture) Attach(ctx context.Context, netns string, dev types.Device, config types.DeviceConfig) (*types.Attachment, error) {
	index, err := f.HostIndex(ctx, dev)
	if err != nil {
		return nil, err
	}
	return f.Mover.Attach(ctx, netns, dev, index, config)
}

func mac(tb testing.TB, s string) net.HardwareAddr {
	tb.Helper()
	m, err := net.ParseMAC(s)
	require.NoError(tb, err)
	return m
}

func openFDs(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(tb, err)
	return len(entries)
}

func numbered(prefix string, n int) string { return fmt.Sprint(prefix, n) }
