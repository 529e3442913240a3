// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

// fakeObjects are those of an API server.
type fakeObjects struct {
	mu      sync.Mutex // guards the fields below
	objects map[string]v2alpha1.CiliumNetworkDriverAddress
	// blocks are the names of objects that are or were there, by the labels that they are listed by.
	blocks map[string]map[string]bool
	// reserved are the same by their reservations.
	reserved map[string]map[string]bool
	// cached is what the API server has in its cache, if it is behind.
	cached map[string]v2alpha1.CiliumNetworkDriverAddress
	uids   int
	calls  []string
	// answer, if it is not nil, may fail a call, before or after it had its effect.
	answer func(call string, done bool) error
}

func newObjects() *fakeObjects {
	return &fakeObjects{objects: map[string]v2alpha1.CiliumNetworkDriverAddress{}, blocks: map[string]map[string]bool{}, reserved: map[string]map[string]bool{}}
}

// answers has f answer the calls from now on, or, where it is nil, the objects alone.
func (o *fakeObjects) answers(f func(call string, done bool) error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answer = f
}

func (o *fakeObjects) call(call string, do func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls = append(o.calls, call)
	if o.answer != nil {
		if err := o.answer(call, false); err != nil {
			return err
		}
	}
	err := do()
	if o.answer != nil && err == nil {
		err = o.answer(call, true)
	}
	return err
}

func (o *fakeObjects) Create(_ context.Context, a *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.call("create "+a.Name, func() error {
		if _, ok := o.objects[a.Name]; ok {
			return apierrors.NewAlreadyExists(v2alpha1.Resource(v2alpha1.AddressResource), a.Name)
		}
		o.uids++
		made := *a
		made.UID, made.ResourceVersion = kubetypes.UID(fmt.Sprint("uid", o.uids)), "1"
		o.objects[a.Name] = made
		key := a.Labels[v2alpha1.LabelNetwork] + "/" + a.Labels[v2alpha1.LabelBlock]
		if o.blocks[key] == nil {
			o.blocks[key] = map[string]bool{}
		}
		o.blocks[key][a.Name] = true
		if label, ok := a.Labels[v2alpha1.LabelReservation]; ok {
			key := a.Spec.Network + "/" + label
			if o.reserved[key] == nil {
				o.reserved[key] = map[string]bool{}
			}
			o.reserved[key][a.Name] = true
		}
		return nil
	})
}

func (o *fakeObjects) Get(_ context.Context, name string) (a *v2alpha1.CiliumNetworkDriverAddress, err error) {
	return a, o.call("get "+name, func() error {
		found, ok := o.objects[name]
		if !ok {
			return apierrors.NewNotFound(v2alpha1.Resource(v2alpha1.AddressResource), name)
		}
		a = &found
		return nil
	})
}

func (o *fakeObjects) InBlock(_ context.Context, network, block string, fresh bool) (found []v2alpha1.CiliumNetworkDriverAddress, err error) {
	return found, o.call("list "+network+" "+block, func() error {
		objects := o.objects
		if o.cached != nil && !fresh {
			objects = o.cached
		}
		for labels, names := range o.blocks {
			if network != "" && labels != network+"/"+block || !strings.HasSuffix(labels, "/"+block) {
				continue
			}
			for name := range names {
				if a, ok := objects[name]; ok {
					found = append(found, a)
				}
			}
		}
		return nil
	})
}

func (o *fakeObjects) Reserved(_ context.Context, network, reservation string) (found []v2alpha1.CiliumNetworkDriverAddress, err error) {
	return found, o.call("reserved "+network, func() error {
		for _, name := range slices.Sorted(maps.Keys(o.reserved[network+"/"+reservation])) {
			if a, ok := o.objects[name]; ok {
				found = append(found, a)
			}
		}
		return nil
	})
}

// Update lets go what the definition does.
func (o *fakeObjects) Update(_ context.Context, a *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.call("update "+a.Name, func() error {
		present, ok := o.objects[a.Name]
		resource := v2alpha1.Resource(v2alpha1.AddressResource)
		switch {
		case !ok:
			return apierrors.NewNotFound(resource, a.Name)
		case present.UID != a.UID || present.ResourceVersion != a.ResourceVersion:
			return apierrors.NewConflict(resource, a.Name, errors.New("it is another one by now"))
		case !a.Spec.ReservedAs(&present.Spec) || a.Spec.Address != present.Spec.Address:
			return apierrors.NewBadRequest("an address stays reserved for whom it is reserved")
		case present.Spec.State == v2alpha1.AddressInUse && a.Spec.Holder() != present.Spec.Holder():
			return apierrors.NewBadRequest("an address that is InUse is its device's until it is Released")
		case present.Spec.State == v2alpha1.AddressReleased && a.Spec.State == v2alpha1.AddressReleased:
			return apierrors.NewBadRequest("an address that is Released changes only as it is taken over, InUse")
		}
		changed := *a
		changed.ResourceVersion = present.ResourceVersion + "1"
		o.objects[a.Name] = changed
		return nil
	})
}

