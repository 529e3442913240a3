// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/nic"
)

// formerRecord is a record as the former version wrote it, with every field that it had.
const formerRecord = `{"version":1,"network":"fabric","containerID":"c1","ifName":"net1","bootID":"b","recorded":7,"netns":"/run/netns/x",` +
	`"netnsID":{"dev":4,"ino":4026532001},` +
	`"nic":{"bus":"pci","device":"0000:03:00.1","permanentMAC":"02:00:00:00:00:01","kind":"veth","mac":"02:00:00:00:00:02","name":"eth1","index":7},` +
	`"state":{"name":"eth1","alias":"port","altNames":["enp3s0f1"],"mtu":9000,"mac":"02:00:00:00:00:02","up":true,"promisc":true,` +
	`"allMulticast":true,"noARP":true,"xdpProgram":5,"addresses":[{"local":"10.1.2.5","peer":"10.1.2.4","prefixLen":31,` +
	`"broadcast":"10.1.2.255","label":"eth1:x","scope":253,"flags":2,"temporary":true,"validLifetime":100,"preferredLifetime":50}]},` +
	`"routes":[{"from":"10.1.2.5","dst":"10.1.0.0/16","via":"10.1.2.4"}],"refusals":1}`

func TestFormerRecordIsRead(t *testing.T) {
	r, err := decodeRecord([]byte(formerRecord))
	require.NoError(t, err)
	require.Equal(t, &record{
		Version: 1, Network: "fabric", ContainerID: "c1", IfName: "net1", BootID: "b", Recorded: 7, NetNS: "/run/netns/x",
		NetNSID: netnamespace.ID{Dev: 4, Ino: 4026532001},
		NIC: nic.Identity{
			Bus: "pci", Device: "0000:03:00.1", PermMAC: "02:00:00:00:00:01", Kind: "veth", MAC: "02:00:00:00:00:02", Name: "eth1", Index: 7,
		},
		State: hostState{
			State: nic.State{
				Name: "eth1", Alias: new("port"), AltNames: []string{"enp3s0f1"}, MTU: 9000, MAC: "02:00:00:00:00:02",
				Up: true, Promisc: true, AllMulti: true, NoARP: true, XDP: 5,
			},
			Addresses: []address{{
				Local: netip.MustParseAddr("10.1.2.5"), Peer: netip.MustParseAddr("10.1.2.4"), PrefixLen: 31,
				Broadcast: netip.MustParseAddr("10.1.2.255"), Label: "eth1:x", Scope: 253, Flags: 2, Temporary: true, Valid: 100, Preferred: 50,
			}},
		},
		Routes:   []recordedRoute{{From: netip.MustParseAddr("10.1.2.5"), Dst: netip.MustParsePrefix("10.1.0.0/16"), Via: netip.MustParseAddr("10.1.2.4")}},
		Refusals: 1,
	}, r)
	// All of it is written again, for a version that comes back.
	written, err := r.encode()
	require.NoError(t, err)
	require.JSONEq(t, formerRecord, string(written))

	r, err = decodeRecord([]byte(`{"version":1,"containerID":"c1","ifName":"net1","bootID":"b","nic":{"name":"eth1","index":7},"state":{"name":"eth1","mtu":0,"up":false}}`))
	require.NoError(t, err)
	require.Equal(t, hostState{State: nic.State{Name: "eth1", Alias: new("")}}, r.State, "a NIC without an alias had an empty one")
}

