// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Parameters for a misspelt driver are refused where a pod would be in another network without them, and otherwise said.
func TestMisdirectedConfigs(t *testing.T) {
	const (
		misspelt = "networkdrivr.cilium.io"
		other    = "nic.example.com"
		claims   = resourceapi.AllocationConfigSourceClaim
		class    = resourceapi.AllocationConfigSourceClass
	)
	const hint = `; they look like those of networkdriver.cilium.io, without which the device would not be what was asked for: ` +
		`correct the name or, where they are for another alternative, have them name its subrequest`
	refused := func(origin, driver, more string) string {
		return `request "net": ` + origin + ` for driver "` + driver + `", which none of the claim's devices has` + more + hint
	}
	ignored := func(driver string) string {
		return `parameters for driver "` + driver + `", which none of the claim's devices has: they are ignored`
	}
	net := with("net", "a")
	tests := []struct {
		name    string
		options []claimOption
		refused string
		warned  string
	}{
		{name: "its own", options: []claimOption{net, fromClaim(`{"vlan":7}`)}},
		{name: "a driver that has a device", options: []claimOption{net, config(claims, other, `{"vlan":7}`, nil),
			withResult(resourceapi.DeviceRequestAllocationResult{Request: "other", Driver: other, Pool: "p", Device: "d"})}},
		{name: "misspelt", options: []claimOption{net, config(claims, misspelt, `{"vlan":7}`, nil)}, refused: refused("parameters", misspelt, "")},
		{name: "any name", options: []claimOption{net, config(claims, other, `{"network":"blue"}`, nil)}, refused: refused("parameters", other, "")},
		{name: "misspelt, a name in the pod", options: []claimOption{net, config(claims, misspelt, `{"podIfName":"net1"}`, nil)},
			refused: refused("parameters", misspelt, "")},
		{name: "any name, a name in the pod", options: []claimOption{net, config(claims, other, `{"podIfName":"net1"}`, nil)}, warned: ignored(other)},
		{name: "misspelt in the class", options: []claimOption{net, config(class, misspelt, `{"vlan":7}`, nil)},
			refused: refused("parameters from the device class", misspelt, "")},
		{name: "one of two", options: []claimOption{net, fromClaim(`{"podIfName":"net1"}`), config(claims, misspelt, `{"vlan":7}`, nil)},
			refused: refused("parameters", misspelt, "")},
		{name: "the claim's instead of the class's", options: []claimOption{net, fromClass(`{"vlan":8}`), config(claims, misspelt, `{"vlan":7}`, nil)},
			refused: refused("parameters", misspelt, "")},
		{name: "misspelt for one request", options: []claimOption{with("other", "b"), net, config(claims, misspelt, `{"vlan":7}`, []string{"net"})},
			refused: refused("parameters", misspelt, "")},
		{name: "parameters misspelt as well", options: []claimOption{net, config(claims, misspelt, `{"vlna":7}`, nil)},
			refused: refused("parameters", misspelt, `, nor can they be read: unknown field "vlna", allowed are addresses, driver, network, podIfName, rdma, routes, vhost and vlan`)},
		{name: "an alternative's", options: []claimOption{with("net/a", "a"), config(claims, other, `{"vlan":7}`, []string{"net/b"})}, warned: ignored(other)},
		{name: "the same for two drivers", options: []claimOption{net, fromClaim(`{"vlan":7}`), config(claims, other, `{"vlan":8}`, nil)}, warned: ignored(other)},
		{name: "a network by name and by number", options: []claimOption{net, fromClaim(`{"network":"blue"}`), config(claims, other, `{"vlan":8}`, nil)},
			warned: ignored(other)},
		{name: "no VLAN by intention", options: []claimOption{net, fromClaim(`{"vlan":0}`), config(claims, other, `{"vlan":8}`, nil)}, warned: ignored(other)},
		{name: "nothing", options: []claimOption{net, config(claims, misspelt, `{}`, nil)}, warned: ignored(misspelt)},
		{name: "another driver's", options: []claimOption{net, config(claims, other, `{"apiVersion":"v1","vlan":7}`, nil)}, warned: ignored(other)},
		{name: "another request's", options: []claimOption{net, config(claims, misspelt, `{"vlan":7}`, []string{"gpu"})}, warned: ignored(misspelt)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, "a", "b")
			f.networks.networks["blue"] = &types.Network{}
			_, err := f.Prepare(t.Context(), newClaim("c", tt.options...))
			var events []string
			if said := tt.refused + tt.warned; said != "" {
				events = []string{"c, pod-c: ParametersIgnored: " + said}
			}
			require.Equal(t, events, f.host.takeEvents())
			if tt.refused == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tt.refused)
			require.True(t, IsPermanent(err))
			require.Empty(t, f.host.takeCalls(), "nothing is touched")
		})
	}
}

// A pod that has its devices, from before such claims were refused, is not ended when kubelet asks again.
func TestMisdirectedConfigsOfARunningPod(t *testing.T) {
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a")))
	require.NoError(t, err)
	_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), config(resourceapi.AllocationConfigSourceClaim, "x.example.com", `{"vlan":7}`, nil)))
	require.NoError(t, err)
	require.Len(t, f.host.takeEvents(), 1)
}

func TestNearlySame(t *testing.T) {
	for b, want := range map[string]bool{
		testDriver: true, "networkdrivr.cilium.io": true, "netwrokdriver.cilium.io": true, "networkdriver.cilium.oi": true, "network-driver.cilium.io": true,
		"networkdrivers.cilium.iox": true, "netdriver.cilium.io": false, "": false, "networkdriver": false, strings.Repeat("x", len(testDriver)): false,
	} {
		require.Equal(t, want, nearlySame(testDriver, b), b)
		require.Equal(t, want, nearlySame(b, testDriver), b)
	}
}