func (o *fakeObjects) OfNode(_ context.Context, node string) (found []v2alpha1.CiliumNetworkDriverAddress, err error) {
	return found, o.call("node "+node, func() error {
		for _, a := range o.objects {
			if a.Spec.Node == node {
				found = append(found, a)
			}
		}
		return nil
	})
}

func (o *fakeObjects) Delete(_ context.Context, a *v2alpha1.CiliumNetworkDriverAddress) error {
	return o.call("delete "+a.Name, func() error {
		present, ok := o.objects[a.Name]
		if ok && (present.UID != a.UID || present.ResourceVersion != a.ResourceVersion) {
			return apierrors.NewConflict(v2alpha1.Resource(v2alpha1.AddressResource), a.Name, errors.New("it is another one by now"))
		}
		delete(o.objects, a.Name)
		return nil
	})
}

func (o *fakeObjects) names() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var names []string
	for name := range o.objects {
		names = append(names, name)
	}
	return names
}

// node is one node's keeper with its journal.
type node struct {
	*Keeper
	mu      sync.Mutex // guards the fields below
	journal map[string]*tables.DRAAllocation
	// told are the messages for pods.
	told []string
}

func newNode(objects Objects, name string) *node {
	n := &node{journal: map[string]*tables.DRAAllocation{}}
	n.Keeper = NewKeeper(Params{
		Logger: slog.New(slog.DiscardHandler), Objects: objects, Node: name,
		Held: func() []*tables.DRAAllocation {
			n.mu.Lock()
			defer n.mu.Unlock()
			return slices.Collect(maps.Values(n.journal))
		},
		Waits: func(row *tables.DRAAllocation, message string) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.told = append(n.told, row.Pod()+": "+message)
		},
	})
	return n
}

func (n *node) note(row *tables.DRAAllocation) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.journal[string(row.ClaimUID)+"/"+row.DeviceName] = row
	return nil
}

func (n *node) forget(row *tables.DRAAllocation) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.journal, string(row.ClaimUID)+"/"+row.DeviceName)
}

func subnet(t testing.TB, cidr, gateway string, ranges ...v2alpha1.AddressRange) types.Subnet {
	s := v2alpha1.NetworkSubnet{CIDR: cidr, Gateway: gateway, Ranges: ranges}
	set, err := s.Addresses()
	require.NoError(t, err)
	made := types.Subnet{Prefix: netip.MustParsePrefix(cidr), Addresses: set}
	if gateway != "" {
		made.Gateway = netip.MustParseAddr(gateway)
	}
	return made
}

func rowFor(claim string, subnets ...types.Subnet) *tables.DRAAllocation {
	return &tables.DRAAllocation{DeviceName: "vf0", ClaimUID: kubetypes.UID(claim), ClaimNamespace: "default", ClaimName: claim, PodName: "pod-" + claim,
		PodUID: kubetypes.UID("pod-" + claim), Request: "net",
		Config: types.DeviceConfig{Network: "storage", Joined: &types.Network{VLAN: 7, Offer: &types.Offer{Subnets: subnets}}}}
}

func TestTake(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	row := rowFor("a", subnet(t, "192.0.2.0/24", "192.0.2.1"), subnet(t, "198.51.100.0/24", ""), subnet(t, "2001:db8::/64", "2001:db8::1"))
	row.Config.Joined.Offer.Routes = []types.Route{
		{To: netip.MustParsePrefix("10.0.0.0/8")}, {To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("192.0.2.2"), Metric: 5},
		{To: netip.MustParsePrefix("11.0.0.0/8"), Via: netip.MustParseAddr("198.51.100.1")}, {To: netip.MustParsePrefix("2001:db8:1::/48")},
	}
	row.Config.Joined.Offer.Derive = &policyroute.Config{NexthopOffset: 3, DstPrefixLen: 16}
	taken, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	joined := taken.Config.Joined
	require.NoError(t, taken.Config.Check())
	require.Len(t, joined.Addresses, 2)
	require.True(t, netip.MustParsePrefix("192.0.2.0/24").Contains(joined.Addresses[0].Addr()))
	require.Equal(t, 24, joined.Addresses[0].Bits())
	require.Equal(t, 64, joined.Addresses[1].Bits())
	require.Nil(t, joined.Offer)
	require.Equal(t, 7, joined.VLAN)
	require.Equal(t, []types.Route{
		{To: netip.MustParsePrefix("10.0.0.0/8"), Via: netip.MustParseAddr("192.0.2.1")},
		{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("192.0.2.2"), Metric: 5},
		{To: netip.MustParsePrefix("2001:db8:1::/48"), Via: netip.MustParseAddr("2001:db8::1")},
		{To: netip.MustParsePrefix("192.0.0.0/16"), Via: netip.MustParseAddr("192.0.2.3")},
	}, joined.Routes, "a next hop in another subnet than the device's is left out")
	require.Len(t, objects.calls, 2, "one write for each family: %v", objects.calls)
	require.NotNil(t, row.Config.Joined.Offer, "a row is immutable")
	require.True(t, n.inUse(n.object(taken, joined.Addresses[0].Addr()), joined.Addresses[0].Addr()), "the journal knew it first")
	require.NoError(t, n.Holds(t.Context(), taken))
	require.Error(t, newNode(objects, "node2").Holds(t.Context(), taken))

	// The same again, as after a crash, is the same.
	again, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	require.Equal(t, taken, again)
	require.Len(t, objects.names(), 2)

	// Another claim's Return of the same addresses takes nothing away.
	n.Return(t.Context(), taken.With(func(r *tables.DRAAllocation) { r.ClaimUID = "b" }))
	require.Len(t, objects.names(), 2)
	n.Return(t.Context(), taken)
	require.Empty(t, objects.names())
	n.Return(t.Context(), taken)

	plain := &tables.DRAAllocation{Config: types.DeviceConfig{}}
	got, err := n.Take(t.Context(), plain, n.note)
	require.NoError(t, err)
	require.Same(t, plain, got)
}

