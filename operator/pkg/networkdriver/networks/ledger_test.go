// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// addressObject is an address that a claim of its node has.
func addressObject(network, addr, node, claim string) *v2alpha1.CiliumNetworkDriverAddress {
	return &v2alpha1.CiliumNetworkDriverAddress{
		ObjectMeta: metav1.ObjectMeta{Name: network + "." + addr, Labels: map[string]string{v2alpha1.LabelNetwork: network}},
		Spec: v2alpha1.CiliumNetworkDriverAddressSpec{
			Network: network, Address: addr, State: v2alpha1.AddressInUse, Node: node, Namespace: "default", Request: "net", Device: "vf0",
			Claim: v2alpha1.AddressOwner{Name: claim, UID: claim}, Pod: v2alpha1.AddressOwner{Name: "pod-" + claim, UID: "pod-" + claim},
		},
	}
}

// reserve has it kept for its pod, and released if it was at a time.
func reserve(a *v2alpha1.CiliumNetworkDriverAddress, released time.Time) *v2alpha1.CiliumNetworkDriverAddress {
	a.Spec.Reservation = v2alpha1.AddressReservation{Claim: "net", Request: "net"}
	if !released.IsZero() {
		a.Spec.State, a.Spec.ReleasedAt = v2alpha1.AddressReleased, metav1.NewTime(released)
	}
	return a
}

// TestLedger counts what comes, goes, changes and is listed anew, and tells whom it concerns.
func TestLedger(t *testing.T) {
	l := newLedger()
	told := map[string]int{}
	l.subscribers = append(l.subscribers, func(a *address) { told[a.network+" "+a.node]++ })
	names := func(network string) (names []string) {
		for a := range l.ofNetwork(network) {
			names = append(names, a.name)
		}
		slices.Sort(names)
		return names
	}
	require.False(t, l.ready())
	require.NoError(t, l.Replace([]any{addressObject("a", "192.0.2.1", "n1", "c"), addressObject("a", "192.0.2.2", "n1", "c"), addressObject("b", "192.0.2.1", "n2", "d")}, "1"))
	require.True(t, l.ready())
	require.Equal(t, []string{"a.192.0.2.1", "a.192.0.2.2"}, names("a"))
	require.Equal(t, 1, l.claimsOf("a"))
	require.Len(t, l.usedOn("n1"), 2)
	require.Equal(t, map[string]int{"a n1": 2, "b n2": 1}, told)

	// One is released, and taken over by another node.
	clear(told)
	ahead := time.Now().Add(time.Hour)
	require.NoError(t, l.Update(reserve(addressObject("a", "192.0.2.1", "n1", "c"), ahead)))
	require.Len(t, l.usedOn("n1"), 1)
	require.Equal(t, 1, l.claimsOf("a"))
	require.True(t, l.byName["a.192.0.2.1"].released.Before(ahead), "a clock that is ahead keeps nothing for longer")
	require.NoError(t, l.Update(reserve(addressObject("a", "192.0.2.1", "n2", "e"), time.Time{})))
	require.Equal(t, 2, l.claimsOf("a"))
	require.Len(t, l.usedOn("n2"), 2)
	require.Equal(t, map[string]int{"a n1": 3, "a n2": 1}, told)

	require.NoError(t, l.Delete(addressObject("a", "192.0.2.2", "n1", "c")))
	require.Equal(t, []string{"a.192.0.2.1"}, names("a"))
	require.Empty(t, l.usedOn("n1"))
	clear(told)
	require.NoError(t, l.Replace([]any{addressObject("b", "192.0.2.1", "n2", "d")}, "2"))
	require.Equal(t, map[string]int{"a n2": 1, "b n2": 2}, told, "those that are gone too")
	require.Empty(t, names("a"))
	require.NoError(t, l.Delete(addressObject("b", "192.0.2.1", "n2", "d")))
	require.Zero(t, len(l.byName)+len(l.byNetwork)+len(l.byNode)+len(l.claims), "nothing is left")
}

// BenchmarkLedger counts the addresses of a network, as a change of one of them makes it, and says what an address costs.
func BenchmarkLedger(b *testing.B) {
	const hosts = 101000
	l := newLedger()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range hosts {
		a := addressObject("storage", fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), fmt.Sprint("node", i%1000), fmt.Sprint("claim", i))
		a.UID, a.ResourceVersion = types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", i)), fmt.Sprint(i)
		if err := l.Update(a); err != nil {
			b.Fatal(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	n := network("storage", 0, 7, nil, "10.0.0.0/8")
	for b.Loop() {
		count(&n, l.ofNetwork("storage"), l.claimsOf("storage"))
		judge(&n, nil, l.ofNetworks(func(name string) bool { return name != "storage" }), apart)
	}
	if n.Status.UsedAddresses != hosts {
		b.Fatal(n.Status.UsedAddresses)
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/hosts, "heap-B/address")
}
