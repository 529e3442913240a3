// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