// TestTakeAll has two nodes take every address of a range at the same time, none twice, and the next one wait for one.
func TestTakeAll(t *testing.T) {
	for _, hosts := range []int{14, 700} {
		t.Run(fmt.Sprint(hosts), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				objects := newObjects()
				nodes := []*node{newNode(objects, "node1"), newNode(objects, "node2")}
				from := netip.MustParseAddr("10.0.0.250")
				to := from
				for range hosts - 1 {
					to = to.Next()
				}
				s := subnet(t, "10.0.0.0/16", "", v2alpha1.AddressRange{From: from.String(), To: to.String()})
				var wg sync.WaitGroup
				var mu sync.Mutex
				has := map[netip.Addr]string{}
				var some *tables.DRAAllocation
				for i := range hosts {
					wg.Go(func() {
						n := nodes[i%2]
						row, err := n.Take(t.Context(), rowFor(fmt.Sprint("claim", i), s), n.note)
						mu.Lock()
						defer mu.Unlock()
						require.NoError(t, err)
						addr := row.Config.Joined.Addresses[0].Addr()
						require.Empty(t, has[addr], "%s twice", addr)
						has[addr] = row.ClaimName
						if i == 0 {
							some = row
						}
					})
				}
				wg.Wait()
				require.Len(t, has, hosts)

				start := time.Now()
				_, err := nodes[1].Take(AtOnce(t.Context()), rowFor("hasty", s), nodes[1].note)
				require.ErrorIs(t, err, errFull)
				require.Zero(t, time.Since(start))
				_, err = nodes[0].Take(t.Context(), rowFor("late", s), nodes[0].note)
				require.EqualError(t, err, "network storage: no address is left in 10.0.0.0/16")
				require.InDelta(t, fullPatience.Seconds(), time.Since(start).Seconds(), 5)
				require.Equal(t, []string{"default/pod-late: " + err.Error()}, nodes[0].told, "once")
				time.AfterFunc(10*time.Second, func() { nodes[0].Return(context.Background(), some) })
				nodes[1].told = nil
				var told []string
				time.AfterFunc(time.Millisecond, func() {
					nodes[1].mu.Lock()
					defer nodes[1].mu.Unlock()
					told = slices.Clone(nodes[1].told)
				})
				got, err := nodes[1].Take(t.Context(), rowFor("later", s), nodes[1].note)
				require.NoError(t, err)
				require.Equal(t, []string{"default/pod-later: network storage: no address is left in 10.0.0.0/16"}, told, "as it begins to wait")
				require.Equal(t, some.Config.Joined.Addresses, got.Config.Joined.Addresses)
			})
		})
	}
}

