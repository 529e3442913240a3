// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/test/lab"
)

// TestRDMA: a program of a pod that is neither privileged nor root's opens the RDMA device of its VF, which is made of the VF's interface
// in software here, and sees the nodes of no other. A pod that does not ask for it has none. After the pod, and after an agent that was
// killed meanwhile, the device is on the node as it was.
func TestRDMA(t *testing.T) {
	e := startSRIOV(t)
	n := e.node
	require.NoError(e, e.ImportRDMA(e.ctx))
	e.configure(n.Name(), sriovPools(vfPool("first", 0), vfPool("second", 1)))
	e.waitDevices(n.Name(), "first", 1)
	e.waitDevices(n.Name(), "second", 1)
	before := e.hostState(n)
	e.atEnd(func() {
		e.onNode(n, "for d in rxe0 rxe1; do rdma link delete $d || true; done; modprobe -r rdma_rxe rdma_ucm ib_umad || true")
	})
	ifNames := map[string]string{"rxe0": attribute(deviceOf(e, n.Name(), 0), "kernelIfName"), "rxe1": attribute(deviceOf(e, n.Name(), 1), "kernelIfName")}
	e.onNode(n, "modprobe -a rdma_rxe rdma_ucm ib_umad")
	for _, name := range []string{"rxe0", "rxe1"} {
		e.onNode(n, fmt.Sprintf("rdma link add %s type rxe netdev %s", name, ifNames[name]))
	}
	home := func() string {
		for name, ifName := range ifNames {
			if is := strings.TrimSpace(e.onNode(n, "cat /sys/class/infiniband/"+name+"/parent || true")); is != ifName {
				return fmt.Sprintf("%s is made of %q, want %s", name, is, ifName)
			}
		}
		return ""
	}
	require.Empty(e, home())
	e.eventually("attributes", func() string {
		d := deviceOf(e, n.Name(), 0)
		if has := d.Attributes["rdma"].BoolValue; has == nil || !*has || attribute(d, "rdmaDevice") != "rxe0" {
			return fmt.Sprintf("%+v", d.Attributes)
		}
		return ""
	})
	restored := func() {
		t.Helper()
		e.noAllocations(n)
		e.eventually("VF and RDMA device", func() string { return cmp.Or(gocmp.Diff(before, e.hostState(n)), home()) })
	}

	e.class("first", "first")
	e.template("verbs", []resourceapi.DeviceRequest{e.request("vf", "first")}, config(`{"rdma": true, "podIfName": "rdma0", "vlan": 1001}`))
	e.vlanTemplate("plain", "first", 1001)
	e.userPod("verbs", n.Name(), "verbs", lab.RDMAImage, "ibv_devices; ibv_devinfo -d rxe0; exec sleep 1000000")
	e.running("verbs")
	e.eventually("an opened device", func() string {
		if out := e.output("verbs"); !strings.Contains(out, "hca_id:\trxe0") || !strings.Contains(out, "state:") {
			return out
		}
		return ""
	})
	e.Logf("the program says %s", e.output("verbs"))
	require.Empty(e, e.hasInterface("verbs", "rdma0"))
	require.Equal(e, 1001, e.vlanOf(n, 0))
	nodes := e.mustInPod("verbs", "stat -c '%u %g %n' /dev/infiniband/*")
	require.Regexp(e, `^1000 1000 /dev/infiniband/rdma_cm\n1000 1000 /dev/infiniband/umad\d\n1000 1000 /dev/infiniband/uverbs\d$`, nodes, "its own, and no others")
	require.Regexp(e, `Max locked memory +unlimited +unlimited`, e.mustInPod("verbs", "cat /proc/1/limits"))
	require.Contains(e, e.mustInPod("verbs", "cat /proc/1/environ | tr '\\0' '\\n'"), "PCIDEVICE_NIC_VF="+pciAddr(e.allocationsOf("verbs")[0].DeviceName))
	e.eventually("mode", func() string {
		if mode := e.configStatus(n.Name()).RDMAMode; mode != "shared" {
			return fmt.Sprintf("the status says %q", mode)
		}
		return ""
	})
	e.deletePods("verbs")
	restored()

	e.userPod("plain", n.Name(), "plain", lab.RDMAImage, "ls /dev/infiniband; ibv_devinfo -d rxe1; exec sleep 1000000")
	e.running("plain")
	e.eventually("what the program says", func() string {
		if out := e.output("plain"); !strings.Contains(out, "/dev/infiniband: No such file") || strings.Contains(out, "state:") {
			return out
		}
		return ""
	})
	e.deletePods("plain")
	restored()

	e.userPod("killed", n.Name(), "verbs", lab.RDMAImage, "exec sleep 1000000")
	e.running("killed")
	e.killAgent(n)
	e.startAgent(n)
	e.deletePods("killed")
	restored()
}
