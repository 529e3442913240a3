// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
	"github.com/cilium/networkdriver/pkg/networkdriver/metadata"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/wires"
)

// The times of the driver's session that are not in the rooms that are real here.
const (
	ensureInterval  = 10 * time.Second
	runtimePatience = 30 * time.Second
	maxReconnect    = 500 * time.Millisecond
	maxClaims       = 8
)

// agent is one life of the agent: the driver's rooms, and the world as they see it.
type agent struct {
	*process
	sim *sim

	db          *statedb.DB
	devices     statedb.RWTable[*tables.DRADevice]
	allocations statedb.RWTable[*tables.DRAAllocation]
	inventory   *inventory.Inventory
	journal     *journal.Journal
	gate        *cdi.Files
	metadata    *metadata.Files
	writer      *claims.Writer
	room        *attachments.Room
	preparer    *claims.Preparer
	handOver    *claims.HandOver
	restorer    *claims.Restorer
	hooks       *nri.Hooks
	keeper      *networks.Keeper
	client      client
	slots       chan struct{}
	// drivers are being changed, of a VF by one at a time, and away has the VFs that have another driver than they were found with.
	drivers keylock.Locks[string]
	away    map[string]bool

	// serving is true while kubelet can call.
	serving bool

	mu        sync.Mutex // guards the fields below
	connected bool
	changed   chan struct{}
	// since is when the agent was connected last.
	since time.Time
}

func (s *sim) journalDir() string { return filepath.Join(s.dir, "journal") }
func (s *sim) cdiDir() string     { return filepath.Join(s.dir, "cdi") }

// startAgent starts a life of the agent.
func (s *sim) startAgent() {
	a := &agent{process: newProcess("agent"), sim: s, db: statedb.New(), changed: make(chan struct{}), slots: make(chan struct{}, maxClaims), away: map[string]bool{}}
	s.agent, a.kill = a, s.killAgent
	log := slog.New(&logHandler{sim: s, process: a.process})
	a.client = client{sim: s, process: a.process, node: nodeName}
	resolver := networks.NewResolver(objects{a.client}, func() labels.Set { return nil }, wires.NewTable().Between)
	a.keeper = networks.NewKeeper(networks.Params{
		Logger: log, Objects: objects{a.client}, Node: nodeName, Held: a.held,
		Waits: func(*tables.DRAAllocation, string) {},
	})

	var err error
	a.devices = must(tables.NewDeviceTable(a.db))
	a.allocations = must(tables.NewAllocationTable(a.db))
	reports := must(inventory.NewReportTable(a.db))
	a.inventory = inventory.New(log, a.db, a.devices, reports, a.allocations)
	a.journal = journal.New(journal.Params{
		Logger: log, DB: a.db, Table: must(journal.NewTable(a.db)), Dir: s.journalDir(), BootID: s.bootID,
		DriverName: driverName, NodeName: nodeName,
	})
	a.gate = cdi.NewFiles(cdi.Params{Logger: log, Folder: s.cdiDir(), Driver: driverName})
	a.metadata = metadata.New(metadata.Params{
		Logger: log, Driver: driverName, Node: nodeName, PluginDir: s.pluginDir(), CDIFolder: s.cdiDir(), Client: &kubernetes.Clientset{},
		DB: a.db, Devices: a.devices, Allocations: a.allocations, Owed: a.journal.OwedClaims, Attributes: func(string) pools.Attributes { return nil },
	})
	a.writer = claims.NewWriter(claims.WriterParams{
		Logger: log, DB: a.db, Allocations: a.allocations, Client: a.client,
		DriverName: driverName, NodeName: nodeName, BootID: s.bootID, JournalID: a.journal.ID,
	})
	metrics, err := attachments.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		panic(err)
	}
	a.room = attachments.New(log, a.db, a.allocations, &world{agent: a, StatusWriter: a.writer, ClaimReader: a.writer}, metrics)
	a.hooks = nri.NewHooks(s.mutant.pods(a.room), log)
	a.preparer = claims.NewPreparer(claims.Params{
		Logger: log, DB: a.db, Devices: a.devices, Allocations: a.allocations, Room: a.room,
		DriverName: driverName, NodeName: nodeName, Sandboxes: a.hooks, Pools: &world{agent: a}, Networks: resolver,
	})
	a.handOver = claims.NewHandOver(log, a.preparer, a.client, &world{agent: a})
	patient := a.client
	patient.patient = true // trying again takes times that no seed chooses
	a.restorer = claims.NewRestorer(claims.RestorerParams{
		Logger: log, Room: a.room, Claims: patient, Managers: []types.DeviceManager{manager{s.kernel}, virtualManager{}},
		Observer: a.writer, Journal: restoredJournal{a.journal, &world{agent: a}}, DriverName: driverName, NodeName: nodeName, BootID: s.bootID,
		Networks: networks.NewResolver(objects{patient}, func() labels.Set { return nil }, wires.NewTable().Between), Addresses: a.keeper,
		Pools: &world{agent: a},
	})
	a.inventory.Expect(types.DeviceManagerTypeSRIOV, types.DeviceManagerTypeDummy)
	go a.session()
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// held are the devices that the journal has, as package networkdriver's session tells of them.
func (a *agent) held() []*tables.DRAAllocation {
	var rows []*tables.DRAAllocation
	for _, e := range a.journal.Entries() {
		row := e.Row(nil)
		row.Releasing = !e.Settled
		rows = append(rows, row)
	}
	return rows
}

