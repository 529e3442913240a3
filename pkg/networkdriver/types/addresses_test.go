// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
)

// repeat writes a JSON list of n items, in which %d is the number of the item.
func repeat(n int, item string) string {
	items := make([]string, n)
	for i := range items {
		items[i] = fmt.Sprintf(item, i+1)
	}
	return "[" + strings.Join(items, ",") + "]"
}

func TestParseAddresses(t *testing.T) {
	cfg, err := ParseDeviceConfig([]byte(`{"addresses":["192.0.2.10/24","2001:db8::1/127","192.0.2.8/31"],"routes":[{"to":"0.0.0.0/0","via":"192.0.2.1","metric":0},
		{"to":"0.0.0.0/0","via":"192.0.2.1","metric":2147483647},{"to":"::/0","via":"fe80::1"}]}`))
	require.NoError(t, err)
	require.NoError(t, cfg.Check())
	v4, v6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	require.Equal(t, DeviceConfig{
		Addresses: []Address{{netip.MustParseAddr("192.0.2.10"), 24}, {netip.MustParseAddr("2001:db8::1"), 127}, {netip.MustParseAddr("192.0.2.8"), 31}},
		Routes: []Route{{To: v4, Via: netip.MustParseAddr("192.0.2.1")}, {To: v4, Via: netip.MustParseAddr("192.0.2.1"), Metric: 2147483647},
			{To: v6, Via: netip.MustParseAddr("fe80::1")}},
	}, cfg)
	require.Equal(t, &Network{Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"), netip.MustParsePrefix("2001:db8::1/127"), netip.MustParsePrefix("192.0.2.8/31")},
		Routes: cfg.Routes}, cfg.InPod())
	require.Nil(t, DeviceConfig{PodIfName: "net1"}.InPod())

	for _, parameters := range []string{
		`{"network":"storage","addresses":["192.0.2.10","2001:db8::1"]}`, `{"addresses":["192.0.2.10"]}`,
		`{"addresses":` + repeat(MaxAddresses, `"192.0.2.%d/24"`) + `}`, `{"vlan":5,"addresses":["192.0.2.10/32"]}`,
		`{"routes":` + repeat(MaxRoutes, `{"to":"10.%d.0.0/16","via":"192.0.2.1"}`) + `}`,
	} {
		_, err := ParseDeviceConfig([]byte(parameters))
		require.NoError(t, err, parameters)
	}

	const form = ` is not an address in canonical form: allowed are one of a network, as 192.0.2.10, and without a network one with the prefix length of its subnet, as 192.0.2.10/24`
	const unicast = ` is not one that a device can have: allowed are unicast addresses but those of the loopback interface and of a link`
	const host = ` is not a host of its subnet: allowed are prefix lengths from 1 on, and neither the first address of a subnet nor, of IPv4, the last`
	const to = ` is not a destination with no bit set beyond the prefix length, in canonical form, as 198.51.100.0/24`
	const via = ` is not an address in canonical form, as 192.0.2.1`
	addresses := map[string]string{
		`"192.0.2.1"`: `addresses: must be a list of 1 to 16 addresses`, `[]`: `addresses: must be a list of 1 to 16 addresses`, `{}`: `addresses: must be a list of 1 to 16 addresses`,
		`null`:                        `addresses: null is not a value; leave the field out`,
		repeat(17, `"192.0.2.%d/24"`): `addresses: must be a list of 1 to 16 addresses`,
		`["192.0.2.1/24",7]`:          `addresses[1]: must be a string`, `[null]`: `addresses[0]: must be a string`, `[["192.0.2.1"]]`: `addresses[0]: must be a string`,
		`[""]`:                                `addresses[0]: ""` + form,
		`["192.0.2.1/"]`:                      `addresses[0]: "192.0.2.1/"` + form,
		`["192.0.2.1/33"]`:                    `addresses[0]: "192.0.2.1/33"` + form,
		`["192.0.2.1/024"]`:                   `addresses[0]: "192.0.2.1/024"` + form,
		`["192.0.2.01"]`:                      `addresses[0]: "192.0.2.01"` + form,
		`["2001:DB8::1"]`:                     `addresses[0]: "2001:DB8::1"` + form,
		`["2001:db8:0::1/64"]`:                `addresses[0]: "2001:db8:0::1/64"` + form,
		`["::ffff:192.0.2.1"]`:                `addresses[0]: "::ffff:192.0.2.1"` + form,
		`["::ffff:192.0.2.1/120"]`:            `addresses[0]: "::ffff:192.0.2.1/120"` + form,
		`["2001:db8::1%eth0"]`:                `addresses[0]: "2001:db8::1%eth0"` + form,
		`["` + strings.Repeat("1", 99) + `"]`: `addresses[0]: "` + strings.Repeat("1", 64) + `"` + form,
		`["0.0.0.0"]`:                         `addresses[0]: 0.0.0.0` + unicast, `["::/64"]`: `addresses[0]: ::/64` + unicast,
		`["127.0.0.1/8"]`: `addresses[0]: 127.0.0.1/8` + unicast, `["::1"]`: `addresses[0]: ::1` + unicast,
		`["224.0.0.1/24"]`: `addresses[0]: 224.0.0.1/24` + unicast, `["ff02::1"]`: `addresses[0]: ff02::1` + unicast,
		`["169.254.0.1/16"]`: `addresses[0]: 169.254.0.1/16` + unicast, `["fe80::1/64"]`: `addresses[0]: fe80::1/64` + unicast,
		`["255.255.255.255"]`: `addresses[0]: 255.255.255.255` + unicast,
		`["192.0.2.0/24"]`:    `addresses[0]: 192.0.2.0/24` + host, `["192.0.2.255/24"]`: `addresses[0]: 192.0.2.255/24` + host,
		`["2001:db8::/64"]`: `addresses[0]: 2001:db8::/64` + host, `["192.0.2.1/0"]`: `addresses[0]: 192.0.2.1/0` + host,
		`["192.0.2.1/24","192.0.2.1/25"]`:         `addresses[1]: 192.0.2.1 is given twice`,
		`["192.0.2.1","192.0.2.1"]`:               `addresses[1]: 192.0.2.1 is given twice`,
		`["192.0.2.1/24","2001:db8::1"]`:          `addresses[1]: 192.0.2.1/24 and 2001:db8::1: either all have a prefix length, or, in a network, none has`,
		`["192.0.2.1","2001:db8::1","192.0.2.2"]`: `addresses: in a network a device has one address of each family at most`,
	}
	for written, want := range addresses {
		_, err := ParseDeviceConfig([]byte(`{"addresses":` + written + `}`))
		require.EqualError(t, err, want, written)
	}
	for written, want := range map[string]string{
		`{}`: `routes: must be a list of 1 to 64 routes`, `[]`: `routes: must be a list of 1 to 64 routes`,
		repeat(65, `{"to":"10.%d.0.0/16","via":"192.0.2.1"}`): `routes: must be a list of 1 to 64 routes`,
		`["10.0.0.0/8"]`: `routes[0]: must be an object of to, via and metric`, `[null]`: `routes[0]: must be an object of to, via and metric`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1","table":7}]`:                             `routes[0]: unknown field "table", allowed are metric, to and via`,
		`[{"TO":"10.0.0.0/8","via":"192.0.2.1"}]`:                                       `routes[0]: unknown field "TO", allowed are metric, to and via`,
		`[{"to":"10.0.0.0/8","to":"11.0.0.0/8","via":"192.0.2.1"}]`:                     `routes[0]: field "to" is given twice`,
		`[{"to":null,"via":"192.0.2.1"}]`:                                               `routes[0]: to: null is not a value; leave the field out`,
		`[{"via":"192.0.2.1"}]`:                                                         `routes[0].to: is missing`,
		`[{"to":"10.0.0.0/8"}]`:                                                         `routes[0].via: is missing`,
		`[{"to":7,"via":"192.0.2.1"}]`:                                                  `routes[0].to: must be a string`,
		`[{"to":"10.0.0.0/8","via":["192.0.2.1"]}]`:                                     `routes[0].via: must be a string`,
		`[{"to":"10.0.0.1/8","via":"192.0.2.1"}]`:                                       `routes[0].to: "10.0.0.1/8"` + to,
		`[{"to":"10.0.0.0","via":"192.0.2.1"}]`:                                         `routes[0].to: "10.0.0.0"` + to,
		`[{"to":"default","via":"192.0.2.1"}]`:                                          `routes[0].to: "default"` + to,
		`[{"to":"::ffff:10.0.0.0/104","via":"192.0.2.1"}]`:                              `routes[0].to: "::ffff:10.0.0.0/104"` + to,
		`[{"to":"2001:DB8::/32","via":"2001:db8::1"}]`:                                  `routes[0].to: "2001:DB8::/32"` + to,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1/24"}]`:                                    `routes[0].via: "192.0.2.1/24"` + via,
		`[{"to":"::/0","via":"fe80::1%eth0"}]`:                                          `routes[0].via: "fe80::1%eth0"` + via,
		`[{"to":"10.0.0.0/8","via":"::ffff:192.0.2.1"}]`:                                `routes[0].via: "::ffff:192.0.2.1"` + via,
		`[{"to":"10.0.0.0/8","via":"2001:db8::1"}]`:                                     `routes[0].via: 2001:db8::1 is not of the family of 10.0.0.0/8`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":-1}]`:                           `routes[0].metric: -1 is not a whole number from 0 to 2147483647`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":2147483648}]`:                   `routes[0].metric: 2147483648 is not a whole number from 0 to 2147483647`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":1.5}]`:                          `routes[0].metric: 1.5 is not a whole number from 0 to 2147483647`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":"7"}]`:                          `routes[0].metric: "7" is not a whole number from 0 to 2147483647`,
		`[{"to":"10.0.0.0/8","via":"192.0.2.1"},{"to":"10.0.0.0/8","via":"192.0.2.2"}]`: `routes[1]: there is another one to 10.0.0.0/8 with the same metric`,
		`[{"to":"::/0","via":"fe80::1","metric":1024},{"to":"::/0","via":"fe80::2"}]`:   `routes[1]: there is another one to ::/0 with the same metric`,
	} {
		_, err := ParseDeviceConfig([]byte(`{"routes":` + written + `}`))
		require.EqualError(t, err, want, written)
	}
	for written, want := range map[string]string{
		`{"network":"storage","addresses":["192.0.2.1/24"]}`:                     `addresses[0]: 192.0.2.1/24 has a prefix length, which network storage says; write the address alone`,
		`{"network":"storage","routes":[{"to":"10.0.0.0/8","via":"192.0.2.1"}]}`: `routes: cannot be asked for together with network storage, which says what they are; leave one of them out`,
	} {
		_, err := ParseDeviceConfig([]byte(written))
		require.EqualError(t, err, want, written)
	}
}

