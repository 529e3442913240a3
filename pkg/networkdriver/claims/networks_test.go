// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// TestMayAsk is what claims may ask of pools' devices, whatever their class asks.
func TestMayAsk(t *testing.T) {
	var set netipx.IPSetBuilder
	set.AddPrefix(netip.MustParsePrefix("192.0.2.0/24"))
	given, err := set.IPSet()
	require.NoError(t, err)
	storage := &types.Network{Offer: &types.Offer{Subnets: []types.Subnet{{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Addresses: given}}}}
	for _, tt := range []struct{ rule, claim, err string }{
		{v2alpha1.ClaimsAny, `{"vlan":5,"podIfName":"net1"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"podIfName":"net1"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"network":"storage"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"vlan":0}`, `request "net": parameters: vlan: claims may not choose the VLAN of devices of pool pool (its claims field is NetworkOnly): ` +
			`name a network, allowed are network, addresses of it and podIfName`},
		{v2alpha1.ClaimsNetworkOnly, `{"network":"storage","addresses":["192.0.2.10"]}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"addresses":["192.0.2.10/24"]}`, `request "net": parameters: addresses: claims may not choose the addresses of devices of pool pool ` +
			`(its claims field is NetworkOnly): name a network, allowed are network, addresses of it and podIfName`},
		{v2alpha1.ClaimsNetworkOnly, `{"routes":[{"to":"2001:db8::/32","via":"fe80::1"}]}`, `request "net": parameters: routes: claims may not choose the routes of devices of pool pool ` +
			`(its claims field is NetworkOnly): name a network, allowed are network, addresses of it and podIfName`},
		{v2alpha1.ClaimsAny, `{"driver":"vfio-pci"}`, ""},
		{v2alpha1.ClaimsNetworkOnly, `{"driver":"vfio-pci"}`, `request "net": parameters: driver: claims may not have programs drive devices of pool pool ` +
			`(its claims field is NetworkOnly): leave driver, rdma and vhost to the device class, allowed are network, addresses of it and podIfName`},
		{v2alpha1.ClaimsNone, `{}`, ""},
		{v2alpha1.ClaimsNone, `{"podIfName":"net1"}`, `request "net": parameters: claims may not have parameters for devices of pool pool (its claims field is None): ` +
			`their device class says what they are`},
		{"", `{}`, ""},
		{"", `{"vlan":5}`, `request "net": parameters: pool pool is not configured on this node any more, so that nothing says what claims may ask of its devices`},
	} {
		t.Run(tt.rule+tt.claim, func(t *testing.T) {
			f := newFixture(t, "a")
			f.networks.rules["pool"], f.networks.networks["storage"] = tt.rule, storage
			_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClaim(tt.claim)))
			if tt.err == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, "prepare claim default/c: "+tt.err)
			require.Empty(t, f.host.takeCalls(), "nothing is touched")
			f.networks.classes["class"] = []string{tt.claim}
			_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClass(tt.claim)))
			require.NoError(t, err, "a class may ask for it")
		})
	}
}

