// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package speccases holds node config specs with what is wrong with them, for
// tests that ask the schema, Validate and a real API server the same.
package speccases

import (
	"fmt"
	"strings"
)

// Case is a spec and the verdict on it.
type Case struct {
	// Name says what the case is about.
	Name string

	// NodeName is the node config's name; empty where it does not matter.
	NodeName string

	// YAML is the spec.
	YAML string

	// Field is the path, below the spec, of the field at fault; empty when the
	// spec is valid.
	Field string

	// GoOnly is set where the schema's rules cannot tell the fault, such as the
	// order of addresses, and Validate alone does.
	GoOnly bool

	// SchemaOnly is set where the fault cannot be told in the Go types, such
	// as a field of the wrong type.
	SchemaOnly bool
}

// Node returns the name to give to a node config with the spec.
func (c Case) Node() string {
	if c.NodeName != "" {
		return c.NodeName
	}
	return "worker-node-1"
}

// Address returns the spec of a case of an address.
func (c Case) Address() string {
	return "network: storage\nnode: worker-1\nnamespace: default\nclaim: {name: c, uid: u}\npod: {name: p, uid: v}\nrequest: net\ndevice: dummy0\n" + c.YAML
}

// Networks are specs of networks. Field is below the object here, and NodeName
// the network's name.
var Networks = []Case{
	{Name: "smallest", YAML: `namespaceSelector: {}`},
	{Name: "every field", NodeName: strings.Repeat("n", 63), YAML: `
namespaceSelector: {matchLabels: {team: storage}, matchExpressions: [{key: env, operator: In, values: [prod]}]}
pools: [sriov-pool, rack.2]
vlan: 4094
vlanPriority: 7
vlanProtocol: 802.1ad
mtu: 9000
vf: {trust: false, spoofCheck: true, linkState: Auto, minTxRate: 100, maxTxRate: 1000}`},
	{Name: "priority 0 without VLAN", YAML: `{namespaceSelector: {}, vlanPriority: 0, vlanProtocol: 802.1Q}`},
	{Name: "a rate of its own, no limit", YAML: `{namespaceSelector: {}, vf: {minTxRate: 100, maxTxRate: 0}}`},

	{Name: "no selector", YAML: `vlan: 5`, Field: "spec.namespaceSelector"},
	{Name: "bad selector", YAML: `namespaceSelector: {matchExpressions: [{key: a, operator: In}]}`, Field: "spec.namespaceSelector.matchExpressions[0].values"},
	{Name: "name with a dot", NodeName: "a.b", YAML: `namespaceSelector: {}`, Field: "metadata"},
	{Name: "name too long", NodeName: strings.Repeat("n", 64), YAML: `namespaceSelector: {}`, Field: "metadata"},
	{Name: "pool twice", YAML: `{namespaceSelector: {}, pools: [a, a]}`, Field: "spec.pools[1]"},
	{Name: "bad pool", YAML: `{namespaceSelector: {}, pools: [A]}`, Field: "spec.pools[0]"},
	{Name: "VLAN too high", YAML: `{namespaceSelector: {}, vlan: 4095}`, Field: "spec.vlan"},
	{Name: "VLAN below 0", YAML: `{namespaceSelector: {}, vlan: -1}`, Field: "spec.vlan"},
	{Name: "priority too high", YAML: `{namespaceSelector: {}, vlan: 5, vlanPriority: 8}`, Field: "spec.vlanPriority"},
	{Name: "priority without VLAN", YAML: `{namespaceSelector: {}, vlanPriority: 3}`, Field: "spec.vlanPriority"},
	{Name: "protocol without VLAN", YAML: `{namespaceSelector: {}, vlan: 0, vlanProtocol: 802.1ad}`, Field: "spec.vlanProtocol"},
	{Name: "unknown protocol", YAML: `{namespaceSelector: {}, vlan: 5, vlanProtocol: 802.1q}`, Field: "spec.vlanProtocol"},
	{Name: "MTU too small", YAML: `{namespaceSelector: {}, mtu: 67}`, Field: "spec.mtu"},
	{Name: "MTU too large", YAML: `{namespaceSelector: {}, mtu: 65536}`, Field: "spec.mtu"},
	{Name: "unknown link state", YAML: `{namespaceSelector: {}, vf: {linkState: up}}`, Field: "spec.vf.linkState"},
	{Name: "trust is text", YAML: `{namespaceSelector: {}, vf: {trust: "on"}}`, Field: "spec.vf.trust", SchemaOnly: true},
	{Name: "rates crossed", YAML: `{namespaceSelector: {}, vf: {minTxRate: 100, maxTxRate: 99}}`, Field: "spec.vf.minTxRate"},
	{Name: "subnets", YAML: `
namespaceSelector: {}
mtu: 1280
subnets:
- {cidr: 192.0.2.0/24, gateway: 192.0.2.1, ranges: [{from: 192.0.2.10, to: 192.0.2.20}, {from: 192.0.2.30, to: 192.0.2.30}], exclude: [192.0.2.12, 192.0.2.16/30]}
- {cidr: 198.51.100.0/31, nodeSelector: {matchLabels: {rack: r1}}}
- {cidr: 203.0.113.7/32}
- {cidr: '2001:db8::/64', gateway: '2001:db8::1', exclude: ['2001:db8::ff00/120']}
routes: [{to: 10.0.0.0/8}, {to: 10.0.0.0/8, metric: 5}, {to: 0.0.0.0/0, via: 192.0.2.2}, {to: '::/0'}]
policyRouting: {derive: {nexthopNetAddrOffset: 1, routeDstPrefixLen: 16}}`},
	{Name: "interface", YAML: `{namespaceSelector: {}, interface: {arpIgnore: 8, arpAnnounce: 2, rpFilter: 0, forwarding: true, acceptRA: 2}}`},
	{Name: "arpIgnore too high", YAML: `{namespaceSelector: {}, interface: {arpIgnore: 9}}`, Field: "spec.interface.arpIgnore"},
	{Name: "arpAnnounce below 0", YAML: `{namespaceSelector: {}, interface: {arpAnnounce: -1}}`, Field: "spec.interface.arpAnnounce"},
	{Name: "rpFilter too high", YAML: `{namespaceSelector: {}, interface: {rpFilter: 3}}`, Field: "spec.interface.rpFilter"},
	{Name: "acceptRA too high", YAML: `{namespaceSelector: {}, interface: {acceptRA: 3}}`, Field: "spec.interface.acceptRA"},
	{Name: "forwarding is a number", YAML: `{namespaceSelector: {}, interface: {forwarding: 1}}`, Field: "spec.interface.forwarding", SchemaOnly: true},
	{Name: "policy routing alone", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], policyRouting: {}}`},
	{Name: "no subnet in subnets", YAML: `{namespaceSelector: {}, subnets: []}`, Field: "spec.subnets", SchemaOnly: true},
	{Name: "host bits", YAML: subnet(`cidr: 192.0.2.1/24`), Field: "spec.subnets[0].cidr"},
	{Name: "no prefix length", YAML: subnet(`cidr: 192.0.2.0`), Field: "spec.subnets[0].cidr"},
	{Name: "IPv6 not canonical", YAML: subnet(`cidr: '2001:DB8::/64'`), Field: "spec.subnets[0].cidr"},
	{Name: "IPv4-mapped", YAML: subnet(`cidr: '::ffff:192.0.2.0/120'`), Field: "spec.subnets[0].cidr"},
	{Name: "no CIDR", YAML: `{namespaceSelector: {}, subnets: [{gateway: 192.0.2.1}]}`, Field: "spec.subnets[0].cidr", SchemaOnly: true},
	{Name: "multicast", YAML: subnet(`cidr: 224.0.0.0/24`), Field: "spec.subnets[0].cidr", GoOnly: true},
	{Name: "loopback", YAML: subnet(`cidr: 127.0.0.0/24`), Field: "spec.subnets[0].cidr", GoOnly: true},
	{Name: "gateway elsewhere", YAML: subnet(`cidr: 192.0.2.0/24, gateway: 192.0.3.1`), Field: "spec.subnets[0].gateway"},
	{Name: "gateway of the other family", YAML: subnet(`cidr: 192.0.2.0/24, gateway: '2001:db8::1'`), Field: "spec.subnets[0].gateway"},
	{Name: "gateway is no address", YAML: subnet(`cidr: 192.0.2.0/24, gateway: router`), Field: "spec.subnets[0].gateway"},
	{Name: "gateway of one address", YAML: subnet(`cidr: 192.0.2.1/32, gateway: 192.0.2.1`), Field: "spec.subnets[0].gateway"},
	{Name: "gateway is the subnet's own address", YAML: subnet(`cidr: 192.0.2.0/24, gateway: 192.0.2.0`), Field: "spec.subnets[0].gateway", GoOnly: true},
	{Name: "gateway is the broadcast address", YAML: subnet(`cidr: 192.0.2.0/24, gateway: 192.0.2.255`), Field: "spec.subnets[0].gateway", GoOnly: true},
	{Name: "range elsewhere", YAML: subnet(`cidr: 192.0.2.0/24, ranges: [{from: 192.0.2.1, to: 192.0.3.1}]`), Field: "spec.subnets[0].ranges"},
	{Name: "range reversed", YAML: subnet(`cidr: 192.0.2.0/24, ranges: [{from: 192.0.2.9, to: 192.0.2.10}, {from: 192.0.2.20, to: 192.0.2.9}]`), Field: "spec.subnets[0].ranges[1]", GoOnly: true},
	{Name: "range end is no address", YAML: subnet(`cidr: 192.0.2.0/24, ranges: [{from: 192.0.2.1, to: 192.0.2}]`), Field: "spec.subnets[0].ranges[0].to"},
	{Name: "nothing left to give out", YAML: subnet(`cidr: 192.0.2.0/30, gateway: 192.0.2.1, exclude: [192.0.2.2]`), Field: "spec.subnets[0]", GoOnly: true},
	{Name: "bad exclude", YAML: subnet(`cidr: 192.0.2.0/24, exclude: [192.0.2.1/24]`), Field: "spec.subnets[0].exclude[0]"},
	{Name: "bad node selector", YAML: subnet(`cidr: 192.0.2.0/24, nodeSelector: {matchLabels: {rack: a/b}}`), Field: "spec.subnets[0].nodeSelector.matchLabels"},
	{Name: "subnets overlap", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}, {cidr: 10.0.0.0/8}, {cidr: 192.0.2.128/25}]}`, Field: "spec.subnets"},
	{Name: "subnet twice", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}, {cidr: 192.0.2.0/24}]}`, Field: "spec.subnets"},
	{Name: "route twice", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24, gateway: 192.0.2.1}], routes: [{to: 10.0.0.0/8}, {to: 10.0.0.0/8, metric: 0}]}`, Field: "spec.routes[1]"},
	{Name: "route without a gateway", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24, gateway: 192.0.2.1}], routes: [{to: '2001:db8::/32'}]}`, Field: "spec.routes"},
	{Name: "route via the other family", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], routes: [{to: 10.0.0.0/8, via: '2001:db8::1'}]}`, Field: "spec.routes[0].via"},
	{Name: "route via elsewhere", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], routes: [{to: 10.0.0.0/8, via: 192.0.3.1}]}`, Field: "spec.routes[0].via", GoOnly: true},
	{Name: "route with host bits", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24, gateway: 192.0.2.1}], routes: [{to: 10.0.0.1/8}]}`, Field: "spec.routes[0].to"},
	{Name: "negative metric", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24, gateway: 192.0.2.1}], routes: [{to: 10.0.0.0/8, metric: -1}]}`, Field: "spec.routes[0].metric"},
	{Name: "policy routing without subnets", YAML: `{namespaceSelector: {}, policyRouting: {}}`, Field: "spec.policyRouting"},
	{Name: "derived routes' prefix too long", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], policyRouting: {derive: {nexthopNetAddrOffset: 1, routeDstPrefixLen: 33}}}`, Field: "spec.policyRouting.derive.routeDstPrefixLen"},
	{Name: "negative offset", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], policyRouting: {derive: {nexthopNetAddrOffset: -1, routeDstPrefixLen: 8}}}`, Field: "spec.policyRouting.derive.nexthopNetAddrOffset"},
	{Name: "MTU too small for IPv6", YAML: `{namespaceSelector: {}, mtu: 1279, subnets: [{cidr: '2001:db8::/64'}]}`, Field: "spec.mtu"},
	{Name: "reuse", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName}}`},
	{Name: "reuse for a day and a half", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: 35h59m60s}}`},
	{Name: "reuse for a year", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: 8760h}}`},
	{Name: "no reuse", YAML: `{namespaceSelector: {}, addressReuse: {mode: None}}`},
	{Name: "reuse without subnets", YAML: `{namespaceSelector: {}, addressReuse: {mode: PodName}}`, Field: "spec.addressReuse"},
	{Name: "reuse without a mode", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {retain: 1h}}`, Field: "spec.addressReuse.mode"},
	{Name: "unknown mode of reuse", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: podName}}`, Field: "spec.addressReuse.mode"},
	{Name: "reuse for no time", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: 500ms}}`, Field: "spec.addressReuse.retain"},
	{Name: "reuse for more than a year", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: 8761h}}`, Field: "spec.addressReuse.retain"},
	{Name: "reuse for less than no time", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: -1h}}`, Field: "spec.addressReuse.retain"},
	{Name: "reuse for days", YAML: `{namespaceSelector: {}, subnets: [{cidr: 192.0.2.0/24}], addressReuse: {mode: PodName, retain: 7d}}`, Field: "spec.addressReuse.retain"},
	{Name: "negative rate", YAML: `{namespaceSelector: {}, vf: {maxTxRate: -1}}`, Field: "spec.vf.maxTxRate"},
}

// Addresses are specs of addresses without the fields that all of them have.
// Field is below the object here, and NodeName the address's name.
var Addresses = []Case{
	{Name: "IPv4", NodeName: "storage.192.0.2.10", YAML: `address: 192.0.2.10`},
	{Name: "IPv6", NodeName: "storage.2001-0db8-0000-0000-0000-0000-0000-0010", YAML: `address: '2001:db8::10'`},
	{Name: "reserved", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nreservation: {claim: net, request: net, ordinal: 0}"},
	{Name: "released", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nreservation: {claim: net, request: net, ordinal: 0}\nstate: Released\nreleasedAt: '2026-01-02T03:04:05Z'"},
	{Name: "released at no time", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nreservation: {claim: net, request: net, ordinal: 0}\nstate: Released", Field: "spec.state"},
	{Name: "released for nobody", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nstate: Released\nreleasedAt: '2026-01-02T03:04:05Z'", Field: "spec.state"},
	{Name: "in use since it was released", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nreleasedAt: '2026-01-02T03:04:05Z'", Field: "spec.state"},
	{Name: "unknown state", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nstate: Free", Field: "spec.state"},
	{Name: "ordinal below 0", NodeName: "storage.192.0.2.10", YAML: "address: 192.0.2.10\nreservation: {claim: net, request: net, ordinal: -1}", Field: "spec.reservation.ordinal"},
	{Name: "another network", NodeName: "backup.192.0.2.10", YAML: `address: 192.0.2.10`, Field: "metadata"},
	{Name: "another address", NodeName: "storage.192.0.2.11", YAML: `address: 192.0.2.10`, Field: "metadata"},
	{Name: "another IPv6 address", NodeName: "storage.2001-0db8-0000-0000-0000-0000-0000-0011", YAML: `address: '2001:db8::10'`, Field: "metadata"},
	{Name: "short IPv6 name", NodeName: "storage.2001-db8--10", YAML: `address: '2001:db8::10'`, Field: "metadata"},
	{Name: "no address", NodeName: "storage.x", YAML: `address: x`, Field: "spec.address"},
	{Name: "not canonical", NodeName: "storage.2001-0db8-0000-0000-0000-0000-0000-0010", YAML: `address: '2001:DB8::10'`, Field: "spec.address"},
}

// All are all cases.
var All = []Case{
	// Valid.
	{Name: "empty spec", YAML: `{}`},
	{Name: "dummies", YAML: `
