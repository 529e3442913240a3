// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/dra"
	"github.com/cilium/networkdriver/pkg/networkdriver/health"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/metadata"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/nri"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nicowner"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/wires"
)

// room is a part of a session that runs as a job of its own, and is started again if it ends before its time.
type room struct {
	name string
	// run runs the room until the context ends.
	run func(*session, context.Context, cell.Health) error
	// outside is true for a room that fails for reasons outside of the agent, which its restart would not change.
	outside bool
}

// ensureInterval is how long a change that somebody makes to a prepared device goes unnoticed.
const ensureInterval = 10 * time.Second

// runtimeTimeout is how long what is left over in a pod waits for the runtime to say which sandboxes there are.
const runtimeTimeout = time.Minute

// placesDir is the folder in the journal's directory with what the gate hook reads.
const placesDir = "gates"

// rooms are the parts of a session in the order in which they open: the allocations are restored, the device managers
// fill the inventory, the devices are looked at, the runtime is connected, what others change is put back, and then kubelet may call. They close in the reverse order.
var rooms = []room{
	{"inventory", func(s *session, ctx context.Context, _ cell.Health) error { return s.inventory.Run(ctx) }, false},
	{"claim-status", func(s *session, ctx context.Context, _ cell.Health) error { return s.writer.Run(ctx) }, false},
	{"restore", (*session).restore, false},
	{"last-config", (*session).keepConfig, true},
	{"container-gate", func(s *session, ctx context.Context, _ cell.Health) error { return s.gate.Run(ctx) }, true},
	{"device-metadata", func(s *session, ctx context.Context, _ cell.Health) error { return s.metadata.Run(ctx) }, true},
	{"give-back", (*session).giveBack, false},
	{"quarantine", (*session).judge, false},
	{"addresses", (*session).keepAddresses, true},
	{"announce", func(s *session, ctx context.Context, _ cell.Health) error { return s.announcer.Run(ctx) }, false},
	{"release-unclaimed", (*session).releaseUnclaimed, false},
	{"device-manager-sr-iov", func(s *session, ctx context.Context, h cell.Health) error { return s.manage(ctx, h, s.sriov) }, true},
	{"device-manager-dummy", func(s *session, ctx context.Context, h cell.Health) error { return s.manage(ctx, h, s.dummy) }, true},
	{"health", func(s *session, ctx context.Context, _ cell.Health) error { return s.health.Run(ctx) }, false},
	{"nri", (*session).connectRuntime, false},
	{"hand-over", (*session).handOverClaims, false},
	{"ensure", (*session).ensure, false},
	{"kubelet", (*session).serveKubelet, true},
}

// restartHelps says whether a restart of the agent may mend a part that goes on failing.
func restartHelps(part string) bool {
	return !slices.ContainsFunc(rooms, func(r room) bool { return r.name == part && r.outside })
}

// session is the driver at work under one driver name, until the agent stops.
type session struct {
	log *slog.Logger
	// spec is the one that the session was started with, and that it registers with kubelet by.
	spec v2alpha1.CiliumNetworkDriverNodeConfigSpec

	db          *statedb.DB
	devices     statedb.Table[*tables.DRADevice]
	allocations statedb.Table[*tables.DRAAllocation]
	inventory   *inventory.Inventory
	writer      *claims.Writer
	nri         *nri.Plugin
	gate        *cdi.Files
	metadata    *metadata.Files
	hooks       *nri.Hooks
	kubelet     *dra.Driver
	handOver    *claims.HandOver
	health      *health.Room

	// configs is what the device managers are told.
	configs *managerConfigs
	sriov   *managerRunner
	dummy   *managerRunner

	journal *journal.Journal
	// fromLast says that the session was started from the last node config, since the API server does not answer.
	fromLast bool
	// otherAgent says what there is to say of another agent on the node, and alone that the API server has not answered;
	// empty for nothing.
	otherAgent, alone *current[string]
	// compared is closed when what is restored was compared with the claims.
	compared     chan struct{}
	markCompared func()
	// applied is the node config at work, which the journal keeps; nil before that is known.
	applied   *current[*applied]
	addresses func() ([]netip.Addr, <-chan struct{})
	room      *attachments.Room
	mover     *podnet.Mover
	listPods  func(context.Context) ([]*corev1.Pod, error)
	restorer  *claims.Restorer
	// warnNode makes an event about the node.
	warnNode  func(reason, message string)
	announcer *podnet.Announcer
	pools     configuredPools
	keeper    *networks.Keeper
	// node is the node's name.
	node string
}