// TestForgedClass gives nobody what only the claim's allocation says that the device class has: whoever may write the claim's status may
// write allocations. Where claims may ask for anything the class is not read.
func TestForgedClass(t *testing.T) {
	for _, rule := range []string{v2alpha1.ClaimsNetworkOnly, v2alpha1.ClaimsNone, ""} {
		f := newFixture(t, "a", "b")
		f.networks.rules["pool"] = rule
		f.networks.classes["class"] = []string{`{"podIfName":"net1"}`, `{ "vlan": 5 }`}
		f.networks.classes["other"] = []string{`{"vlan":6}`}
		forged := newClaim("c", with("net", "a"), withClass("more", "b", "other"), fromClass(`{"podIfName":"net1"}`, "net"), fromClass(`{"vlan":6}`, "net"))
		_, err := f.Prepare(t.Context(), forged)
		require.EqualError(t, err, `prepare claim default/c: request "net": parameters from the device class: "{\"vlan\":6}" is in the claim's allocation, and device class `+
			`class does not have it: the class was changed since, or the allocation is not the scheduler's; delete the pods that use the claim, so that it is allocated anew`)
		require.Empty(t, f.host.takeCalls(), "nothing is touched")

		// As the class has it, but for blanks; each class is read once.
		good := newClaim("c", with("net/s", "a"), withClass("more", "b", "other"), fromClass(`{"podIfName":"net1"}`, "net"), fromClass(`{"vlan":5}`, "net/s"), fromClass(`{"vlan":6}`, "more"))
		f.networks.read = 0
		_, err = f.Prepare(t.Context(), good)
		require.NoError(t, err)
		require.Equal(t, 2, f.networks.read)
		require.Equal(t, []int{5, 6}, []int{f.row("a").Config.VLAN(), f.row("b").Config.VLAN()})
		// What is prepared stays.
		delete(f.networks.classes, "class")
		_, err = f.Prepare(t.Context(), good)
		require.NoError(t, err)
		require.NoError(t, f.Unprepare(t.Context(), good.UID))
		_, err = f.Prepare(t.Context(), good)
		require.ErrorContains(t, err, `"class" not found`)

		f.networks.classes["class"] = []string{`{"podIfName":"net1"}`, `{"vlan":5}`}
		f.networks.away = []error{errors.New("connection refused")}
		_, err = f.Prepare(t.Context(), good)
		require.ErrorContains(t, err, "connection refused")
		require.False(t, IsPermanent(err))
		_, err = f.Prepare(t.Context(), good)
		require.NoError(t, err)
	}
	f := newFixture(t, "a")
	_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClass(`{"vlan":6}`)))
	require.NoError(t, err)
	require.Zero(t, f.networks.read)
}

// TestHandOverIsJudgedAnew gives the next pod of a claim nothing that it may not have by now, and asks again when nobody answered.
func TestHandOverIsJudgedAnew(t *testing.T) {
	h := newHandedOver(t, "a")
	storage := &types.Network{VLAN: 7}
	h.networks.networks["storage"] = storage
	var log testenv.LogBuffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	joins := []claimOption{with("net", "a"), fromClaim(`{"network":"storage"}`)}
	first := h.prepareAndRun(newClaim("c", append(joins, forPod("first"))...), "first", "s1")
	h.host.run("second", "s2")
	h.host.stop("s1")
	require.NoError(t, h.Room.Detach(t.Context(), first))
	h.set(newClaim("c", append(joins, forPod("second"))...))

	delete(h.networks.networks, "storage")
	h.host.takeCalls()
	h.wait(15)
	require.Equal(t, first.PodUID, h.row("a").PodUID)
	require.Empty(t, h.host.takeCalls(), "nothing is touched")
	require.Contains(t, log.String(), "network storage: there is none")
	require.Contains(t, h.host.takeEvents(), "second: FailedPrepare: prepare claim default/c: network storage: there is none")

	h.networks.networks["storage"] = storage
	h.networks.away = []error{errors.New("connection refused")}
	h.wait(25)
	require.Contains(t, log.String(), "connection refused")
	require.Equal(t, "uid-second", string(h.row("a").PodUID))
	require.Equal(t, "Attached", h.row("a").State())
}