deviceManagerConfigs: {dummy: {enabled: true, count: 3}}
pools: [{name: fast-net, filter: {deviceManagers: [dummy]}}]`},
	{Name: "VFs", YAML: `
deviceManagerConfigs: {sriov: {enabled: true, ifaces: [{ifName: ens1f0, vfCount: 4}]}}
pools: [{name: sriov-pool, filter: {deviceManagers: [sr-iov], pfNames: [ens1f0]}}]`},
	{Name: "every field", YAML: `
driverName: nics.example.com
draRegistrationRetryInterval: 3600
draRegistrationTimeout: 1
draRegistrationMaxAttempts: 100000
deviceManagerConfigs:
  sriov: {enabled: false, ifaces: [{ifName: ens1f0np0, vfCount: 0}, {ifName: 'p1.100@x', vfCount: 4096}]}
  dummy: {enabled: true, count: 1024}
pools:
- name: a.b-c
  filter:
    deviceManagers: [sr-iov, dummy]
    ifNames: [ens1f0v0, abcdefghijklmno]
    pfNames: [ens1f0]
    parentIfNames: [eth0]
    pciAddrs: ['0000:03:00.1', '10000:e1:1f.7']
    vendorIDs: ['0x8086']
    deviceIDs: ['0x10ca']
    drivers: [igbvf, vfio-pci, mlx5_core]`},
	{Name: "what claims may ask", YAML: `pools: [{name: a, claims: Any}, {name: b, claims: NetworkOnly}, {name: c, claims: None}]`},
	{Name: "unknown answer to what claims may ask", YAML: `pools: [{name: a}, {name: b, claims: none}]`, Field: "pools[1].claims"},
	{Name: "what faults do", YAML: `pools: [{name: a, faultEffect: NoSchedule}, {name: b, faultEffect: NoExecute}]`},
	{Name: "unknown effect of faults", YAML: `pools: [{name: a}, {name: b, faultEffect: PreferNoSchedule}]`, Field: "pools[1].faultEffect"},
	{Name: "attributes of one's own", YAML: `