// TestTakeOfMany takes addresses of a range of 101,000 that is nearly full: up to nine tenths, one request more and a list do for
// all but one in a hundred.
func TestTakeOfMany(t *testing.T) {
	const hosts, tries = 101000, 300
	objects := newObjects()
	n := newNode(objects, "node1")
	s := subnet(t, "10.0.0.0/8", "", v2alpha1.AddressRange{From: "10.0.0.0", To: addressAt(subnet(t, "10.0.0.0/8", "", v2alpha1.AddressRange{From: "10.0.0.0", To: "10.255.255.255"}).Addresses,
		big.NewInt(hosts-1)).String()})
	order := rand.New(rand.NewPCG(1, 2)).Perm(hosts)
	taken := 0
	fill := func(share float64) {
		for ; float64(taken) < share*hosts; taken++ {
			addr := addressAt(s.Addresses, big.NewInt(int64(order[taken])))
			object := n.object(rowFor(fmt.Sprint("other", taken), s), addr)
			if err := objects.Create(t.Context(), object); err != nil && !apierrors.IsAlreadyExists(err) {
				require.NoError(t, err)
			}
		}
	}
	for _, share := range []float64{0.5, 0.9, 0.99} {
		fill(share)
		// For a network that keeps addresses it is a list more, of those that are kept for the pod.
		for kind, most := range map[string]int{"claim": 3, "pod": 4} {
			var calls []int
			for i := range tries {
				objects.calls = nil
				row := rowFor(fmt.Sprint(share, kind, i), s)
				if kind == "pod" {
					row = podRow(fmt.Sprint(share, kind, i), "claim", s)
				}
				row, err := n.Take(t.Context(), row, func(*tables.DRAAllocation) error { return nil })
				require.NoError(t, err)
				calls = append(calls, len(objects.calls))
				delete(objects.objects, v2alpha1.AddressName("storage", row.Config.Joined.Addresses[0].Addr()))
			}
			slices.Sort(calls)
			p99 := calls[tries*99/100]
			t.Logf("%.0f %% full, for a %s: %d requests at the median, %d for 99 of 100, %d at most", 100*share, kind, calls[tries/2], p99, calls[tries-1])
			if share <= 0.9 {
				require.LessOrEqual(t, p99, most)
			}
		}
	}
}

// TestTakeOfUnjudgedNetwork does not take what a device has from a network that is gone, as long as the operator has not said that
// nobody has any of the network's addresses.
func TestTakeOfUnjudgedNetwork(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	row := func(claim, network string, vlan int, unjudged bool) *tables.DRAAllocation {
		row := rowFor(claim, subnet(t, "192.0.2.6/31", ""))
		row.Config.Network, row.Config.Joined.VLAN, row.Config.Joined.Offer.Unjudged = network, vlan, unjudged
		return row
	}
	gone, err := n.Take(t.Context(), row("a", "gone", 7, false), n.note)
	require.NoError(t, err)
	used := gone.Config.Joined.Addresses[0].Addr()
	taken, err := n.Take(t.Context(), row("b", "storage", 7, true), n.note)
	require.NoError(t, err)
	require.NotEqual(t, used, taken.Config.Joined.Addresses[0].Addr())
	_, err = n.Take(AtOnce(t.Context()), row("c", "storage", 7, true), n.note)
	require.ErrorIs(t, err, errFull)

	certain := row("d", "storage", 7, true)
	certain.Config.Joined.Offer.Subnets = []types.Subnet{subnet(t, used.String()+"/32", "")}
	certain.Config.Joined.Offer.Subnets[0].Certain = true
	_, err = n.Take(t.Context(), certain, n.note)
	require.ErrorContains(t, err, "address "+used.String()+" is used by pod default/pod-a on node node1, which has it from network gone")

	// Another VLAN is another wire, and what the operator has looked at needs no look.
	_, err = n.Take(t.Context(), row("e", "other", 8, true), n.note)
	require.NoError(t, err)
	_, err = n.Take(t.Context(), row("f", "storage", 7, false), n.note)
	require.NoError(t, err)
}

// TestTakeOfUnjudgedNetworkReads reads a block once for all addresses of it, and anew for the next try.
func TestTakeOfUnjudgedNetworkReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n := newNode(objects, "node1")
		row := func(claim, network string, unjudged bool) *tables.DRAAllocation {
			row := rowFor(claim, subnet(t, "192.0.2.0/28", ""))
			row.Config.Network, row.Config.Joined.Offer.Unjudged = network, unjudged
			return row
		}
		var last *tables.DRAAllocation
		for i := range 14 {
			var err error
			last, err = n.Take(t.Context(), row(fmt.Sprint(i), "gone", false), n.note)
			require.NoError(t, err)
		}
		var taken *tables.DRAAllocation
		var err error
		go func() { taken, err = n.Take(t.Context(), row("a", "storage", true), n.note) }()
		reads := func() (reads int) {
			synctest.Wait()
			objects.mu.Lock()
			defer objects.mu.Unlock()
			for _, call := range objects.calls {
				if strings.HasPrefix(call, "list  ") {
					reads++
				}
			}
			return reads
		}
		require.Equal(t, 1, reads(), "it waits for an address")
		n.Return(t.Context(), last)
		time.Sleep(lastWait)
		require.Equal(t, 2, reads())
		require.NoError(t, err)
		require.Equal(t, last.Config.Joined.Addresses, taken.Config.Joined.Addresses)
	})
}

