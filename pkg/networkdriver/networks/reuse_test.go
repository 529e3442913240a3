// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// podRow is a row of a claim that is made for a pod, of a network that keeps addresses.
func podRow(pod, claim string, subnets ...types.Subnet) *tables.DRAAllocation {
	row := rowFor(claim, subnets...)
	row.PodName = pod
	row.Config.Joined.Offer.Reserve = true
	row.Config.Joined.Reservation = &v2alpha1.AddressReservation{Claim: "net", Request: "net"}
	return row
}

// release has the node give back what the row has.
func (n *node) release(t *testing.T, row *tables.DRAAllocation) {
	require.NoError(t, n.note(row.With(func(r *tables.DRAAllocation) { r.Releasing = true })))
	n.Return(t.Context(), row)
	n.forget(row)
}

// TestReuse gives a pod its addresses again, on another node, by one list and one write for each, and nobody else.
func TestReuse(t *testing.T) {
	objects := newObjects()
	one, two := newNode(objects, "node1"), newNode(objects, "node2")
	subnets := []types.Subnet{subnet(t, "192.0.2.0/30", ""), subnet(t, "2001:db8::/64", "")}
	first, err := one.Take(t.Context(), podRow("db-0", "first", subnets...), one.note)
	require.NoError(t, err)
	one.release(t, first)
	require.Len(t, objects.names(), 2)
	for _, object := range objects.objects {
		require.Equal(t, v2alpha1.AddressReleased, object.Spec.State)
		require.False(t, object.Spec.ReleasedAt.IsZero())
		require.Equal(t, "node1", object.Spec.Node)
	}
	require.NoError(t, one.compare(t.Context()))
	require.Len(t, objects.names(), 2, "what is released is no device's, and stays")
	require.Error(t, one.Holds(t.Context(), first))

	other, err := two.Take(t.Context(), podRow("db-1", "other", subnets...), two.note)
	require.NoError(t, err)
	require.NotEqual(t, first.Config.Joined.Addresses, other.Config.Joined.Addresses)
	_, err = two.Take(AtOnce(t.Context()), podRow("db-2", "more", subnets...), two.note)
	require.ErrorIs(t, err, errFull, "one of two is used, the other one is kept")

	objects.calls = nil
	second := podRow("db-0", "second", subnets...)
	second.DeviceName, second.Pool, second.Request = "vf5", "other-pool", "net/vf"
	objects.answer = func(call string, done bool) error {
		if name, ok := strings.CutPrefix(call, "update "); ok && !done {
			addr := netip.MustParseAddr(objects.objects[name].Spec.Address)
			require.True(t, two.inUse(two.object(second, addr), addr), "the journal knew it first")
		}
		return nil
	}
	again, err := two.Take(t.Context(), second, two.note)
	require.NoError(t, err)
	require.Equal(t, first.Config.Joined.Addresses, again.Config.Joined.Addresses)
	require.NoError(t, two.Holds(t.Context(), again))
	require.Len(t, objects.calls, 3+2, "%v", objects.calls)
	require.Equal(t, "reserved storage", objects.calls[0])
	object := objects.objects[v2alpha1.AddressName("storage", first.Config.Joined.Addresses[0].Addr())]
	require.Equal(t, two.object(again, first.Config.Joined.Addresses[0].Addr()).Spec, object.Spec)
	require.Equal(t, one.object(first, first.Config.Joined.Addresses[0].Addr()).Labels, object.Labels)

	// The former node comes back and gives back what it once had.
	one.release(t, first)
	require.NoError(t, one.compare(t.Context()))
	require.NoError(t, two.Holds(t.Context(), again))
}

