// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, chained := range []bool{false, true} {
		b := newBed(t)
		b.host.address(nicName, "10.1.2.130/25", "10.1.4.130/25")
		plugins := []string{b.plugin(routeFields(1, 19))}
		if chained {
			plugins = append(plugins, sbr)
		}
		list := b.list("1.1.0", plugins...)
		b.add(list)
		require.NoError(t, b.check(list))
		link := b.pod.mustLink("net1")

		fails := func(want string) {
			t.Helper()
			require.ErrorContains(t, b.check(list), want)
		}
		if chained {
			rule := netlink.NewRule()
			rule.Table = 101
			rule.Src = &net.IPNet{IP: net.IPv4(10, 1, 4, 130).To4(), Mask: net.CIDRMask(32, 32)}
			require.NoError(t, b.pod.RuleDel(rule))
			fails("no rule that leads from 10.1.4.130 to its route 10.1.0.0/19 via 10.1.4.129")
			require.NoError(t, b.pod.RuleAdd(rule))
			require.NoError(t, b.check(list))
		}
		routes, err := b.pod.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Gw: net.IPv4(10, 1, 4, 129)}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_GW)
		require.NoError(t, err)
		require.Len(t, routes, 1)
		require.NoError(t, b.pod.RouteDel(&routes[0]))
		fails("lost the route 10.1.0.0/19 via 10.1.4.129")
		require.NoError(t, b.pod.RouteAddEcmp(&routes[0]))
		require.NoError(t, b.check(list))

		addr, err := netlink.ParseAddr("10.1.4.130/25")
		require.NoError(t, err)
		require.NoError(t, b.pod.AddrDel(link, addr))
		fails("lost its address 10.1.4.130")
		require.NoError(t, b.pod.LinkSetDown(link))
		fails("is down")
		require.NoError(t, b.pod.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 1}))
		require.NoError(t, b.pod.LinkSetUp(link))
		fails("has the MAC 02:00:00:00:00:01 instead of")
		require.NoError(t, b.pod.LinkSetDown(link))
		require.NoError(t, b.pod.LinkSetName(link, "stolen"))
		fails("no interface net1")
		b.pod.veth("net1", b.leaf, "port2")
		fails("is not NIC eth1")

		b.del(list)
		_, _, failure := b.run(b.call("CHECK", b.single(`"prevResult": {"cniVersion": "1.1.0"}`)))
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrUnknownContainer), int(failure.Code))
	}
}

// Results and verbs in each version of the specification.
func TestVersions(t *testing.T) {
	t.Parallel()
	for _, v := range Versions.SupportedVersions() {
		b := newBed(t)
		b.host.address(nicName, "10.1.2.130/25")
		before := b.host.snapshot()
		list := b.list(v, b.plugin(routeFields(1, 19)), sbr)
		b.add(list) // compares the result's version
		if v != "0.3.1" {
			require.NoError(t, b.check(list))
		} else {
			_, _, failure := b.run(b.call("CHECK", strings.Replace(b.single(), "1.1.0", v, 1)))
			require.Equal(t, int(types.ErrIncompatibleCNIVersion), int(failure.Code))
		}
		b.del(list)
		b.requireHome(before)
	}
	b := newBed(t)
	out, _, failure := b.run(rawCall{verb: "VERSION"})
	require.Nil(t, failure)
	require.JSONEq(t, `{"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]}`, out)
}

func TestStatus(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	status := func(path string, fields ...string) *types.Error {
		_, _, failure := b.run(rawCall{verb: "STATUS", conf: b.single(fields...), path: path})
		return failure
	}
	require.Nil(t, status(b.bin))
	require.Empty(t, b.recorded())
	refused := func(failure *types.Error, msg string) {
		t.Helper()
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrPluginNotAvailable), int(failure.Code))
		require.Contains(t, failure.Msg, msg)
	}
	empty := t.TempDir()
	refused(status(empty), `"host-device"`)
	require.NoError(t, os.Symlink(filepath.Join(b.bin, subPlugin), filepath.Join(empty, subPlugin)))
	refused(status(empty), `"static"`)
	refused(status(b.bin, `"ipam": {"type": "whereabouts"}`), `"whereabouts"`)
	b.stateDir = "/proc/amd-host-device"
	b.node()
	refused(status(b.bin), "/proc/amd-host-device")
}

// GC frees what the runtime does not know, of its own network, and nothing without the runtime's list.
func TestGC(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.host.veth("eth2", b.leaf, "port2")
	b.host.address("eth2", "10.1.3.1/24")
	before := b.host.snapshot()
	second := strings.Replace(b.single(), "eth1", "eth2", 1)
	b.must("ADD", b.single())
	call := b.call("ADD", second)
	call.containerID, call.ifName = "c2", "net2"
	_, _, failure := b.run(call)
	require.Nil(t, failure)

	gc := func(conf string) *types.Error {
		_, _, failure := b.run(rawCall{verb: "GC", conf: conf})
		return failure
	}
	failure = gc(b.single())
	require.NotNil(t, failure)
	require.Contains(t, failure.Msg, "cni.dev/valid-attachments")
	require.Nil(t, gc(strings.Replace(b.single(`"cni.dev/valid-attachments": []`), "fabric", "other", 1)))
	both := `{"containerID": "c1", "ifname": "net1"}, {"containerID": "c2", "ifname": "net2"}`
	require.Nil(t, gc(b.single(`"cni.dev/valid-attachments": [`+both+`]`)))
	require.Len(t, b.recorded(), 2)

	require.Nil(t, gc(b.single(`"cni.dev/valid-attachments": [{"containerID": "c2", "ifname": "net2"}, {"containerID": "c1", "ifname": "net9"}]`)))
	require.NotNil(t, b.host.link(nicName))
	require.Nil(t, b.host.link("eth2"))
	require.Len(t, b.recorded(), 1)
	// A broken record harms only itself.
	require.NoError(t, os.WriteFile(filepath.Join(b.stateDir, "attachments", "x@y.json"), []byte("{"), 0o600))
	require.Nil(t, gc(b.single(`"cni.dev/valid-attachments": null`)))
	require.Equal(t, before, b.host.snapshot())
	require.Equal(t, []string{"x@y.json"}, b.recorded())
}
