// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	// otherDevices are those of another node.
	otherDevices = 2
	// outOfService is after how long an operator gives back the addresses of a node that is off, and declared to be.
	outOfService = 5 * time.Minute
)

// otherNode is another node of the cluster, as far as addresses go: the real keeper, and in few words what the driver, kubelet
// and the kernel do around it.
type otherNode struct {
	sim  *sim
	name string
	// agent is the present life of the agent, nil while it is away.
	agent *process
	// pods has what each device is to be for, and links what of that is in a pod, by the device.
	pods, links map[string]*tables.DRAAllocation
	// off is since when the node has no power, zero while it has.
	off time.Time

	mu sync.Mutex // guards journal
	// journal has the entries by the device. Releasing says that one is not settled.
	journal map[string]*tables.DRAAllocation
}

func newOtherNode(s *sim, name string) *otherNode {
	n := &otherNode{sim: s, name: name}
	n.forgetAll()
	return n
}

// forgetAll is what a power cut does.
func (n *otherNode) forgetAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods, n.links, n.journal = map[string]*tables.DRAAllocation{}, map[string]*tables.DRAAllocation{}, map[string]*tables.DRAAllocation{}
}

func sortedRows(rows map[string]*tables.DRAAllocation) []*tables.DRAAllocation {
	return slices.SortedFunc(maps.Values(rows), func(a, b *tables.DRAAllocation) int { return cmp.Compare(a.DeviceName, b.DeviceName) })
}

// start starts a life of the agent.
func (n *otherNode) start() {
	s := n.sim
	p := newProcess(n.name)
	n.agent, p.kill = p, n.kill
	keeper := networks.NewKeeper(networks.Params{
		Logger: slog.New(&logHandler{sim: s, process: p}), Objects: objects{client{sim: s, process: p, node: n.name}}, Node: n.name,
		Held: func() []*tables.DRAAllocation {
			n.mu.Lock()
			defer n.mu.Unlock()
			return sortedRows(n.journal)
		},
		Waits: func(*tables.DRAAllocation, string) {},
	})
	if !s.mutant.keepAll {
		go func() { _ = keeper.Run(withActor(p.ctx, "addresses")) }()
	}
	for i := range otherDevices {
		go n.serve(p, keeper, fmt.Sprint("vf", i))
	}
}

// kill ends the agent. It comes back some time later, if the node has power.
func (n *otherNode) kill() {
	s := n.sim
	p := n.agent
	s.condemn(p)
	n.agent = nil
	p.cancel()
	s.after("the agent of "+n.name+" is started", span{time.Second, 40 * time.Second}, func() {
		if n.agent == nil && n.off.IsZero() {
			n.start()
		}
	})
}

// powerCut ends everything on the node, for a while.
func (n *otherNode) powerCut() {
	s := n.sim
	since := time.Now()
	s.note("  %s has no power", n.name)
	n.off = since
	n.forgetAll()
	if n.agent != nil {
		n.kill()
	}
	s.after("the operator looks at "+n.name, span{outOfService, outOfService + time.Minute}, func() {
		if n.off == since {
			go n.orphan()
		}
	})
	s.after(n.name+" is started", span{10 * time.Second, 2 * outOfService}, func() {
		n.off = time.Time{}
		if n.agent == nil {
			n.start()
		}
	})
}

// orphan is what the operator does: it gives back what it has seen of a node that was off for long.
func (n *otherNode) orphan() {
	s := n.sim
	server := objects{client{sim: s, process: s.world}}
	ctx := withActor(context.Background(), "operator")
	for !n.off.IsZero() {
		addresses, err := server.OfNode(ctx, n.name)
		for i := range addresses {
			err = cmp.Or(err, server.Delete(ctx, &addresses[i]))
		}
		if err == nil {
			return
		}
		s.sleep(s.world, "operator", span{time.Second, 10 * time.Second}, nil)
	}
}