// killAgent ends the agent in the midst of whatever it does.
func (s *sim) killAgent() {
	a := s.agent
	s.condemn(a.process)
	a.serving = false
	if s.runtime.plugin == a {
		s.runtime.plugin = nil
	}
	s.runtime.syncing = false
	s.agent = nil
	s.killAfter = ""
	a.cancel()
}

// session is what package networkdriver's does: it opens the rooms one after the other.
func (a *agent) session() {
	s := a.sim
	ctx := func(actor string) context.Context { return withActor(a.ctx, actor) }
	go func() { _ = a.inventory.Run(ctx("inventory")) }()
	go func() { _ = a.writer.Run(ctx("claim-status")) }()

	s.do(&call{process: a.process, key: "open the journal", takes: span{100 * time.Millisecond, 2 * time.Second}, effect: func() {
		if err := a.journal.Open(); err != nil {
			s.fail("journal cannot be opened: %v", err)
		}
	}})
	pods, err := a.client.listPods(ctx("restore"))
	if err != nil {
		return
	}
	if err := a.restorer.Restore(ctx("restore"), pods); err != nil {
		return
	}
	go func() { _ = a.gate.Run(ctx("container-gate")) }()
	go func() { _ = a.metadata.Run(ctx("device-metadata")) }()
	go func() {
		start := time.Now()
		_ = a.room.Run(ctx("give-back"), func(pod kubetypes.UID) ([]attachments.Sandbox, error) {
			a.mu.Lock()
			connected := a.connected
			a.mu.Unlock()
			if !connected && time.Since(start) < time.Minute {
				return nil, errors.New("not connected")
			}
			return s.mutant.sandboxesOf(a.hooks, pod), nil
		})
	}()
	if !s.mutant.keepAll {
		go func() { _ = a.keeper.Run(ctx("addresses")) }()
	}
	go a.discover()
	go a.ensure(ctx("ensure"))
	_, discovered := a.devices.Initialized(a.db.ReadTxn())
	select {
	case <-discovered:
	case <-a.ctx.Done():
	}
	go a.stayConnected()
	if a.waitConnected(a.ctx) != nil {
		return
	}
	go func() {
		s.sleep(a.process, "release-unclaimed", span{0, time.Second}, nil)
		_ = a.room.ReleaseUnclaimed(ctx("release-unclaimed"))
	}()
	if !s.mutant.noHandOver {
		go func() {
			s.sleep(a.process, "hand-over", span{0, time.Second}, nil)
			_ = a.handOver.Run(ctx("hand-over"))
		}()
	}
	s.do(&call{process: a.process, key: "register with kubelet", takes: span{100 * time.Millisecond, 2 * time.Second}, effect: func() { a.serving = true }})
}

// discover publishes what the kernel has.
func (a *agent) discover() {
	s := a.sim
	for {
		s.do(&call{process: a.process, key: "discover", poll: true, takes: span{100 * time.Millisecond, 3 * time.Second}, effect: func() {
			a.inventory.Publish(types.DeviceManagerTypeSRIOV, s.kernel.snapshot(func(device string) bool {
				for range a.allocations.List(a.db.ReadTxn(), tables.AllocationsByDevice(device)) {
					return true
				}
				return false
			}, func(device string) bool { return a.away[device] }))
			a.inventory.Publish(types.DeviceManagerTypeDummy, types.Snapshot{Devices: []types.Device{
				&device{Name: "dummy0", Kernel: "dummy0", VF: vfCount, Virtual: true},
			}})
		}})
		s.do(&call{process: a.process, key: "publish", poll: true, takes: span{50 * time.Millisecond, time.Second}, effect: func() {
			if s.api.away {
				return
			}
			s.api.published = nil
			for row := range a.devices.All(a.db.ReadTxn()) {
				s.api.published = append(s.api.published, row.Name)
			}
		}})
	}
}

func (a *agent) ensure(ctx context.Context) {
	a.sim.sleep(a.process, "ensure", span{0, time.Second}, nil)
	for {
		a.hooks.Ensure(ctx)
		if !pause.For(ctx, ensureInterval) {
			return
		}
	}
}

