// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory/inventorytest"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const testNode = "worker-node-1"

func rows(devs ...*inventorytest.Device) []*tables.DRADevice {
	var rows []*tables.DRADevice
	for _, d := range devs {
		rows = append(rows, &tables.DRADevice{Name: d.Name, Manager: d.Manager, Dev: d})
	}
	return rows
}

func dummy(name string) *inventorytest.Device {
	return &inventorytest.Device{Name: name, Kernel: name, Manager: types.DeviceManagerTypeDummy}
}

func pool(name string, filter *v2alpha1.CiliumNetworkDriverDeviceFilter) v2alpha1.CiliumNetworkDriverDevicePoolConfig {
	return v2alpha1.CiliumNetworkDriverDevicePoolConfig{PoolName: name, Filter: filter}
}

func names(a Assignment) map[string][]string {
	names := map[string][]string{}
	for pool, devs := range a {
		for _, d := range devs {
			names[pool] = append(names[pool], d.Name)
		}
	}
	return names
}

// TestPFs has the PFs of each pool's devices, once and in order, and none of devices that have no PF.
func TestPFs(t *testing.T) {
	vf := func(n int, pf string) *inventorytest.Device {
		d := inventorytest.VF(n)
		d.PFName = pf
		return d
	}
	require.Equal(t, map[string][]string{"a": {"eth0", "eth1"}, "b": {"eth1"}}, Assignment{
		"a": rows(vf(1, "eth1"), vf(2, "eth0"), vf(3, "eth1"), dummy("dummy0")), "b": rows(vf(4, "eth1")), "c": rows(dummy("dummy1")), "d": rows(vf(5, "")),
	}.PFs())
}

func TestAssign(t *testing.T) {
	type configs = []v2alpha1.CiliumNetworkDriverDevicePoolConfig
	everything := &v2alpha1.CiliumNetworkDriverDeviceFilter{}
	only := func(ifNames ...string) *v2alpha1.CiliumNetworkDriverDeviceFilter {
		return &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: ifNames}
	}
	row := func(pool, device string) *tables.DRAAllocation {
		return &tables.DRAAllocation{Pool: pool, DeviceName: device}
	}
	tests := []struct {
		name        string
		devices     []string
		allocations []*tables.DRAAllocation
		pools       configs
		want        map[string][]string
		conflicts   []Conflict
	}{
		{
			name:    "no filter takes nothing",
			devices: []string{"dummy0"},
			pools:   configs{pool("a", nil)},
			want:    map[string][]string{},
		}, {
			name:    "empty filter takes everything, in the order of names",
			devices: []string{"dummy1", "dummy10", "dummy0"},
			pools:   configs{pool("a", everything)},
			want:    map[string][]string{"a": {"dummy0", "dummy1", "dummy10"}},
		}, {
			name:    "filter",
			devices: []string{"dummy0", "dummy1", "dummy2"},
			pools:   configs{pool("a", only("dummy0")), pool("b", only("dummy2"))},
			want:    map[string][]string{"a": {"dummy0"}, "b": {"dummy2"}},
		}, {
			name:      "alphabetically first of several",
			devices:   []string{"dummy0"},
			pools:     configs{pool("c", everything), pool("a", nil), pool("b", everything)},
			want:      map[string][]string{"b": {"dummy0"}},
			conflicts: []Conflict{{Device: "dummy0", Pools: []string{"b", "c"}, Pool: "b"}},
		}, {
			name:        "prepared device stays though another pool's filter takes it",
			devices:     []string{"dummy0", "dummy1"},
			allocations: []*tables.DRAAllocation{row("z", "dummy0")},
			pools:       configs{pool("a", everything), pool("z", nil)},
			want:        map[string][]string{"a": {"dummy1"}, "z": {"dummy0"}},
		}, {
			name:        "prepared device stays though its pool is gone from the configuration",
			devices:     []string{"dummy0"},
			allocations: []*tables.DRAAllocation{row("gone", "dummy0")},
			want:        map[string][]string{"gone": {"dummy0"}},
		}, {
			name:        "filters that overlap are reported for a prepared device too",
			devices:     []string{"dummy0"},
			allocations: []*tables.DRAAllocation{row("b", "dummy0")},
			pools:       configs{pool("a", everything), pool("b", everything)},
			want:        map[string][]string{"b": {"dummy0"}},
			conflicts:   []Conflict{{Device: "dummy0", Pools: []string{"a", "b"}, Pool: "b"}},
		}, {
			name:        "allocations that name two pools",
			devices:     []string{"dummy0", "dummy1"},
			allocations: []*tables.DRAAllocation{row("b", "dummy0"), row("a", "dummy0"), row("a", "dummy1"), row("a", "dummy1")},
			pools:       configs{pool("a", everything)},
			want:        map[string][]string{"a": {"dummy1"}},
			conflicts:   []Conflict{{Device: "dummy0", Pools: []string{"a", "b"}, Prepared: true}},
		}, {
			name:        "allocation of a device that no manager reports",
			devices:     []string{"dummy1"},
			allocations: []*tables.DRAAllocation{row("a", "dummy0")},
			want:        map[string][]string{},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var devs []*inventorytest.Device
			for _, name := range tt.devices {
				devs = append(devs, dummy(name))
			}
			before := slices.Clone(tt.pools)
			assignment, conflicts := Assign(slices.Values(rows(devs...)), slices.Values(tt.allocations), tt.pools)
			assert.Equal(t, tt.want, names(assignment))
			assert.Equal(t, tt.conflicts, conflicts)
			assert.Equal(t, before, tt.pools, "the caller's configuration must not be reordered")
		})
	}
}

