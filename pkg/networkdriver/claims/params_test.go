// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// severalDevices is what a request of several devices is told that asks for addresses.
const severalDevices = `request "net": parameters: addresses: the request is for several devices (count, or allocationMode All), which cannot all have them; make a request for each`

func addresses(written ...string) []types.Address {
	parsed := make([]types.Address, len(written))
	for i, s := range written {
		if err := parsed[i].UnmarshalText([]byte(s)); err != nil {
			panic(err)
		}
	}
	return parsed
}

// all has the request be for all devices there are.
func all(request string) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		name, sub, _ := strings.Cut(request, "/")
		for i := range c.Spec.Devices.Requests {
			r := &c.Spec.Devices.Requests[i]
			if r.Name == name && r.Exactly != nil {
				r.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
			}
			for j := range r.FirstAvailable {
				if r.Name == name && r.FirstAvailable[j].Name == sub {
					r.FirstAvailable[j].AllocationMode = resourceapi.DeviceAllocationModeAll
				}
			}
		}
	}
}

func TestResolveConfigs(t *testing.T) {
	foreign := func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.example.com", Pool: "p", Device: "d"})
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests,
			resourceapi.DeviceRequest{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu-class"}})
	}
	tests := []struct {
		name    string
		options []claimOption
		want    []types.DeviceConfig
		err     string
	}{
		{name: "no result of ours", options: []claimOption{foreign, fromClaim(`{"vlna":1}`)}},
		{name: "no parameters", options: []claimOption{with("net", "a")}, want: []types.DeviceConfig{{}}},
		{name: "no requests means all", options: []claimOption{with("a", "a"), with("b", "b"), fromClaim(`{"vlan":7}`)},
			want: []types.DeviceConfig{{Vlan: vlan(7)}, {Vlan: vlan(7)}}},
		{name: "one request only", options: []claimOption{with("a", "a"), with("b", "b"), fromClaim(`{"vlan":7}`, "b")},
			want: []types.DeviceConfig{{}, {Vlan: vlan(7)}}},
		{name: "extended resources of two classes", options: []claimOption{with("container-0-request-0", "a"), with("container-0-request-1", "b"),
			fromClass(`{"vlan":10}`, "container-0-request-0"), fromClass(`{"vlan":20,"podIfName":"net1"}`, "container-0-request-1")},
			want: []types.DeviceConfig{{Vlan: vlan(10)}, {Vlan: vlan(20), PodIfName: "net1"}}},
		{name: "claim beats class", options: []claimOption{with("a", "a"), fromClaim(`{"vlan":20}`), fromClass(`{"vlan":10}`, "a")},
			want: []types.DeviceConfig{{Vlan: vlan(20)}}},
		{name: "claim for all beats class for the subrequest", options: []claimOption{with("a/s", "a"), fromClass(`{"vlan":10}`, "a/s"), fromClaim(`{"vlan":20}`)},
			want: []types.DeviceConfig{{Vlan: vlan(20)}}},
		{name: "each field by itself", options: []claimOption{with("a", "a"), fromClass(`{"vlan":10,"podIfName":"x0"}`), fromClaim(`{"podIfName":"net1"}`)},
			want: []types.DeviceConfig{{Vlan: vlan(10), PodIfName: "net1"}}},
		{name: "vlan 0 overrides", options: []claimOption{with("a", "a"), fromClass(`{"vlan":10}`), fromClaim(`{"vlan":0}`)},
			want: []types.DeviceConfig{{Vlan: vlan(0)}}},
		{name: "request beats all, whatever the order", options: []claimOption{with("a", "a"), with("b", "b"), fromClaim(`{"vlan":30}`, "a"), fromClaim(`{"vlan":20}`)},
			want: []types.DeviceConfig{{Vlan: vlan(30)}, {Vlan: vlan(20)}}},
		{name: "subrequest beats request beats all", options: []claimOption{with("a/s", "a"), fromClaim(`{"vlan":3}`, "a/s"), fromClaim(`{"vlan":2}`, "a"), fromClaim(`{"vlan":1}`)},
			want: []types.DeviceConfig{{Vlan: vlan(3)}}},
		{name: "parent name matches a subrequest", options: []claimOption{with("a/s", "a"), fromClaim(`{"vlan":2}`, "a")},
			want: []types.DeviceConfig{{Vlan: vlan(2)}}},
		{name: "another subrequest does not match", options: []claimOption{with("a/s", "a"), fromClaim(`{"vlan":2}`, "a/t")},
			want: []types.DeviceConfig{{}}},
		{name: "a request is no prefix", options: []claimOption{with("ab", "a"), fromClaim(`{"vlan":2}`, "a")},
			want: []types.DeviceConfig{{}}},
		{name: "of two equals the later counts", options: []claimOption{with("a", "a"), fromClaim(`{"vlan":2}`, "a"), fromClaim(`{"vlan":3}`, "a")},
			want: []types.DeviceConfig{{Vlan: vlan(3)}}},
		{name: "several names in one entry", options: []claimOption{with("a", "a"), with("b/s", "b"), fromClaim(`{"vlan":2}`, "a", "b", "b/s"), fromClaim(`{"vlan":3}`, "b")},
			want: []types.DeviceConfig{{Vlan: vlan(2)}, {Vlan: vlan(2)}}},
		{name: "other drivers are not parsed", options: []claimOption{foreign, with("net", "a"),
			config(resourceapi.AllocationConfigSourceClaim, "gpu.example.com", `{"vlan":"no"`, nil), fromClaim(`{"vlan":2}`)},
			want: []types.DeviceConfig{{Vlan: vlan(2)}}},
		{name: "an entry without opaque", options: []claimOption{with("net", "a"), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config,
				resourceapi.DeviceAllocationConfiguration{Source: resourceapi.AllocationConfigSourceClaim})
		}}, want: []types.DeviceConfig{{}}},
		{name: "entries for nothing of ours are not parsed", options: []claimOption{with("net", "a"), fromClaim(`{"vlna":1}`, "gpu")},
			want: []types.DeviceConfig{{}}},

		{name: "class without requests, one class", options: []claimOption{with("a", "a"), with("b", "b"), fromClass(`{"vlan":10}`)},
			want: []types.DeviceConfig{{Vlan: vlan(10)}, {Vlan: vlan(10)}}},
		{name: "class without requests, the other class is another driver's", options: []claimOption{foreign, with("a", "a"), fromClass(`{"vlan":10}`)},
			want: []types.DeviceConfig{{Vlan: vlan(10)}}},
		{name: "class without requests, two classes", options: []claimOption{withClass("a", "a", "red"), withClass("b/s", "b", "blue"), fromClass(`{"vlan":10}`), fromClass(`{"vlan":20}`)},
			err: `requests "a", "b/s": parameters from a device class are ambiguous: the scheduler does not say for which request they are, and the claim uses the classes "blue", "red"; use one class, or one claim for each`},
		{name: "class with requests, two classes", options: []claimOption{withClass("a", "a", "red"), withClass("b", "b", "blue"), fromClass(`{"vlan":10}`, "a"), fromClass(`{"vlan":20}`, "b")},
			want: []types.DeviceConfig{{Vlan: vlan(10)}, {Vlan: vlan(20)}}},
		{name: "two classes, only claim parameters", options: []claimOption{withClass("a", "a", "red"), withClass("b", "b", "blue"), fromClaim(`{"vlan":10}`)},
			want: []types.DeviceConfig{{Vlan: vlan(10)}, {Vlan: vlan(10)}}},
		{name: "unknown source", options: []claimOption{with("net", "a"), config("FromMars", testDriver, `{}`, nil)},
			err: `requests "net": parameters come from "FromMars", which is neither FromClass nor FromClaim`},

		{name: "vlan too large", options: []claimOption{with("net", "a"), fromClaim(`{"vlan":5000}`)},
			err: `request "net": parameters: vlan: 5000 is not in 0..4094`},
		{name: "vlan negative", options: []claimOption{with("net", "a"), fromClaim(`{"vlan":-1}`)},
			err: `request "net": parameters: vlan: -1 is not in 0..4094`},
		{name: "unknown field in the class", options: []claimOption{with("net", "a"), fromClass(`{"vlna":100}`)},
			err: `request "net": parameters from the device class: unknown field "vlna", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`},
		{name: "wrong type", options: []claimOption{with("x", "x"), with("net", "a"), fromClaim(`{"vlan":"100"}`, "net")},
			err: `request "net": parameters: vlan: "100" is not a whole number from 0 to 4094`},
		{name: "addresses of the class's network", options: []claimOption{with("net", "a"), fromClass(`{"network":"storage"}`), fromClaim(`{"addresses":["192.0.2.10"]}`)},
			want: []types.DeviceConfig{{Network: "storage", Addresses: addresses("192.0.2.10")}}},
		{name: "the claim's addresses and routes instead of the class's", options: []claimOption{with("net", "a"),
			fromClass(`{"addresses":["192.0.2.9/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1"},{"to":"0.0.0.0/0","via":"192.0.2.1"}]}`),
			fromClaim(`{"addresses":["198.51.100.9/24","192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"198.51.100.1","metric":7}]}`)},
			want: []types.DeviceConfig{{Addresses: addresses("198.51.100.9/24", "192.0.2.10/24"),
				Routes: []types.Route{{To: netip.MustParsePrefix("10.0.0.0/8"), Via: netip.MustParseAddr("198.51.100.1"), Metric: 7}}}}},
		{name: "routes by the class's addresses", options: []claimOption{with("net", "a"), fromClass(`{"addresses":["192.0.2.9/24"]}`),
			fromClaim(`{"routes":[{"to":"10.0.0.0/8","via":"198.51.100.1"}]}`)},
			err: `request "net": all parameters together: routes[0].via: 198.51.100.1 is no host of a subnet of the device's addresses, nor an IPv6 address of a link, so that it cannot be reached`},
		{name: "an address of no network", options: []claimOption{with("net", "a"), fromClaim(`{"addresses":["192.0.2.10"]}`)},
			err: `request "net": all parameters together: addresses[0]: 192.0.2.10 has no prefix length, which only an address of a network goes without; name the network, or add the length`},
		{name: "the class's network and the claim's routes", options: []claimOption{with("net", "a"), fromClass(`{"network":"storage"}`),
			fromClaim(`{"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1"}]}`)},
			err: `request "net": all parameters together: routes: cannot be asked for together with network storage, which says what they are; leave one of them out`},
		{name: "addresses for two devices", options: []claimOption{with("net", "a"), with("net", "b"), fromClaim(`{"addresses":["192.0.2.10/24"]}`)}, err: severalDevices},
		{name: "addresses for all devices there are", options: []claimOption{with("net", "a"), all("net"), fromClaim(`{"addresses":["192.0.2.10/24"]}`)}, err: severalDevices},
		{name: "addresses for all devices of a subrequest", options: []claimOption{with("net/all", "a"), all("net/all"), fromClaim(`{"network":"storage","addresses":["192.0.2.10"]}`)},
			err: strings.ReplaceAll(severalDevices, `"net"`, `"net/all"`)},
		{name: "addresses of one of two requests", options: []claimOption{with("net", "a"), with("two", "b"), with("two", "c"), all("two"), fromClaim(`{"addresses":["192.0.2.10/24"]}`, "net")},
			want: []types.DeviceConfig{{Addresses: addresses("192.0.2.10/24")}, {}, {}}},
		{name: "no parameters at all", options: []claimOption{with("net", "a"), fromClaim(``)},
			err: `request "net": parameters: decode parameters: EOF`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ResolveConfigs(newClaim("c", tt.options...), testDriver)
			if tt.err != "" {
				require.EqualError(t, err, tt.err)
				require.True(t, IsPermanent(err), "must be permanent")
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.want, configsOf(got))
		})
	}
	_, err := ResolveConfigs(&resourceapi.ResourceClaim{}, testDriver)
	require.NoError(t, err, "a claim without allocation has no configurations")
}