// What is written by hand has to fit together when all of it is known, and in a record too.
func TestCheckByHand(t *testing.T) {
	const unreachable = ` is no host of a subnet of the device's addresses, nor an IPv6 address of a link, so that it cannot be reached`
	for written, want := range map[string]string{
		`{"addresses":["192.0.2.10"]}`:                                                                `addresses[0]: 192.0.2.10 has no prefix length, which only an address of a network goes without; name the network, or add the length`,
		`{"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1"}]}`:                                          `routes[0].via: 192.0.2.1` + unreachable,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.3.1"}]}`:            `routes[0].via: 192.0.3.1` + unreachable,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.255"}]}`:          `routes[0].via: 192.0.2.255` + unreachable,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.0"}]}`:            `routes[0].via: 192.0.2.0` + unreachable,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.10"}]}`:           `routes[0].via: 192.0.2.10 is an address of the device itself; allowed is another host of its subnet`,
		`{"addresses":["192.0.2.10/24"],"routes":[{"to":"192.0.2.0/24","via":"192.0.2.1"}]}`:          `routes[0].to: 192.0.2.0/24 is the subnet of the address 192.0.2.10/24, which has a route of its own; leave it out`,
		`{"addresses":["2001:db8::10/64"],"routes":[{"to":"2001:db8:1::/48","via":"2001:db8:2::1"}]}`: `routes[0].via: 2001:db8:2::1` + unreachable,
	} {
		cfg, err := ParseDeviceConfig([]byte(written))
		require.NoError(t, err, "others may say what is missing: %s", written)
		require.EqualError(t, cfg.CheckTogether(), want, written)
		require.EqualError(t, cfg.Check(), want, written)
	}
}

