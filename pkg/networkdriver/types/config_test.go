// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/nic"
)

func TestParseDeviceConfig(t *testing.T) {
	number := func(n int) *int { return &n }
	valid := map[string]DeviceConfig{
		`{}`:                                 {},
		` { } `:                              {},
		`{"vlan":0}`:                         {Vlan: number(0)},
		`{"vlan":4094}`:                      {Vlan: number(4094)},
		`{"vlan":1001,"podIfName":"sriov0"}`: {Vlan: number(1001), PodIfName: "sriov0"},
		`{"podIfName":"abcdefghijklmno"}`:    {PodIfName: "abcdefghijklmno"},
		`{"podIfName":"ens1f0.100-x_y"}`:     {PodIfName: "ens1f0.100-x_y"},
		`{"pod\u0049fName":"ü"}`:             {PodIfName: "ü"},
		`{"driver":"vfio-pci","vhost":true}`: {Driver: "vfio-pci", Vhost: true},
		`{"vhost":false}`:                    {},
		`{"rdma":true,"podIfName":"rdma0"}`:  {RDMA: true, PodIfName: "rdma0"},
	}
	for raw, want := range valid {
		got, err := ParseDeviceConfig([]byte(raw))
		require.NoError(t, err, raw)
		require.Equal(t, want, got, raw)
	}

	invalid := map[string]string{
		``:                     `decode parameters: EOF`,
		`null`:                 `parameters must be a JSON object`,
		`[]`:                   `parameters must be a JSON object`,
		`"vlan"`:               `parameters must be a JSON object`,
		`7`:                    `parameters must be a JSON object`,
		`{`:                    `decode parameters: unexpected EOF`,
		`{"vlan":1}{"vlan":2}`: `data after the end of the parameters object`,
		`{"vlan":1} x`:         `data after the end of the parameters object`,
		`{"vlan":1}]`:          `data after the end of the parameters object`,

		`{"vlna":100}`:                          `unknown field "vlna", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,
		`{"kind":"VFConfig","vlan":1}`:          `unknown field "kind", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,
		`{"VLAN":100}`:                          `unknown field "VLAN", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,
		`{"podifname":"x"}`:                     `unknown field "podifname", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,
		`{"":1}`:                                `unknown field "", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,
		`{"vlan":1,"vlan":2}`:                   `field "vlan" is given twice`,
		`{"vlan":1,"vl\u0061n":2}`:              `field "vlan" is given twice`,
		`{"vlan":null}`:                         `vlan: null is not a value; leave the field out`,
		`{"podIfName":null}`:                    `podIfName: null is not a value; leave the field out`,
		`{"` + strings.Repeat("x", 99) + `":1}`: `unknown field "` + strings.Repeat("x", 64) + `", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,

		`{"vlan":-1}`:                   `vlan: -1 is not in 0..4094`,
		`{"vlan":4095}`:                 `vlan: 4095 is not in 0..4094`,
		`{"vlan":"100"}`:                `vlan: "100" is not a whole number from 0 to 4094`,
		`{"vlan":1.5}`:                  `vlan: 1.5 is not a whole number from 0 to 4094`,
		`{"vlan":true}`:                 `vlan: true is not a whole number from 0 to 4094`,
		`{"vlan":[1]}`:                  `vlan: [1] is not a whole number from 0 to 4094`,
		`{"vlan":99999999999999999999}`: `vlan: 99999999999999999999 is not a whole number from 0 to 4094`,
		`{"vlan":` + strings.Repeat("9", 5000) + `}`: `vlan: ` + strings.Repeat("9", 64) + ` is not a whole number from 0 to 4094`,

		`{"network":7}`:                  `network: a JSON number is not a string`,
		`{"network":""}`:                 `network: "" is not the name of a network: at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit, are allowed`,
		`{"network":"a.b"}`:              `network: "a.b" is not the name of a network: at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit, are allowed`,
		`{"network":null}`:               `network: null is not a value; leave the field out`,
		`{"network":"storage","vlan":0}`: `vlan: 0 cannot be asked for together with network storage, which says what the VLAN is; leave one of them out`,
		`{"joined":{"vlan":5}}`:          `unknown field "joined", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`,

		`{"driver":7}`:       `driver: a JSON number is not a string`,
		`{"driver":null}`:    `driver: null is not a value; leave the field out`,
		`{"driver":""}`:      `driver: "" is not vfio-pci, the only one that can be asked for`,
		`{"driver":"igbvf"}`: `driver: "igbvf" is not vfio-pci, the only one that can be asked for`,
		`{"driver":"vfio-pci","addresses":["192.0.2.1/24"]}`:             `addresses: cannot be asked for together with driver vfio-pci, which leaves no interface that could have them; leave one of them out`,
		`{"driver":"vfio-pci","routes":[{"to":"::/0","via":"fe80::1"}]}`: `routes: cannot be asked for together with driver vfio-pci, which leaves no interface that could have them; leave one of them out`,
		`{"vhost":"true"}`:                         `vhost: a JSON string is not a bool`,
		`{"rdma":1}`:                               `rdma: a JSON number is not a bool`,
		`{"driver":"vfio-pci","rdma":true}`:        `rdma: cannot be asked for together with driver vfio-pci, which takes the VF from the driver that has its RDMA device; leave one of them out`,
		`{"driver":"vfio-pci","podIfName":"net1"}`: `podIfName: "net1" cannot be asked for together with driver vfio-pci, which leaves no interface to name; leave one of them out`,

		`{"podIfName":7}`:      `podIfName: a JSON number is not a string`,
		`{"podIfName":["x"]}`:  `podIfName: a JSON array is not a string`,
		`{"podIfName":""}`:     `podIfName: must not be empty`,
		`{"podIfName":"lo"}`:   `podIfName: "lo" is taken in every pod`,
		`{"podIfName":"eth0"}`: `podIfName: "eth0" is taken in every pod`,
		`{"podIfName":"."}`:    `podIfName: "." is not an interface name`,
		`{"podIfName":".."}`:   `podIfName: ".." is not an interface name`,
		`{"podIfName":"all"}`:  `podIfName: "all" means every interface in the kernel's settings (/proc/sys/net/ipv4/conf)`,

		`{"podIfName":"abcdefghijklmnop"}`: `podIfName: "abcdefghijklmnop" is 16 bytes long, at most 15 are allowed`,
		`{"podIfName":"üüüüüüüü"}`:         `podIfName: "üüüüüüüü" is 16 bytes long, at most 15 are allowed`,
		`{"podIfName":"../../etc"}`:        `podIfName: "../../etc" contains '/', which an interface name must not`,
		`{"podIfName":"a b"}`:              `podIfName: "a b" contains ' ', which an interface name must not`,
		`{"podIfName":"a:1"}`:              `podIfName: "a:1" contains ':', which an interface name must not`,
		`{"podIfName":"eth%d"}`:            `podIfName: "eth%d" contains '%', which an interface name must not`,
		`{"podIfName":"a\n"}`:              `podIfName: "a\n" contains '\n', which an interface name must not`,
		`{"podIfName":"a\u0000"}`:          `podIfName: "a\x00" contains '\x00', which an interface name must not`,
		`{"podIfName":"a\u202e"}`:          `podIfName: "a\u202e" contains '\u202e', which an interface name must not`,
		"{\"podIfName\":\"a\xff\"}":        `podIfName: "a�" contains '�', which an interface name must not`,
		`{"podIfName":"a\ud800"}`:          `podIfName: "a�" contains '�', which an interface name must not`,
	}
	for raw, want := range invalid {
		_, err := ParseDeviceConfig([]byte(raw))
		require.EqualError(t, err, want, raw)
	}
	require.ErrorContains(t, ValidatePodIfName("a\xff"), "not valid UTF-8")
	require.ErrorContains(t, ValidatePodIfName("default"), "settings")
}