// TestReuseWaits has the pod wait for its own address while another node has it for the former pod, with a message that names node and
// claim, although there are others.
func TestReuseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		one, two := newNode(objects, "node1"), newNode(objects, "node2")
		s := subnet(t, "192.0.2.0/24", "")
		first, err := one.Take(t.Context(), podRow("db-0", "first", s), one.note)
		require.NoError(t, err)
		addr := first.Config.Joined.Addresses[0].Addr()

		start := time.Now()
		_, err = two.Take(t.Context(), podRow("db-0", "second", s), two.note)
		require.ErrorIs(t, err, errHeld)
		require.EqualError(t, err, fmt.Sprintf("network storage: address %s is kept for the pod and is not released yet: node node1 has it for claim default/first; "+
			"if that node is gone for good, delete the Node or taint it node.kubernetes.io/out-of-service", addr))
		require.InDelta(t, fullPatience.Seconds(), time.Since(start).Seconds(), 5)
		require.Equal(t, []string{"default/db-0: " + err.Error()}, two.told, "once, when it begins to wait")
		require.Len(t, objects.names(), 1)
		start = time.Now()
		_, err = two.Take(AtOnce(t.Context()), podRow("db-0", "second", s), two.note)
		require.ErrorIs(t, err, errHeld)
		require.Zero(t, time.Since(start))

		time.AfterFunc(10*time.Second, func() { one.release(t, first) })
		second, err := two.Take(t.Context(), podRow("db-0", "second", s), two.note)
		require.NoError(t, err)
		require.Equal(t, first.Config.Joined.Addresses, second.Config.Joined.Addresses)

		// The same on one node, and for several devices of a pod.
		next, err := one.Take(t.Context(), podRow("db-0", "third", s).With(func(r *tables.DRAAllocation) {
			joined := *r.Config.Joined
			joined.Reservation = &v2alpha1.AddressReservation{Claim: "net", Request: "net", Ordinal: 1}
			r.Config.Joined = &joined
		}), one.note)
		require.NoError(t, err)
		require.NotEqual(t, addr, next.Config.Joined.Addresses[0].Addr())
		_, err = two.Take(AtOnce(t.Context()), podRow("db-0", "third", s), two.note)
		require.ErrorIs(t, err, errHeld)
		two.release(t, second)
		_, err = two.Take(t.Context(), podRow("db-0", "third", s), two.note)
		require.NoError(t, err)
	})
}

// TestReuseRaced has two nodes take an address for a pod that do not see each other's at first: the same is chosen, and one of them
// waits. An address that was released to another one meanwhile is not taken from it.
func TestReuseRaced(t *testing.T) {
	objects := newObjects()
	one, two := newNode(objects, "node1"), newNode(objects, "node2")
	s := subnet(t, "192.0.2.0/24", "")
	var first *tables.DRAAllocation
	meanwhile := func() {
		objects.mu.Unlock()
		defer objects.mu.Lock()
		var err error
		first, err = one.Take(t.Context(), podRow("db-0", "first", s), one.note)
		require.NoError(t, err)
	}
	once := func(prefix string) {
		objects.answer = func(call string, done bool) error {
			if done && strings.HasPrefix(call, prefix) {
				objects.answer = nil
				meanwhile()
			}
			return nil
		}
	}
	once("reserved")
	_, err := two.Take(AtOnce(t.Context()), podRow("db-0", "second", s), two.note)
	require.ErrorIs(t, err, errHeld)
	require.Len(t, objects.names(), 1)

	one.release(t, first)
	once("reserved")
	_, err = two.Take(AtOnce(t.Context()), podRow("db-0", "second", s), two.note)
	require.ErrorIs(t, err, errHeld)
	require.NoError(t, one.Holds(t.Context(), first))
	require.Len(t, objects.names(), 1)
}

// TestReuseElsewhere takes another address where the kept one is not given out: on a node with subnets of its own, or since the
// network has changed. Each stays for where it is.
func TestReuseElsewhere(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	here, there := subnet(t, "192.0.2.0/24", ""), subnet(t, "198.51.100.0/24", "")
	first, err := n.Take(t.Context(), podRow("db-0", "first", here), n.note)
	require.NoError(t, err)
	second, err := n.Take(t.Context(), podRow("db-0", "second", there), n.note)
	require.NoError(t, err, "it does not wait for what it could not have")
	n.release(t, first)
	n.release(t, second)
	for _, tt := range []struct {
		subnet types.Subnet
		want   *tables.DRAAllocation
	}{{here, first}, {there, second}} {
		row, err := n.Take(t.Context(), podRow("db-0", "third", tt.subnet), n.note)
		require.NoError(t, err)
		require.Equal(t, tt.want.Config.Joined.Addresses, row.Config.Joined.Addresses)
		n.release(t, row)
	}

	// A subnet gives out more than when the address was taken, so that another one would be chosen now.
	narrow := v2alpha1.AddressRange{From: "10.0.9.1", To: "10.0.9.9"}
	held, err := n.Take(t.Context(), podRow("db-1", "fourth", subnet(t, "10.0.0.0/16", "", narrow)), n.note)
	require.NoError(t, err)
	wide := subnet(t, "10.0.0.0/16", "")
	_, err = n.Take(AtOnce(t.Context()), podRow("db-1", "fifth", wide), n.note)
	require.ErrorIs(t, err, errHeld)
	n.release(t, held)
	row, err := n.Take(t.Context(), podRow("db-1", "fifth", wide), n.note)
	require.NoError(t, err)
	require.Equal(t, held.Config.Joined.Addresses, row.Config.Joined.Addresses)
}