// A device is where it is published, which the filters decide only until it is prepared.
func TestOf(t *testing.T) {
	configs := []v2alpha1.CiliumNetworkDriverDevicePoolConfig{
		pool("b", &v2alpha1.CiliumNetworkDriverDeviceFilter{}), pool("a", &v2alpha1.CiliumNetworkDriverDeviceFilter{IfNames: []string{"dummy0"}}),
	}
	one, two := rows(dummy("dummy0"))[0], rows(dummy("dummy1"))[0]
	none := slices.Values([]*tables.DRAAllocation(nil))
	assert.Equal(t, "a", Of(one, none, configs))
	assert.Equal(t, "b", Of(two, none, configs))
	assert.Empty(t, Of(one, none, nil))
	assert.Equal(t, "gone", Of(one, slices.Values([]*tables.DRAAllocation{{DeviceName: "dummy0", Pool: "gone"}}), configs))
}

func TestSlicesSplit(t *testing.T) {
	var devs []*inventorytest.Device
	for i := range 300 {
		devs = append(devs, dummy(fmt.Sprintf("dummy%03d", i)))
	}
	resources, omissions := NewDescriber(testNode).Slices(Assignment{"fast-net": rows(devs...)}, nil, nil)
	assert.Empty(t, omissions)
	require.Len(t, resources.Pools, 1)
	got := resources.Pools["worker-node-1/fast-net"].Slices
	require.Len(t, got, 5)
	for _, slice := range got[:4] {
		assert.Len(t, slice.Devices, 64)
	}
	assert.Len(t, got[4].Devices, 44)
	assert.Equal(t, "dummy000", got[0].Devices[0].Name)
	assert.Equal(t, "dummy299", got[4].Devices[43].Name)
	assert.Equal(t, map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pool":          {StringValue: ptr.To("fast-net")},
		"deviceManager": {StringValue: ptr.To("dummy")},
	}, got[0].Devices[0].Attributes)

	resources, _ = NewDescriber(testNode).Slices(Assignment{}, nil, nil)
	assert.Empty(t, resources.Pools, "a pool without devices is not published")
}

func TestSlicesAttributes(t *testing.T) {
	str := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	tests := []struct {
		name  resourceapi.QualifiedName
		value resourceapi.DeviceAttribute
		want  string // part of the reason; empty: published
	}{
		{name: "mac", value: str("02:00:00:00:00:01")},
		{name: "empty", value: str("")},
		{name: "longest", value: str(strings.Repeat("x", 64))},
		{name: "resource.kubernetes.io/pciBusID", value: str("0000:03:00.1")},
		{name: "vfID", value: resourceapi.DeviceAttribute{IntValue: ptr.To[int64](9)}},
		{name: "longValue", value: str(strings.Repeat("x", 65)), want: "longer than 64"},
		{name: "binary", value: str("\xff"), want: "UTF-8"},
	}
	bad, good := dummy("dummy0"), dummy("dummy1")
	bad.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	good.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"mtu": {IntValue: ptr.To[int64](1500)}}
	bad.Attributes[AttributePool] = str("other-pool") // is the driver's to say
	for _, tt := range tests {
		bad.Attributes[tt.name] = tt.value
	}
	resources, omissions := NewDescriber(testNode).Slices(Assignment{"fast-net": rows(bad, good)}, nil, nil)
	reasons := map[resourceapi.QualifiedName]string{}
	for _, o := range omissions {
		assert.Equal(t, "dummy0", o.Device)
		assert.Equal(t, "fast-net", o.Pool)
		reasons[o.Attribute] = o.Reason
	}
	devs := resources.Pools["worker-node-1/fast-net"].Slices[0].Devices
	require.Len(t, devs, 2, "bad attributes hide no device")
	assert.Len(t, devs[1].Attributes, 3)
	published := devs[0].Attributes
	assert.Equal(t, "fast-net", *published["pool"].StringValue)
	assert.Equal(t, "dummy", *published["deviceManager"].StringValue)
	for _, tt := range tests {
		if tt.want == "" {
			assert.Equal(t, tt.value, published[tt.name], "attribute %q", tt.name)
			assert.NotContains(t, reasons, tt.name)
			continue
		}
		assert.Contains(t, reasons[tt.name], tt.want, "attribute %q", tt.name)
		assert.NotContains(t, published, tt.name)
	}
}