// Newer schedulers drop the names of a configuration's requests in the allocation when they are all requests there are;
// which is more exact is then known from the claim's spec only.
func TestResolveConfigsWithoutNames(t *testing.T) {
	type spec struct {
		parameters string
		requests   []string
	}
	for _, tt := range []struct {
		name      string
		spec      []spec
		allocated []claimOption
		want      types.DeviceConfig
	}{
		{"subrequest beats request", []spec{{`{"podIfName":"sub0"}`, []string{"net/vf"}}, {`{"vlan":3,"podIfName":"net0"}`, []string{"net"}}},
			[]claimOption{fromClaim(`{"podIfName":"sub0"}`), fromClaim(`{"podIfName":"net0","vlan":3}`)}, types.DeviceConfig{PodIfName: "sub0", Vlan: vlan(3)}},
		{"request beats all", []spec{{`{"vlan": 1}`, []string{"net"}}, {`{"vlan": 2}`, nil}},
			[]claimOption{fromClaim(`{"vlan":1}`), fromClaim(`{"vlan":2}`)}, types.DeviceConfig{Vlan: vlan(1)}},
		{"the other alternative's is not mistaken for it", []spec{{`{"vlan":1}`, []string{"net/best"}}, {`{"vlan":1}`, []string{"net"}}, {`{"vlan":2}`, nil}},
			[]claimOption{fromClaim(`{"vlan":1}`), fromClaim(`{"vlan":2}`)}, types.DeviceConfig{Vlan: vlan(1)}},
		{"equal ones are taken in their order", []spec{{`{"vlan":1}`, []string{"net/vf"}}, {`{"vlan":2}`, []string{"net/vf"}}, {`{"vlan":1}`, []string{"net"}}},
			[]claimOption{fromClaim(`{"vlan":1}`), fromClaim(`{"vlan":2}`), fromClaim(`{"vlan":1}`)}, types.DeviceConfig{Vlan: vlan(2)}},
		{"names that are there count", []spec{{`{"vlan":1}`, []string{"net"}}},
			[]claimOption{fromClaim(`{"vlan":1}`, "net"), fromClaim(`{"vlan":2}`)}, types.DeviceConfig{Vlan: vlan(1)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			claim := newClaim("c", append([]claimOption{with("net/vf", "a")}, tt.allocated...)...)
			for _, s := range tt.spec {
				claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{
					Requests: s.requests, DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
						Driver: testDriver, Parameters: runtime.RawExtension{Raw: []byte(s.parameters)},
					}},
				})
			}
			got, err := ResolveConfigs(claim, testDriver)
			require.NoError(t, err)
			require.Equal(t, []types.DeviceConfig{tt.want}, configsOf(got))
		})
	}
}