// TestTakeFails leaves nothing behind, also when the API server has taken what it does not answer to.
func TestTakeFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n := newNode(objects, "node1")
		away := errors.New("away")
		lost := 0
		objects.answer = func(call string, done bool) error {
			if done && strings.Contains(call, "create storage.2001") {
				lost++
				return away
			}
			return nil
		}
		row := rowFor("a", subnet(t, "192.0.2.0/24", ""), subnet(t, "2001:db8::/64", ""))
		_, err := n.Take(t.Context(), row, n.note)
		require.ErrorIs(t, err, away)
		require.Equal(t, 1, lost)
		require.Len(t, objects.names(), 1, "the other one is given back")
		n.forget(row)
		objects.answer = nil
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- n.Run(ctx) }()
		time.Sleep(5 * time.Second)
		require.Empty(t, objects.names(), "the keeper finds it")
		cancel()
		require.NoError(t, <-done)
	})
}

// begin has the node's keeper run until end is called.
func (n *node) begin(t *testing.T) (ctx context.Context, end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	return ctx, func() {
		cancel()
		require.NoError(t, <-done)
	}
}

// TestReturnLater gives back what could not be given back at once, and not what was taken again meanwhile.
func TestReturnLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n := newNode(objects, "node1")
		ctx, end := n.begin(t)
		defer end()
		s := subnet(t, "192.0.2.0/31", "")
		a, err := n.Take(ctx, rowFor("a", s), n.note)
		require.NoError(t, err)
		b, err := n.Take(ctx, rowFor("b", s), n.note)
		require.NoError(t, err)
		objects.answers(func(call string, _ bool) error {
			if strings.HasPrefix(call, "delete") {
				return errors.New("away")
			}
			return nil
		})
		n.Return(ctx, a)
		n.forget(a)
		n.Return(ctx, b)
		n.forget(b)
		_, err = n.Take(ctx, rowFor("b", s), n.note)
		require.ErrorContains(t, err, "anew", "its own object is there still, and may be deleted yet")
		time.Sleep(3 * time.Minute)
		require.Len(t, objects.names(), 2)
		objects.answers(nil)
		b, err = n.Take(ctx, rowFor("b", s), n.note)
		require.NoError(t, err)
		time.Sleep(2 * time.Minute)
		require.Equal(t, []string{"storage." + b.Config.Joined.Addresses[0].Addr().String()}, objects.names())
	})
}

// TestTakeFailsAndTheJournalKeepsIt gives back what the API server took without an answer as soon as the journal lets go of it, which
// could not be written when Prepare failed.
func TestTakeFailsAndTheJournalKeepsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n := newNode(objects, "node1")
		ctx, end := n.begin(t)
		defer end()
		away := errors.New("away")
		objects.answers(func(call string, done bool) error {
			if done && strings.HasPrefix(call, "create") {
				return away
			}
			return nil
		})
		row := rowFor("a", subnet(t, "192.0.2.7/32", ""))
		_, err := n.Take(ctx, row, n.note)
		require.ErrorIs(t, err, away)
		objects.answers(nil)
		time.Sleep(20 * time.Minute)
		require.Len(t, objects.names(), 1, "the journal has it")
		n.forget(row)
		time.Sleep(2 * time.Minute)
		require.Empty(t, objects.names())
	})
}

// TestReturnWhenTheJournalLetsGo gives back, soon after, what the journal kept for a device that was never set up: neither the API server
// nor the disk took what a failed Prepare undid. Then another claim gets the device.
func TestReturnWhenTheJournalLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n := newNode(objects, "node1")
		ctx, end := n.begin(t)
		defer end()
		a, err := n.Take(ctx, rowFor("a", subnet(t, "192.0.2.7/32", "")), n.note)
		require.NoError(t, err)
		objects.answers(func(call string, _ bool) error {
			if strings.HasPrefix(call, "get") {
				return errors.New("away")
			}
			return nil
		})
		n.Return(ctx, a)
		objects.answers(nil)
		time.Sleep(20 * time.Minute)
		require.Len(t, objects.names(), 1, "the journal has it")
		n.forget(a)
		time.Sleep(2 * time.Minute)
		require.Empty(t, objects.names())

		objects.mu.Lock()
		objects.calls = nil
		objects.mu.Unlock()
		time.Sleep(30 * time.Minute)
		objects.mu.Lock()
		defer objects.mu.Unlock()
		require.LessOrEqual(t, len(objects.calls), 1, "nothing is looked for any more")
	})
}

// TestTakenWhileReturned makes another object for an address whose object is there from an earlier try, so that no deletion that is
// under way takes the address from its new holder; and leaves to another node what was deleted in between.
func TestTakenWhileReturned(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	row := rowFor("a", subnet(t, "192.0.2.6/31", ""))
	taken, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	n.forget(taken)
	addr := taken.Config.Joined.Addresses[0].Addr()
	name := "storage." + addr.String()
	first := objects.objects[name]
	again, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	require.Equal(t, taken, again)
	require.True(t, apierrors.IsConflict(objects.Delete(t.Context(), &first)))

	// The comparison gives it back while the journal is being written, and another node takes it.
	n.forget(taken)
	other := newNode(objects, "node2")
	noted := 0
	again, err = n.Take(t.Context(), row, func(row *tables.DRAAllocation) error {
		if noted++; noted == 2 {
			now := objects.objects[name]
			require.NoError(t, objects.Delete(t.Context(), &now))
			_, err := other.Take(t.Context(), rowFor("b", subnet(t, addr.String()+"/32", "")), other.note)
			require.NoError(t, err)
		}
		return n.note(row)
	})
	require.NoError(t, err)
	require.NotEqual(t, addr, again.Config.Joined.Addresses[0].Addr())
	require.NoError(t, n.Holds(t.Context(), again))
	require.Len(t, objects.names(), 2)
}