// stayConnected connects to the runtime whenever it is not.
func (a *agent) stayConnected() {
	s := a.sim
	for {
		if s.runtime.connect(a) {
			a.setConnected(true)
			s.do(&call{process: a.process, key: "lose the runtime", ready: func() bool { return s.runtime.plugin != a }, effect: func() {}})
			a.setConnected(false)
		}
		s.sleep(a.process, "reconnect", span{100 * time.Millisecond, maxReconnect}, nil)
	}
}

func (a *agent) setConnected(connected bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.connected, a.since = connected, time.Now()
	close(a.changed)
	a.changed = make(chan struct{})
}

// readySince says since when the agent does its work.
func (a *agent) readySince() (since time.Time, ok bool) {
	if a == nil {
		return time.Time{}, false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.since, a.connected && a.serving
}

// waitConnected is the one of NRI's plugin.
func (a *agent) waitConnected(ctx context.Context) error {
	for {
		a.mu.Lock()
		connected, changed := a.connected, a.changed
		a.mu.Unlock()
		if connected {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the runtime is not connected: %w", ctx.Err())
		}
	}
}

// prepareClaims does what kubelet's helper and the driver's plugin do with the request.
func (a *agent) prepareClaims(ctx context.Context, batch []*claim, results map[kubetypes.UID]error) error {
	actor := actorOf(ctx)
	objects := make([]*resourceapi.ResourceClaim, len(batch))
	for i, c := range batch {
		object, err := a.client.GetClaim(ctx, podsNamespace, c.name)
		switch {
		case err != nil:
			return err
		case object.UID != c.uid:
			return fmt.Errorf("claim %s was replaced", c.name)
		case object.Status.Allocation == nil:
			return fmt.Errorf("claim %s is not allocated", c.name)
		}
		objects[i] = object
	}
	prepared := make([][]kubeletplugin.Device, len(objects))
	err := each(objects, results, func(o *resourceapi.ResourceClaim) kubetypes.UID { return o.UID }, func(object *resourceapi.ResourceClaim) error {
		ctx := withActor(ctx, actor+" "+object.Name)
		waiting, cancel := context.WithTimeout(ctx, runtimePatience)
		defer cancel()
		if err := a.waitConnected(waiting); err != nil {
			return err
		}
		a.preparer.AwaitDevices(ctx, object)
		if err := a.takeSlot(ctx, object.Name); err != nil {
			return err
		}
		defer func() { <-a.slots }()
		result, err := a.preparer.Prepare(ctx, object)
		for _, d := range result.Devices {
			i := slices.Index(objects, object)
			prepared[i] = append(prepared[i], kubeletplugin.Device{Requests: []string{d.Request}, PoolName: d.Pool, DeviceName: d.Device})
		}
		return err
	})
	for i, object := range objects {
		if results[object.UID] == nil {
			results[object.UID] = a.describe(ctx, object, prepared[i])
		}
	}
	return err
}

func (a *agent) unprepareClaims(ctx context.Context, batch []*claimInfo, results map[kubetypes.UID]error) error {
	actor := actorOf(ctx)
	err := each(batch, results, func(c *claimInfo) kubetypes.UID { return c.uid }, func(info *claimInfo) error {
		ctx := withActor(ctx, actor+" "+info.name)
		if err := a.takeSlot(ctx, info.name); err != nil {
			return err
		}
		defer func() { <-a.slots }()
		return a.sim.mutant.unpreparer(a.preparer).Unprepare(ctx, info.uid)
	})
	for _, info := range batch {
		s := a.sim
		s.do(&call{process: a.process, key: "remove metadata of claim " + info.name, effect: func() {
			if results[info.uid] == nil {
				results[info.uid] = a.removeMetadata(info)
			}
		}})
	}
	failed := errors.Join(slices.Collect(maps.Values(results))...)
	if failed == nil && ctx.Err() == nil {
		a.preparer.Unprepared(slices.Collect(maps.Keys(results)))
	}
	return err
}

// each does the work on each claim at the same time. The results are there when it returns.
func each[C any](batch []C, results map[kubetypes.UID]error, uid func(C) kubetypes.UID, work func(C) error) error {
	errs := make([]error, len(batch))
	var group sync.WaitGroup
	for i, c := range batch {
		group.Go(func() { errs[i] = work(c) })
	}
	group.Wait()
	for i, c := range batch {
		results[uid(c)] = errs[i]
	}
	return nil
}

// takeSlot is a step, so that which of several claims comes first is for the seed to say.
func (a *agent) takeSlot(ctx context.Context, claim string) error {
	if err := a.sim.doUntil(ctx, &call{process: a.process, key: actorOf(ctx) + ": slot for " + claim}); err != nil {
		return err
	}
	select {
	case a.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return errors.New("waiting for other claims")
	}
}
