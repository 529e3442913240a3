// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/lab"
)

const (
	hostDevice = "amd-host-device"
	// fabricConfig comes before the node's own network in the order of names, which containerd goes by.
	fabricConfig = "/etc/cni/net.d/00-fabric.conflist"
	hostRecords  = "/var/lib/cni/amd-host-device/attachments"
)

// installHostDevice puts the plugin beside the others of a node.
func (e *T) installHostDevice(n *lab.Node) {
	e.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "bin", hostDevice))
	require.NoError(e, err, "make build makes it")
	// Tests on the two nodes may do this at the same time.
	name := hostDevice + "-" + n.Name()
	require.NoError(e, os.WriteFile(filepath.Join(e.ShareDir(), name), data, 0o755))
	// Beside and then in place, so that nobody runs half of it.
	e.onNode(n, fmt.Sprintf("cp %s /opt/cni/bin/.%s && mv /opt/cni/bin/.%[2]s /opt/cni/bin/%[2]s", path.Join(lab.ShareDir, name), hostDevice))
}

// fabric makes pods of the node get a NIC as their network, until the test's end.
func (e *T) fabric(n *lab.Node, pciAddr string, offset, prefixLen int) {
	e.Helper()
	conf := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "fabric", "plugins": [
		{"type": %q, "pciBusID": %q, "nexthopNetAddrOffset": %d, "routeDstPrefixLen": %d, "logFile": "/var/log/amd-host-device.log"},
		{"type": "sbr"}]}`, hostDevice, pciAddr, offset, prefixLen)
	e.onNode(n, fmt.Sprintf("cat > %s.new <<'EOT' && mv %[1]s.new %[1]s\n%s\nEOT", fabricConfig, conf))
	e.atEnd(func() { e.onNode(n, "rm -f "+fabricConfig) })
}

// pciAddrOf returns the PCI address of an interface of the host.
func (e *T) pciAddrOf(n *lab.Node, link string) string {
	e.Helper()
	return strings.TrimSpace(e.onNode(n, "basename $(readlink /sys/class/net/"+link+"/device)"))
}

// hostAddresses returns whether an interface of the host is up, and its IPv4 addresses.
func (e *T) hostAddresses(n *lab.Node, link string) (up bool, addrs []string) {
	e.Helper()
	out, _, code, err := n.Exec(e.ctx, "ip -4 -j address show dev "+link)
	require.NoError(e, err)
	if code != 0 {
		return false, nil
	}
	var links []struct {
		Flags []string `json:"flags"`
		Addrs []struct {
			Local     string `json:"local"`
			PrefixLen int    `json:"prefixlen"`
		} `json:"addr_info"`
	}
	require.NoError(e, json.Unmarshal([]byte(out), &links), out)
	for _, l := range links {
		for _, f := range l.Flags {
			up = up || f == "UP"
		}
		for _, a := range l.Addrs {
			addrs = append(addrs, fmt.Sprintf("%s/%d", a.Local, a.PrefixLen))
		}
	}
	return up, addrs
}

// onFabric runs a pod of the node on the fabric: it has the NIC's address as its own, its policy route, and answers from
// behind the leaf. When it is gone the NIC is home as it was. It returns the routes of the address's table.
func (e *T) onFabric(n *lab.Node, link, address, rule, route, far string) (routes []string) {
	e.Helper()
	// containerd watches the directory of networks and may still be about to read it: a pod that came too early is on
	// the other network.
	e.eventually("pod on the fabric", func() string {
		e.pod("fabric", n.Name())
		e.running("fabric")
		if _, ok := e.inPod("fabric", "ip -4 addr show dev eth0 | grep -q "+address); ok {
			return ""
		}
		e.deletePods("fabric")
		return "it has another network"
	})
	pod, err := e.Client.CoreV1().Pods(e.ns).Get(e.ctx, "fabric", metav1.GetOptions{})
	require.NoError(e, err)
	own := strings.Split(address, "/")[0]
	require.Equal(e, own, pod.Status.PodIP, "what kubelet knows is what the NIC had")
	require.NotContains(e, e.links(n.Name()), link)
	require.Contains(e, e.mustInPod("fabric", "ip -4 addr show dev eth0"), address)
	require.Contains(e, e.mustInPod("fabric", "ip rule"), rule)
	require.Contains(e, e.mustInPod("fabric", "ip route show table 100"), route)
	routes = e.routesFrom("fabric", "eth0", own)
	require.NotContains(e, e.mustInPod("fabric", "ip route show table main"), "default")
	e.eventually("pod fabric pings "+far, func() string {
		if out, ok := e.inPod("fabric", fmt.Sprintf("ping -c 1 -W 2 -I %s %s", own, far)); !ok {
			return out
		}
		return ""
	})
	e.deletePods("fabric")
	e.eventually(link+" of "+n.Name(), func() string {
		if up, addrs := e.hostAddresses(n, link); !up || len(addrs) != 1 || addrs[0] != address {
			return fmt.Sprintf("up %v, addresses %v", up, addrs)
		}
		return ""
	})
	require.Empty(e, strings.TrimSpace(e.onNode(n, "ls -A "+hostRecords)))
	return routes
}

// routesFrom returns, sorted, the routes that the pod has for what it sends from an address of an interface, in the table that its rule
// names. Left out is what each program chooses for itself: the number of the table and the word for who made a route.
func (e *T) routesFrom(pod, name, addr string) (routes []string) {
	e.Helper()
	table := e.mustInPod(pod, fmt.Sprintf(`ip rule | sed -n 's/.*from %s lookup \([0-9]*\).*/\1/p'`, addr))
	require.NotEmpty(e, table, "pod %s has no rule for %s", pod, addr)
	for line := range strings.Lines(e.mustInPod(pod, "ip route show table "+table)) {
		words := strings.Fields(line)
		for i := 1; i+1 < len(words); i++ {
			switch {
			case words[i] == "proto":
				words = slices.Delete(words, i, i+2)
				i--
			case words[i] == "dev" && words[i+1] == name:
				words[i+1] = "NIC"
			}
		}
		routes = append(routes, strings.Join(words, " "))
	}
	slices.Sort(routes)
	return routes
}

// TestHostDeviceVF: through containerd, a pod's network is a VF with its address and a policy route through the PF. The driver gives
// the same VF, where its network derives routes, the same table for the same address.
func TestHostDeviceVF(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.installHostDevice(n)
	vf := vfName(0)
	const own = "10.1.2.130"
	e.configure(n.Name(), sriovPools(vfPool("fabric", 0)))
	e.waitDevices(n.Name(), "fabric", 1)
	e.class("fabric", "fabric")
	e.network("fabric", fmt.Sprintf(`{namespaceSelector: {}, subnets: [{cidr: 10.1.2.128/25, ranges: [{from: %s, to: %[1]s}]}],
		policyRouting: {derive: {nexthopNetAddrOffset: 1, routeDstPrefixLen: 19}}}`, own))
	e.networkTemplate("fabric", "fabric", "fabric", `{"network": %q, "podIfName": "sriov0"}`)
	e.pod("derived", n.Name(), "fabric")
	e.running("derived")
	derived := e.routesFrom("derived", "sriov0", own)
	require.Contains(e, e.mustInPod("derived", "ip route get 10.1.20.1 from "+own), "via 10.1.2.129 dev sriov0")
	e.deletePods("derived")
	e.noAllocations(n)

	e.onNode(n, fmt.Sprintf(`set -e
		ip address add 10.1.2.129/25 dev %[1]s noprefixroute
		ip address add 10.1.20.1/32 dev %[1]s
		ip route add 10.1.2.128/25 dev %[1]s metric 1
		ip link set %[2]s up
		ip address add 10.1.2.130/25 dev %[2]s`, lab.Uplink, vf))
	e.atEnd(func() {
		e.onNode(n, fmt.Sprintf("ip -4 address flush dev %s; ip route flush dev %[1]s; ip -4 address flush dev %s; ip link set %[2]s down", lab.Uplink, vf))
	})
	e.fabric(n, e.pciAddrOf(n, vf), 1, 19)
	routes := e.onFabric(n, vf, own+"/25", "from "+own+" lookup 100", "10.1.0.0/19 via 10.1.2.129", "10.1.20.1")
	require.Len(e, routes, 2)
	require.Equal(e, routes, derived, "by amd-host-device and sbr, and by the driver")
}

// TestHostDevicePF: the same with a PF, whose /31 ends at the other node's.
func TestHostDevicePF(t *testing.T) {
	e := startEverywhere(t)
	e.guard()
	n, leaf := e.Node("node2"), e.Node("node1")
	e.installHostDevice(n)
	e.onNode(leaf, fmt.Sprintf("ip address add 10.1.2.4/31 dev %s && ip address add 10.1.200.1/32 dev %[1]s", lab.Uplink))
	e.onNode(n, fmt.Sprintf("ip address add 10.1.2.5/31 dev %s", lab.Uplink))
	e.atEnd(func() {
		for _, n := range []*lab.Node{n, leaf} {
			e.onNode(n, "ip -4 address flush dev "+lab.Uplink)
		}
	})
	e.fabric(n, e.pciAddrOf(n, lab.Uplink), 0, 16)
	e.onFabric(n, lab.Uplink, "10.1.2.5/31", "from 10.1.2.5 lookup 100", "10.1.0.0/16 via 10.1.2.4", "10.1.200.1")
}
