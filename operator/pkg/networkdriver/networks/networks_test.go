// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/wires"
)

func network(name string, age int, vlan int32, pools []string, cidrs ...string) v2alpha1.CiliumNetworkDriverNetwork {
	n := v2alpha1.CiliumNetworkDriverNetwork{ObjectMeta: metav1.ObjectMeta{
		Name: name, Generation: 1, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0)),
	}}
	n.Spec = v2alpha1.CiliumNetworkDriverNetworkSpec{NamespaceSelector: &v2alpha1.LabelSelector{}, Vlan: vlan, Pools: pools}
	for _, cidr := range cidrs {
		n.Spec.Subnets = append(n.Spec.Subnets, v2alpha1.NetworkSubnet{CIDR: cidr})
	}
	return n
}

// none are no addresses.
func none(func(*address) bool) {}

// apart are wires of their own for all pools.
func apart([]string, []string) string { return "" }

func TestConflict(t *testing.T) {
	old := network("old", 9, 7, []string{"a", "b"}, "192.0.2.0/24", "2001:db8::/64")
	for name, tt := range map[string]struct {
		network v2alpha1.CiliumNetworkDriverNetwork
		with    string
	}{
		"overlap":          {network("n", 1, 7, []string{"b"}, "198.51.100.0/24", "192.0.2.128/25"), "192.0.2.128/25"},
		"all pools":        {network("n", 1, 7, nil, "192.0.0.0/16"), "192.0.0.0/16"},
		"IPv6":             {network("n", 1, 7, nil, "2001:db8::/48"), "2001:db8::/48"},
		"same age by name": {network("p", 9, 7, nil, "192.0.2.0/24"), "192.0.2.0/24"},
		"another VLAN":     {network("n", 1, 8, nil, "192.0.2.0/24"), ""},
		"other pools":      {network("n", 1, 7, []string{"c"}, "192.0.2.0/24"), ""},
		"other addresses":  {network("n", 1, 7, nil, "192.0.3.0/24"), ""},
		"no addresses":     {network("n", 1, 7, nil), ""},
		"older":            {network("n", 10, 7, nil, "192.0.2.0/24"), ""},
		"same age, lower":  {network("a", 9, 7, nil, "192.0.2.0/24"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := tt.network
			n.Status.ObservedGeneration = n.Generation
			message := n.Conflict([]v2alpha1.CiliumNetworkDriverNetwork{n, old}, apart)
			require.Equal(t, tt.with != "", strings.HasPrefix(message, "the older network old has addresses of "+tt.with+" too"), message)
			judge(&n, []v2alpha1.CiliumNetworkDriverNetwork{n, old}, none, apart)
			require.Equal(t, tt.with == "", meta.IsStatusConditionTrue(n.Status.Conditions, v2alpha1.ConditionReady))
			require.Equal(t, tt.with != "", meta.IsStatusConditionTrue(n.Status.Conditions, v2alpha1.ConditionNetworkConflicting))
		})
	}

	invalid := network("bad", 10, 7, nil, "192.0.2.0/24")
	invalid.Spec.Subnets[0].Gateway = "192.0.2.0"
	judge(&invalid, nil, none, apart)
	ready := meta.FindStatusCondition(invalid.Status.Conditions, v2alpha1.ConditionReady)
	require.Equal(t, reasonInvalid, ready.Reason)
	require.Contains(t, ready.Message, "spec.subnets[0].gateway")
	require.NotEmpty(t, old.Conflict([]v2alpha1.CiliumNetworkDriverNetwork{invalid}, apart), "pods may have its addresses from when it was valid")

	// What a pod still has of a network that is gone is nobody else's.
	left := func(vlan int32, pool string) *address {
		return &address{network: "gone", addr: netip.MustParseAddr("192.0.2.9"), vlan: vlan, pool: pool, namespace: "default", pod: "p"}
	}
	released := left(7, "a")
	released.released = time.Now()
	judge(&old, nil, slices.Values([]*address{left(7, "a")}), apart)
	require.Contains(t, meta.FindStatusCondition(old.Status.Conditions, v2alpha1.ConditionNetworkConflicting).Message,
		"pod default/p still has address 192.0.2.9, from network gone")
	for _, addresses := range [][]*address{nil, {left(8, "a")}, {left(7, "c")}, {released}} {
		judge(&old, nil, slices.Values(addresses), apart)
		require.True(t, meta.IsStatusConditionTrue(old.Status.Conditions, v2alpha1.ConditionReady))
	}
	require.Len(t, truncated(strings.Repeat("x", 5000)), 1024)
}

// Pools that have devices of one PF are one wire, over other pools too, whatever the networks list.
func TestConflictOnOneWire(t *testing.T) {
	old, young := network("old", 9, 7, []string{"a"}, "192.0.2.0/24"), network("young", 1, 7, []string{"c", "d"}, "192.0.2.128/25")
	all := []v2alpha1.CiliumNetworkDriverNetwork{old, young}
	conflict := func(n v2alpha1.CiliumNetworkDriverNetwork, table *wires.Table, addresses ...*address) string {
		judge(&n, all, slices.Values(addresses), table.Between)
		return meta.FindStatusCondition(n.Status.Conditions, v2alpha1.ConditionNetworkConflicting).Message
	}
	used := &address{network: "young", addr: netip.MustParseAddr("192.0.2.200"), vlan: 7, pool: "c", namespace: "default", pod: "p"}
	table := wires.NewTable()
	table.Set("n1", map[string][]string{"a": {"eth0"}, "b": {"eth0"}, "c": {"eth1"}, "d": {"eth1"}})
	require.Empty(t, conflict(young, table))
	require.Empty(t, conflict(old, table, used), "ports of their own")

	table.Set("n2", map[string][]string{"b": {"eth0"}, "c": {"eth0"}})
	require.Equal(t, "the older network old has addresses of 192.0.2.128/25 too, in the same VLAN and on one wire: "+
		"pools c and b have devices of PF eth0 on node n2, pools b and a have devices of PF eth0 on node n1", conflict(young, table))
	old.Status.ObservedGeneration = old.Generation
	require.Empty(t, conflict(old, table), "it is the older one")
	require.Equal(t, "pod default/p still has address 192.0.2.200, from network young, in the same VLAN and on one wire: "+
		"pools a and b have devices of PF eth0 on node n1, pools b and c have devices of PF eth0 on node n2", conflict(old, table, used))
	table.Set("n2", nil)
	require.Empty(t, conflict(young, table))
	require.Empty(t, conflict(old, table, used))
}