func TestOverride(t *testing.T) {
	ten, zero := 10, 0
	base := DeviceConfig{PodIfName: "a", Vlan: &ten}
	require.Equal(t, base, base.Override(DeviceConfig{}))
	require.Equal(t, base, DeviceConfig{}.Override(base))
	require.Equal(t, DeviceConfig{PodIfName: "b", Vlan: &ten}, base.Override(DeviceConfig{PodIfName: "b"}))
	require.Equal(t, DeviceConfig{PodIfName: "a", Vlan: &zero}, base.Override(DeviceConfig{Vlan: &zero}))
	require.Equal(t, "a", base.PodIfName, "values are immutable")
	require.Equal(t, 10, base.VLAN())
	require.Zero(t, DeviceConfig{}.VLAN())
	require.Equal(t, DeviceConfig{PodIfName: "a", Vlan: &ten, Network: "n"}, base.Override(DeviceConfig{Network: "n"}))
	driven := DeviceConfig{Driver: DriverVFIO, Vhost: true}
	require.Equal(t, driven, driven.Override(DeviceConfig{}))
	require.Equal(t, driven, DeviceConfig{}.Override(driven))
	require.Equal(t, DeviceConfig{RDMA: true}, DeviceConfig{}.Override(DeviceConfig{RDMA: true}))
	require.Equal(t, DeviceConfig{RDMA: true}, DeviceConfig{RDMA: true}.Override(DeviceConfig{}))
}