// TestTakeByStaleAnswers takes addresses where the API server's cache is behind: it has none of those that were taken since, and has some
// that were given back. No address is taken twice.
func TestTakeByStaleAnswers(t *testing.T) {
	objects := newObjects()
	n, other := newNode(objects, "node1"), newNode(objects, "node2")
	s := subnet(t, "192.0.2.0/27", "")
	early, err := n.Take(t.Context(), rowFor("early", s), n.note)
	require.NoError(t, err)
	objects.cached = maps.Clone(objects.objects)
	n.forget(early)
	n.Return(t.Context(), early)
	has := map[netip.Addr]string{}
	for i := range 29 {
		claim := fmt.Sprint("claim", i)
		row, err := []*node{n, other}[i%2].Take(t.Context(), rowFor(claim, s), []*node{n, other}[i%2].note)
		require.NoError(t, err)
		addr := row.Config.Joined.Addresses[0].Addr()
		require.Empty(t, has[addr], "%s twice", addr)
		has[addr] = claim
	}
	require.Len(t, objects.names(), 29)
	// The last is free in truth, and the cache has it as this claim's, as it was.
	again, err := n.Take(AtOnce(t.Context()), rowFor("early", s), n.note)
	require.NoError(t, err)
	require.Empty(t, has[again.Config.Joined.Addresses[0].Addr()])
	require.NoError(t, n.Holds(t.Context(), again))
}

// TestTakenFromOthers takes an address again whose object somebody has deleted under the device, and says so when another device
// has got it.
func TestTakenFromOthers(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	log := &testenv.LogBuffer{}
	n.log = slog.New(slog.NewTextHandler(log, nil))
	taken, err := n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), n.note)
	require.NoError(t, err)
	delete(objects.objects, "storage.192.0.2.7")
	require.NoError(t, n.compare(t.Context()))
	require.NoError(t, n.Holds(t.Context(), taken))
	require.Contains(t, log.String(), "is taken again")

	delete(objects.objects, "storage.192.0.2.7")
	other := newNode(objects, "node2")
	_, err = other.Take(t.Context(), rowFor("b", subnet(t, "192.0.2.7/32", "")), other.note)
	require.NoError(t, err)
	require.NoError(t, n.compare(t.Context()))
	require.Contains(t, log.String(), "another device has it too")
	require.Contains(t, log.String(), "otherPod=default/pod-b")
	require.Error(t, n.Holds(t.Context(), taken))
}

// TestNotTakenAgain leaves an address alone that is being given back: its object is gone before the journal's entry, which an agent
// that ends in between finds. By then the address may be another device's, which is no reason to have a pod deleted.
func TestNotTakenAgain(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	log := &testenv.LogBuffer{}
	n.log = slog.New(slog.NewTextHandler(log, nil))
	taken, err := n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), n.note)
	require.NoError(t, err)
	require.NoError(t, n.note(taken.With(func(r *tables.DRAAllocation) { r.Releasing = true })))
	n.Return(t.Context(), taken)
	require.NoError(t, n.compare(t.Context()))
	require.Empty(t, objects.names())

	other := newNode(objects, "node2")
	_, err = other.Take(t.Context(), rowFor("b", subnet(t, "192.0.2.7/32", "")), other.note)
	require.NoError(t, err)
	require.NoError(t, n.compare(t.Context()))
	require.NotContains(t, log.String(), "delete one of the pods")
}

// TestReturnedDespiteTry gives back what another device has only tried to take: it found it taken, and will choose another one, but
// the journal says that it was about to have it.
func TestReturnedDespiteTry(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	taken, err := n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), n.note)
	require.NoError(t, err)
	_, err = n.Take(AtOnce(t.Context()), rowFor("b", subnet(t, "192.0.2.7/32", "")), n.note)
	require.ErrorIs(t, err, errFull)
	require.NoError(t, n.compare(t.Context()))
	require.Len(t, objects.names(), 1)
	n.forget(taken)
	require.NoError(t, n.compare(t.Context()))
	require.Empty(t, objects.names())
}