// TestReuseKilled ends the agent before and after each of its writes, and has its next life clean up: the address is in use by
// the journal's device or released, and the next try gets it.
func TestReuseKilled(t *testing.T) {
	killed := errors.New("killed")
	for _, call := range []string{"create", "update"} {
		for _, done := range []bool{false, true} {
			t.Run(fmt.Sprint(call, done), func(t *testing.T) {
				objects := newObjects()
				s := subnet(t, "192.0.2.0/24", "")
				if call == "update" {
					before := newNode(objects, "node0")
					row, err := before.Take(t.Context(), podRow("db-0", "before", s), before.note)
					require.NoError(t, err)
					before.release(t, row)
				}
				n := newNode(objects, "node1")
				objects.answer = func(c string, d bool) error {
					if strings.HasPrefix(c, call) && d == done {
						return killed
					}
					return nil
				}
				_, err := n.Take(t.Context(), podRow("db-0", "first", s), n.note)
				require.ErrorIs(t, err, killed)
				objects.answer = nil

				// What the journal has that is not settled is undone.
				next := newNode(objects, "node1")
				next.journal = n.journal
				require.NoError(t, next.compare(t.Context()))
				for _, row := range slices.Collect(maps.Values(next.journal)) {
					next.release(t, row)
				}
				for _, object := range objects.objects {
					require.Equal(t, v2alpha1.AddressReleased, object.Spec.State)
				}
				for _, claim := range []string{"first", "second"} {
					row, err := next.Take(t.Context(), podRow("db-0", claim, s), next.note)
					require.NoError(t, err)
					require.Len(t, objects.names(), 1)
					// It is killed again before it releases, and the device is given back by the next one.
					next.forget(row)
					require.NoError(t, next.compare(t.Context()))
					require.Equal(t, v2alpha1.AddressReleased, objects.objects[objects.names()[0]].Spec.State)
				}
			})
		}
	}
}

// TestReuseReleasedByOthers takes an address again that the operator has released under the device, and says so where the next pod
// has it by now.
func TestReuseReleasedByOthers(t *testing.T) {
	objects := newObjects()
	one, two := newNode(objects, "node1"), newNode(objects, "node2")
	log := &testenv.LogBuffer{}
	one.log = slog.New(slog.NewTextHandler(log, nil))
	s := subnet(t, "192.0.2.7/32", "")
	taken, err := one.Take(t.Context(), podRow("db-0", "first", s), one.note)
	require.NoError(t, err)
	release := func() {
		object := objects.objects["storage.192.0.2.7"]
		object.Spec.State, object.Spec.ReleasedAt = v2alpha1.AddressReleased, metav1.Now()
		require.NoError(t, objects.Update(t.Context(), &object))
	}
	release()
	require.NoError(t, one.compare(t.Context()))
	require.NoError(t, one.Holds(t.Context(), taken))
	require.Contains(t, log.String(), "is taken again")

	release()
	second, err := two.Take(t.Context(), podRow("db-0", "second", s), two.note)
	require.NoError(t, err)
	require.NoError(t, one.compare(t.Context()))
	require.Contains(t, log.String(), "another device has it too")
	require.NoError(t, two.Holds(t.Context(), second))
	one.release(t, taken)
	require.NoError(t, two.Holds(t.Context(), second))
}

