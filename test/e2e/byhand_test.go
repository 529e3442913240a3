// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// written returns what the pod's container has written to the file, once it is there: a container that runs need not have got that far. It
// is moved there when it is whole.
func (e *T) written(pod, file string) (content string) {
	e.Helper()
	e.eventually("file "+file+" of pod "+pod, func() string {
		out, ok := e.inPod(pod, "cat "+file)
		if !ok {
			return out
		}
		content = out
		return ""
	})
	return content
}

// statusHas waits until the claim of the pod tells of the addresses.
func (e *T) statusHas(pod string, ips ...string) {
	e.Helper()
	e.eventually("claim of pod "+pod, func() string {
		var last []string
		for _, d := range e.claimOf(pod).Status.Devices {
			if d.NetworkData != nil {
				last = d.NetworkData.IPs
			}
		}
		for _, ip := range ips {
			if !slices.Contains(last, ip) {
				return fmt.Sprintf("its status has %v, not %s", last, ip)
			}
		}
		return ""
	})
}

// TestAddressesByHand: a claim without a network says what addresses and routes a VF and a dummy link have. They are there when
// the pod's first container starts, also in a sandbox that is made anew by an agent that was started meanwhile, and reach others.
func TestAddressesByHand(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), mixedSpec(1))
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.waitDevices(n.Name(), "fast-net", 1)
	e.class("vf", "sriov-pool")
	e.class("dummy", "fast-net")
	one := func(class string) []resourceapi.DeviceRequest {
		return []resourceapi.DeviceRequest{e.request("net", class)}
	}
	const vf = `{"vlan": 1021, "podIfName": "sriov0", "addresses": ["10.78.21.%[1]d/24", "2001:db8:78:21::%[1]d/64"], "routes": [
		{"to": "10.98.0.0/16", "via": "10.78.21.254"}, {"to": "2001:db8:98::/48", "via": "fe80::1", "metric": 7}]}`
	e.template("one", one("vf"), config(fmt.Sprintf(vf, 1)))
	e.template("two", one("vf"), config(fmt.Sprintf(vf, 2)))
	e.template("dummy", one("dummy"), config(`{"podIfName": "net1", "addresses": ["10.78.22.1/24"], "routes": [{"to": "10.97.0.0/16", "via": "10.78.22.254", "metric": 100}]}`))
	e.template("clash", one("vf"), config(`{"podIfName": "sriov0", "addresses": ["10.78.23.1/24"], "routes": [{"to": "0.0.0.0/0", "via": "10.78.23.254"}]}`))
	for _, pod := range []string{"one", "two", "dummy"} {
		e.changedPod(pod, n.Name(), pod, func(pod *corev1.Pod) {
			pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
			pod.Spec.Containers[0].Command = []string{"sh", "-c", "(ip -o addr; ip route; ip -6 route) > /tmp/part; mv /tmp/part /tmp/start; exec sleep 1000000"}
		})
	}
	e.running("one", "two", "dummy")
	// It is what the first instruction saw.
	had := func(pod string, all ...string) {
		e.Helper()
		seen := strings.Join(strings.Fields(e.written(pod, "/tmp/start")), " ")
		for _, want := range all {
			require.Contains(e, seen, want)
		}
	}
	ofOne := []string{"sriov0 inet 10.78.21.1/24", "sriov0 inet6 2001:db8:78:21::1/64", "10.98.0.0/16 via 10.78.21.254 dev sriov0",
		"2001:db8:98::/48 via fe80::1 dev sriov0 metric 7"}
	had("one", ofOne...)
	had("dummy", "net1 inet 10.78.22.1/24", "10.97.0.0/16 via 10.78.22.254 dev net1 metric 100")
	e.reaches("one", "10.78.21.2")
	e.reaches("two", "2001:db8:78:21::1")
	require.Equal(e, "0", e.mustInPod("one", "cat /proc/sys/net/ipv6/conf/sriov0/accept_ra"))
	e.statusHas("one", "10.78.21.1/24", "2001:db8:78:21::1/64")
	e.statusHas("dummy", "10.78.22.1/24")

	// The agent is started anew, and then a sandbox ends.
	e.killAgent(n)
	e.startAgent(n)
	sandbox := e.allocationsOf("one")[0].Attachment.SandboxID
	e.onNode(n, "ctr -n k8s.io tasks kill -s SIGKILL "+sandbox)
	e.eventually("another sandbox", func() string {
		rows := e.allocationsOf("one")
		if len(rows) != 1 || rows[0].Attachment == nil || rows[0].Attachment.SandboxID == sandbox {
			return fmt.Sprintf("%+v", rows)
		}
		return ""
	})
	had("one", ofOne...)
	e.reaches("two", "10.78.21.1")

	// A route that the pod has from its own network is refused by name, and the VF goes home.
	e.pod("clash", n.Name(), "clash")
	e.eventSays("clash", "route to 0.0.0.0/0: the pod has one already")
	e.deletePods("clash", "one", "two", "dummy")
	e.noAllocations(n)
}