// held returns the devices that the journal has, without what their managers know of them, and those that have rows of further claims:
// the journal has one claim for each.
func (s *session) held() []*tables.DRAAllocation {
	var rows []*tables.DRAAllocation
	for _, e := range s.journal.Entries() {
		row := e.Row(nil)
		row.Releasing = !e.Settled
		rows = append(rows, row)
	}
	for row := range s.allocations.All(s.db.ReadTxn()) {
		if !slices.ContainsFunc(rows, func(r *tables.DRAAllocation) bool {
			return r.DeviceName == row.DeviceName && r.ClaimUID == row.ClaimUID
		}) {
			rows = append(rows, row)
		}
	}
	return rows
}

// keepAddresses gives back addresses that no device has, once it is known what the devices are: the claims may tell of some that the
// journal has lost.
func (s *session) keepAddresses(ctx context.Context, _ cell.Health) error {
	if !wait(ctx, s.compared) {
		return nil
	}
	return s.keeper.Run(ctx)
}

// configuredPools are the pools that are in force.
type configuredPools struct {
	// configs are replaced as a whole; nil before the first.
	configs atomic.Pointer[[]v2alpha1.CiliumNetworkDriverDevicePoolConfig]
}

var _ claims.Pools = (*configuredPools)(nil)

func (p *configuredPools) set(configs []v2alpha1.CiliumNetworkDriverDevicePoolConfig) {
	p.configs.Store(&configs)
}

func (p *configuredPools) get() []v2alpha1.CiliumNetworkDriverDevicePoolConfig {
	if configs := p.configs.Load(); configs != nil {
		return *configs
	}
	return nil
}

// attributes are what the administrator gives a pool's devices.
func (p *configuredPools) attributes(pool string) pools.Attributes {
	return pools.AttributesOf(p.get())[pool]
}

// ClaimParameters implements [claims.Pools].
func (p *configuredPools) ClaimParameters(pool string) (string, bool) {
	for _, c := range p.get() {
		if c.PoolName == pool {
			return c.Claims, true
		}
	}
	return "", false
}

// Of implements [claims.Pools].
func (p *configuredPools) Of(device *tables.DRADevice, rows iter.Seq[*tables.DRAAllocation]) string {
	return pools.Of(device, rows, p.get())
}

// wires says which pools are one wire, by the devices that the node has. It is a [v2alpha1.Wires].
func (s *session) wires(some, others []string) string {
	txn := s.db.ReadTxn()
	assignment, _ := pools.Assign(statedb.ToSeq(s.devices.All(txn)), statedb.ToSeq(s.allocations.All(txn)), s.pools.get())
	table := wires.NewTable()
	table.Set(s.node, assignment.PFs())
	return table.Between(some, others)
}