// TestRestoreAsks believes no record, without a journal, of what the claim may not ask for, and waits for whoever has to say that.
func TestRestoreAsks(t *testing.T) {
	for name, tt := range map[string]struct {
		rule    string
		options []claimOption
		away    bool
		log     string
	}{
		"anything":       {v2alpha1.ClaimsAny, []claimOption{fromClaim(parameters)}, false, ""},
		"no such pool":   {"", []claimOption{fromClaim(parameters)}, false, ""},
		"not by a claim": {v2alpha1.ClaimsNetworkOnly, []claimOption{fromClaim(parameters)}, false, "vlan: claims may not choose the VLAN"},
		"no such class":  {v2alpha1.ClaimsNone, []claimOption{fromClass(`{"vlan":5,"podIfName":"net1" }`)}, false, "does not have it"},
		"by its class":   {v2alpha1.ClaimsNone, []claimOption{fromClass(parameters)}, true, ""},
		"not understood": {v2alpha1.ClaimsNone, []claimOption{fromClaim(`{"mtu":9000}`)}, false, "unknown field"},
	} {
		t.Run(name, func(t *testing.T) {
			claim := newClaim("c", append([]claimOption{forPod("p"), with("net", "a"), recorded("a", goodRecord("a", "p"))}, tt.options...)...)
			r := newRestored(t, newFakeAPI(claim))
			r.networks.rules["pool"] = tt.rule
			r.networks.classes["class"] = []string{`{"vlan":6}`}
			if tt.log == "" {
				r.networks.classes["class"] = []string{parameters}
			}
			if tt.away {
				r.networks.away = []error{errors.New("connection refused")}
			}
			require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
			require.Equal(t, tt.away, r.log.Count("cannot be compared; the driver starts when it could be") == 1)
			if tt.log == "" {
				require.Equal(t, 5, r.row("a").Config.VLAN())
				return
			}
			require.Empty(t, r.rows())
			require.Contains(t, r.log.String(), tt.log)
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
	claim.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "nets"}
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "nets", f.row("b").PodClaim)
	require.Empty(t, f.row("a").PodClaim, "an agent that knows no drivers can read its journal entry")
	require.Empty(t, ifName(f.row("b").Config, f.row("b").PreparedDevice))

	record := changed(func(r *types.Record) {
		r.Version, r.Config = types.RecordVersionDriver, types.DeviceConfig{Driver: types.DriverVFIO}
	})
	claim = newClaim("c", forPod("p"), with("net", "a"), fromClaim(`{"driver":"vfio-pci"}`), recorded("a", record))
	claim.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "nets"}
	r := newRestored(t, newFakeAPI(claim))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Equal(t, "nets", r.row("a").PodClaim)
}

// TestPrepareForExtendedResource tells programs of a pod that knows nothing of claims by the resource that it asked for, as a device
// plugin did.
func TestPrepareForExtendedResource(t *testing.T) {
	f := newFixture(t, "a", "b", "c")
	f.networks.classes["red"], f.networks.classes["blue"] = nil, nil
	f.networks.resources = map[string]string{"red": "example.com/vf"}
	claim := newClaim("c", withClass("container-0-request-0", "a", "red"), withClass("container-1-request-0", "b", "blue"), withClass("container-1-request-1", "c", "red"),
		fromClass(`{"rdma":true}`, "container-0-request-0"), fromClass(`{"driver":"vfio-pci"}`, "container-1-request-0"))
	claim.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	f.networks.away = []error{errors.New("connection refused")}
	_, err := f.Prepare(t.Context(), claim)
	require.ErrorContains(t, err, "connection refused")
	require.False(t, IsPermanent(err))
	require.Empty(t, f.host.takeCalls())
	_, err = f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, "example.com/vf", f.row("a").PodClaim)
	require.Equal(t, "deviceclass.resource.kubernetes.io/blue", f.row("b").PodClaim, "a class without a resource of its own")
	require.Empty(t, f.row("c").PodClaim, "no program opens it")

	record := changed(func(r *types.Record) {
		r.Version, r.Config = types.RecordVersionRDMA, types.DeviceConfig{RDMA: true}
	})
	claim = newClaim("c", forPod("p"), with("container-0-request-0", "a"), fromClass(`{"rdma":true}`), recorded("a", record))
	claim.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(podWith("p"), corev1.SchemeGroupVersion.WithKind("Pod"))}
	r := newRestored(t, newFakeAPI(claim))
	pod := podWith("p")
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "c", RequestMappings: []corev1.ContainerExtendedResourceRequest{
		{ContainerName: "app", ResourceName: "example.com/other", RequestName: "container-0-request-1"},
		{ContainerName: "app", ResourceName: "example.com/vf", RequestName: "container-0-request-0"},
	}}
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{pod}))
	require.Equal(t, "example.com/vf", r.row("a").PodClaim)
}