// serve looks after a device: it has pods come and go, and does what the driver does for them.
func (n *otherNode) serve(p *process, keeper *networks.Keeper, device string) {
	s := n.sim
	ctx := withActor(p.ctx, device)
	for soon := (span{0, 200 * time.Millisecond}); ; soon = (span{200 * time.Millisecond, 15 * time.Second}) {
		var prepare, release *tables.DRAAllocation
		s.do(&call{process: p, key: "look at " + device, poll: true, takes: soon, effect: func() {
			pod, entry := n.pods[device], n.journal[device]
			switch {
			case pod == nil && !s.faults.quiet && s.chance(0.5):
				pod = n.newPod(device)
			case pod != nil && (s.faults.quiet || s.chance(0.2)):
				pod = nil
			}
			n.pods[device] = pod
			switch {
			case pod == nil:
				delete(n.pods, device)
				release = entry
			case entry == nil:
				prepare = pod
			case entry.Releasing || entry.ClaimUID != pod.ClaimUID:
				release = entry
			default:
				n.links[device] = entry
			}
		}})
		switch {
		case prepare != nil:
			n.prepare(ctx, p, keeper, prepare)
		case release != nil:
			n.release(ctx, p, keeper, release)
		}
	}
}

func (n *otherNode) newPod(device string) *tables.DRAAllocation {
	name := n.sim.name(n.name + "-pod")
	offer := &types.Offer{}
	for i := range theNetwork.Spec.Subnets {
		set := must(theNetwork.Spec.Addresses(i))
		offer.Subnets = append(offer.Subnets, types.Subnet{Prefix: netip.MustParsePrefix(theNetwork.Spec.Subnets[i].CIDR), Addresses: set})
	}
	return &tables.DRAAllocation{
		DeviceName: device, Pool: poolName, PodName: name, PodUID: kubetypes.UID("uid-" + name), ClaimNamespace: podsNamespace, ClaimName: name,
		ClaimUID: kubetypes.UID("uid-" + name + "-own"), Request: "net",
		Config: types.DeviceConfig{Network: theNetwork.Name, Joined: &types.Network{VLAN: int(theNetwork.Spec.Vlan), Offer: offer}},
	}
}

// note has the journal say what the row says.
func (n *otherNode) note(p *process, row *tables.DRAAllocation, settled bool) (err error) {
	s := n.sim
	s.do(&call{process: p, key: fmt.Sprintf("note %s of claim %s, settled %v", row.DeviceName, row.ClaimName, settled), effect: func() {
		if s.chance(s.faults.disk) {
			err = fmt.Errorf("injected: %w", syscall.ENOSPC)
			return
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.journal[row.DeviceName] = row.With(func(r *tables.DRAAllocation) { r.Releasing = !settled })
	}})
	return err
}

func (n *otherNode) forget(p *process, row *tables.DRAAllocation) {
	n.sim.do(&call{process: p, key: "forget " + row.DeviceName + " of claim " + row.ClaimName, effect: func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.journal, row.DeviceName)
	}})
}

// prepare does what the room does to set a device up. What it has set up is moved into the pod when it is looked at next.
func (n *otherNode) prepare(ctx context.Context, p *process, keeper *networks.Keeper, row *tables.DRAAllocation) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	note := func(row *tables.DRAAllocation) error { return n.note(p, row, false) }
	if note(row) != nil {
		return
	}
	taken, err := n.sim.mutant.take(ctx, keeper, row, note)
	if err == nil {
		row = taken
		err = n.note(p, row, true)
	}
	if err != nil {
		keeper.Return(context.WithoutCancel(ctx), row)
		n.forget(p, row)
	}
}

// release does what the room does to give a device back.
func (n *otherNode) release(ctx context.Context, p *process, keeper *networks.Keeper, row *tables.DRAAllocation) {
	_ = n.note(p, row, false)
	if n.sim.mutant.returnFirst {
		keeper.Return(ctx, row)
	}
	n.sim.do(&call{process: p, key: row.DeviceName + " comes home", takes: span{time.Millisecond, time.Second}, effect: func() { delete(n.links, row.DeviceName) }})
	keeper.Return(ctx, row)
	n.forget(p, row)
}

// cutOff keeps a node from the API server for a while.
func (s *sim) cutOff(node string) {
	if s.api.cutOff[node] {
		return
	}
	s.note("  %s is cut off from the API server", node)
	s.api.cutOff[node] = true
	s.after(node+" reaches the API server", span{time.Second, 90 * time.Second}, func() {
		delete(s.api.cutOff, node)
		s.faults.since = time.Now()
	})
}

// goWrongElsewhere is what goes wrong on the other nodes.
func (s *sim) goWrongElsewhere() {
	n := s.others[s.rng.IntN(len(s.others))]
	switch k := s.rng.IntN(100); {
	case k < 30 && n.agent != nil && n.agent.crashIn == 0:
		n.agent.crashIn = 1 + s.rng.IntN(20)
	case k < 40:
		s.cutOff(n.name)
	case k < 43 && n.off.IsZero():
		n.powerCut()
	}
}
