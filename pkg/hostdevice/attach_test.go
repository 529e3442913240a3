// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Both families are kept; the policy routes are of IPv4 alone, and what sbr does with IPv6 is seen too.
func TestDualStack(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25", "2001:db8::5/64")
	b.leaf.address(port, "10.1.2.129/25", "2001:db8::1/64")
	b.leaf.address("lo", "10.1.20.1/32")
	b.leaf.serve("10.1.20.1")
	b.leaf.serve("2001:db8::1")
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin(routeFields(1, 19)), sbr)
	result := b.add(list)
	require.ElementsMatch(t, []string{"10.1.2.130/25", "2001:db8::5/64"}, prefixes(result))
	require.Len(t, result.Routes, 1)
	require.Equal(t, []string{"from 10.1.2.130 lookup 100"}, b.pod.rules(netlink.FAMILY_V4))
	require.Equal(t, []string{"from 2001:db8::5 lookup 101"}, b.pod.rules(netlink.FAMILY_V6), "one address, not its network")
	require.NoError(t, b.pod.ping("10.1.2.130", "10.1.20.1"))
	// The kernel proves the address to be unique first.
	require.Eventually(t, func() bool { return b.pod.ping("2001:db8::5", "2001:db8::1") == nil }, patience, pollInterval)
	b.del(list)
	b.requireHome(before)
}

// sbr moves the connected route out of the main table. Without a source address, a neighbour on the NIC is then reached
// by the pod's default route only, unless sbr is told to leave hints.
func TestUnboundTraffic(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		sbr     string
		reaches bool
	}{{sbr, false}, {`{"type": "sbr", "addSourceHints": true}`, true}} {
		b := newBed(t)
		b.host.address(nicName, "10.1.2.130/25")
		b.leaf.address(port, "10.1.2.129/25")
		b.leaf.serve("10.1.2.129")
		b.add(b.list("1.0.0", b.plugin(routeFields(1, 19)), tt.sbr))
		require.NoError(t, b.pod.ping("10.1.2.130", "10.1.2.129"))
		err := b.pod.ping("", "10.1.2.129")
		if tt.reaches {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, unix.ENETUNREACH)
		}
	}
}

// Without both fields there is no route, on a /31 neither, where earlier versions had an implicit gateway.
func TestNoRoutesUnlessAskedFor(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		fields []string
		log    string
	}{
		"neither":          {},
		"offset alone":     {fields: []string{`"nexthopNetAddrOffset": 1`}, log: "one of the two fields alone has no effect"},
		"length alone":     {fields: []string{`"routeDstPrefixLen": 0`}, log: "one of the two fields alone has no effect"},
		"null is absent":   {fields: []string{`"nexthopNetAddrOffset": null, "routeDstPrefixLen": 16`}, log: "one of the two fields alone"},
		"all are skipped":  {fields: []string{`"nexthopNetAddrOffset": 1, "routeDstPrefixLen": 31`}, log: "is not shorter than the interface's 31"},
		"user has an IPAM": {fields: []string{`"nexthopNetAddrOffset": 1, "routeDstPrefixLen": 16, "ipam": {"type": "static", "addresses": [{"address": "10.9.9.9/24"}]}`}, log: "IPAM plugin of its own"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host.address(nicName, "10.1.2.5/31")
			before := b.host.snapshot()
			log := b.must("ADD", b.single(tt.fields...))
			if tt.log != "" {
				require.Contains(t, log, "level=WARN")
				require.Contains(t, log, tt.log)
			} else {
				require.NotContains(t, log, "level=WARN")
			}
			want := []string{"10.1.2.4/31 dev net1"}
			if strings.HasPrefix(name, "user") {
				want = []string{"10.9.9.0/24 dev net1"}
			}
			require.Equal(t, want, b.pod.routes(254))
			b.must("DEL", b.single(tt.fields...))
			b.requireHome(before)
		})
	}
}

// A NIC without addresses is moved and up; a request for routes is no error then.
func TestNoAddresses(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin(routeFields(1, 19)))
	result := b.add(list)
	require.Empty(t, result.IPs)
	require.Empty(t, result.Routes)
	require.Len(t, result.Interfaces, 1)
	require.Equal(t, "net1", result.Interfaces[0].Name)
	require.Equal(t, b.pod.path, result.Interfaces[0].Sandbox)
	require.True(t, isUp(b.pod.mustLink("net1")))
	require.NoError(t, b.check(list))
	b.del(list)
	b.requireHome(before)
}

