// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package sriov is the device manager of SR-IOV virtual functions. It makes VFs on physical functions that have none,
// finds the VFs of all physical functions in sysfs, and keeps a VF in its VLAN by the PF, where the pod that has the VF
// cannot change it.
//
// A VF is known by its PCI address. Names, the PF and the VF's index on it are looked up anew whenever something is
// done, because each of them may change while the agent runs.
package sriov

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"sync"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/keylock"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nicowner"
	"github.com/cilium/networkdriver/pkg/rdma"
)

// Params is what the manager needs.
type Params struct {
	Logger *slog.Logger
	// Config names the PFs to make VFs on. VFs of other PFs are found too: what is offered is up to the pools.
	Config *v2alpha1.SRIOVDeviceManagerConfig
	// SysfsPath is where the host's sysfs is mounted, writable if VFs are to be made.
	SysfsPath string
	// NodeIPs returns the addresses that the cluster knows the node by at present, and a channel that is closed when
	// there are others. A VF that has one is not offered. Nil: there are none.
	NodeIPs func() ([]netip.Addr, <-chan struct{})
	// Prepared says whether the device with this name is prepared for a claim. The link of such a device may be in a
	// pod, where discovery cannot see it. It must know the restored allocations before Run is called.
	Prepared func(name string) bool
	// PFs are the locks of the node's PFs. A device belongs to the manager that found or restored it, so that managers
	// which follow each other must have the same. Nil: locks of its own.
	PFs *PFLocks
	// Owners is where the node's programs say which NIC they have: a VF that another one has is not set up.
	Owners nicowner.Dir
	// Drivers is what is under way with the VFs' drivers. Managers that follow each other must have the same. Nil: one of its own.
	Drivers *Drivers
	// Speeds are how fast the PFs' links were. Managers that follow each other must have the same. Nil: some of its own.
	Speeds *Speeds
	// Work is the work on the node's PFs. Managers that follow each other must have the same. Nil: one of its own.
	Work *PFWork
}

// PFLocks serialise what is done to the VFs of one PF, by its PCI address: its driver answers busy to the second caller.
// Other PFs do not wait.
type PFLocks struct{ keylock.Locks[string] }

// acquire waits for the PF's lock and returns the function that gives it back.
func (l *PFLocks) acquire(ctx context.Context, pfAddr string) (release func(), err error) {
	if release, err = l.Lock(ctx, pfAddr); err != nil {
		return nil, fmt.Errorf("wait for other work on PF %s: %w", pfAddr, err)
	}
	return release, nil
}

// Manager is the device manager of SR-IOV virtual functions.
type Manager struct {
	log      *slog.Logger
	sysfs    sysfs
	rdma     rdma.Sysfs
	kernel   kernel
	nodeIPs  func() ([]netip.Addr, <-chan struct{})
	prepared func(name string) bool
	// provisioner is used by Run only.
	provisioner *provisioner
	pfs         *PFLocks
	drivers     *Drivers
	owners      nicowner.Dir
	speeds      *Speeds
	tables      vfTables
}

var _ types.DeviceManager = (*Manager)(nil)

// New returns a manager that works on the network namespace it is called from.
func New(p Params) *Manager { return newManager(p, rtnetlink{log: p.Logger, sysfs: p.SysfsPath}) }

func newManager(p Params, k kernel) *Manager {
	m := &Manager{
		log:      p.Logger,
		sysfs:    sysfs{root: p.SysfsPath, write: writeAttribute},
		rdma:     rdma.Sysfs(p.SysfsPath),
		kernel:   k,
		nodeIPs:  p.NodeIPs,
		prepared: p.Prepared,
		pfs:      p.PFs,
		drivers:  p.Drivers,
		owners:   p.Owners,
		speeds:   p.Speeds,
	}
	if m.nodeIPs == nil {
		m.nodeIPs = func() ([]netip.Addr, <-chan struct{}) { return nil, nil }
	}
	if m.pfs == nil {
		m.pfs = &PFLocks{}
	}
	if m.drivers == nil {
		m.drivers = &Drivers{}
	}
	if m.speeds == nil {
		m.speeds = &Speeds{}
	}
	m.provisioner = &provisioner{log: p.Logger, sysfs: m.sysfs, kernel: k, write: writeAttribute, work: p.Work}
	if p.Work == nil {
		m.provisioner.work = NewPFWork()
	}
	if p.Config != nil {
		m.provisioner.ifaces = p.Config.Ifaces
	}
	return m
}

// Type implements [types.DeviceManager].
func (m *Manager) Type() types.DeviceManagerType { return types.DeviceManagerTypeSRIOV }

// Run implements [types.DeviceManager].
func (m *Manager) Run(ctx context.Context, publish func(types.Snapshot)) error {
	var last *types.Snapshot
	return rescan.Run(ctx, m.log, m.watch, func() error {
		last = m.refresh(ctx, last, publish)
		return nil
	})
}

// watch tells of links, of the node's addresses and of the PFs that were worked on.
func (m *Manager) watch(ctx context.Context, notify func()) error {
	ctx, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	defer others.Wait()
	defer cancel()
	others.Go(func() {
		for {
			_, changed := m.nodeIPs()
			select {
			case <-changed:
				notify()
			case <-m.provisioner.work.changed:
				notify()
			case <-ctx.Done():
				return
			}
		}
	})
	return m.kernel.WatchLinks(ctx, notify)
}

// refresh scans, publishes what differs from the last snapshot, which it returns, and has missing VFs made: they are seen by a
// later scan, since making them may take long. A scan that fails keeps the last devices, and before the first one nothing is
// published, which would withdraw them all.
func (m *Manager) refresh(ctx context.Context, last *types.Snapshot, publish func(types.Snapshot)) *types.Snapshot {
	next, err := m.scan()
	problems := m.provisioner.provision(ctx)
	if err != nil {
		m.log.Error("Cannot discover SR-IOV VFs, the last known ones stay", "problems", problems, "error", err)
		if last == nil {
			return nil
		}
		next = types.Snapshot{Devices: last.Devices, Skipped: last.Skipped}
	}
	next.Problems = problems
	if last != nil && reflect.DeepEqual(*last, next) {
		return last
	}
	m.logChanges(last, next)
	publish(next)
	return &next
}

// logChanges warns of what is new among the devices left out and the problems, and not again at every scan.
func (m *Manager) logChanges(last *types.Snapshot, next types.Snapshot) {
	skipped, problems := map[types.Skipped]bool{}, map[types.Problem]bool{}
	if last != nil {
		for _, s := range last.Skipped {
			skipped[s] = true
		}
		for _, p := range last.Problems {
			problems[p] = true
		}
	}
	for _, s := range next.Skipped {
		if !skipped[s] {
			m.log.Warn("SR-IOV VF is not offered", "device", s.Device, "reason", s.Reason)
		}
	}
	for _, p := range next.Problems {
		if !problems[p] {
			m.log.Warn("SR-IOV configuration cannot be met", "field", p.Field, "reason", p.Message)
		}
	}
	m.log.Info("Discovered SR-IOV VFs", "devices", len(next.Devices), "skipped", len(next.Skipped))
}