// What is asked for is in the record, also as much of it as is allowed, and no agent takes it for a record without.
func TestRecordWithAddresses(t *testing.T) {
	addresses := repeat(MaxAddresses, `"2001:db8:ffff:ffff:ffff:ffff:ffff:%d/112"`)
	routes := repeat(MaxRoutes, `{"to":"2001:db8:eeee:eeee:eeee:eeee:eeee:%d/128","via":"2001:db8:ffff:ffff:ffff:ffff:ffff:ffff","metric":2147483647}`)
	cfg, err := ParseDeviceConfig([]byte(`{"podIfName":"0123456789abcde","vlan":4094,"addresses":` + addresses + `,"routes":` + routes + `}`))
	require.NoError(t, err)
	r := validRecord()
	r.Config, r.Version = cfg, RecordVersionOf(cfg)
	require.Equal(t, 3, r.Version)
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	require.Less(t, len(raw), resourceapi.AllocatedDeviceStatusDataMaxLength-1024, "what a device has to remember has room")
	got, err := DecodeRecord(raw)
	require.NoError(t, err)
	require.Equal(t, r, got)

	r.Config = DeviceConfig{Network: "storage", Joined: &Network{VLAN: 5}, Addresses: []Address{{netip.MustParseAddr("192.0.2.1"), -1}}}
	require.Equal(t, 3, RecordVersionOf(r.Config))
	require.Equal(t, DeviceConfig{Network: "storage", Addresses: r.Config.Addresses}, r.Config.Asked())
	for _, raw := range []string{
		`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"addresses":["127.0.0.1/8"]}}`,
		`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"addresses":["192.0.2.1"]}}`,
		`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"addresses":["192.0.2.1/x"]}}`,
		`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"routes":[{"to":"10.0.0.1/8","via":"fe80::1"}]}}`,
		`{"version":3,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"routes":[{}]}}`,
		`{"version":1,"manager":"m","podUID":"p","bootID":"b","device":{},"config":{"addresses":["192.0.2.1/24"]}}`,
	} {
		_, err := DecodeRecord([]byte(raw))
		require.Error(t, err, raw)
	}
}