// TestCertainAddresses: a claim gets the address of its network that it asks for. Another one that asks for it waits, is told who
// has it, and gets it when that one has gone. What a network does not give, or no pod can have, is refused before anything is touched.
func TestCertainAddresses(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	const dummies = 9
	spec := mixedSpec(dummies)
	networkOnly := spec.Pools[1]
	networkOnly.Claims = v2alpha1.ClaimsNetworkOnly
	spec.Pools[1] = networkOnly
	e.configure(n.Name(), spec)
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.waitDevices(n.Name(), "fast-net", dummies)
	e.class("vf", "sriov-pool")
	e.class("dummy", "fast-net")
	e.network("certain", `{namespaceSelector: {}, pools: [sriov-pool], vlan: 1022, subnets: [{cidr: 10.78.24.0/24, gateway: 10.78.24.1}, {cidr: '2001:db8:78:24::/64'}]}`)
	e.network("flat", `{namespaceSelector: {}, pools: [fast-net], subnets: [{cidr: 10.78.25.0/24, gateway: 10.78.25.1, exclude: [10.78.25.128/25]}], routes: [{to: 10.96.0.0/16}]}`)
	e.networkTemplate("first", "vf", "certain", `{"network": %q, "podIfName": "sriov0", "addresses": ["10.78.24.10"]}`)
	e.networkTemplate("peer", "vf", "certain", `{"network": %q, "podIfName": "sriov0", "addresses": ["2001:db8:78:24::20", "10.78.24.20"]}`)
	e.pod("first", n.Name(), "first")
	e.pod("peer", n.Name(), "peer")
	e.running("first", "peer")
	all := e.addressesOf("certain")
	require.Len(e, all["first"], 2, "the other family is chosen: %v", all)
	require.Equal(e, "10.78.24.10", all["first"][0])
	require.Equal(e, []string{"10.78.24.20", "2001:db8:78:24::20"}, all["peer"])
	e.reaches("first", "10.78.24.20")
	e.reaches("first", "2001:db8:78:24::20")
	e.statusHas("first", "10.78.24.10/24", all["first"][1]+"/64")

	e.pod("second", n.Name(), "first")
	flat := e.networkName("flat")
	two := e.request("net", "dummy")
	two.Exactly.Count = 2
	one := []resourceapi.DeviceRequest{e.request("net", "dummy")}
	refused := map[string]struct {
		requests   []resourceapi.DeviceRequest
		parameters string
		says       string
	}{
		"elsewhere": {one, fmt.Sprintf(`{"network": %q, "addresses": ["10.78.24.10"]}`, flat), "addresses[0]: 10.78.24.10 is in none of the network's subnets for this node: allowed are addresses of 10.78.25.0/24"},
		"excluded":  {one, fmt.Sprintf(`{"network": %q, "addresses": ["10.78.25.200"]}`, flat), "addresses[0]: 10.78.25.200 is an address of 10.78.25.0/24 that the network gives to no device"},
		"router":    {one, fmt.Sprintf(`{"network": %q, "addresses": ["10.78.25.1"]}`, flat), "addresses[0]: 10.78.25.1 is an address of 10.78.25.0/24 that the network gives to no device"},
		"several":   {[]resourceapi.DeviceRequest{two}, fmt.Sprintf(`{"network": %q, "addresses": ["10.78.25.10"]}`, flat), "addresses: the request is for several devices"},
		"routes":    {[]resourceapi.DeviceRequest{e.request("left", "dummy"), e.request("right", "dummy")}, fmt.Sprintf(`{"network": %q}`, flat), `request "right": routes: request "left" of claim `},
		"by-hand":   {one, `{"addresses": ["10.78.26.1/24"]}`, "addresses: claims may not choose the addresses of devices of pool fast-net (its claims field is NetworkOnly)"},
		"mixed":     {one, fmt.Sprintf(`{"network": %q, "routes": [{"to": "10.0.0.0/8", "via": "10.78.25.1"}]}`, flat), "routes: cannot be asked for together with network " + flat},
	}
	for name, r := range refused {
		e.template(name, r.requests, config(r.parameters))
		e.pod(name, n.Name(), name)
	}
	for name, r := range refused {
		e.eventSays(name, r.says)
	}
	require.Empty(e, e.addressesOf("flat"))
	e.deletePods(slices.Collect(maps.Keys(refused))...)

	e.eventSays("second", "address 10.78.24.10 is taken: claim "+e.ns+"/first-", "for pod first on node "+n.Name())
	e.deletePods("first")
	e.running("second")
	require.Equal(e, "10.78.24.10", e.addressesOf("certain")["second"][0])
	e.reaches("peer", "10.78.24.10")
	e.deletePods("second", "peer")
	e.noAllocations(n)
	require.Empty(e, e.addressesOf("certain"))
}