// The container has a link with the name that the NIC has on the host.
func TestContainerHasTheHostsName(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.pod.veth(nicName, b.leaf, "other")
	index := b.pod.mustLink(nicName).Attrs().Index
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin(), sbr)
	b.add(list)
	require.NotNil(t, b.pod.link("net1"))
	require.Equal(t, index, b.pod.mustLink(nicName).Attrs().Index)
	b.del(list)
	b.requireHome(before)
	require.NotNil(t, b.pod.link(nicName), "the container's own link stays")
}

// The peer of a /31 is the next hop also in another network, by a route of its own; without sbr, which cannot copy such
// a route.
func TestPeerInAnotherNetwork(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.5 peer 10.9.0.1/31")
	b.leaf.address(port, "10.9.0.1 peer 10.1.2.5/32")
	b.leaf.address("lo", "10.1.20.1/32")
	b.leaf.serve("10.1.20.1")
	before := b.host.snapshot()
	log := b.must("ADD", b.single(routeFields(1, 16)))
	require.Contains(t, log, "sbr does not copy such a route")
	require.Equal(t, []string{"10.1.0.0/16 via 10.9.0.1 dev net1", "10.9.0.0/31 dev net1"}, b.pod.routes(254))
	require.NoError(t, b.pod.ping("10.1.2.5", "10.1.20.1"))
	b.must("DEL", b.single())
	b.requireHome(before)
}

// What is not for this plugin reaches the next one as it came, large numbers too.
func TestRestOfTheConfigurationIsPassedOn(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	bin := t.TempDir()
	// A sub-plugin that shows what it gets.
	require.NoError(t, os.WriteFile(filepath.Join(bin, subPlugin), []byte("#!/bin/sh\ncat > "+bin+"/stdin\necho '{\"code\": 102, \"msg\": \"seen\"}'\nexit 1\n"), 0o755))
	conf := strings.Replace(b.single(routeFields(1, 19)), "{", `{"mtu": 18446744073709551616, "dns": {"nameservers": ["192.0.2.53"]}, "runtimeConfig": {"mac": "02:00:00:00:00:01", "x": 1.50}, "allowNodeNetwork": false, "stateDir": "`+b.stateDir+`", `, 1)
	before := b.host.snapshot()
	call := b.call("ADD", conf)
	call.path = bin
	_, _, failure := b.run(call)
	require.NotNil(t, failure)
	require.Equal(t, uint(102), failure.Code, "the sub-plugin's code")
	require.Contains(t, failure.Msg, "seen")
	b.requireHome(before)

	raw, err := os.ReadFile(filepath.Join(bin, "stdin"))
	require.NoError(t, err)
	var got map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(raw, &got))
	require.Equal(t, map[string]json.RawMessage{
		"cniVersion":    json.RawMessage(`"1.1.0"`),
		"name":          json.RawMessage(`"fabric"`),
		"type":          json.RawMessage(`"host-device"`),
		"device":        json.RawMessage(`"eth1"`),
		"mtu":           json.RawMessage(`18446744073709551616`),
		"dns":           json.RawMessage(`{"nameservers":["192.0.2.53"]}`),
		"runtimeConfig": json.RawMessage(`{"mac":"02:00:00:00:00:01","x":1.50}`),
		"ipam":          json.RawMessage(`{"type":"static","addresses":[{"address":"10.1.2.130/25"}],"routes":[{"dst":"10.1.0.0/19","gw":"10.1.2.129"}]}`),
	}, got)
}

// An IPAM plugin of the user's own gives addresses and gets them back.
func TestUsersIPAM(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	dir := t.TempDir()
	ipam := fmt.Sprintf(`"ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.9.0.0/24"}]]}`, dir)
	leases := func() []string {
		files, err := filepath.Glob(filepath.Join(dir, "fabric", "10.9.0.*"))
		require.NoError(t, err)
		return files
	}
	list := b.list("1.0.0", b.plugin(ipam))
	require.Equal(t, []string{"10.9.0.2/24"}, prefixes(b.add(list)))
	require.Len(t, leases(), 1)
	require.NoError(t, b.check(list))
	b.del(list)
	require.Empty(t, leases())
	b.requireHome(before)
}

