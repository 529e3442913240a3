// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/test/lab"
)

// vfioTemplate makes a claim template for a VF that a program drives, in a VLAN.
func (e *T) vfioTemplate(name, class string, vlan int) {
	e.Helper()
	e.template(name, []resourceapi.DeviceRequest{e.request("vf", class)}, config(fmt.Sprintf(`{"driver": "vfio-pci", "vlan": %d}`, vlan)))
}

// dpdkPod makes a pod for DPDK's programs.
func (e *T) dpdkPod(name, node, template, script string) {
	e.Helper()
	e.userPod(name, node, template, lab.DPDKImage, script)
}

// userPod makes a pod without privileges, whose user is not root, that runs a script of an image and calls its claim nic.
func (e *T) userPod(name, node, template, image, script string) {
	e.Helper()
	pod := e.podObject(name, node)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimTemplateName: &template}}
	c := &pod.Spec.Containers[0]
	c.Image, c.Command = image, []string{"sh", "-c", script}
	c.Resources.Claims = []corev1.ResourceClaim{{Name: "nic"}}
	// A poll mode driver takes all that it gets of the node's one processor.
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("400m"), corev1.ResourceMemory: resource.MustParse("512Mi")}
	c.SecurityContext = &corev1.SecurityContext{
		RunAsUser: ptr.To[int64](1000), RunAsGroup: ptr.To[int64](1000), RunAsNonRoot: ptr.To(true),
		AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
	_, err := e.Client.CoreV1().Pods(e.ns).Create(e.ctx, pod, metav1.CreateOptions{})
	require.NoError(e, err)
}

// testpmd is a script that has DPDK's program receive or send: to all, so that whoever is not in the VLAN would get it too.
func testpmd(mode string) string {
	return "exec dpdk-testpmd -a $PCIDEVICE_NIC_VF --lcores '(0,1)@0' --no-huge -m 256 --no-telemetry -- --total-num-mbufs=4096 --burst=4 " +
		"--eth-peer=0,ff:ff:ff:ff:ff:ff --stats-period 1 --forward-mode=" + mode
}

var packets = regexp.MustCompile(`(RX|TX)-packets: *([0-9]+)`)

// packets returns how many packets the program of the pod says that it has received and sent.
func (e *T) packets(pod string) (received, sent int) {
	e.Helper()
	log := e.output(pod)
	for _, m := range packets.FindAllStringSubmatch(log, -1) {
		n, err := strconv.Atoi(m[2])
		require.NoError(e, err)
		if m[1] == "RX" {
			received = max(received, n)
		} else {
			sent = max(sent, n)
		}
	}
	return received, sent
}

// output is what the pod's container has written.
func (e *T) output(pod string) string {
	e.Helper()
	return e.onNode(e.podNode(pod), fmt.Sprintf("cat /var/log/pods/%s_%s_*/app/*.log", e.ns, pod))
}

// receives waits until the program of the pod has received packets.
func (e *T) receives(pod string, atLeast int) int {
	e.Helper()
	got := 0
	e.eventually("packets of pod "+pod, func() string {
		if got, _ = e.packets(pod); got >= atLeast {
			return ""
		}
		log := e.output(pod)
		return fmt.Sprintf("%d, want %d; the program says %s", got, atLeast, log[max(0, len(log)-2000):])
	})
	return got
}

// TestDPDK: programs of pods that are neither privileged nor root's drive VFs of two nodes by vfio-pci. What one sends the other
// receives, and the one in another VLAN receives nothing. Containers see their own devices alone. Afterwards the VFs are as
// they were.
func TestDPDK(t *testing.T) {
	e := startEverywhere(t)
	require.NoError(e, e.ImportDPDK(e.ctx))
	e.ensureVFs()
	e.guard()
	before := map[string]hostState{}
	groups := map[string]string{}
	for _, n := range e.Nodes() {
		e.configure(n.Name(), sriovSpec())
		for _, d := range devices(e.waitDevices(n.Name(), "sriov-pool", vfCount)) {
			groups[n.Name()+d.Name] = attribute(d, "iommuGroup")
			require.NotEmpty(e, groups[n.Name()+d.Name])
		}
		before[n.Name()] = e.hostState(n)
	}
	e.class("vf", "sriov-pool")
	e.vfioTemplate("blue", "vf", 1001)
	e.vfioTemplate("red", "vf", 1002)
	one, two := e.Nodes()[0].Name(), e.Nodes()[1].Name()
	capture, err := e.CaptureUplinks()
	require.NoError(e, err)
	defer capture.Close()
	e.dpdkPod("blue-rx", two, "blue", testpmd("rxonly"))
	e.dpdkPod("red-rx", two, "red", testpmd("rxonly"))
	e.running("blue-rx", "red-rx")
	e.eventually("programs", func() string {
		for _, pod := range []string{"blue-rx", "red-rx"} {
			if log := e.output(pod); !strings.Contains(log, "Port statistics") {
				return pod + ": " + log[max(0, len(log)-2000):]
			}
		}
		return ""
	})
	// The VF's counters go on from what it received before, as an interface.
	earlier, _ := e.packets("red-rx")
	e.dpdkPod("blue-tx", one, "blue", testpmd("txonly"))
	e.running("blue-tx")

	received := e.receives("blue-rx", 100)
	_, sent := e.packets("blue-tx")
	other, _ := e.packets("red-rx")
	blue, others := 0, 0
	for _, f := range capture.Frames() {
		switch {
		case f.Node != two || f.FromNode:
		case f.VLAN == 1001:
			blue++
		default:
			others++
		}
	}
	e.Logf("sent %d, received %d, in the other VLAN %d and %d before; on the wire to the node %d frames of VLAN 1001 and %d others", sent, received, other-earlier, earlier,
		blue, others)
	require.GreaterOrEqual(e, blue, 100)
	require.LessOrEqual(e, other-earlier, others, "packets in VLAN 1002 that came in VLAN 1001")

	for pod, vlan := range map[string]int{"blue-tx": 1001, "blue-rx": 1001, "red-rx": 1002} {
		n := e.podNode(pod)
		rows := e.allocationsOf(pod)
		require.Len(e, rows, 1)
		group := groups[n.Name()+rows[0].DeviceName]
		require.Equal(e, fmt.Sprintf("1000 1000 /dev/vfio/%s\n1000 1000 /dev/vfio/vfio", group),
			e.mustInPod(pod, "stat -c '%u %g %n' /dev/vfio/*"), "its own devices, and no others")
		require.Contains(e, e.mustInPod(pod, "cat /proc/1/environ | tr '\\0' '\\n'"), "PCIDEVICE_NIC_VF="+pciAddr(rows[0].DeviceName))
		require.Regexp(e, `Max locked memory +unlimited +unlimited`, e.mustInPod(pod, "cat /proc/1/limits"))
		require.Equal(e, "vfio-pci", e.driverOf(n, pciAddr(rows[0].DeviceName)))
		for vf := range vfCount {
			if deviceOf(e, n.Name(), vf).Name == rows[0].DeviceName {
				require.Equal(e, vlan, e.vlanOf(n, vf))
			}
		}
	}
	e.deletePods("blue-tx", "blue-rx", "red-rx")
	for _, n := range e.Nodes() {
		e.noAllocations(n)
		e.eventually("VFs of "+n.Name(), func() string {
			return cmp.Or(gocmp.Diff(before[n.Name()], e.hostState(n)), e.notOn(n, "igbvf"))
		})
	}
}

