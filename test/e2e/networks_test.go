// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/lab"
)

var networkResource = v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.NetworkResource)

// networkName returns the name in the cluster of a network of the test: tests on other nodes have their own.
func (e *T) networkName(name string) string { return e.node.Name() + "-" + name }

// network makes a network, which goes with the test.
func (e *T) network(name, spec string) {
	e.Helper()
	object := map[string]any{}
	require.NoError(e, yaml.Unmarshal([]byte(spec), &object))
	_, err := e.Dynamic.Resource(networkResource).Create(e.ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v2alpha1.SchemeGroupVersion.String(), "kind": v2alpha1.NetworkKind,
		"metadata": map[string]any{"name": e.networkName(name)}, "spec": object,
	}}, metav1.CreateOptions{})
	require.NoError(e, err)
	e.atEnd(func() { e.deleteNetwork(name) })
}

func (e *T) deleteNetwork(name string) {
	e.Helper()
	_ = e.Dynamic.Resource(networkResource).Delete(e.ctx, e.networkName(name), metav1.DeleteOptions{})
}

// labelNamespace gives the namespace of the test's pods a label until the test's end.
func (e *T) labelNamespace(key, value string) {
	e.Helper()
	patch := func(value string) {
		_, err := e.Client.CoreV1().Namespaces().Patch(e.ctx, e.ns, types.MergePatchType,
			[]byte(fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, key, value)), metav1.PatchOptions{})
		require.NoError(e, err)
	}
	patch(fmt.Sprintf("%q", value))
	e.atEnd(func() { patch("null") })
}

// networkTemplate makes a claim template for one device of a class with parameters, in which %s stands for the network.
func (e *T) networkTemplate(name, class, network, parameters string) {
	e.Helper()
	e.template(name, []resourceapi.DeviceRequest{e.request("net", class)}, config(fmt.Sprintf(parameters, e.networkName(network))))
}

// vfRecord is all that a PF tells of a VF.
type vfRecord struct {
	VF         int     `json:"vf"`
	VLANList   []vfTag `json:"vlan_list"`
	SpoofCheck bool    `json:"spoofchk"`
	LinkState  string  `json:"link_state"`
	Trust      bool    `json:"trust"`
	Rate       struct {
		MaxTx int `json:"max_tx"`
		MinTx int `json:"min_tx"`
	} `json:"rate"`
}

// vfTag is the tag that a PF gives a VF's frames.
type vfTag struct {
	VLAN int `json:"vlan"`
	QoS  int `json:"qos"`
}

// vfRecords returns what the node's PF tells of its VFs.
func (e *T) vfRecords(n *lab.Node) []vfRecord {
	e.Helper()
	var links []struct {
		VFs []vfRecord `json:"vfinfo_list"`
	}
	out := e.onNode(n, "ip -d -j link show dev "+lab.Uplink)
	require.NoError(e, json.Unmarshal([]byte(out), &links), out)
	return links[0].VFs
}

