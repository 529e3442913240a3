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
	"github.com/cilium/networkdriver/pkg/nic"
)

func TestRestore(t *testing.T) {
	node := newNode(t)
	m, d, pf := discovered(t, node, Params{})
	node.kernel.vfs[pf][0] = VFSettings{VLAN: 9, QoS: 2, MAC: d.MAC}
	dev, err := d.Setup(t.Context(), withVLAN(1001))
	require.NoError(t, err)
	data, err := dev.(*Device).MarshalNote()
	require.NoError(t, err)

	restored, err := m.RestoreDevice(data)
	require.NoError(t, err)
	restored, err = restored.(*Device).RestoreNote(data)
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
	require.Equal(t, dev.Attrs(), restored.Attrs())
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
		{`"up":true`, `"alias":"` + strings.Repeat("a", 256) + `"`, "original.link.alias"},
		{`"vf":{`, `"permanentMAC":"x","vf":{`, "original.permanentMAC"},
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

// An agent of an earlier version has written of the link no more than this.
func TestRestoreOldRecord(t *testing.T) {
	dev, err := newNode(t).manager(Params{}).RestoreDevice([]byte(goodRecord))
	require.NoError(t, err)
	require.Equal(t, nic.State{Name: "ens1f0v0", AltNames: []string{"a"}, MTU: 1500, MAC: "02:00:00:00:00:03", Up: true}, dev.HostState(),
		"what is not there is not known")
	require.Equal(t, nic.PCI("0000:03:10.0"), dev.Link())
	require.Equal(t, VFSettings{VLAN: 9, QoS: 1, MAC: "02:00:00:00:00:03"}, dev.(*Device).Original.VF)

	_, err = newNode(t).manager(Params{}).RestoreDevice([]byte(strings.Replace(goodRecord, `["a"]`, `["a%b"]`, 1)))
	require.NoError(t, err, "the kernel takes it for an alternative name")
}

// What sysfs tells of a VF is not taken from its record.
func TestRestoreBelievesSysfs(t *testing.T) {
	node := newNode(t)
	node.write(filepath.Join(bus, "0000:03:10.0", "numa_node"), "1")
	m, d, _ := discovered(t, node, Params{})
	forged := strings.NewReplacer(`"pfName":"ens1f0"`, `"pfName":"eth0"`, `"vfID":0`, `"vfID":3`, `0x8086`, `0x15b3`, `0x10ca`, `0x1018`, `igbvf`, `vfio-pci`,
		`pci0000:00`, `pci0000:80`, `"numaNode":0`, `"numaNode":7`).Replace(goodRecord)
	dev, err := m.RestoreDevice([]byte(forged))
	require.NoError(t, err)
	require.Equal(t, d.Attrs(), dev.Attrs())
	require.Equal(t, nic.PCI("0000:03:10.0"), dev.Link())

	// A VF without a driver and a PF without an interface had them when the device was prepared.
	node.remove(filepath.Join(bus, "0000:03:10.0", "driver"))
	node.hideNetdev(pfAddr, pfName)
	dev, err = m.RestoreDevice([]byte(goodRecord))
	require.NoError(t, err)
	require.Equal(t, d.Attrs(), dev.Attrs())
}

// Whoever rebinds a prepared VF keeps neither its interface from coming home nor the PF's settings from being restored.
func TestRestoreReboundVF(t *testing.T) {
	const addr = "0000:03:10.0"
	prepare := func(t *testing.T, node *tree) (record []byte, pf int) {
		_, d, pf := discovered(t, node, Params{})
		dev, err := d.Setup(t.Context(), withVLAN(5))
		require.NoError(t, err)
		require.Equal(t, VFSettings{VLAN: 5}, node.kernel.vfs[pf][0])
		record, err = json.Marshal(dev)
		require.NoError(t, err)
		return record, pf
	}
	restore := func(t *testing.T, node *tree, record []byte) types.Device {
		dev, err := node.manager(Params{}).RestoreDevice(record)
		require.NoError(t, err)
		// The record may be written again.
		again, err := json.Marshal(dev)
		require.NoError(t, err)
		same, err := node.manager(Params{}).RestoreDevice(again)
		require.NoError(t, err)
		require.Equal(t, dev.Link(), same.Link())
		require.Equal(t, dev.HostState(), same.HostState())
		return dev
	}
	free := func(t *testing.T, node *tree, dev types.Device, pf int) {
		require.NoError(t, dev.Free(t.Context(), withVLAN(5)))
		require.Equal(t, VFSettings{}, node.kernel.vfs[pf][0])
	}
	toVFIO := func(node *tree) {
		node.hideNetdev(addr, "ens1f0v0")
		node.bind(addr, "vfio-pci")
	}

	t.Run("to vfio-pci", func(t *testing.T) {
		node := newNode(t)
		record, pf := prepare(t, node)
		toVFIO(node)
		dev := restore(t, node, record)
		require.Equal(t, nic.PCI(addr), dev.Link(), "it is looked for, and sysfs says that there is none")
		require.Equal(t, "ens1f0v0", dev.HostState().Name)
		free(t, node, dev, pf)
	})
	t.Run("from vfio-pci", func(t *testing.T) {
		node := newNode(t)
		toVFIO(node)
		record, pf := prepare(t, node)
		node.bind(addr, "igbvf")
		node.showNetdev(node.kernel.links[3])
		dev := restore(t, node, record)
		require.True(t, dev.Link().IsZero(), "the interface on the host is nobody's to bring home")
		free(t, node, dev, pf)
	})
	// Nobody does that but with a forged record.
	t.Run("from vfio-pci, the interface is away", func(t *testing.T) {
		node := newNode(t)
		toVFIO(node)
		record, pf := prepare(t, node)
		node.bind(addr, "igbvf")
		dev := restore(t, node, record)
		require.Equal(t, nic.PCI(addr), dev.Link())
		require.Zero(t, dev.HostState())
		free(t, node, dev, pf)
	})
}

// What the journal has of settings is not in a claim's record, and is not believed of one: who forges it could have what a pod
// has set last.
func TestSettingsAreNotRecorded(t *testing.T) {
	node := newNode(t)
	m, d, _ := discovered(t, node, Params{})
	dev, err := d.Setup(t.Context(), withVLAN(5))
	require.NoError(t, err)
	require.NotEmpty(t, dev.(*Device).Original.Settings)
	record, err := dev.MarshalJSON()
	require.NoError(t, err)
	require.NotContains(t, string(record), "settings")
	note, err := dev.(*Device).MarshalNote()
	require.NoError(t, err)
	forged, err := m.RestoreDevice(note)
	require.NoError(t, err, "an older agent takes a note")
	require.Nil(t, forged.(*Device).Original.Settings)

	_, err = forged.(*Device).RestoreNote([]byte(`{"settings":{"ring sizes":[-1]}}`))
	require.ErrorContains(t, err, "decode VF")
	_, err = forged.(*Device).RestoreNote([]byte(`{"settings":{"ring sizes":[` + strings.Repeat("1,", 5000) + `1]}}`))
	require.ErrorContains(t, err, `settings: "ring sizes": 5001 numbers are more than`)
	before, err := forged.(*Device).RestoreNote(record)
	require.NoError(t, err, "an older agent has noted none")
	require.Nil(t, before.(*Device).Original.Settings)
}

func FuzzRestoreNote(f *testing.F) {
	f.Add([]byte(goodRecord))
	f.Add([]byte(`{"settings":{"flow rules":[],"features":[1,2,3,4]}}`))
	m := newManager(Params{SysfsPath: filepath.Join(f.TempDir(), "none")}, &fakeKernel{})
	f.Fuzz(func(t *testing.T, data []byte) {
		dev, err := m.RestoreDevice([]byte(goodRecord))
		require.NoError(t, err)
		noted, err := dev.(*Device).RestoreNote(data)
		if err != nil {
			return
		}
		again, err := noted.(*Device).MarshalNote()
		require.NoError(t, err)
		same, err := dev.(*Device).RestoreNote(again)
		require.NoError(t, err)
		require.Equal(t, noted, same)
		require.Nil(t, dev.(*Device).Original.Settings, "devices are immutable")
	})
}

func FuzzRestoreDevice(f *testing.F) {
	f.Add([]byte(goodRecord))
	f.Add([]byte(`{"pciAddr":"0000:03:10.0","original":{}}`))
	f.Add([]byte(strings.Replace(goodRecord, `["a"]`, `[]`, 1)))
	f.Add([]byte(strings.Replace(goodRecord, `"up":true`, `"up":true,"alias":"x","group":7,"txQueueLen":10,"sizes":{"gso":65536,"gsoSegs":65535}`, 1)))
	f.Add([]byte(strings.Replace(goodRecord, `"future":true`, `"settings":{"flow rules":[1]},"strayed":true,"manager":{}`, 1)))
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