// newSession makes the session of a spec, which offers nothing before [session.configure]. Nothing runs yet.
func (d *driver) newSession(spec *v2alpha1.CiliumNetworkDriverNodeConfigSpec) *session {
	s := &session{
		log: d.Logger.With("driver", spec.DriverName), spec: *spec,
		db: d.DB, devices: d.Devices, allocations: d.Allocations, inventory: d.inventory, nri: d.nri, hooks: d.hooks,
		configs: newCurrent[*v2alpha1.CiliumNetworkDriverDeviceManagerConfig](),
		journal: d.journal, otherAgent: newCurrent[string](), alone: newCurrent[string](), compared: make(chan struct{}),
		fromLast: d.last != nil,
		applied:  d.applied, addresses: d.node.addresses,
		warnNode: d.events.warnNode,
		room:     d.room,
		mover:    d.mover, announcer: d.announcer,
		listPods: d.listPods,
		node:     d.Config.NodeName,
	}
	s.markCompared = sync.OnceFunc(func() { close(s.compared) })
	d.journal.DriverName = spec.DriverName
	prompt, classes := claims.NewClaimClient(d.Prompt.ResourceV1()), claims.NewClasses(d.Prompt.ResourceV1())
	s.writer = claims.NewWriter(claims.WriterParams{
		Logger: s.log, DB: d.DB, Allocations: d.Allocations, Faults: d.Faults,
		Client: prompt, Background: claims.NewClaimClient(d.Clientset.ResourceV1()),
		DriverName: spec.DriverName, NodeName: d.Config.NodeName, BootID: d.bootID, JournalID: d.journal.ID,
	})
	s.gate = cdi.NewFiles(cdi.Params{
		Logger: s.log, Folder: d.Config.CDISpecDir, Driver: spec.DriverName,
		Hook: d.Config.GateHookPath, Places: filepath.Join(d.Config.JournalDir, placesDir),
	})
	s.metadata = metadata.New(metadata.Params{
		Logger: s.log, Driver: spec.DriverName, Node: d.Config.NodeName,
		PluginDir: dra.PluginDir(d.Config.KubeletRootDir, spec.DriverName), CDIFolder: d.Config.CDISpecDir,
		Client: d.Clientset, DB: d.DB, Devices: d.Devices, Allocations: d.Allocations, Owed: d.room.OwedClaims, Attributes: s.pools.attributes,
	})
	d.outside.StatusWriter, d.outside.ClaimReader, d.outside.Gate, d.outside.Metadata = s.writer, s.writer, s.gate, s.metadata
	resolver := networks.NewResolver(d.networks, d.node.labels, s.wires)
	s.keeper = networks.NewKeeper(networks.Params{
		Logger: s.log, Objects: d.networks, Node: d.Config.NodeName, Held: s.held,
		Waits: func(row *tables.DRAAllocation, message string) {
			pod := attachments.Sandbox{PodUID: row.PodUID, PodNamespace: row.ClaimNamespace, PodName: row.PodName}
			d.events.Warn(pod, attachments.ReasonWaitsForAddress, message)
		},
	})
	s.keeper.Metrics = d.networkMetrics
	d.outside.Addresses = s.keeper
	preparer := claims.NewPreparer(claims.Params{
		Logger: s.log, DB: d.DB, Devices: d.Devices, Allocations: d.Allocations, Room: d.room,
		DriverName: spec.DriverName, NodeName: d.Config.NodeName, Metrics: d.claimMetrics, Sandboxes: d.hooks,
		Networks: resolver, Pools: &s.pools, Classes: classes, Events: d.events, Unhooked: d.Config.GateHookPath == "",
	})
	s.handOver = claims.NewHandOver(s.log, preparer, prompt, d.events)
	runner := managerRunner{log: s.log, inventory: d.inventory, parts: d.parts, configs: s.configs, quarantine: s.quarantine}
	s.sriov = sriovRunner(runner, sriov.Params{
		Logger: s.log, SysfsPath: d.Config.SysfsPath, NodeIPs: d.node.addresses, Prepared: s.prepared, PFs: &sriov.PFLocks{}, Drivers: &sriov.Drivers{},
		Owners: nicowner.Default, Speeds: &sriov.Speeds{},
		Work: sriov.NewPFWork(),
	})
	s.dummy = dummyRunner(runner)
	// What is prepared is restored, checked and examined by managers that find nothing.
	managers := []types.DeviceManager{s.sriov.make(nil), s.dummy.make(nil)}
	d.outside.Checkers = map[types.DeviceManagerType]types.Checker{}
	examiners := map[types.DeviceManagerType]types.Examiner{}
	for _, m := range managers {
		if checker, ok := m.(types.Checker); ok {
			d.outside.Checkers[m.Type()] = checker
		}
		if examiner, ok := m.(types.Examiner); ok {
			examiners[m.Type()] = examiner
		}
	}
	s.health = health.New(health.Params{
		Logger: s.log, DB: d.DB, Table: d.Faults, Devices: d.Devices, Allocations: d.Allocations, Reports: d.Reports,
		Examiners: examiners, Quarantine: s.quarantine, Events: d.events, Metrics: d.healthMetrics,
	})
	s.kubelet = dra.New(dra.Params{
		Logger: s.log, DB: d.DB, Devices: d.Devices, Allocations: d.Allocations, Pools: d.Pools,
		Client: d.Clientset, Prompt: d.Prompt, Claims: preparer, Metadata: s.metadata,
		Runtime: s.runtime(), Metrics: d.draMetrics, Faults: d.Faults, Health: s.health,
		Config: dra.Config{
			DriverName: spec.DriverName, NodeName: d.Config.NodeName, KubeletRootDir: d.Config.KubeletRootDir,
			RetryInterval: time.Duration(spec.DraRegistrationRetryInterval) * time.Second,
			Timeout:       time.Duration(spec.DraRegistrationTimeout) * time.Second,
			MaxAttempts:   int(spec.DraRegistrationMaxAttempts),
		},
	})
	s.restorer = claims.NewRestorer(claims.RestorerParams{
		Logger: s.log, Room: d.room, Claims: prompt,
		Managers: managers, Observer: s.writer, Journal: d.journal,
		DriverName: spec.DriverName, NodeName: d.Config.NodeName, BootID: d.bootID, Networks: resolver, Pools: &s.pools, Classes: classes,
		Addresses: s.keeper,
		Restored: func(rows []*tables.DRAAllocation) {
			prepared := make([]types.Device, len(rows))
			for i, row := range rows {
				prepared[i] = row.PreparedDevice
			}
			quarantined, _ := s.quarantine()
			sriov.Reclaim(s.log, nicowner.Default, prepared, slices.Collect(maps.Keys(quarantined)))
		},
	})
	return s
}