pools: [{name: a, attributes: {rail: "3", example.com/rack: r12, _x: "", Plane_2: '` + strings.Repeat("é", 64) + `'}}]`},
	{Name: "too many attributes", YAML: `pools: [{name: a, attributes: {a1: x, a2: x, a3: x, a4: x, a5: x, a6: x, a7: x, a8: x, a9: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute that is no identifier", YAML: `pools: [{name: a, attributes: {top-rack: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of a long name", YAML: `pools: [{name: a, attributes: {` + strings.Repeat("a", 33) + `: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of a long domain", YAML: `pools: [{name: a, attributes: {` + strings.Repeat("a", 64) + `/rack: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of a bad domain", YAML: `pools: [{name: a, attributes: {Example.com/rack: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of the driver's", YAML: `pools: [{name: a, attributes: {mac: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute that only metadata have", YAML: `pools: [{name: a, attributes: {vlan: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of Kubernetes's", YAML: `pools: [{name: a, attributes: {resource.kubernetes.io/pcieRoot: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute of Multus's", YAML: `pools: [{name: a, attributes: {k8s.cni.cncf.io/resourceName: x}}]`, Field: "pools[0].attributes"},
	{Name: "attribute with a long value", YAML: `pools: [{name: a, attributes: {rack: '` + strings.Repeat("a", 65) + `'}}]`, Field: "pools[0].attributes"},
	{Name: "attribute that is a number", YAML: `pools: [{name: a, attributes: {rail: 3}}]`, Field: "pools[0].attributes", SchemaOnly: true},
	{Name: "attribute of the driver's domain", YAML: `
driverName: nics.example.com
pools: [{name: a, attributes: {nics.example.com/rack: x}}]`, Field: "pools"},
	{Name: "no filter and an empty one", YAML: `pools: [{name: none}, {name: all, filter: {}}]`},
	{Name: "pools that overlap by other fields than ifNames", YAML: `
pools: [{name: a, filter: {pfNames: [ens1f0]}}, {name: b, filter: {pfNames: [ens1f0], drivers: [igbvf]}}]`},
	{Name: "as many names as may be", YAML: pools(8, 64)},

	// Pools.
	{Name: "duplicate pool names", YAML: `pools: [{name: a}, {name: b}, {name: a}]`, Field: "pools[2]"},
	{Name: "an ifNames value in two pools", YAML: `
pools: [{name: a, filter: {ifNames: [v0, v1]}}, {name: b}, {name: c, filter: {ifNames: [v2, v1]}}]`, Field: "pools"},
	{Name: "an ifNames value in two pools with more filters", YAML: `
pools: [{name: a, filter: {ifNames: [v0], drivers: [igbvf]}}, {name: b, filter: {ifNames: [v0], drivers: [iavf]}}]`, Field: "pools"},
	{Name: "too many pools", YAML: pools(33, 0), Field: "pools"},
	{Name: "too many names", YAML: pools(9, 64), Field: "pools"},
	{Name: "empty pool name", YAML: `pools: [{name: ""}]`, Field: "pools[0].name"},
	{Name: "pool name with a slash", YAML: `pools: [{name: a/b}]`, Field: "pools[0].name"},
	{Name: "pool name in upper case", YAML: `pools: [{name: Fast}]`, Field: "pools[0].name"},
	{Name: "pool name too long", YAML: `pools: [{name: ` + strings.Repeat("p", 64) + `}]`, Field: "pools[0].name"},
	{Name: "longest pool name", YAML: `pools: [{name: ` + strings.Repeat("p", 63) + `}]`},
	{Name: "pool without a name", YAML: `pools: [{filter: {}}]`, Field: "pools[0].name", SchemaOnly: true},
	{Name: "node and pool name just fit", NodeName: longNode, YAML: `pools: [{name: ` + strings.Repeat("p", 253-1-len(longNode)) + `}]`},
	{Name: "node and pool name too long", NodeName: longNode, YAML: `pools: [{name: ` + strings.Repeat("p", 253-len(longNode)) + `}]`, Field: "pools"},

	// Filters.
	{Name: "unknown device manager", YAML: filter(`deviceManagers: [sriov]`), Field: "pools[0].filter.deviceManagers[0]"},
	{Name: "the same value twice", YAML: filter(`pfNames: [a, b, a]`), Field: "pools[0].filter.pfNames[2]"},
	{Name: "ifNames empty", YAML: filter(`ifNames: [""]`), Field: "pools[0].filter.ifNames[0]"},
	{Name: "ifNames too long", YAML: filter(`ifNames: [abcdefghijklmnop]`), Field: "pools[0].filter.ifNames[0]"},
	{Name: "ifNames with a slash", YAML: filter(`ifNames: [ok, a/b]`), Field: "pools[0].filter.ifNames[1]"},
	{Name: "pfNames with a space", YAML: filter(`pfNames: ["a b"]`), Field: "pools[0].filter.pfNames[0]"},
	{Name: "pfNames with a line break", YAML: filter(`pfNames: ["a\n"]`), Field: "pools[0].filter.pfNames[0]"},
	{Name: "parentIfNames is dots", YAML: filter(`parentIfNames: [".."]`), Field: "pools[0].filter.parentIfNames[0]"},
	{Name: "PCI address without a domain", YAML: filter(`pciAddrs: ["03:00.1"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "PCI address in upper case", YAML: filter(`pciAddrs: ["0000:0A:00.1"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "PCI address with function 8", YAML: filter(`pciAddrs: ["0000:03:00.8"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "PCI address with device 20", YAML: filter(`pciAddrs: ["0000:03:20.0"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "PCI address with dashes", YAML: filter(`pciAddrs: ["0000-03-00-1"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "PCI address too long", YAML: filter(`pciAddrs: ["0000:03:00.1/../x"]`), Field: "pools[0].filter.pciAddrs[0]"},
	{Name: "vendor without 0x", YAML: filter(`vendorIDs: ["8086"]`), Field: "pools[0].filter.vendorIDs[0]"},
	{Name: "device in upper case", YAML: filter(`deviceIDs: ["0x10CA"]`), Field: "pools[0].filter.deviceIDs[0]"},
	{Name: "driver with a slash", YAML: filter(`drivers: [../igbvf]`), Field: "pools[0].filter.drivers[0]"},
	{Name: "filter field that is no list", YAML: filter(`pfNames: ens1f0`), Field: "pools[0].filter.pfNames", SchemaOnly: true},

	// Device managers.
	{Name: "negative vfCount", YAML: iface(`ifName: ens1f0, vfCount: -1`), Field: "deviceManagerConfigs.sriov.ifaces[0].vfCount"},
	{Name: "too large vfCount", YAML: iface(`ifName: ens1f0, vfCount: 4097`), Field: "deviceManagerConfigs.sriov.ifaces[0].vfCount"},
	{Name: "vfCount is text", YAML: iface(`ifName: ens1f0, vfCount: "4"`), Field: "deviceManagerConfigs.sriov.ifaces[0].vfCount", SchemaOnly: true},
	{Name: "no vfCount", YAML: iface(`ifName: ens1f0`), Field: "deviceManagerConfigs.sriov.ifaces[0].vfCount", SchemaOnly: true},
	{Name: "empty PF", YAML: iface(`ifName: "", vfCount: 1`), Field: "deviceManagerConfigs.sriov.ifaces[0].ifName"},
	{Name: "PF too long", YAML: iface(`ifName: abcdefghijklmnop, vfCount: 1`), Field: "deviceManagerConfigs.sriov.ifaces[0].ifName"},
	{Name: "PF is a path", YAML: iface(`ifName: ../eth0, vfCount: 1`), Field: "deviceManagerConfigs.sriov.ifaces[0].ifName"},
	{Name: "PF is a dot", YAML: iface(`ifName: ".", vfCount: 1`), Field: "deviceManagerConfigs.sriov.ifaces[0].ifName"},
	{Name: "PF with a colon", YAML: iface(`ifName: "eth0:1", vfCount: 1`), Field: "deviceManagerConfigs.sriov.ifaces[0].ifName"},
	{Name: "the same PF twice", YAML: iface(`ifName: ens1f0, vfCount: 4}, {ifName: ens1f0, vfCount: 2`), Field: "deviceManagerConfigs.sriov.ifaces[1]"},
	{Name: "negative count", YAML: `deviceManagerConfigs: {dummy: {enabled: true, count: -1}}`, Field: "deviceManagerConfigs.dummy.count"},
	{Name: "too large count", YAML: `deviceManagerConfigs: {dummy: {enabled: true, count: 1025}}`, Field: "deviceManagerConfigs.dummy.count"},
	{Name: "neither enabled nor disabled", YAML: `deviceManagerConfigs: {dummy: {count: 1}}`, Field: "deviceManagerConfigs.dummy.enabled", SchemaOnly: true},

	// Registration.
	{Name: "empty driver name", YAML: `driverName: ""`, Field: "driverName"},
	{Name: "driver name in upper case", YAML: `driverName: NetworkDriver.cilium.io`, Field: "driverName"},
	{Name: "driver name with a slash", YAML: `driverName: cilium.io/networkdriver`, Field: "driverName"},
	{Name: "driver name with two dots", YAML: `driverName: networkdriver..io`, Field: "driverName"},
	{Name: "driver name too long", YAML: `driverName: ` + strings.Repeat("d", 64), Field: "driverName"},
	{Name: "no interval", YAML: `draRegistrationRetryInterval: 0`, Field: "draRegistrationRetryInterval"},
	{Name: "interval too large", YAML: `draRegistrationRetryInterval: 3601`, Field: "draRegistrationRetryInterval"},
	{Name: "negative timeout", YAML: `draRegistrationTimeout: -5`, Field: "draRegistrationTimeout"},
	{Name: "no attempts", YAML: `draRegistrationMaxAttempts: 0`, Field: "draRegistrationMaxAttempts"},
	{Name: "attempts is text", YAML: `draRegistrationMaxAttempts: "10"`, Field: "draRegistrationMaxAttempts", SchemaOnly: true},
}

// Selectors are node selectors of cluster configs. Field is the path below the selector.
var Selectors = []Case{
	{Name: "empty selector", YAML: `{}`},
	{Name: "every operator", YAML: `
matchLabels: {a: "1", example.com/role: "", A_b.c: x.y_z-0}
matchExpressions:
- {key: a, operator: In, values: ["1", ""]}
- {key: example.com/zone, operator: NotIn, values: [z1]}
- {key: b, operator: Exists}
- {key: c, operator: DoesNotExist, values: []}`},
	{Name: "longest key and value", YAML: expression(longKey, `operator: In, values: [`+strings.Repeat("v", 63)+`]`)},
	{Name: "unknown operator", YAML: expression("a", `operator: Contains, values: ["1"]`), Field: "matchExpressions[0].operator"},
	{Name: "operator in lower case", YAML: expression("a", `operator: exists`), Field: "matchExpressions[0].operator"},
	{Name: "operator of a node affinity", YAML: expression("a", `operator: Gt, values: ["1"]`), Field: "matchExpressions[0].operator"},
	{Name: "no operator", YAML: `matchExpressions: [{key: a}]`, Field: "matchExpressions[0].operator"},
	{Name: "second operator", YAML: `matchExpressions: [{key: a, operator: Exists}, {key: b, operator: "?"}]`, Field: "matchExpressions[1].operator"},
	{Name: "In without values", YAML: expression("a", `operator: In`), Field: "matchExpressions[0].values"},
	{Name: "NotIn with no value", YAML: expression("a", `operator: NotIn, values: []`), Field: "matchExpressions[0].values"},
	{Name: "Exists with a value", YAML: expression("a", `operator: Exists, values: ["1"]`), Field: "matchExpressions[0].values"},
	{Name: "DoesNotExist with a value", YAML: expression("a", `operator: DoesNotExist, values: [""]`), Field: "matchExpressions[0].values"},
	{Name: "values is text", YAML: expression("a", `operator: In, values: "1"`), Field: "matchExpressions[0].values", SchemaOnly: true},
	{Name: "value with a space", YAML: expression("a", `operator: In, values: [ok, "a b"]`), Field: "matchExpressions[0].values[1]"},
	{Name: "value too long", YAML: expression("a", `operator: In, values: [`+strings.Repeat("v", 64)+`]`), Field: "matchExpressions[0].values[0]"},
	{Name: "empty key", YAML: expression(`""`, `operator: Exists`), Field: "matchExpressions[0].key"},
	{Name: "key with a space", YAML: expression("a b", `operator: Exists`), Field: "matchExpressions[0].key"},
	{Name: "key with two slashes", YAML: expression("a/b/c", `operator: Exists`), Field: "matchExpressions[0].key"},
	{Name: "key with an upper case domain", YAML: expression("Example.com/a", `operator: Exists`), Field: "matchExpressions[0].key"},
	{Name: "key's name too long", YAML: expression(strings.Repeat("k", 64), `operator: Exists`), Field: "matchExpressions[0].key"},
	{Name: "label value with a slash", YAML: `matchLabels: {a: b/c}`, Field: "matchLabels"},
	{Name: "label value too long", YAML: `matchLabels: {a: ` + strings.Repeat("v", 64) + `}`, Field: "matchLabels"},
	{Name: "empty label key", YAML: `matchLabels: {"": a}`, Field: "matchLabels"},
	{Name: "label key too long", YAML: `matchLabels: {` + strings.Repeat("k", 318) + `: a}`, Field: "matchLabels"},
}

var longKey = strings.Repeat("d", 63) + "." + strings.Repeat("e", 63) + "/" + strings.Repeat("k", 63)

func subnet(fields string) string {
	return fmt.Sprintf("{namespaceSelector: {}, subnets: [{%s}]}", fields)
}

func expression(key, rest string) string {
	return fmt.Sprintf("matchExpressions: [{key: %s, %s}]", key, rest)
}

var longNode = strings.Repeat("n", 63) + "." + strings.Repeat("o", 63) + "." + strings.Repeat("p", 63) + ".q"

func filter(fields string) string {
	return fmt.Sprintf("pools: [{name: a, filter: {%s}}]", fields)
}

func iface(fields string) string {
	return fmt.Sprintf("deviceManagerConfigs: {sriov: {enabled: true, ifaces: [{%s}]}}", fields)
}

// pools makes pools with a number of ifNames values each, none of them twice.
func pools(count, names int) string {
	var b strings.Builder
	b.WriteString("pools:\n")
	for i := range count {
		fmt.Fprintf(&b, "- name: pool-%d\n  filter:\n    ifNames:\n", i)
		for j := range names {
			fmt.Fprintf(&b, "    - p%dn%d\n", i, j)
		}
		if names == 0 {
			fmt.Fprintf(&b, "    - only%d\n", i)
		}
	}
	return b.String()
}