// The former version took the values of its keys as these types.
func TestFormerVersionReadsRecords(t *testing.T) {
	var former struct {
		NIC struct {
			Bus     string `json:"bus"`
			Device  string `json:"device"`
			PermMAC string `json:"permanentMAC"`
			Kind    string `json:"kind"`
			MAC     string `json:"mac"`
			Name    string `json:"name"`
			Index   int    `json:"index"`
		} `json:"nic"`
		State struct {
			Name      string    `json:"name"`
			Alias     string    `json:"alias"`
			AltNames  []string  `json:"altNames"`
			MTU       int       `json:"mtu"`
			MAC       string    `json:"mac"`
			Up        bool      `json:"up"`
			Promisc   bool      `json:"promisc"`
			AllMulti  bool      `json:"allMulticast"`
			NoARP     bool      `json:"noARP"`
			XDP       uint32    `json:"xdpProgram"`
			Addresses []address `json:"addresses"`
		} `json:"state"`
	}
	r := newRecord("c1")
	r.State.AllMulti, r.State.NoARP, r.State.XDP = true, true, 5
	data, err := r.encode()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &former))
	require.Equal(t, r.NIC, nic.Identity{
		Bus: former.NIC.Bus, Device: former.NIC.Device, PermMAC: former.NIC.PermMAC, Kind: former.NIC.Kind, MAC: former.NIC.MAC,
		Name: former.NIC.Name, Index: former.NIC.Index,
	})
	st := former.State
	require.Equal(t, r.State, hostState{Addresses: st.Addresses, State: nic.State{
		Name: st.Name, Alias: &st.Alias, AltNames: st.AltNames, MTU: st.MTU, MAC: st.MAC, Up: st.Up, Promisc: st.Promisc,
		AllMulti: st.AllMulti, NoARP: st.NoARP, XDP: st.XDP, Group: r.State.Group, TxQLen: r.State.TxQLen,
	}})
}

// The permanent MAC of a VF does not count any more, but the former version looks for the NIC by it.
func TestPermanentMACOfVF(t *testing.T) {
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{
		Name: "eth1", Index: 7, ParentDevBus: "pci", ParentDev: "0000:03:00.1", PermHWAddr: []byte{2, 0, 0, 0, 0, 1},
	}}
	vf := nic.Identity{Bus: "pci", Device: "0000:03:00.1", Name: "eth1", Index: 7}
	r := newRecord("c1")
	r.setNIC(vf, link)
	s := newStore(t)
	for range 2 { // what was read is written again
		require.NoError(t, s.save(r))
		data, err := os.ReadFile(s.path(r.attachment()))
		require.NoError(t, err)
		require.Contains(t, string(data), `"permanentMAC":"02:00:00:00:00:01"`)
		r, err = s.load(r.attachment())
		require.NoError(t, err)
		require.Equal(t, vf, r.NIC)
	}
	pf := vf
	pf.PermMAC = "02:00:00:00:00:01"
	r = newRecord("c1")
	r.setNIC(pf, link)
	require.NoError(t, s.save(r))
	r, err := s.load(r.attachment())
	require.NoError(t, err)
	require.Equal(t, pf, r.NIC)
}

// The pod was made by the former version, and ends under this one.
func TestFormerRecordIsRestored(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.adorn()
	require.NoError(t, b.host.LinkSetAlias(b.host.mustLink(nicName), "")) // left out by the former version
	before := mustState(t, b.host, nicName)
	b.must("ADD", b.single())
	file := filepath.Join(b.stateDir, "attachments", attachment{"c1", "net1"}.file())
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	r, err := decodeRecord(data)
	require.NoError(t, err)
	addrs, err := json.Marshal(before.Addresses)
	require.NoError(t, err)
	former := fmt.Sprintf(`{"version":1,"network":"fabric","containerID":"c1","ifName":"net1","bootID":%q,"recorded":%d,"netns":%q,`+
		`"netnsID":{"dev":%d,"ino":%d},"nic":{"kind":"veth","mac":%q,"name":"eth1","index":%d},`+
		`"state":{"name":"eth1","altNames":["enp3s0f0",%q],"mtu":1400,"mac":%q,"up":true,"promisc":true,"addresses":%s}}`,
		r.BootID, r.Recorded, r.NetNS, r.NetNSID.Dev, r.NetNSID.Ino, before.MAC, r.NIC.Index, longName, before.MAC, addrs)
	require.NoError(t, os.WriteFile(file, []byte(former), 0o600))
	b.vandalise()
	b.must("DEL", b.single())
	require.Empty(t, b.recorded())
	after := mustState(t, b.host, nicName)
	require.EqualValues(t, 8, *after.Group, "not recorded: as the pod left it")
	require.EqualValues(t, 3, *after.TxQLen)
	before.Group, before.TxQLen = after.Group, after.TxQLen
	require.ElementsMatch(t, before.AltNames, after.AltNames)
	before.AltNames = after.AltNames
	for _, st := range []hostState{before, after} {
		for i, a := range st.Addresses {
			if a.Valid != forever {
				st.Addresses[i].Valid, st.Addresses[i].Preferred = 1, 1
			}
		}
	}
	require.Equal(t, before, after)
}
