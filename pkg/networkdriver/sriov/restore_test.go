// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

func TestRestore(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9, QoS: 2, MAC: d.MAC}
	dev, err := d.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	data, err := json.Marshal(dev)
	require.NoError(t, err)

	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	require.Equal(t, dev, restored)

	// Another agent, whose node no longer has the device.
	node.remove("bus/pci/devices/0000:03:10.0")
	_, err = node.manager(Params{}).RestoreDevice(data)
	require.NoError(t, err)
}

// A forged record cannot make Free touch another VF or PF, and no device that is no VF.
func TestRestoreForgedPF(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	other := node.pf("0000:04:00.0", "ens2f0", 7)
	node.kernelVF("0000:04:00.0", 0, "0000:04:10.0", "ens2f0v0")
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	forged := *dev.(*Device)
	forged.PFName, forged.VFID = "ens2f0", 1
	data, err := json.Marshal(&forged)
	require.NoError(t, err)
	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	node.kernel.vfs[pf][1], node.kernel.vfs[other][0], node.kernel.vfs[other][1] = VFSettings{VLAN: 5}, VFSettings{VLAN: 5}, VFSettings{VLAN: 5}
	require.NoError(t, restored.Free(t.Context(), withVLAN(5)))
	require.Equal(t, map[int]VFSettings{0: {}, 1: {VLAN: 5}}, node.kernel.vfs[pf])
	require.Equal(t, map[int]VFSettings{0: {VLAN: 5}, 1: {VLAN: 5}}, node.kernel.vfs[other])

	forged.Addr = pfAddr
	data, err = json.Marshal(&forged)
	require.NoError(t, err)
	_, err = m.RestoreDevice(data)
	require.ErrorIs(t, err, errNotVF)
}

const goodRecord = `{"pciAddr":"0000:03:10.0","kernelIfName":"ens1f0v0","mtu":1500,"mac":"02:00:00:00:00:03","pfName":"ens1f0",
"vfID":0,"vendor":"0x8086","deviceID":"0x10ca","driver":"igbvf","pcieRoot":"pci0000:00","numaNode":0,"future":true,
"original":{"link":{"name":"ens1f0v0","altNames":["a"],"mtu":1500,"mac":"02:00:00:00:00:03","up":true},"vf":{"vlan":9,"qos":1,"mac":"02:00:00:00:00:03"}}}`

func TestRestoreRefuses(t *testing.T) {
	node := newNode(t)
	m := node.manager(Params{})
	_, err := m.RestoreDevice([]byte(goodRecord))
	require.NoError(t, err)

	for _, tc := range []struct{ old, new, want string }{
		{`"0000:03:10.0"`, `"../../0000:03:10.0"`, "pciAddr"},
		{`"0000:03:10.0"`, `""`, "pciAddr"},
		{`"0000:03:10.0"`, `"0000:03:10.0\n"`, "pciAddr"},
		{`"0000:03:10.0"`, `"0000:03:10.8"`, "pciAddr"},
		{`"kernelIfName":"ens1f0v0"`, `"kernelIfName":"a/b"`, "kernelIfName"},
		{`"kernelIfName":"ens1f0v0"`, `"kernelIfName":""`, "kernelIfName"},
		{`"pfName":"ens1f0"`, `"pfName":".."`, "pfName"},
		{`"pfName":"ens1f0"`, `"pfName":""`, "pfName"},
		{`"vfID":0`, `"vfID":-1`, "vfID"},
		{`"vfID":0`, `"vfID":1.5`, "vfID"},
		{`"mtu":1500,"mac":"02:00:00:00:00:03","pfName"`, `"mtu":-1,"pfName"`, "mtu"},
		{`"mac":"02:00:00:00:00:03","pfName"`, `"mac":"02-00-00-00-00-03","pfName"`, "mac"},
		{`"mac":"02:00:00:00:00:03","pfName"`, `"mac":"02:00:00:00:00:00:00:03","pfName"`, "mac"},
		{`"0x8086"`, `"8086"`, "vendor"},
		{`"0x10ca"`, `"0x10cag"`, "deviceID"},
		{`"igbvf"`, `"ig/bvf"`, "driver"},
		{`"igbvf"`, `""`, "driver"},
		{`"pci0000:00"`, `"pci"`, "pcieRoot"},
		{`"numaNode":0`, `"numaNode":-1`, "numaNode"},
		{`"name":"ens1f0v0"`, `"name":"far too long a name"`, "original.link.name"},
		{`"name":"ens1f0v0"`, `"name":""`, "original.link.name"},
		{`["a"]`, `["a b"]`, "original.link.altNames[0]"},
		{`["a"]`, `["` + strings.Repeat("a", 128) + `"]`, "original.link.altNames[0]"},
		{`["a"]`, `[` + strings.Repeat(`"a",`, 64) + `"a"]`, "original.link.altNames"},
		{`"mtu":1500,"mac":"02:00:00:00:00:03","up"`, `"mtu":99999999,"up"`, "original.link.mtu"},
		{`"mac":"02:00:00:00:00:03","up"`, `"mac":"x","up"`, "original.link.mac"},
		{`"vlan":9`, `"vlan":4096`, "original.vf.vlan"},
		{`"qos":1`, `"qos":8`, "original.vf.qos"},
		{`"qos":1`, `"vlanProto":2048`, "original.vf.vlanProto"},
		{`"mac":"02:00:00:00:00:03"}`, `"mac":"02:00:00"}`, "original.vf.mac"},
		{`"original"`, `"forgotten"`, "original"},
		{goodRecord, `[]`, "decode VF"},
		{goodRecord, `null`, "pciAddr"},
		{goodRecord, ``, "decode VF"},
		{goodRecord, goodRecord + goodRecord, "decode VF"},
	} {
		data := strings.Replace(goodRecord, tc.old, tc.new, 1)
		require.NotEqual(t, goodRecord, data, "%s is not in the record", tc.old)
		dev, err := m.RestoreDevice([]byte(data))
		require.Nil(t, dev, data)
		require.ErrorContains(t, err, tc.want, data)
	}

	// A VF without an interface needs none in its record.
	dpdk := strings.NewReplacer(`"kernelIfName":"ens1f0v0",`, "", `"name":"ens1f0v0",`, "", "igbvf", "vfio-pci").Replace(goodRecord)
	dev, err := m.RestoreDevice([]byte(dpdk))
	require.NoError(t, err)
	require.True(t, dev.Link().IsZero())
}

func FuzzRestoreDevice(f *testing.F) {
	f.Add([]byte(goodRecord))
	f.Add([]byte(`{"pciAddr":"0000:03:10.0","original":{}}`))
	f.Add([]byte(strings.Replace(goodRecord, `["a"]`, `[]`, 1)))
	m := newManager(Params{SysfsPath: filepath.Join(f.TempDir(), "none")}, &fakeKernel{})
	f.Fuzz(func(t *testing.T, data []byte) {
		dev, err := m.RestoreDevice(data)
		if err != nil {
			return
		}
		// What is taken survives another round unchanged, and its name is one that the driver gives.
		out, err := json.Marshal(dev)
		require.NoError(t, err)
		again, err := m.RestoreDevice(out)
		require.NoError(t, err)
		if link := &dev.(*Device).Original.Link; len(link.AltNames) == 0 {
			link.AltNames = nil // an empty list is none
		}
		require.Equal(t, dev, again)
		require.Equal(t, nameOf(dev.(*Device).Addr), dev.IfName())
		require.NotContains(t, dev.HostState().Name, "/")
		require.NoError(t, dev.Validate(types.DeviceConfig{}))
	})
}
