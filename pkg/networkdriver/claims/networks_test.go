// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// TestMayAsk is what claims may ask of pools' devices, whatever their class asks.
func TestMayAsk(t *testing.T) {
	for _, tt := range []struct{ rule, claim, err string }{
		{v2alpha1.ClaimsAny, `{"vlan":5,"podIfName":"net1"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"podIfName":"net1"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"network":"storage"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"vlan":0}`, `request "net": parameters: vlan: claims may not choose the VLAN of devices of pool pool (its claims field is NetworkOnly): ` +
			`name a network, allowed are network and podIfName`},
		{v2alpha1.ClaimsAny, `{"driver":"vfio-pci"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"driver":"vfio-pci"}`, `request "net": parameters: driver: claims may not have programs drive devices of pool pool ` +
			`(its claims field is NetworkOnly): leave driver and vhost to the device class, allowed are network and podIfName`},
		{v2alpha1.ClaimsNone, `{}`, ""},
		{v2alpha1.ClaimsNone, `{"podIfName":"net1"}`, `request "net": parameters: claims may not have parameters for devices of pool pool (its claims field is None): ` +
			`their device class says what they are`},
		{"", `{}`, ""},
		{"", `{"vlan":5}`, `request "net": parameters: pool pool is not configured on this node any more, so that nothing says what claims may ask of its devices`},
	} {
		t.Run(tt.rule+tt.claim, func(t *testing.T) {
			f := newFixture(t, "a")
			f.networks.rules["pool"], f.networks.networks["storage"] = tt.rule, &types.Network{}
			_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClaim(tt.claim)))
			if tt.err == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, "prepare claim default/c: "+tt.err)
			require.Empty(t, f.host.takeCalls(), "nothing is touched")
			_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClass(tt.claim)))
			require.NoError(t, err, "a class may ask for it")
		})
	}
}

// TestPrepareJoins gives devices what their networks say, once.
func TestPrepareJoins(t *testing.T) {
	f := newFixture(t, "a", "b")
	storage := &types.Network{VLAN: 7, MTU: 9000}
	f.networks.networks["storage"] = storage
	claim := newClaim("c", with("net", "a"), with("other", "b"), fromClaim(`{"network":"storage","podIfName":"net1"}`, "net"))
	want := types.DeviceConfig{Network: "storage", PodIfName: "net1", Joined: storage}
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, want, f.row("a").Config)
	require.Equal(t, types.DeviceConfig{}, f.row("b").Config)
	require.Equal(t, []networks.Query{{Network: "storage", Namespace: "default", Pool: "pool"}}, f.networks.queries)

	// What is prepared stays, whatever becomes of the network and of what claims may ask.
	f.host.takeCalls()
	delete(f.networks.networks, "storage")
	f.networks.rules["pool"] = v2alpha1.ClaimsNone
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, want, f.row("a").Config)
	require.Empty(t, f.host.takeCalls())

	f = newFixture(t, "a")
	_, err = f.Prepare(t.Context(), claim)
	require.EqualError(t, err, "prepare claim default/c: network storage: there is none")
	require.False(t, IsPermanent(err), "somebody may make it")
	require.Empty(t, f.host.takeCalls())
}

// TestPrepareForProgram prepares a device that a program drives itself: it takes no name in the pod, and the program is told of it by
// what the pod calls the claim.
func TestPrepareForProgram(t *testing.T) {
	f := newFixture(t, "a", "b")
	claim := newClaim("c", with("net", "a"), with("user", "b"), fromClaim(`{"podIfName":"net1"}`, "net"), fromClaim(`{"driver":"vfio-pci","vlan":5}`, "user"))
	claim.Annotations = map[string]string{podClaimAnnotation: "nets"}
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "nets", f.row("b").PodClaim)
	require.Empty(t, f.row("a").PodClaim, "an agent that knows no drivers can read its journal entry")
	require.Empty(t, ifName(f.row("b").Config, f.row("b").PreparedDevice))

	record := changed(func(r *types.Record) {
		r.Version, r.Config = types.RecordVersionDriver, types.DeviceConfig{Driver: types.DriverVFIO}
	})
	claim = newClaim("c", forPod("p"), with("net", "a"), fromClaim(`{"driver":"vfio-pci"}`), recorded("a", record))
	claim.Annotations = map[string]string{podClaimAnnotation: "nets"}
	r := newRestored(t, newFakeAPI(claim))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Equal(t, "nets", r.row("a").PodClaim)
}

// TestRestoreImpossible does not believe a record of what its device cannot have been prepared for.
func TestRestoreImpossible(t *testing.T) {
	record := goodRecord("dummy0", "p")
	r := newRestored(t, newFakeAPI(newClaim("c", forPod("p"), with("net", "dummy0"), fromClaim(parameters), recorded("dummy0", record))))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Empty(t, r.rows())
	require.Contains(t, r.log.String(), "the device cannot have been prepared for the record's configuration: vlan: a dummy device has no VLAN filter")
}

// TestNetworkChangesBetweenTries frees what a failed try has left by what that was for.
func TestNetworkChangesBetweenTries(t *testing.T) {
	f := newFixture(t, "a")
	f.networks.networks["storage"] = &types.Network{VLAN: 7}
	claim := newClaim("c", with("net", "a"), fromClaim(`{"network":"storage"}`))
	errTest := errors.New("test")
	f.status.fail, f.host.fail["free a"] = errTest, errTest
	_, err := f.Prepare(t.Context(), claim)
	require.ErrorIs(t, err, errTest)
	require.True(t, f.row("a").Releasing)

	f.status.fail, f.host.fail = nil, map[string]error{}
	f.host.takeCalls()
	f.networks.networks["storage"] = &types.Network{VLAN: 8}
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, 8, f.row("a").Config.VLAN())
	require.Equal(t, []string{"return a", "free a", "setup a"}, f.host.takeCalls())
}

// TestRestoreNetwork believes a record's network without a journal only where it is what the network is: whoever may write a
// claim's status may write any VLAN.
func TestRestoreNetwork(t *testing.T) {
	record := changed(func(r *types.Record) {
		r.Version = types.RecordVersionNetwork
		r.Config = types.DeviceConfig{Network: "storage", Joined: &types.Network{VLAN: 7}}
	})
	for name, tt := range map[string]struct {
		network *types.Network
		asked   string
		log     string
	}{
		"the same":      {&types.Network{VLAN: 7}, `{"network":"storage"}`, ""},
		"another":       {&types.Network{VLAN: 8}, `{"network":"storage"}`, "the record has network storage other than it is"},
		"gone":          {nil, `{"network":"storage"}`, "the record's network cannot be compared: network storage: there is none"},
		"not asked for": {&types.Network{VLAN: 7}, `{"network":"other"}`, "the record's configuration is not what the claim asks for"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRestored(t, newFakeAPI(newClaim("c", forPod("p"), with("net", "a"), fromClaim(tt.asked), recorded("a", record))))
			if tt.network != nil {
				r.networks.networks["storage"] = tt.network
			}
			require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
			if tt.log == "" {
				require.Equal(t, 7, r.row("a").Config.VLAN())
				require.Empty(t, r.networks.left)
				return
			}
			require.Empty(t, r.rows())
			require.Equal(t, []string{"uid-c a"}, r.networks.left, "its pod may use the addresses that it has")
			require.Contains(t, r.log.String(), tt.log)
		})
	}
}