// The sub-plugin can keep the addresses itself; routes are added to them.
func TestUseInterfaceNetwork(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin(routeFields(1, 19), `"useInterfaceNetwork": true`), sbr)
	require.Equal(t, []string{"10.1.2.130/25"}, prefixes(b.add(list)))
	require.Contains(t, b.pod.routes(100), "10.1.0.0/19 via 10.1.2.129 dev net1")
	b.del(list)
	b.requireHome(before)
}

// Whatever fails after the NIC has moved, it is home again, and nothing is recorded.
func TestFailedAddLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25", "2001:db8::5/64")
	before := b.host.snapshot()
	for name, ipam := range map[string]string{
		// The sub-plugin leaves the NIC in the container in each case.
		"no addresses":       `"ipam": {"type": "static"}`,
		"missing plugin":     `"ipam": {"type": "nowhere"}`,
		"unreachable router": `"ipam": {"type": "static", "addresses": [{"address": "10.1.2.130/25"}], "routes": [{"dst": "10.0.0.0/8", "gw": "10.200.0.1"}]}`,
	} {
		_, _, failure := b.run(b.call("ADD", b.single(ipam)))
		require.NotNil(t, failure, name)
		require.Contains(t, failure.Msg, subPlugin, name)
		b.requireHome(before)
		require.Nil(t, b.pod.link("net1"), name)
		// The runtime's DEL after a failed ADD.
		_, _, failure = b.run(b.call("DEL", b.single()))
		require.Nil(t, failure, name)
		b.requireHome(before)
	}
}