// TestKeepsOfUnknown leaves a device its address whose journal entry cannot be read: a pod may have it, and use the address.
func TestKeepsOfUnknown(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	taken, err := n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), n.note)
	require.NoError(t, err)
	n.forget(taken)
	unread := &tables.DRAAllocation{DeviceName: taken.DeviceName}
	require.NoError(t, n.note(unread))
	require.NoError(t, n.compare(t.Context()))
	require.Len(t, objects.names(), 1)
	n.forget(unread)
	require.NoError(t, n.note(&tables.DRAAllocation{DeviceName: "another"}))
	n.Leave(taken.ClaimUID, taken.DeviceName)
	require.NoError(t, n.compare(t.Context()))
	require.Len(t, objects.names(), 1, "a device that was left to its pod has them too")

	// Kubelet unprepares the claim: its pods have ended. Nobody waits for the next comparison of all.
	more := n.more
	n.ReturnLeft("another")
	require.NoError(t, n.compare(t.Context()))
	require.Len(t, objects.names(), 1)
	n.ReturnLeft(taken.ClaimUID)
	<-more
	require.NoError(t, n.compare(t.Context()))
	require.Empty(t, objects.names())

	// The device is set up for another claim, and has been on the host for that.
	taken, err = n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), func(*tables.DRAAllocation) error { return nil })
	require.NoError(t, err)
	n.Leave(taken.ClaimUID, taken.DeviceName)
	next := &tables.DRAAllocation{DeviceName: taken.DeviceName, ClaimUID: "b", Releasing: true}
	require.NoError(t, n.note(next))
	require.NoError(t, n.compare(t.Context()))
	require.Len(t, objects.names(), 1, "nobody knows how far that is")
	require.NoError(t, n.note(next.With(func(r *tables.DRAAllocation) { r.Releasing = false })))
	require.NoError(t, n.compare(t.Context()))
	require.Empty(t, objects.names())

	_, err = n.Take(t.Context(), rowFor("a", subnet(t, "192.0.2.7/32", "")), func(*tables.DRAAllocation) error { return nil })
	require.NoError(t, err)
	n = newNode(objects, "node1")
	n.Leave(taken.ClaimUID, "another")
	n.Leave("another", taken.DeviceName)
	require.NoError(t, n.compare(t.Context()))
	require.Empty(t, objects.names())
}

// TestMetrics counts what came of each device that was to get an address. One without a network gets none.
func TestMetrics(t *testing.T) {
	objects := newObjects()
	n := newNode(objects, "node1")
	n.Metrics = NewMetrics()
	taking := func(claim string) error {
		_, err := n.Take(AtOnce(t.Context()), rowFor(claim, subnet(t, "192.0.2.7/32", "")), n.note)
		return err
	}
	require.NoError(t, taking("a"))
	require.Error(t, taking("b"))
	objects.answer = func(string, bool) error { return errors.New("away") }
	require.Error(t, taking("c"))
	_, err := n.Take(t.Context(), &tables.DRAAllocation{}, n.note)
	require.NoError(t, err)
	for _, result := range []string{"success", "full", "error"} {
		require.Equal(t, 1.0, testutil.ToFloat64(n.Metrics.allocations.WithLabelValues(result)), result)
	}
	require.Equal(t, 1, testutil.CollectAndCount(n.Metrics.duration))
}