// TestNetworks has pods join networks by name: they get VLAN, priority, MTU and rights, reach each other in a network and
// not across, and keep what they have when the agent is killed and the network deleted. Afterwards the PF's record of each
// VF is as it was.
func TestNetworks(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	before := e.vfRecords(n)
	e.labelNamespace("e2e.example.com/tenant", n.Name())
	offered := devices(e.waitDevices(n.Name(), "sriov-pool", vfCount))
	e.class("vf", "sriov-pool")
	e.network("storage", fmt.Sprintf(`{namespaceSelector: {matchLabels: {e2e.example.com/tenant: %s}}, pools: [sriov-pool], vlan: 1001, vlanPriority: 3,
		mtu: 1400, vf: {trust: true, spoofCheck: false, maxTxRate: 100}}`, n.Name()))
	e.network("backup", `{namespaceSelector: {}, vlan: 1002}`)
	e.networkTemplate("storage", "vf", "storage", `{"network": %q, "podIfName": "sriov0"}`)
	e.networkTemplate("backup", "vf", "backup", `{"network": %q, "podIfName": "sriov0"}`)
	pods := map[string]string{"a": "storage", "b": "storage", "c": "backup", "d": "backup"}
	for pod, network := range pods {
		e.pod(pod, n.Name(), network)
	}
	e.running("a", "b", "c", "d")
	for i, pod := range []string{"a", "b", "c", "d"} {
		e.address(pod, fmt.Sprintf("10.77.1.%d", i+1))
	}
	e.reaches("a", "10.77.1.2")
	e.reaches("c", "10.77.1.4")
	e.doesNotReach("a", "10.77.1.3")
	require.Equal(e, "1400", e.mustInPod("a", "cat /sys/class/net/sriov0/mtu"))
	require.Equal(e, "1500", e.mustInPod("c", "cat /sys/class/net/sriov0/mtu"))

	requireRecord := func(pod string, change func(*vfRecord)) {
		e.Helper()
		vf := e.vfOf(pod, offered)
		want := before[vf]
		change(&want)
		require.Equal(e, want, e.vfRecords(n)[vf], "VF of pod %s", pod)
	}
	inStorage := func(r *vfRecord) {
		r.VLANList = []vfTag{{VLAN: 1001, QoS: 3}}
		r.Trust, r.SpoofCheck, r.Rate.MaxTx = true, false, 100
	}
	requireRecord("a", inStorage)
	requireRecord("c", func(r *vfRecord) { r.VLANList = []vfTag{{VLAN: 1002}} })

	vf := e.vfOf("a", offered)

	// The agent is killed, the network goes, and somebody takes a right from the VF meanwhile.
	e.deleteNetwork("storage")
	e.killAgent(n)
	e.onNode(n, fmt.Sprintf("ip link set %s vf %d trust off", lab.Uplink, vf))
	e.startAgent(n)
	e.eventually("trust is back", func() string {
		if !e.vfRecords(n)[vf].Trust {
			return "it is not"
		}
		return ""
	})
	e.reaches("a", "10.77.1.2")
	requireRecord("a", inStorage)
	e.pod("late", n.Name(), "storage")
	e.deletePods("c", "d")
	e.eventSays("late", "network "+e.networkName("storage"), "there is no CiliumNetworkDriverNetwork of this name")
	e.deletePods("late")

	e.killAgent(n)
	e.startAgent(n)
	e.deletePods("a", "b")
	e.noAllocations(n)
	e.eventually("records", func() string {
		if now := e.vfRecords(n); fmt.Sprint(now) != fmt.Sprint(before) {
			return fmt.Sprintf("%+v is not %+v", now, before)
		}
		return ""
	})
}