// Errors before anything is touched: code, field, and what is allowed.
func TestAddRefuses(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.host.veth("eth2", b.leaf, "port2")
	b.host.veth("eth3", b.leaf, "port4")
	// Two links of one address.
	require.NoError(t, b.host.LinkSetHardwareAddr(b.host.mustLink(nicName), b.host.mustLink("eth2").Attrs().HardwareAddr))
	mac := b.host.mustLink(nicName).Attrs().HardwareAddr.String()
	// The kernel takes names that no text of JSON can hold.
	b.host.veth("e\xff", b.leaf, "port5")
	b.pod.veth("taken", b.leaf, "port3")
	before := b.host.snapshot()
	without := func(s string) string { return strings.Replace(s, `"device": "eth1", `, "", 1) }
	for name, tt := range map[string]struct {
		conf  string
		netns string
		name  string
		code  uint
		msg   []string
	}{
		"offset beyond 64 bits": {conf: b.single(`"nexthopNetAddrOffset": -9223372036854775809, "routeDstPrefixLen": 19`), code: types.ErrInvalidNetworkConfig, msg: []string{"nexthopNetAddrOffset", "-9223372036854775809"}},
		"fractional offset":     {conf: b.single(`"nexthopNetAddrOffset": 1.5, "routeDstPrefixLen": 19`), code: types.ErrInvalidNetworkConfig, msg: []string{"nexthopNetAddrOffset", "1.5"}},
		"offset as text":        {conf: b.single(`"nexthopNetAddrOffset": "1", "routeDstPrefixLen": 19`), code: types.ErrInvalidNetworkConfig, msg: []string{"nexthopNetAddrOffset", "integer"}},
		"length too large":      {conf: b.single(`"nexthopNetAddrOffset": 1, "routeDstPrefixLen": 33`), code: types.ErrInvalidNetworkConfig, msg: []string{"routeDstPrefixLen", "33", "0 to 32"}},
		"negative length":       {conf: b.single(`"nexthopNetAddrOffset": 1, "routeDstPrefixLen": -1`), code: types.ErrInvalidNetworkConfig, msg: []string{"routeDstPrefixLen", "-1"}},
		"length as text":        {conf: b.single(`"routeDstPrefixLen": "19"`), code: types.ErrInvalidNetworkConfig, msg: []string{"routeDstPrefixLen"}},
		"misspelt field":        {conf: b.single(`"NextHopNetAddrOffset": 1, "routeDstPrefixLen": 19`), code: types.ErrInvalidNetworkConfig, msg: []string{"NextHopNetAddrOffset", "nexthopNetAddrOffset"}},
		"no NIC chosen":         {conf: without(b.single()), code: types.ErrInvalidNetworkConfig, msg: []string{"deviceID", "hwaddr", "kernelpath"}},
		"empty device":          {conf: strings.Replace(b.single(), `"eth1"`, `""`, 1), code: types.ErrInvalidNetworkConfig, msg: []string{"chooses no NIC"}},
		"device as number":      {conf: strings.Replace(b.single(), `"eth1"`, `1`, 1), code: types.ErrInvalidNetworkConfig, msg: []string{"device", "string"}},
		"deviceID as number":    {conf: b.single(`"deviceID": 3`), code: types.ErrInvalidNetworkConfig, msg: []string{"deviceID"}},
		"runtimeConfig as text": {conf: b.single(`"runtimeConfig": "x"`), code: types.ErrInvalidNetworkConfig, msg: []string{"runtimeConfig"}},
		"unknown PCI address":   {conf: without(b.single(`"pciBusID": "ffff:ff:1f.7"`)), code: types.ErrInvalidNetworkConfig, msg: []string{"pciBusID", "ffff:ff:1f.7"}},
		"path as PCI address":   {conf: without(b.single(`"pciBusID": "../../../devices"`)), code: types.ErrInvalidNetworkConfig, msg: []string{"pciBusID"}},
		"kernelpath elsewhere":  {conf: without(b.single(`"kernelpath": "/sys/devices/../class/net/eth1"`)), code: types.ErrInvalidNetworkConfig, msg: []string{"kernelpath", "/sys/devices"}},
		"bad hwaddr":            {conf: without(b.single(`"hwaddr": "zz"`)), code: types.ErrInvalidNetworkConfig, msg: []string{"hwaddr"}},
		"hwaddr of two NICs":    {conf: without(b.single(`"hwaddr": "` + mac + `"`)), code: types.ErrInvalidNetworkConfig, msg: []string{"several NICs", "eth1", "eth2", "device"}},
		"two NICs chosen":       {conf: b.single(`"hwaddr": "` + b.host.mustLink("eth3").Attrs().HardwareAddr.String() + `"`), code: types.ErrInvalidNetworkConfig, msg: []string{"hwaddr", "same NIC"}},
		"missing NIC":           {conf: strings.Replace(b.single(), `"eth1"`, `"eth9"`, 1), code: types.ErrInvalidNetworkConfig, msg: []string{"eth9", "no such NIC"}},
		"name that is no text":  {conf: without(b.single(`"hwaddr": "` + b.host.mustLink("e\xff").Attrs().HardwareAddr.String() + `"`)), code: types.ErrInvalidNetworkConfig, msg: []string{`NIC "e\xff" could not be brought home`, "UTF-8"}},
		"loopback":              {conf: strings.Replace(b.single(), `"eth1"`, `"lo"`, 1), code: types.ErrInvalidNetworkConfig, msg: []string{"loopback"}},
		"ipam as text":          {conf: b.single(`"ipam": "static"`), code: types.ErrInvalidNetworkConfig, msg: []string{"ipam"}},
		"another state folder":  {conf: b.single(`"stateDir": "/srv/cni"`), code: types.ErrInvalidNetworkConfig, msg: []string{"stateDir", b.stateDir, "node.json"}},
		"log file anywhere":     {conf: b.single(`"logFile": "/etc/cron.d/x"`), code: types.ErrInvalidNetworkConfig, msg: []string{"logFile", ".log"}},
		"log level":             {conf: b.single(`"logLevel": "loud"`), code: types.ErrInvalidNetworkConfig, msg: []string{"logLevel", "warn"}},
		"missing namespace":     {conf: b.single(), netns: "/run/netns/none", code: types.ErrInvalidNetNS, msg: []string{"/run/netns/none"}},
		"namespace of the host": {conf: b.single(), netns: b.host.path, code: types.ErrInvalidNetNS, msg: []string{"host's own"}},
		"no namespace":          {conf: b.single(), netns: b.stateDir, code: types.ErrInvalidNetNS},
		"name taken":            {conf: b.single(), name: "taken", code: types.ErrInvalidEnvironmentVariables, msg: []string{"taken"}},
		"no object":             {conf: `[]`, code: types.ErrDecodingFailure},
		"old version":           {conf: strings.Replace(b.single(), "1.1.0", "0.2.0", 1), code: types.ErrIncompatibleCNIVersion},
	} {
		t.Run(name, func(t *testing.T) {
			b := b.in(t)
			call := b.call("ADD", tt.conf)
			if tt.netns != "" {
				call.netns = tt.netns
			}
			if tt.name != "" {
				call.ifName = tt.name
			}
			_, stderr, failure := b.run(call)
			require.NotNil(t, failure)
			require.Equal(t, int(tt.code), int(failure.Code), "%v", failure)
			for _, m := range tt.msg {
				require.Contains(t, failure.Msg, m)
			}
			require.NotContains(t, stderr, "panic")
			b.requireHome(before)
		})
	}
}