// TestReuseWhileReturned makes another object for an address whose object is there from an earlier try, so that no release that is
// under way takes the address from its holder; and does not take it from the pod's successor, who has taken it over in between.
func TestReuseWhileReturned(t *testing.T) {
	objects := newObjects()
	n, other := newNode(objects, "node1"), newNode(objects, "node2")
	row := podRow("db-0", "first", subnet(t, "192.0.2.7/32", ""))
	_, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	first := objects.objects["storage.192.0.2.7"]
	_, err = n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	require.Error(t, n.give(t.Context(), &first))
	require.Equal(t, v2alpha1.AddressInUse, objects.objects["storage.192.0.2.7"].Spec.State)

	var successor *tables.DRAAllocation
	_, err = n.Take(AtOnce(t.Context()), row, func(row *tables.DRAAllocation) error {
		if successor == nil {
			now := objects.objects["storage.192.0.2.7"]
			require.NoError(t, n.give(t.Context(), &now))
			successor, err = other.Take(t.Context(), podRow("db-0", "second", subnet(t, "192.0.2.7/32", "")), other.note)
			require.NoError(t, err)
		}
		return n.note(row)
	})
	require.Error(t, err)
	require.NoError(t, other.Holds(t.Context(), successor))
}

// TestReuseAtRandom moves pods between nodes whose agents are killed at any call, in an order that a seed chooses. Never have two
// devices that may send one address, and in the end none is in use.
func TestReuseAtRandom(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		objects := newObjects()
		killed := errors.New("killed")
		objects.answer = func(string, bool) error {
			if random.IntN(8) == 0 {
				return killed
			}
			return nil
		}
		s := subnet(t, "192.0.2.0/29", "")
		nodes := []*node{newNode(objects, "node1"), newNode(objects, "node2"), newNode(objects, "node3")}
		// set are the rows of devices that were set up, which may send.
		set := map[string]*tables.DRAAllocation{}
		restart := func(i int) {
			next := newNode(objects, nodes[i].node)
			next.journal = nodes[i].journal
			nodes[i] = next
			for key, row := range next.journal {
				if set[key] == nil {
					next.Return(t.Context(), row)
					delete(next.journal, key)
				}
			}
		}
		for step := range 120 {
			i := random.IntN(len(nodes))
			n := nodes[i]
			switch random.IntN(6) {
			case 0, 1, 2: // the next pod of a name
				pod := fmt.Sprint("db-", random.IntN(4))
				row := podRow(pod, fmt.Sprint(seed, "-", step), s)
				if random.IntN(5) == 0 { // and one of a network that keeps nothing
					row = rowFor(fmt.Sprint(seed, "-", step), s)
				}
				taken, err := n.Take(AtOnce(t.Context()), row, n.note)
				if err != nil {
					if random.IntN(2) == 0 {
						restart(i)
					} else {
						n.forget(row)
					}
					continue
				}
				require.NoError(t, n.note(taken))
				addr := taken.Config.Joined.Addresses[0].Addr()
				for _, other := range set {
					require.NotEqual(t, addr, other.Config.Joined.Addresses[0].Addr(), "seed %d step %d", seed, step)
				}
				set[taken.ClaimName+"/"+taken.DeviceName] = taken
			case 3: // a pod ends
				for _, key := range slices.Sorted(maps.Keys(n.journal)) {
					row := n.journal[key]
					if set[key] != nil {
						delete(set, key)
						require.NoError(t, n.note(row.With(func(r *tables.DRAAllocation) { r.Releasing = true })))
						if random.IntN(3) > 0 {
							n.Return(t.Context(), row)
							n.forget(row)
						}
						break
					}
				}
			case 4:
				restart(i)
			case 5:
				_ = n.compare(t.Context()) // it may be killed in it
			}
		}
		objects.answer = nil
		for i := range nodes {
			for key, row := range nodes[i].journal {
				nodes[i].Return(t.Context(), row)
				delete(nodes[i].journal, key)
			}
			restart(i)
			require.NoError(t, nodes[i].compare(t.Context()))
		}
		for name, object := range objects.objects {
			require.Equal(t, v2alpha1.AddressReleased, object.Spec.State, "seed %d: %s", seed, name)
		}
	}
}