// prepared says whether a device is prepared for a claim.
func (s *session) prepared(device string) bool {
	for range s.allocations.List(s.db.ReadTxn(), tables.AllocationsByDevice(device)) {
		return true
	}
	return false
}

// registersAs says whether the spec asks for the name and the registration that the session was started with.
func (s *session) registersAs(spec *v2alpha1.CiliumNetworkDriverNodeConfigSpec) bool {
	return spec.DriverName == s.spec.DriverName &&
		spec.DraRegistrationRetryInterval == s.spec.DraRegistrationRetryInterval &&
		spec.DraRegistrationTimeout == s.spec.DraRegistrationTimeout &&
		spec.DraRegistrationMaxAttempts == s.spec.DraRegistrationMaxAttempts
}

// configure gives the session the pools and device managers of the spec, or none of them for nil.
func (s *session) configure(spec *v2alpha1.CiliumNetworkDriverNodeConfigSpec) {
	if spec == nil {
		spec = &v2alpha1.CiliumNetworkDriverNodeConfigSpec{}
	}
	s.pools.set(spec.Pools)
	s.kubelet.SetPools(spec.Pools)
	s.configs.set(spec.DeviceManagerConfigs)
}

// expectManagers tells the inventory which managers will publish, so that it knows when it is complete.
func (s *session) expectManagers() {
	wanted, _ := s.configs.get()
	var enabled []types.DeviceManagerType
	for _, r := range []*managerRunner{s.sriov, s.dummy} {
		if r.configOf(wanted) != nil {
			enabled = append(enabled, r.kind)
		}
	}
	s.inventory.Expect(enabled...)
}

// restore rebuilds the allocations from the journal and the claims of the node's pods, once. The pods are listed here and
// nowhere else.
func (s *session) restore(ctx context.Context, health cell.Health) error {
	unlock, err := s.journal.Lock(ctx, s.otherAgent.set)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.journal.Open(); err != nil {
		return err
	}
	debts, err := s.journal.Debts()
	if err != nil {
		return err
	}
	s.mover.Owe(debts)
	if err := s.restoreClaims(ctx); err != nil {
		return err
	}
	s.markCompared()
	health.OK("Restored")
	<-ctx.Done()
	return nil
}

// restoreClaims restores what the journal and the claims tell. If the API server does not answer, and the driver was at work on
// this node before, the journal alone has to do at first, so that pods that have devices are served.
func (s *session) restoreClaims(ctx context.Context) error {
	if !s.fromLast {
		last, err := s.journal.LastConfig()
		if err != nil {
			s.log.Warn("Whether the driver was at work on this node before cannot be told; without the API server nothing is restored", "error", err)
		}
		if last == nil {
			return s.readClaims(ctx)
		}
		patient, cancel := context.WithTimeout(ctx, apiPatience)
		defer cancel()
		err = s.readClaims(patient)
		if err == nil || patient.Err() == nil || ctx.Err() != nil {
			return err
		}
	}
	if err := s.restorer.RestoreAlone(); err != nil {
		return err
	}
	s.alone.set("the API server has not answered since the agent was started: devices are restored from the node's journal alone, claims are " +
		"not prepared, and what is left over is not given back, until the claims could be read")
	defer s.alone.set("")
	return s.readClaims(ctx)
}