// The NIC that the node itself needs stays.
func TestNodesOwnNetwork(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	index := b.host.mustLink(nicName).Attrs().Index
	refused := func(reason string, fields ...string) {
		t.Helper()
		before := b.host.snapshot()
		_, _, failure := b.run(b.call("ADD", b.single(fields...)))
		require.NotNil(t, failure)
		require.Equal(t, int(types.ErrInvalidNetworkConfig), int(failure.Code))
		require.Contains(t, failure.Msg, reason)
		require.Contains(t, failure.Msg, "allowNodeNetwork")
		b.requireHome(before)
	}
	uplink := &netlink.Route{Gw: net.IPv4(10, 1, 2, 129), LinkIndex: index}
	require.NoError(t, b.host.RouteAdd(uplink))
	refused("default route")
	require.NoError(t, b.host.RouteDel(uplink))

	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	require.NoError(t, b.host.LinkAdd(bridge))
	require.NoError(t, b.host.LinkSetMaster(b.host.mustLink(nicName), bridge))
	refused("upper device br0")
	require.NoError(t, b.host.LinkDel(bridge))

	// A default route of the fabric's in a policy table is none of the node's.
	require.NoError(t, b.host.RouteAdd(&netlink.Route{Gw: net.IPv4(10, 1, 2, 129), LinkIndex: index, Table: 77}))
	b.must("ADD", b.single())
	b.must("DEL", b.single())

	require.NoError(t, b.host.RouteAdd(uplink))
	const asked = `"allowNodeNetwork": true`
	refused("here and in "+filepath.Join(b.bin, "node.json"), asked)
	b.node(asked)
	refused("default route")
	b.must("ADD", b.single(asked))
	b.must("DEL", b.single())
}

// One NIC is given once: the second is told who has it, and leaves it alone.
func TestOneNICTwoContainers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	other := newSpace(t)
	calls := []rawCall{b.call("ADD", b.single()), b.call("ADD", b.single())}
	calls[1].containerID, calls[1].netns = "c2", other.path
	failures := make([]*types.Error, 2)
	var wg sync.WaitGroup
	for i, c := range calls {
		wg.Go(func() { _, _, failures[i] = b.run(c) })
	}
	wg.Wait()
	winner, loser := 0, 1
	if failures[0] != nil {
		winner, loser = 1, 0
	}
	require.Nil(t, failures[winner])
	require.NotNil(t, failures[loser])
	require.Contains(t, failures[loser].Msg, "container "+calls[winner].containerID+" has it as net1")

	// The runtime cleans up after the failure, which must not take the NIC from its owner.
	for _, i := range []int{loser, winner} {
		call := calls[i]
		call.verb = "DEL"
		_, _, failure := b.run(call)
		require.Nil(t, failure)
		if i == loser {
			require.Nil(t, b.host.link(nicName))
		}
	}
	b.requireHome(before)
}

// Adding what is there is refused and changes nothing.
func TestAddTwice(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	pod := b.pod.snapshot()
	_, _, failure := b.run(b.call("ADD", b.single()))
	require.NotNil(t, failure)
	require.Contains(t, failure.Msg, "container c1 has it as net1")
	require.Equal(t, pod, b.pod.snapshot())
	b.must("DEL", b.single())
	b.requireHome(before)
}

// The log goes to a file too if that is asked for.
func TestLogFile(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	file := filepath.Join(t.TempDir(), "made", "x.log")
	b.node(`"logFiles": ["` + filepath.Dir(file) + `/*.log"]`)
	conf := b.single(`"logFile": "`+file+`"`, routeFields(0, 19))
	stderr := b.must("ADD", conf)
	log, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, stderr, string(log))
	for _, part := range []string{"containerID=c1", "interface=net1", "network=fabric", "address=10.1.2.130/25", "offset 0 is not within 1 to 126"} {
		require.Contains(t, string(log), part)
	}
}