func TestSlicesPoolAttributes(t *testing.T) {
	str := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	vf, other := dummy("dummy0"), dummy("dummy1")
	vf.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"mtu": {IntValue: ptr.To[int64](1500)}, "k8s.cni.cncf.io/deviceID": str("0000:03:00.1"),
	}
	assignment := Assignment{"rail3": rows(vf), "plain": rows(other)}
	d := NewDescriber(testNode)
	published := func(own map[string]Attributes, pool string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
		resources, omissions := d.Slices(assignment, own, nil)
		assert.Empty(t, omissions)
		return resources.Pools[Name(testNode, pool)].Slices[0].Devices[0].Attributes
	}
	own := AttributesOf([]v2alpha1.CiliumNetworkDriverDevicePoolConfig{
		{PoolName: "plain"},
		{PoolName: "rail3", Attributes: Attributes{"example.com/rail": "3", "rack": "r12", "mtu": "is the device's"}},
	})
	assert.Equal(t, map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"pool": str("rail3"), "deviceManager": str("dummy"), "mtu": {IntValue: ptr.To[int64](1500)},
		"k8s.cni.cncf.io/deviceID": str("0000:03:00.1"), "k8s.cni.cncf.io/resourceName": str("rail3"),
		"example.com/rail": str("3"), "rack": str("r12"),
	}, published(own, "rail3"))
	assert.Equal(t, map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"pool": str("plain"), "deviceManager": str("dummy")},
		published(own, "plain"))

	own["rail3"] = Attributes{"rack": "r13"}
	changed := published(own, "rail3")
	assert.Equal(t, str("r13"), changed["rack"], "the same row with another attribute")
	assert.NotContains(t, changed, resourceapi.QualifiedName("example.com/rail"))
	assert.NotContains(t, published(nil, "rail3"), resourceapi.QualifiedName("rack"))
}

func TestSlicesFollowTheRow(t *testing.T) {
	d := NewDescriber(testNode)
	attr := func(a Assignment, pool string, name resourceapi.QualifiedName) resourceapi.DeviceAttribute {
		resources, _ := d.Slices(a, nil, nil)
		return resources.Pools[Name(testNode, pool)].Slices[0].Devices[0].Attributes[name]
	}
	dev := dummy("dummy0")
	dev.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"mtu": {IntValue: ptr.To[int64](1500)}}
	same := rows(dev)
	assert.Equal(t, int64(1500), *attr(Assignment{"a": same}, "a", "mtu").IntValue)
	assert.Equal(t, "b", *attr(Assignment{"b": same}, "b", "pool").StringValue, "the same row in another pool")

	changed := dummy("dummy0")
	changed.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"mtu": {IntValue: ptr.To[int64](9000)}}
	assert.Equal(t, int64(9000), *attr(Assignment{"b": rows(changed)}, "b", "mtu").IntValue)
	assert.Len(t, d.known, 1, "rows that are gone are forgotten")
}

func TestSlicesBadPool(t *testing.T) {
	for pool, want := range map[string]string{
		"Up_Per":                       "DNS subdomain",
		"../x":                         "DNS subdomain",
		"":                             "DNS subdomain",
		strings.Repeat("p", 63) + ".x": "longer than 64",
	} {
		resources, omissions := NewDescriber(testNode).Slices(Assignment{
			pool:       rows(dummy("dummy0")),
			"fast-net": rows(dummy("dummy1")),
		}, nil, nil)
		require.Len(t, omissions, 1, pool)
		assert.Contains(t, omissions[0].Reason, want)
		assert.Empty(t, omissions[0].Device)
		assert.Len(t, resources.Pools, 1, "a bad pool hides no other")
	}
	_, omissions := NewDescriber(strings.Repeat("n", 200)).Slices(Assignment{strings.Repeat("p", 60): rows(dummy("dummy0"))}, nil, nil)
	require.Len(t, omissions, 1)
	assert.Contains(t, omissions[0].Reason, "longer than 253")
}

func BenchmarkBuild(b *testing.B) {
	var devs []*inventorytest.Device
	var allocations []*tables.DRAAllocation
	for i := range 4096 {
		d := inventorytest.VF(i)
		devs = append(devs, d)
		if i%8 == 0 {
			allocations = append(allocations, &tables.DRAAllocation{Pool: "sriov-pool", DeviceName: d.Name})
		}
	}
	inventory := rows(devs...)
	configs := []v2alpha1.CiliumNetworkDriverDevicePoolConfig{
		pool("other", &v2alpha1.CiliumNetworkDriverDeviceFilter{PfNames: []string{"ens1f1"}}),
		pool("sriov-pool", &v2alpha1.CiliumNetworkDriverDeviceFilter{PfNames: []string{"ens1f0"}}),
	}
	build := func(b *testing.B, d *Describer) {
		assignment, _ := Assign(slices.Values(inventory), slices.Values(allocations), configs)
		if resources, _ := d.Slices(assignment, nil, nil); len(resources.Pools["worker-node-1/sriov-pool"].Slices) != 64 {
			b.Fatal("not built")
		}
	}
	b.Run("first", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			build(b, NewDescriber(testNode))
		}
	})
	b.Run("one-changed", func(b *testing.B) {
		b.ReportAllocs()
		d := NewDescriber(testNode)
		for b.Loop() {
			changed := *inventory[0]
			inventory[0] = &changed
			build(b, d)
		}
	})
}
