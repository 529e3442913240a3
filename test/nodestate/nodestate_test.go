// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodestate

import (
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

const someLinks = `[
{"ifname":"lo","flags":["LOOPBACK","UP","LOWER_UP"],"mtu":65536,"address":"00:00:00:00:00:00","group":"default","txqlen":1000},
{"ifname":"veth12","flags":["UP"],"linkinfo":{"info_kind":"veth"}},
{"ifname":"ens1f0","flags":["BROADCAST","MULTICAST","UP"],"mtu":1500,"address":"52:54:00:00:01:01","parentdev":"0000:01:00.0","vfinfo_list":[
 {"vf":0,"address":"02:00:00:00:00:01","vlan_list":[{"vlan":1001,"qos":0}],"rate":{"max_tx":0,"min_tx":0},"spoofchk":true,"link_state":"auto","trust":false},
 {"vf":1,"address":"02:00:00:00:00:02","vlan_list":[{}],"spoofchk":true,"link_state":"auto","trust":true}]},
{"ifname":"ens1f0v1","flags":["BROADCAST","MULTICAST","PROMISC"],"promiscuity":1,"mtu":1400,"address":"02:00:00:00:00:02","altnames":["a"],"parentdev":"0000:01:10.2"}]`

func TestParseLinks(t *testing.T) {
	network, err := parseLinks([]byte(someLinks))
	require.NoError(t, err)
	require.Equal(t, []VF{
		{PF: "ens1f0", VF: 0, MAC: "02:00:00:00:00:01", VLAN: 1001, SpoofCheck: true, LinkState: "auto"},
		{PF: "ens1f0", VF: 1, MAC: "02:00:00:00:00:02", SpoofCheck: true, LinkState: "auto", Trust: true},
	}, network.VFs)
	require.Len(t, network.Links, 3, "without that of the pod network")
	require.True(t, network.Links["ens1f0"].Up)
	require.Equal(t, Link{
		MAC: "02:00:00:00:00:02", Parent: "0000:01:10.2", MTU: 1400, AltNames: []string{"a"}, Promiscuity: 1,
		Flags: []string{"BROADCAST", "MULTICAST", "PROMISC"},
	}, network.Links["ens1f0v1"])
	_, err = parseLinks([]byte("[{"))
	require.Error(t, err)
}

func TestCheckpointed(t *testing.T) {
	const state = `{"Data":"{\"kind\":\"DRACheckpoint\",\"Entries\":[{\"ClaimUID\":\"0b3d-1\",\"ClaimName\":\"a\"},{\"ClaimUID\":\"0b3d-2\"}]}","Checksum":1}`
	var uids []string
	for _, match := range checkpointed.FindAllStringSubmatch(state, -1) {
		uids = append(uids, match[1])
	}
	require.Equal(t, []string{"0b3d-1", "0b3d-2"}, uids)
}

func TestDifference(t *testing.T) {
	before, err := parseLinks([]byte(someLinks))
	require.NoError(t, err)
	now, err := parseLinks([]byte(someLinks))
	require.NoError(t, err)
	offered := func(mac string) map[string][]resourceapi.Device {
		return map[string][]resourceapi.Device{"node1/p": {{Name: "d", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"mac": {StringValue: ptr.To(mac)},
		}}}}
	}
	drivers := map[string]string{"0000:01:10.2": "igbvf"}
	a, b := Snapshot{Network: before, Drivers: drivers, Slices: offered("a")}, Snapshot{Network: now, Drivers: drivers, Slices: offered("a")}
	require.Empty(t, Difference(a, b))
	now.VFs[1].MAC = "02:00:00:00:00:0a"
	link := now.Links["ens1f0v1"]
	link.MAC = "02:00:00:00:00:0a"
	now.Links["ens1f0v1"] = link
	b.Slices = offered("b")
	require.Contains(t, Difference(a, b), "02:00:00:00:00:0a")
	require.Empty(t, Difference(a.WithoutAddresses(), b.WithoutAddresses()))
	require.NotEmpty(t, b.Network.VFs[1].MAC, "the snapshot itself stays as it is")
	now.VFs[1].VLAN = 7
	require.Contains(t, Difference(a.WithoutAddresses(), b.WithoutAddresses()), "VLAN")
}