func configsOf(asked []Asked) []types.DeviceConfig {
	var configs []types.DeviceConfig
	for _, a := range asked {
		configs = append(configs, a.DeviceConfig)
	}
	return configs
}

// TestResolveConfigsByClaim tells what the claim asks for from what its class does.
func TestResolveConfigsByClaim(t *testing.T) {
	got, err := ResolveConfigs(newClaim("c", with("net", "a"), with("other", "b"),
		fromClass(`{"network":"storage","podIfName":"class0"}`, "net"), fromClaim(`{"podIfName":"claim0"}`, "net")), testDriver)
	require.NoError(t, err)
	require.Equal(t, []Asked{
		{DeviceConfig: types.DeviceConfig{Network: "storage", PodIfName: "claim0"}, ByClaim: types.DeviceConfig{PodIfName: "claim0"},
			Class: "class", FromClass: [][]byte{[]byte(`{"network":"storage","podIfName":"class0"}`)}},
		{Class: "class"},
	}, got)

	for _, options := range [][]claimOption{
		{fromClass(`{"vlan":0}`), fromClaim(`{"network":"storage"}`)},
		{fromClaim(`{"vlan":0}`), fromClass(`{"network":"storage"}`)},
	} {
		_, err = ResolveConfigs(newClaim("c", append(options, with("net", "a"))...), testDriver)
		require.EqualError(t, err, `request "net": all parameters together: `+
			`vlan: 0 cannot be asked for together with network storage, which says what the VLAN is; leave one of them out`)
		require.True(t, IsPermanent(err))
	}
}