// What a device takes of the main table is known of routes by hand and of chosen addresses, and of a network as far as it does not
// depend on which are chosen.
func TestMainRoutes(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	byHand, err := ParseDeviceConfig([]byte(`{"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1"},{"to":"::/0","via":"fe80::1"},{"to":"2001:db8::/32","via":"fe80::1","metric":7}]}`))
	require.NoError(t, err)
	require.Equal(t, []RouteKey{{prefix("10.0.0.0/8"), 0}, {prefix("::/0"), 1024}, {prefix("2001:db8::/32"), 7}}, byHand.MainRoutes())
	require.Empty(t, DeviceConfig{}.MainRoutes())

	network := &Network{Routes: []Route{{To: prefix("10.0.0.0/8"), Via: addr("192.0.2.1"), Metric: 5}}}
	joined := DeviceConfig{Network: "storage", Joined: network}
	require.Equal(t, []RouteKey{{prefix("10.0.0.0/8"), 5}}, joined.MainRoutes())
	network.PolicyRouting = true
	require.Empty(t, joined.MainRoutes(), "they are in another table")

	joined.Joined = &Network{Offer: &Offer{
		Subnets: []Subnet{{Prefix: prefix("192.0.2.0/24"), Gateway: addr("192.0.2.1")}, {Prefix: prefix("198.51.100.0/24"), Gateway: addr("198.51.100.1")},
			{Prefix: prefix("2001:db8::/64")}},
		Routes: []Route{{To: prefix("10.0.0.0/8")}, {To: prefix("11.0.0.0/8"), Via: addr("192.0.2.2")}, {To: prefix("2001:db8:1::/48"), Via: addr("2001:db8::1"), Metric: 3},
			{To: prefix("2001:db8:2::/48")}},
	}}
	require.Equal(t, []RouteKey{{prefix("10.0.0.0/8"), 0}, {prefix("2001:db8:1::/48"), 3}}, joined.MainRoutes(),
		"which subnet a device is in, and so has the router of, is not known, and one without a gateway has no route by it")
	joined.Joined.Offer.Subnets = joined.Joined.Offer.Subnets[:2]
	require.Equal(t, []RouteKey{{prefix("10.0.0.0/8"), 0}}, joined.MainRoutes(), "a family without a subnet has no routes")
}