// TestChoose finds every address by its number, and every block once.
func TestChoose(t *testing.T) {
	s := subnet(t, "10.0.0.0/16", "", v2alpha1.AddressRange{From: "10.0.0.255", To: "10.0.2.1"}, v2alpha1.AddressRange{From: "10.0.2.9", To: "10.0.2.9"})
	require.Equal(t, "10.0.0.255", addressAt(s.Addresses, big.NewInt(0)).String())
	require.Equal(t, "10.0.2.1", addressAt(s.Addresses, big.NewInt(258)).String())
	require.Equal(t, "10.0.2.9", addressAt(s.Addresses, big.NewInt(259)).String())
	var blocks []string
	for block := range blocksOf(s.Addresses) {
		blocks = append(blocks, block.String())
	}
	require.Equal(t, []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24"}, blocks)
	wide := subnet(t, "2001:db8::/32", "")
	n := 0
	for addr := range draws(wide.Addresses, "seed") {
		require.True(t, wide.Addresses.Contains(addr))
		if n++; n == 100 {
			break
		}
	}
	last := subnet(t, "255.255.255.0/24", "", v2alpha1.AddressRange{From: "255.255.255.254", To: "255.255.255.255"})
	n = 0
	for range blocksOf(last.Addresses) {
		n++
	}
	require.Equal(t, 1, n)
}

// asked returns addresses as a claim asks for them.
func asked(t testing.TB, written ...string) []types.Address {
	t.Helper()
	parsed := make([]types.Address, len(written))
	for i, s := range written {
		require.NoError(t, parsed[i].UnmarshalText([]byte(s)))
	}
	return parsed
}

// TestChooseCertain leaves nothing to choose from but the addresses that are asked for, of which the network has to give each.
func TestChooseCertain(t *testing.T) {
	network := &types.Network{VLAN: 5, Offer: &types.Offer{Subnets: []types.Subnet{
		subnet(t, "192.0.2.0/24", "192.0.2.1"), subnet(t, "2001:db8::/64", ""),
		subnet(t, "198.51.100.0/24", "198.51.100.1", v2alpha1.AddressRange{From: "198.51.100.10", To: "198.51.100.20"}),
	}, Routes: []types.Route{{To: netip.MustParsePrefix("10.0.0.0/8")}}}}
	same, err := Choose(network, nil)
	require.NoError(t, err)
	require.Same(t, network, same)

	chosen, err := Choose(network, asked(t, "198.51.100.12"))
	require.NoError(t, err)
	require.Len(t, network.Offer.Subnets, 3, "it is another one's too")
	row := rowFor("a")
	row.Config.Joined = chosen
	n := newNode(newObjects(), "node1")
	taken, err := n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	require.Len(t, taken.Config.Joined.Addresses, 2, "the other family is chosen")
	require.Equal(t, netip.MustParsePrefix("198.51.100.12/24"), taken.Config.Joined.Addresses[0])
	require.Equal(t, []types.Route{{To: netip.MustParsePrefix("10.0.0.0/8"), Via: netip.MustParseAddr("198.51.100.1")}}, taken.Config.Joined.Routes)

	chosen, err = Choose(network, asked(t, "2001:db8::7", "192.0.2.200"))
	require.NoError(t, err)
	row.Config.Joined = chosen
	n = newNode(newObjects(), "node1")
	taken, err = n.Take(t.Context(), row, n.note)
	require.NoError(t, err)
	require.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.0.2.200/24"), netip.MustParsePrefix("2001:db8::7/64")}, taken.Config.Joined.Addresses)

	const notGiven = "is an address of %s that the network gives to no device: it is outside of ranges, in exclude, a router's or the subnet's own"
	for addr, want := range map[string]string{
		"203.0.113.1":   "is in none of the network's subnets for this node: allowed are addresses of 192.0.2.0/24, 198.51.100.0/24",
		"192.0.2.1":     fmt.Sprintf(notGiven, "192.0.2.0/24"),
		"192.0.2.0":     fmt.Sprintf(notGiven, "192.0.2.0/24"),
		"192.0.2.255":   fmt.Sprintf(notGiven, "192.0.2.0/24"),
		"198.51.100.21": fmt.Sprintf(notGiven, "198.51.100.0/24"),
		"2001:db8::":    fmt.Sprintf(notGiven, "2001:db8::/64"),
	} {
		_, err := Choose(network, asked(t, addr))
		require.EqualError(t, err, "addresses[0]: "+addr+" "+want)
	}
	_, err = Choose(&types.Network{}, asked(t, "192.0.2.1"))
	require.EqualError(t, err, "addresses: the network has no subnets, and gives devices no addresses; leave the parameter out")
	_, err = Choose(&types.Network{Offer: &types.Offer{Subnets: network.Offer.Subnets[:1]}}, asked(t, "2001:db8::7"))
	require.EqualError(t, err, "addresses[0]: 2001:db8::7 is of a family that the network has no subnet of for this node")
}

// TestTakeCertain waits for an address that another claim has, says whose it is, and takes it when it is free. A claim that tries
// again has it already.
func TestTakeCertain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		objects := newObjects()
		n, other := newNode(objects, "node1"), newNode(objects, "node2")
		network, err := Choose(rowFor("x", subnet(t, "192.0.2.0/24", "")).Config.Joined, asked(t, "192.0.2.10"))
		require.NoError(t, err)
		certain := func(claim string) *tables.DRAAllocation {
			row := rowFor(claim)
			row.Config.Joined = network
			return row
		}
		first, err := other.Take(t.Context(), certain("first"), other.note)
		require.NoError(t, err)
		again, err := other.Take(t.Context(), certain("first"), other.note)
		require.NoError(t, err)
		require.Equal(t, first, again)
		require.Len(t, objects.names(), 1)

		began := time.Now()
		_, err = n.Take(t.Context(), certain("second"), n.note)
		require.EqualError(t, err, "network storage: address 192.0.2.10 is taken: claim default/first has it, for pod pod-first on node node2")
		require.Greater(t, time.Since(began), fullPatience-lastWait-time.Second)
		_, err = n.Take(AtOnce(t.Context()), certain("second"), n.note)
		require.ErrorContains(t, err, "claim default/first has it")

		go func() {
			time.Sleep(10 * time.Second)
			other.Return(t.Context(), first)
		}()
		second, err := n.Take(t.Context(), certain("second"), n.note)
		require.NoError(t, err)
		require.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24")}, second.Config.Joined.Addresses)
		for _, call := range objects.calls {
			require.NotContains(t, call, "list", "there is nothing to choose from")
		}
	})
}