// What a network says counts, and is checked where it is read again.
func TestJoined(t *testing.T) {
	yes, rate := true, 100
	whole := DeviceConfig{Network: "storage", Joined: &Network{VLAN: 7, VLANPriority: 3, VLANProtocol: "802.1ad", MTU: 9000, VF: VFRights{Trust: &yes}}}
	require.NoError(t, whole.Check())
	require.Equal(t, Tag{VLAN: 7, Priority: 3, Protocol: "802.1ad"}, whole.Tag())
	require.Equal(t, 9000, whole.MTU())
	require.Equal(t, VFRights{Trust: &yes}, whole.Rights())
	require.Equal(t, DeviceConfig{Network: "storage"}, whole.Asked())
	require.Zero(t, DeviceConfig{}.MTU())
	require.True(t, DeviceConfig{}.Rights().IsZero())

	negative := -1
	for want, cfg := range map[string]DeviceConfig{
		`joined: is missing although the network "n" is named`:               {Network: "n"},
		`joined: is set although no network is named`:                        {Joined: &Network{}},
		`driver: "../x" is not vfio-pci, the only one that can be asked for`: {Driver: "../x"},
		`network: "a.b" is not the name of a network: at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit, are allowed`: {Network: "a.b", Joined: &Network{}},
		`vlan: 100 cannot be asked for together with network n, which says what the VLAN is; leave one of them out`:                                            {Network: "n", Vlan: &rate, Joined: &Network{}},
		`joined.vlan: 4095 is not in 0..4094`:                                    {Network: "n", Joined: &Network{VLAN: 4095}},
		`joined.vlanPriority: 8 is not in 0..7`:                                  {Network: "n", Joined: &Network{VLAN: 1, VLANPriority: 8}},
		`joined.vlanProtocol: "802.1Q" is not 802.1ad`:                           {Network: "n", Joined: &Network{VLAN: 1, VLANProtocol: "802.1Q"}},
		`joined.vlan: is missing although priority or protocol of a tag are set`: {Network: "n", Joined: &Network{VLANPriority: 1}},
		`joined.mtu: -1 is not in 0..65535`:                                      {Network: "n", Joined: &Network{MTU: -1}},
		`joined.vf.linkState: "up" is not a state`:                               {Network: "n", Joined: &Network{VF: VFRights{LinkState: "up"}}},
		`joined.vf.minTxRate: -1 is not in 0..2147483647`:                        {Network: "n", Joined: &Network{VF: VFRights{MinTxRate: &negative}}},
	} {
		require.EqualError(t, cfg.Check(), want)
	}
}

// The configuration is shown, and stored, under the names that a claim uses.
func TestDeviceConfigJSON(t *testing.T) {
	vlan := 1001
	raw, err := json.Marshal(DeviceConfig{PodIfName: "sriov0", Vlan: &vlan})
	require.NoError(t, err)
	require.JSONEq(t, `{"podIfName":"sriov0","vlan":1001}`, string(raw))
	raw, err = json.Marshal(DeviceConfig{})
	require.NoError(t, err)
	require.JSONEq(t, `{}`, string(raw))
}

// What is accepted is within the limits and unambiguous: written out and read again it is the same.
func FuzzParseDeviceConfig(f *testing.F) {
	for _, seed := range []string{`{}`, `null`, `{"vlan":1001,"podIfName":"sriov0"}`, `{"vlan":null}`, `{"vlan":1,"VLAN":2}`, `{"podIfName":"\ud800"}`, `{"vlan":1} {`, `[1]`,
		`{"network":"storage","addresses":["192.0.2.10","2001:db8::1"]}`, `{"addresses":["192.0.2.10/24","::ffff:192.0.2.1/96","fe80::1%1"]}`,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":7},{"to":"::/0","via":"fe80::1"}]}`,
		`{"routes":[{"to":"10.0.0.1/8","TO":"","via":null}]}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		cfg, err := ParseDeviceConfig(raw)
		if err != nil {
			require.NotEmpty(t, err.Error())
			require.True(t, utf8.ValidString(err.Error()) || !utf8.Valid(raw), "%q", err)
			require.Less(t, len(err.Error()), 2048, "errors end up in events")
			return
		}
		require.True(t, json.Valid(raw))
		if cfg.PodIfName != "" {
			require.NoError(t, ValidatePodIfName(cfg.PodIfName))
			require.LessOrEqual(t, len(cfg.PodIfName), nic.MaxNameLen)
			require.False(t, strings.ContainsAny(cfg.PodIfName, "/ \t\n\x00%:"))
		}
		require.True(t, cfg.VLAN() >= 0 && cfg.VLAN() <= MaxVLAN)
		require.LessOrEqual(t, len(cfg.Addresses), MaxAddresses)
		for _, a := range cfg.Addresses {
			require.True(t, a.Addr.IsGlobalUnicast() && !a.Addr.Is4In6() && a.Addr.Zone() == "" && a.Bits != 0 && a.Bits <= a.Addr.BitLen(), "%s", a)
		}
		require.LessOrEqual(t, len(cfg.Routes), MaxRoutes)
		for _, r := range cfg.Routes {
			require.True(t, r.To == r.To.Masked() && r.To.Addr().Is4() == r.Via.Is4() && !r.Via.Is4In6() && r.Metric >= 0, "%v", r)
		}
		again, err := json.Marshal(cfg)
		require.NoError(t, err)
		same, err := ParseDeviceConfig(again)
		require.NoError(t, err, "%s", again)
		require.Equal(t, cfg, same)
	})
}