func (s *session) readClaims(ctx context.Context) error {
	pods, err := s.listPods(ctx)
	if err != nil {
		return err
	}
	return s.restorer.Restore(ctx, pods)
}

// keepConfig has the journal keep what the driver is configured by, once no other agent is at work.
func (s *session) keepConfig(ctx context.Context, health cell.Health) error {
	_, restored := s.allocations.Initialized(s.db.ReadTxn())
	for ok := wait(ctx, restored); ok; {
		applied, changed := s.applied.get()
		addresses, moved := s.addresses()
		if applied != nil {
			if err := s.journal.SaveConfig(applied.config, addresses); err != nil {
				return err
			}
			health.OK("Kept")
		}
		select {
		case <-changed:
		case <-moved:
		case <-ctx.Done():
			ok = false
		}
	}
	return nil
}

// comparedRuntime is the container runtime as claims may be prepared for it: not before what is restored was compared with the
// claims.
type comparedRuntime struct {
	dra.Runtime
	compared <-chan struct{}
}

func (s *session) runtime() comparedRuntime { return comparedRuntime{s.nri, s.compared} }

// WaitConnected implements [dra.Runtime].
func (r comparedRuntime) WaitConnected(ctx context.Context) error {
	if !wait(ctx, r.compared) {
		return fmt.Errorf("the API server has not answered since the agent was started, so that it is not known which claims have devices: %w", ctx.Err())
	}
	return r.Runtime.WaitConnected(ctx)
}

// giveBack gives back what is left over, and what could not be given back when it should.
func (s *session) giveBack(ctx context.Context, _ cell.Health) error {
	if !wait(ctx, s.compared) {
		return nil
	}
	start := time.Now()
	return s.room.Run(ctx, func(pod kubetypes.UID) ([]attachments.Sandbox, error) {
		// A runtime that does not say must not keep devices from everyone for good.
		if status, _ := s.nri.Status(); !status.Connected && time.Since(start) < runtimeTimeout {
			return nil, fmt.Errorf("it is not known yet whether the pod's sandbox runs: %s", status.Reason)
		}
		return s.hooks.SandboxesOf(pod), nil
	})
}

// releaseUnclaimed gives back what kubelet does not ask for any more, once the runtime has said which sandboxes there are.
func (s *session) releaseUnclaimed(ctx context.Context, _ cell.Health) error {
	if err := s.runtime().WaitConnected(ctx); err != nil {
		return err
	}
	return s.room.ReleaseUnclaimed(ctx)
}

// manage runs a device manager once what is prepared is restored, since discovery has to know it.
func (s *session) manage(ctx context.Context, health cell.Health, r *managerRunner) error {
	_, restored := s.allocations.Initialized(s.db.ReadTxn())
	if wait(ctx, restored) {
		r.run(ctx, health)
	}
	return nil
}

// connectRuntime connects to the runtime when both tables are complete.
func (s *session) connectRuntime(ctx context.Context, _ cell.Health) error {
	txn := s.db.ReadTxn()
	_, restored := s.allocations.Initialized(txn)
	_, discovered := s.devices.Initialized(txn)
	if !wait(ctx, restored) || !wait(ctx, discovered) {
		return nil
	}
	return s.nri.Run(ctx)
}

// handOverClaims needs to know the sandboxes.
func (s *session) handOverClaims(ctx context.Context, _ cell.Health) error {
	if err := s.runtime().WaitConnected(ctx); err != nil {
		return err
	}
	return s.handOver.Run(ctx)
}

// ensure keeps what is prepared as it was prepared, from when it is restored.
func (s *session) ensure(ctx context.Context, _ cell.Health) error {
	_, restored := s.allocations.Initialized(s.db.ReadTxn())
	for ok := wait(ctx, restored); ok; ok = pause.For(ctx, ensureInterval) {
		s.hooks.Ensure(ctx)
	}
	return nil
}

// serveKubelet connects to kubelet when the runtime is connected: a claim must not be prepared that nobody would then
// move into its pod.
func (s *session) serveKubelet(ctx context.Context, _ cell.Health) error {
	if err := s.nri.WaitConnected(ctx); err != nil {
		return err
	}
	return s.kubelet.Run(ctx)
}

// wait waits until the channel is closed, and returns false when the context ends before.
func wait(ctx context.Context, closed <-chan struct{}) bool {
	select {
	case <-closed:
		return true
	case <-ctx.Done():
		return false
	}
}