// TestNetworkPermissions refuses, before anything is touched, networks of others, VLANs and overrides that a pool does not
// let claims ask for, and rights that a PF cannot give; the same from a class is allowed.
func TestNetworkPermissions(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	networkOnly, none := vfPool("network-only", 0, 1), vfPool("none", 2, 3)
	networkOnly.Claims, none.Claims = v2alpha1.ClaimsNetworkOnly, v2alpha1.ClaimsNone
	e.configure(n.Name(), sriovPools(networkOnly, none))
	e.waitDevices(n.Name(), "network-only", 2)
	e.waitDevices(n.Name(), "none", 2)
	before := e.vfRecords(n)
	e.network("others", `{namespaceSelector: {matchLabels: {e2e.example.com/tenant: nobody}}, vlan: 1003}`)
	e.network("rates", `{namespaceSelector: {}, vlan: 1004, vf: {trust: true, minTxRate: 10}}`)
	e.network("wide", `{namespaceSelector: {}, mtu: 9000}`)
	e.network("elsewhere", `{namespaceSelector: {}, pools: [network-only]}`)
	e.class("network-only", "network-only")
	e.class("none", "none")
	e.class("fixed", "none", `{"vlan": 1005, "podIfName": "sriov0"}`)
	e.class("away", "none", fmt.Sprintf(`{"network": %q}`, e.networkName("elsewhere")))
	e.networkTemplate("others", "network-only", "others", `{"network": %q}`)
	e.networkTemplate("rates", "network-only", "rates", `{"network": %q}`)
	e.networkTemplate("wide", "network-only", "wide", `{"network": %q}`)
	one := func(class string) []resourceapi.DeviceRequest {
		return []resourceapi.DeviceRequest{e.request("net", class)}
	}
	e.template("raw", one("network-only"), config(`{"vlan": 1006}`))
	e.template("override", one("fixed"), config(`{"podIfName": "other0"}`))
	e.template("fixed", one("fixed"))
	e.template("away", one("away"))
	for _, refused := range []struct {
		template string
		words    []string
	}{
		{"others", []string{"network " + e.networkName("others"), "claims of namespace " + e.ns + " may not join it", "tenant=nobody"}},
		{"raw", []string{`request "net"`, "vlan: claims may not choose the VLAN of devices of pool network-only", "NetworkOnly"}},
		{"override", []string{`request "net"`, "claims may not have parameters for devices of pool none"}},
		{"wide", []string{"mtu: 9000 is more than its PF " + lab.Uplink + " has, 1500"}},
		{"away", []string{"network " + e.networkName("elsewhere"), "the device is of pool none, which is not on the network's wire: spec.pools are network-only"}},
		{"rates", []string{"set minTxRate 10 Mbit/s", "on PF " + lab.Uplink}},
	} {
		e.pod(refused.template, n.Name(), refused.template)
		e.eventSays(refused.template, refused.words...)
		require.Equal(e, before, e.vfRecords(n), refused.template)
		e.deletePods(refused.template)
	}
	e.pod("fixed", n.Name(), "fixed")
	e.running("fixed")
	require.Empty(e, e.hasInterface("fixed", "sriov0"))
	e.deletePods("fixed")
	e.noAllocations(n)
	e.eventually("records", func() string {
		if now := e.vfRecords(n); fmt.Sprint(now) != fmt.Sprint(before) {
			return fmt.Sprintf("%+v is not %+v", now, before)
		}
		return ""
	})
}

var addressResource = v2alpha1.SchemeGroupVersion.WithResource(v2alpha1.AddressResource)

// addressesOf returns the addresses that the API server has for a network of the test, by the pods that have them: of each the
// IPv4 address first.
func (e *T) addressesOf(network string) map[string][]string {
	e.Helper()
	list, err := e.Dynamic.Resource(addressResource).List(e.ctx, metav1.ListOptions{LabelSelector: v2alpha1.LabelNetwork + "=" + e.networkName(network)})
	require.NoError(e, err)
	found := map[string][]string{}
	for _, object := range list.Items {
		address := v2alpha1.CiliumNetworkDriverAddress{}
		require.NoError(e, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &address))
		found[address.Spec.Pod.Name] = append(found[address.Spec.Pod.Name], address.Spec.Address)
	}
	for _, addrs := range found {
		slices.SortFunc(addrs, func(a, b string) int { return len(a) - len(b) })
	}
	return found
}

// scriptPod makes a pod whose first instructions are a script, with a claim of a template.
func (e *T) scriptPod(name, node, template, script string) {
	e.Helper()
	pod := e.podObject(name, node)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimTemplateName: &template}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	pod.Spec.Containers[0].Command = []string{"sh", "-c", script + "\nexec sleep 1000000"}
	_, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
}