// TestRestoreImpossible does not believe a record of what its device cannot have been prepared for.
func TestRestoreImpossible(t *testing.T) {
	record := goodRecord("dummy0", "p")
	r := newRestored(t, newFakeAPI(newClaim("c", forPod("p"), with("net", "dummy0"), fromClaim(parameters), recorded("dummy0", record))))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Empty(t, r.rows())
	require.Contains(t, r.log.String(), "the device cannot have been prepared for the record's configuration: vlan: a dummy device has no VLAN filter")
}

// TestPrepareCertainAddresses asks for addresses of a network, and refuses those that it does not give before anything is touched.
func TestPrepareCertainAddresses(t *testing.T) {
	subnet := netip.MustParsePrefix("192.0.2.0/24")
	var set netipx.IPSetBuilder
	set.AddPrefix(subnet)
	given, err := set.IPSet()
	require.NoError(t, err)
	f := newFixture(t, "a", "b")
	f.networks.networks["storage"] = &types.Network{Offer: &types.Offer{Subnets: []types.Subnet{{Prefix: subnet, Addresses: given}}}}
	_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClaim(`{"network":"storage","addresses":["198.51.100.1"]}`)))
	require.EqualError(t, err, `prepare claim default/c: request "net": network storage: parameters: addresses[0]: 198.51.100.1 is in none of the network's subnets for this node: `+
		`allowed are addresses of 192.0.2.0/24 (permanent: trying again does not help)`)
	require.Empty(t, f.host.takeCalls())
	for _, parameters := range []string{`{"network":"storage","addresses":["192.0.2.10"]}`, `{"addresses":["192.0.2.10/24"]}`} {
		_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), with("other", "b"), fromClaim(parameters)))
		require.EqualError(t, err, `prepare claim default/c: request "other": parameters: addresses: 192.0.2.10 is also what request "net" asks for `+
			`(permanent: trying again does not help)`)
		require.Empty(t, f.host.takeCalls())
	}
	_, err = f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClaim(`{"network":"storage","addresses":["192.0.2.10"]}`)))
	require.NoError(t, err)
	require.Equal(t, addresses("192.0.2.10"), f.row("a").Config.Addresses)
	require.True(t, f.row("a").Config.Joined.Offer.Subnets[0].Certain, "nothing else is to be chosen")
}

// TestPrepareReserves tells the devices of a pod apart by what is the same for the next pod of the name, whatever its claim is called
// and which alternative and devices it is allotted.
func TestPrepareReserves(t *testing.T) {
	made := func(c *resourceapi.ResourceClaim) {
		c.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "nics"}
	}
	for name, tt := range map[string]struct {
		claim *resourceapi.ResourceClaim
		of    string
	}{
		"made from a template": {newClaim("db-0-nics-x7k2p", made, with("net", "b"), with("net", "a"), with("other/vf", "c"), fromClaim(`{"network":"storage"}`)), "nics"},
		"named":                {newClaim("c", with("net", "b"), with("net", "a"), with("other/dummy", "c"), fromClaim(`{"network":"storage"}`)), "c"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "c")
			f.networks.networks["storage"] = &types.Network{Offer: &types.Offer{Reserve: true}}
			_, err := f.Prepare(t.Context(), tt.claim)
			require.NoError(t, err)
			for device, want := range map[string]v2alpha1.AddressReservation{
				"b": {Claim: tt.of, Request: "net"}, "a": {Claim: tt.of, Request: "net", Ordinal: 1}, "c": {Claim: tt.of, Request: "other"},
			} {
				require.Equal(t, &want, f.row(device).Config.Joined.Reservation)
			}
		})
	}
	f := newFixture(t, "a")
	f.networks.networks["storage"] = &types.Network{Offer: &types.Offer{}}
	_, err := f.Prepare(t.Context(), newClaim("c", with("net", "a"), fromClaim(`{"network":"storage"}`)))
	require.NoError(t, err)
	require.Nil(t, f.row("a").Config.Joined.Reservation, "of a network that keeps nothing")
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