// driverOf returns the driver of a PCI device of the node.
func (e *T) driverOf(n *lab.Node, addr string) string {
	e.Helper()
	return strings.TrimSpace(e.onNode(n, "basename $(readlink /sys/bus/pci/devices/"+addr+"/driver)"))
}

// notOn says which of the node's VFs is not bound to the driver, or may be bound to no other one.
func (e *T) notOn(n *lab.Node, driver string) string {
	e.Helper()
	for name := range devices(e.slices(n.Name())) {
		addr := pciAddr(name)
		if now := e.driverOf(n, addr); now != driver {
			return fmt.Sprintf("%s is bound to %s", addr, now)
		}
		if override := strings.TrimSpace(e.onNode(n, "cat /sys/bus/pci/devices/"+addr+"/driver_override")); override != "(null)" {
			return fmt.Sprintf("driver_override of %s is %s", addr, override)
		}
	}
	return ""
}

// TestDriverRounds: one VF is a pod's interface, then a program's, then an interface again, over and over, and is each time as it
// was. A claim of both has both. What somebody else has set of the VF is not overridden.
func TestDriverRounds(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	e.configure(n.Name(), sriovPools(vfPool("one", 0), vfPool("two", 1)))
	e.waitDevices(n.Name(), "one", 1)
	e.waitDevices(n.Name(), "two", 1)
	device := deviceOf(e, n.Name(), 0)
	addr := pciAddr(device.Name)
	before := e.hostState(n)
	e.class("one", "one")
	e.class("two", "two")
	e.vfioTemplate("program", "one", 1001)
	e.vlanTemplate("interface", "one", 1002)
	e.template("both", []resourceapi.DeviceRequest{e.request("vf", "one"), e.request("net", "two")},
		config(`{"driver": "vfio-pci", "vlan": 1001}`, "vf"), config(`{"podIfName": "sriov0", "vlan": 1002}`, "net"))
	restored := func() {
		e.noAllocations(n)
		e.eventually("VF", func() string { return cmp.Or(gocmp.Diff(before, e.hostState(n)), e.notOn(n, "igbvf")) })
	}
	for range 2 {
		e.pod("interface", n.Name(), "interface")
		e.running("interface")
		require.Empty(e, e.hasInterface("interface", "sriov0"))
		e.deletePods("interface")
		restored()
		e.pod("program", n.Name(), "program")
		e.running("program")
		require.Equal(e, "vfio-pci", e.driverOf(n, addr))
		require.Equal(e, attribute(device, "mac"), e.hostState(n).VFs[0].MAC, "the program finds the VF's address")
		e.deletePods("program")
		restored()
	}
	e.pod("both", n.Name(), "both")
	e.running("both")
	require.Empty(e, e.hasInterface("both", "sriov0"))
	require.Equal(e, 1001, e.vlanOf(n, 0))
	require.Equal(e, 1002, e.vlanOf(n, 1))

	// The agent is away, and the pod's node is not touched when it is back.
	e.killAgent(n)
	e.startAgent(n)
	e.eventually("rows", func() string {
		for _, row := range e.allocations(n) {
			if row.Attachment == nil || row.Error != "" {
				return fmt.Sprintf("%+v", row)
			}
		}
		return ""
	})
	require.Equal(e, "vfio-pci", e.driverOf(n, addr))
	e.deletePods("both")
	restored()

	e.atEnd(func() { e.onNode(n, "echo > /sys/bus/pci/devices/"+addr+"/driver_override") })
	e.onNode(n, "echo uio_pci_generic > /sys/bus/pci/devices/"+addr+"/driver_override")
	e.pod("refused", n.Name(), "program")
	e.eventSays("refused", "driver_override of the VF says", "uio_pci_generic", "somebody else")
	require.Zero(e, e.vlanOf(n, 0))
	e.onNode(n, "echo > /sys/bus/pci/devices/"+addr+"/driver_override")
	e.deletePods("refused")
	restored()
}