// TestNetworkAddresses: pods on two nodes reach each other by the addresses that their network gave them, IPv4 and IPv6, from the
// first instruction of their first container. The addresses are objects of the API while the devices have them, also while the
// agent is away, and go with them.
func TestNetworkAddresses(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	for _, n := range e.Nodes() {
		e.configure(n.Name(), sriovSpec())
		e.waitDevices(n.Name(), "sriov-pool", vfCount)
	}
	e.class("vf", "sriov-pool")
	e.network("lan", `{namespaceSelector: {}, vlan: 1011, subnets: [{cidr: 10.78.11.0/24, gateway: 10.78.11.1}, {cidr: '2001:db8:78::/64'}],
		routes: [{to: 10.99.0.0/16}]}`)
	e.networkTemplate("lan", "vf", "lan", `{"network": %q, "podIfName": "sriov0"}`)
	one, two := e.Nodes()[0], e.Nodes()[1]
	const first = "ip route > /tmp/routes; ip -o addr show dev sriov0 > /tmp/part; mv /tmp/part /tmp/first"
	e.scriptPod("a", one.Name(), "lan", first)
	e.running("a")
	addrs := e.addressesOf("lan")["a"]
	require.Len(e, addrs, 2, "%v", addrs)
	e.scriptPod("b", two.Name(), "lan", fmt.Sprintf("ping -c 1 -W 5 %s > /tmp/ping4 2>&1; ping -c 1 -W 5 %s > /tmp/ping6 2>&1", addrs[0], addrs[1]))
	e.running("b")
	seen := e.written("a", "/tmp/first")
	require.Contains(e, seen, addrs[0]+"/24")
	require.Contains(e, seen, addrs[1]+"/64")
	require.NotContains(e, seen, "tentative "+addrs[1])
	require.Contains(e, e.mustInPod("a", "cat /tmp/routes"), "10.99.0.0/16 via 10.78.11.1 dev sriov0")
	require.Equal(e, "0", e.mustInPod("a", "cat /proc/sys/net/ipv6/conf/sriov0/accept_ra"))
	for _, file := range []string{"/tmp/ping4", "/tmp/ping6"} {
		e.eventually("the first ping of pod b", func() string {
			out, _ := e.inPod("b", "cat "+file) // it may not be there yet
			if !strings.Contains(out, " 0% packet loss") {
				return out
			}
			return ""
		})
	}
	e.eventually("claim of pod a", func() string {
		for _, d := range e.claimOf("a").Status.Devices {
			if d.NetworkData != nil && slices.Contains(d.NetworkData.IPs, addrs[0]+"/24") && slices.Contains(d.NetworkData.IPs, addrs[1]+"/64") {
				return ""
			}
		}
		return "its status has not both addresses"
	})

	// The agent is killed, the pod goes meanwhile, and nobody gives its addresses away before the node's agent has freed the device.
	e.killAgent(one)
	now := int64(0)
	require.NoError(e, e.Client.CoreV1().Pods(e.ns).Delete(e.ctx, "a", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	require.Equal(e, addrs, e.addressesOf("lan")["a"])
	e.startAgent(one)
	e.eventually("addresses of pod a", func() string {
		if left := e.addressesOf("lan")["a"]; len(left) > 0 {
			return fmt.Sprintf("are not given back: %v", left)
		}
		return ""
	})
	e.deletePods("b")
	for _, n := range e.Nodes() {
		e.noAllocations(n)
	}
	require.Empty(e, e.addressesOf("lan"))
}

// TestNetworkFull has a pod wait for an address of a network that is full, with an event that says so, and start when one is
// freed. Two devices of one pod in one subnet answer on the wire that they were asked on.
func TestNetworkFull(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovSpec())
	e.waitDevices(n.Name(), "sriov-pool", vfCount)
	e.class("vf", "sriov-pool")
	e.network("small", `{namespaceSelector: {}, vlan: 1012, subnets: [{cidr: 10.78.12.0/24, ranges: [{from: 10.78.12.5, to: 10.78.12.7}]}], policyRouting: {}}`)
	e.networkTemplate("small", "vf", "small", `{"network": %q, "podIfName": "sriov0"}`)
	pair := e.request("net", "vf")
	pair.Exactly.Count = 2
	e.template("pair", []resourceapi.DeviceRequest{pair}, config(fmt.Sprintf(`{"network": %q}`, e.networkName("small"))))
	e.pod("pair", n.Name(), "pair")
	e.running("pair")
	e.pod("peer", n.Name(), "small")
	e.running("peer")
	all := e.addressesOf("small")
	require.Len(e, all["pair"], 2, "%v", all)
	require.Len(e, all["peer"], 1, "%v", all)

	// The peer asks both, and each answer comes from the interface that has the address.
	for _, ip := range all["pair"] {
		e.reaches("peer", ip)
		name := e.mustInPod("pair", fmt.Sprintf("ip -o addr show to %s/32 | cut -d' ' -f2", ip))
		require.Contains(e, e.mustInPod("pair", fmt.Sprintf("ip route get %s from %s", all["peer"][0], ip)), "dev "+name)
	}

	e.pod("waits", n.Name(), "small")
	e.eventSays("waits", "WaitsForAddress", "network "+e.networkName("small")+": no address is left in 10.78.12.0/24")
	e.deletePods("peer")
	e.running("waits")
	require.Equal(e, all["peer"], e.addressesOf("small")["waits"])
	e.deletePods("pair", "waits")
	e.noAllocations(n)
	require.Empty(e, e.addressesOf("small"))
}

// TestJumboFrames is the storage network of the documentation on two nodes whose PFs have an MTU of 9000: pings of 8,900 bytes reach
// each of the two NICs of a pod in one frame, and are answered by it, IPv4 and IPv6.
func TestJumboFrames(t *testing.T) {
	e := startEverywhere(t)
	e.ensureVFs()
	e.guard()
	for _, n := range e.Nodes() {
		e.onNode(n, "ip link set "+lab.Uplink+" mtu 9000")
		e.atEnd(func() { e.onNode(n, "ip link set "+lab.Uplink+" mtu 1500") })
		e.configure(n.Name(), sriovSpec())
		e.waitDevices(n.Name(), "sriov-pool", vfCount)
	}
	e.class("vf", "sriov-pool")
	const vlan = 1100
	e.network("storage", fmt.Sprintf(`{namespaceSelector: {}, pools: [sriov-pool], vlan: %d, mtu: 9000, policyRouting: {},
		subnets: [{cidr: 10.79.0.0/24, gateway: 10.79.0.1}, {cidr: '2001:db8:79::/64'}],
		routes: [{to: 10.79.128.0/17}], interface: {arpIgnore: 1, arpAnnounce: 2}}`, vlan))
	parameters := func(name string) string {
		return fmt.Sprintf(`{"network": %q, "podIfName": %q}`, e.networkName("storage"), name)
	}
	e.template("target", []resourceapi.DeviceRequest{e.request("net", "vf")}, config(parameters("stor0")))
	e.template("paths", []resourceapi.DeviceRequest{e.request("left", "vf"), e.request("right", "vf")},
		config(parameters("stor0"), "left"), config(parameters("stor1"), "right"))
	e.pod("target", e.Nodes()[0].Name(), "target")
	e.pod("client", e.Nodes()[1].Name(), "paths")
	e.running("target", "client")
	capture, err := e.CaptureUplinks()
	require.NoError(e, err)
	defer capture.Close()

	const payload, ipv4, ipv6 = 8900, 0x0800, 0x86dd
	for _, name := range []string{"stor0", "stor1"} {
		require.Equal(e, "9000", e.mustInPod("client", "cat /sys/class/net/"+name+"/mtu"))
		mac := e.mustInPod("client", "cat /sys/class/net/"+name+"/address")
		addrs := strings.Fields(e.mustInPod("client", "ip -o addr show dev "+name+" scope global | sed 's/.* inet6* //; s,/.*,,'"))
		require.Len(e, addrs, 2, "%v", addrs)
		for _, addr := range addrs {
			e.reaches("target", fmt.Sprintf("-s %d %s", payload, addr))
		}
		for etherType, header := range map[uint16]int{ipv4: 20 + 8, ipv6: 40 + 8} {
			for _, fromClient := range []bool{false, true} {
				ctx, cancel := context.WithTimeout(e.ctx, patience)
				_, err := capture.WaitFor(ctx, func(f lab.Frame) bool {
					from := f.Dst
					if fromClient {
						from = f.Src
					}
					return from.String() == mac && f.EtherType == etherType && f.VLAN == vlan && len(f.Payload) == header+payload &&
						(etherType == ipv6 || fromClient || f.Payload[6]&0x40 != 0) // ping says not to fragment, the kernel's answer does not
				})
				cancel()
				require.NoError(e, err, "a frame of %d bytes, type %#x, of %s, from it: %t", header+payload, etherType, name, fromClient)
			}
		}
	}
	e.deletePods("target", "client")
	for _, n := range e.Nodes() {
		e.noAllocations(n)
	}
}