// Networks are looked at again when pools come to share PFs, or cease to, and not for anything else that is written to node configs.
func TestNodeConfigEvents(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, v2alpha1.AddToScheme(scheme))
	one, two := network("one", 1, 0, nil), network("two", 1, 0, nil)
	r := &statusReconciler{log: slog.New(slog.DiscardHandler), wires: wires.NewTable(), client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(&one, &two).Build()}
	q := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer q.ShutDown()
	h := r.nodeConfigs()
	told := func() (names []string) {
		for q.Len() > 0 {
			request, _ := q.Get()
			names = append(names, request.Name)
			q.Done(request)
		}
		slices.Sort(names)
		return names
	}
	config := func(devices int32, pfs ...string) *v2alpha1.CiliumNetworkDriverNodeConfig {
		c := &v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
		for i, pf := range pfs {
			c.Status.Pools = append(c.Status.Pools, v2alpha1.DevicePoolStatus{Name: string(rune('a' + i)), Devices: devices, PFs: []string{pf}})
		}
		return c
	}
	update := func(c *v2alpha1.CiliumNetworkDriverNodeConfig) []string {
		stripped, err := stripNodeConfig(c)
		require.NoError(t, err)
		h.Update(t.Context(), event.UpdateEvent{ObjectNew: stripped.(client.Object)}, q)
		return told()
	}
	both := []string{"one", "two"}
	h.Create(t.Context(), event.CreateEvent{Object: config(1, "eth0", "eth1")}, q)
	require.Empty(t, told(), "nothing is shared")
	require.Equal(t, both, update(config(1, "eth0", "eth0")))
	require.Empty(t, update(config(2, "eth0", "eth0")), "other numbers")
	require.Equal(t, both, update(config(2, "eth0", "eth1")))
	h.Delete(t.Context(), event.DeleteEvent{Object: config(2, "eth0", "eth1")}, q)
	require.Empty(t, told())
	h.Create(t.Context(), event.CreateEvent{Object: config(1, "eth0", "eth0")}, q)
	require.Equal(t, both, told())
	h.Delete(t.Context(), event.DeleteEvent{Object: config(1, "eth0", "eth0")}, q)
	require.Equal(t, both, told())
}

// On a network without a VLAN pods may tag, which whoever looks at it has to know.
func TestUntagged(t *testing.T) {
	for _, vlan := range []int32{0, 7} {
		n := network("n", 1, vlan, nil)
		judge(&n, nil, slices.Values[[]*address](nil), apart)
		c := meta.FindStatusCondition(n.Status.Conditions, v2alpha1.ConditionNetworkUntagged)
		require.NotNil(t, c)
		require.Equal(t, vlan == 0, c.Status == metav1.ConditionTrue)
		require.Equal(t, vlan == 0, strings.Contains(c.Message, "may tag them itself"))
		require.True(t, meta.IsStatusConditionTrue(n.Status.Conditions, v2alpha1.ConditionReady), "claims can join all the same")
	}
}

func TestCount(t *testing.T) {
	n := network("n", 1, 7, nil, "192.0.2.0/29", "2001:db8::/64", "198.51.100.0/31")
	var addresses []*address
	for _, addr := range []string{"192.0.2.1", "2001:db8::1", "192.0.2.2", "203.0.113.1"} {
		addresses = append(addresses, &address{addr: netip.MustParseAddr(addr)})
	}
	addresses = append(addresses, &address{addr: netip.MustParseAddr("192.0.2.3"), released: time.Now()})
	count(&n, slices.Values(addresses), 2)
	require.Equal(t, v2alpha1.CiliumNetworkDriverNetworkStatus{
		UsedAddresses: 4, ReservedAddresses: 1, Free: "5 IPv4, 2^64 IPv6", FreeAddresses: math.MaxInt64, Claims: 2,
		Subnets: []v2alpha1.NetworkSubnetStatus{
			{CIDR: "192.0.2.0/29", Used: 2, Reserved: 1, Free: 3}, {CIDR: "2001:db8::/64", Used: 1, Free: math.MaxInt64 - 1}, {CIDR: "198.51.100.0/31", Free: 2},
		},
	}, n.Status)
	count(&n, none, 0)
	require.Zero(t, n.Status.UsedAddresses)
	for cidr, free := range map[string]string{"10.0.0.0/8": "2^24 IPv4", "10.0.0.0/13": "524286 IPv4", "2001:db8::/112": "65535 IPv6", "2001:db8::/40": "2^88 IPv6"} {
		n := network("n", 1, 7, nil, cidr)
		count(&n, none, 0)
		require.Equal(t, free, n.Status.Free)
	}
}