// TestRestoreByHand takes addresses and routes of a record for the device's where the claim asks for them.
func TestRestoreByHand(t *testing.T) {
	const parameters = `{"addresses":["192.0.2.10/24"],"routes":[{"to":"10.0.0.0/8","via":"192.0.2.1","metric":7}]}`
	config, err := types.ParseDeviceConfig([]byte(parameters))
	require.NoError(t, err)
	record := changed(func(r *types.Record) { r.Version, r.Config = types.RecordVersionAddresses, config })
	for asked, log := range map[string]string{
		parameters:                        "",
		`{"addresses":["192.0.2.11/24"]}`: "the record's configuration is not what the claim asks for",
		`{"network":"storage"}`:           "the record's configuration is not what the claim asks for",
	} {
		r := newRestored(t, newFakeAPI(newClaim("c", forPod("p"), with("net", "a"), fromClaim(asked), recorded("a", record))))
		require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
		if log == "" {
			require.Equal(t, config, r.row("a").Config)
			continue
		}
		require.Empty(t, r.rows())
		require.Contains(t, r.log.String(), log)
	}
}

// TestPrepareEqualRoutes refuses, before anything is touched, devices of a pod that would have two routes to one destination in its
// main table.
func TestPrepareEqualRoutes(t *testing.T) {
	route := types.Route{To: netip.MustParsePrefix("10.0.0.0/8")}
	f := newFixture(t, "a", "b")
	f.networks.networks["storage"] = &types.Network{Offer: &types.Offer{Routes: []types.Route{route},
		Subnets: []types.Subnet{{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Gateway: netip.MustParseAddr("192.0.2.1")}}}}
	policy := *f.networks.networks["storage"]
	policy.PolicyRouting = true
	f.networks.networks["policy"] = &policy
	const storage = `{"network":"storage"}`
	const already = `routes: request "one" of claim default/c has one to 10.0.0.0/8 already, with the same metric; another metric is needed, or a network with policyRouting`
	byHand := func(metric string) string {
		return `{"addresses":["198.51.100.10/24"],"routes":[{"to":"10.0.0.0/8","via":"198.51.100.1","metric":` + metric + `}]}`
	}
	for name, tt := range map[string]struct {
		claim *resourceapi.ResourceClaim
		err   string
	}{
		"two devices of a request": {newClaim("c", with("net", "a"), with("net", "b"), fromClaim(storage)),
			`request "net": routes: two devices of this one request would have a route to 10.0.0.0/8; a network with policyRouting gives each a table of its own`},
		"with tables of their own": {newClaim("c", with("net", "a"), with("net", "b"), fromClaim(`{"network":"policy"}`)), ""},
		"two requests":             {newClaim("c", with("one", "a"), with("two", "b"), fromClaim(storage)), `request "two": ` + already},
		"one of them by hand":      {newClaim("c", with("one", "a"), with("two", "b"), fromClaim(storage, "one"), fromClaim(byHand("0"), "two")), `request "two": ` + already},
		"another metric":           {newClaim("c", with("one", "a"), with("two", "b"), fromClaim(storage, "one"), fromClaim(byHand("7"), "two")), ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := f.Prepare(t.Context(), tt.claim)
			if tt.err == "" {
				require.NoError(t, err)
				require.NoError(t, f.Unprepare(t.Context(), tt.claim.UID))
				f.host.takeCalls()
				return
			}
			require.EqualError(t, err, "prepare claim default/c: "+tt.err+" (permanent: trying again does not help)")
			require.Empty(t, f.host.takeCalls())
		})
	}
	t.Run("two claims", func(t *testing.T) {
		_, err := f.Prepare(t.Context(), newClaim("c", forPod("p"), with("one", "a"), fromClaim(byHand("0"))))
		require.NoError(t, err)
		f.host.takeCalls()
		_, err = f.Prepare(t.Context(), newClaim("d", forPod("p"), with("two", "b"), fromClaim(storage)))
		require.EqualError(t, err, `prepare claim default/d: request "two": `+already+" (permanent: trying again does not help)")
		require.Empty(t, f.host.takeCalls())
		_, err = f.Prepare(t.Context(), newClaim("d", forPod("q"), with("two", "b"), fromClaim(storage)))
		require.NoError(t, err, "another pod has another table")
	})
}
