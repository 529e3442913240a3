// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/claims"
	"github.com/cilium/networkdriver/pkg/networkdriver/dra"
	"github.com/cilium/networkdriver/pkg/networkdriver/dummy"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// session is the driver at work under one driver name, until the agent stops. Its rooms open in this order: the
// allocations are restored, the device managers fill the inventory, the runtime is connected, and then kubelet may
// call.
type session struct {
	*driver
	log      *slog.Logger
	first    v2alpha1.CiliumNetworkDriverNodeConfigSpec
	claims   claims.ClaimClient
	writer   *claims.Writer
	kubelet  *dra.Driver
	managers []*managedManager

	cancel context.CancelFunc
	work   sync.WaitGroup

	mu sync.Mutex // guards the fields below
	// wanted is the configuration of the device managers, which may be nil.
	wanted  *v2alpha1.CiliumNetworkDriverDeviceManagerConfig
	changed chan struct{}
}

// managedManager is a device manager with how it is made and configured.
type managedManager struct {
	managerRunner
	// configOf returns the manager's part of the configuration, nil (without a type) when it is off.
	configOf func(*v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any
	// make makes a manager for a configuration from configOf, or one that only restores for nil.
	make func(config any) types.DeviceManager
}

// startSession starts the driver under the spec's name, with the pools and device managers of config, none for nil.
func (d *driver) startSession(ctx context.Context, node *corev1.Node, spec, config *v2alpha1.CiliumNetworkDriverNodeConfigSpec) *session {
	s := &session{
		driver:  d,
		log:     d.Logger.With("driver", spec.DriverName),
		first:   *spec,
		claims:  claims.NewClaimClient(d.Clientset.ResourceV1()),
		changed: make(chan struct{}),
	}
	s.writer = claims.NewWriter(claims.WriterParams{
		Logger: s.log, DB: d.DB, Allocations: d.Allocations, Client: s.claims,
		DriverName: spec.DriverName, NodeName: d.Config.NodeName, BootID: d.bootID,
	})
	d.outside.StatusWriter = s.writer
	preparer := claims.NewPreparer(claims.Params{
		Logger: s.log, DB: d.DB, Devices: d.Devices, Allocations: d.Allocations, Room: d.room,
		DriverName: spec.DriverName, NodeName: d.Config.NodeName, Metrics: d.claimMetrics,
	})
	s.kubelet = dra.New(dra.Params{
		Logger: s.log, DB: d.DB, Devices: d.Devices, Allocations: d.Allocations, Client: d.Clientset, Claims: preparer,
		Metrics: d.draMetrics,
		Config: dra.Config{
			DriverName: spec.DriverName, NodeName: d.Config.NodeName, KubeletRootDir: d.Config.KubeletRootDir,
			RetryInterval: time.Duration(spec.DraRegistrationRetryInterval) * time.Second,
			Timeout:       time.Duration(spec.DraRegistrationTimeout) * time.Second,
			MaxAttempts:   int(spec.DraRegistrationMaxAttempts),
		},
	})
	s.addManagers(node)
	s.configure(config)

	var enabled []types.DeviceManagerType
	for _, m := range s.managers {
		if m.configOf(s.wanted) != nil {
			enabled = append(enabled, m.kind)
		}
	}
	d.inventory.Expect(enabled...)

	ctx, s.cancel = context.WithCancel(ctx)
	s.work.Go(func() { s.must(ctx, "inventory", d.inventory.Run(ctx)) })
	s.work.Go(func() { s.must(ctx, "claim status", s.writer.Run(ctx)) })
	s.work.Go(func() { s.runManagers(ctx) })
	s.work.Go(func() { s.serve(ctx) })
	return s
}

// must logs a part of the driver that ended before its time, which is a defect.
func (s *session) must(ctx context.Context, part string, err error) {
	if ctx.Err() == nil {
		s.log.Error("A part of the network driver has ended, restart the agent", "part", part, "error", err)
	}
}

func (s *session) addManagers(node *corev1.Node) {
	ips, pfs := nodeIPs(node, s.log), &sriov.PFLocks{}
	runner := func(kind types.DeviceManagerType) managerRunner {
		return managerRunner{kind: kind, inventory: s.inventory, log: s.log}
	}
	s.managers = []*managedManager{{
		managerRunner: runner(types.DeviceManagerTypeSRIOV),
		configOf: func(c *v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any {
			if c == nil || c.SRIOV == nil || !c.SRIOV.Enabled {
				return nil
			}
			return c.SRIOV
		},
		make: func(config any) types.DeviceManager {
			c, _ := config.(*v2alpha1.SRIOVDeviceManagerConfig)
			return sriov.New(sriov.Params{
				Logger: s.log, Config: c, SysfsPath: s.Config.SysfsPath, NodeIPs: ips, Prepared: s.prepared, PFs: pfs,
			})
		},
	}, {
		managerRunner: runner(types.DeviceManagerTypeDummy),
		configOf: func(c *v2alpha1.CiliumNetworkDriverDeviceManagerConfig) any {
			if c == nil || c.Dummy == nil || !c.Dummy.Enabled {
				return nil
			}
			return c.Dummy
		},
		make: func(config any) types.DeviceManager {
			c, _ := config.(*v2alpha1.DummyDeviceManagerConfig)
			return dummy.New(s.log, c)
		},
	}}
}

// prepared says whether a device is prepared for a claim.
func (s *session) prepared(device string) bool {
	for range s.Allocations.List(s.DB.ReadTxn(), tables.AllocationsByDevice(device)) {
		return true
	}
	return false
}

// registersAs says whether the spec asks for the name and the registration that the session was started with.
func (s *session) registersAs(spec *v2alpha1.CiliumNetworkDriverNodeConfigSpec) bool {
	return spec.DriverName == s.first.DriverName &&
		spec.DraRegistrationRetryInterval == s.first.DraRegistrationRetryInterval &&
		spec.DraRegistrationTimeout == s.first.DraRegistrationTimeout &&
		spec.DraRegistrationMaxAttempts == s.first.DraRegistrationMaxAttempts
}

// configure gives the session the pools and device managers of the spec, or none of them for nil.
func (s *session) configure(spec *v2alpha1.CiliumNetworkDriverNodeConfigSpec) {
	if spec == nil {
		spec = &v2alpha1.CiliumNetworkDriverNodeConfigSpec{}
	}
	s.kubelet.SetPools(spec.Pools)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wanted = spec.DeviceManagerConfigs
	close(s.changed)
	s.changed = make(chan struct{})
}

// runManagers restores what is prepared, since discovery has to know it, and then keeps the device managers running
// as they are configured.
func (s *session) runManagers(ctx context.Context) {
	if err := s.restore(ctx); err != nil {
		s.must(ctx, "restore", err)
		return
	}
	defer func() {
		for _, m := range s.managers {
			m.stop()
		}
	}()
	for {
		s.mu.Lock()
		wanted, changed := s.wanted, s.changed
		s.mu.Unlock()
		for _, m := range s.managers {
			config := m.configOf(wanted)
			m.apply(ctx, config, func() types.DeviceManager { return m.make(config) })
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// restore rebuilds the allocations from the claims of the node's pods. The pods are listed once, here.
func (s *session) restore(ctx context.Context) error {
	pods, err := s.listPods(ctx)
	if err != nil {
		return err
	}
	managers := make([]types.DeviceManager, len(s.managers))
	for i, m := range s.managers {
		managers[i] = m.make(nil)
	}
	return claims.NewRestorer(claims.RestorerParams{
		Logger: s.log, Room: s.room, Claims: s.claims, Managers: managers, Observer: s.writer,
		DriverName: s.first.DriverName, NodeName: s.Config.NodeName, BootID: s.bootID,
	}).Restore(ctx, pods)
}

// serve connects to the runtime when the tables are complete, and to kubelet when the runtime is connected: a claim
// must not be prepared that nobody would then move into its pod.
func (s *session) serve(ctx context.Context) {
	txn := s.DB.ReadTxn()
	_, allocations := s.Allocations.Initialized(txn)
	_, devices := s.Devices.Initialized(txn)
	for _, initialized := range []<-chan struct{}{allocations, devices} {
		select {
		case <-initialized:
		case <-ctx.Done():
			return
		}
	}
	s.work.Go(func() { s.must(ctx, "nri", s.nri.Run(ctx)) })
	if err := s.nri.WaitConnected(ctx); err != nil {
		return
	}
	s.must(ctx, "dra", s.kubelet.Run(ctx))
}

// stop ends the session and waits for it.
func (s *session) stop() {
	s.cancel()
	s.work.Wait()
	s.hooks.Wait()
}

// view describes the session for the node config's status, and adds to the watch set what tells of another view.
func (s *session) view(watch *statedb.WatchSet) view {
	txn := s.DB.ReadTxn()
	allocations, allocationsChanged := s.Allocations.AllWatch(txn)
	reports, reportsChanged := s.Reports.AllWatch(txn)
	restored, restoredChanged := s.Allocations.Initialized(txn)
	discovered, discoveredChanged := s.Devices.Initialized(txn)
	runtime, runtimeChanged := s.nri.Status()
	kubelet, kubeletChanged := s.kubelet.State()

	v := view{
		driverName:  s.first.DriverName,
		allocations: statedb.Collect(allocations),
		reports:     statedb.Collect(reports),
		advertised:  map[string]int{},
	}
	switch {
	case !restored:
		v.notReady = append(v.notReady, problem{reasonRestoring, "reading the claims of the node's pods"})
	case !discovered:
		v.notReady = append(v.notReady, problem{reasonDiscovering, fmt.Sprintf("waiting for the first inventory of the device managers %s, the log says what keeps them",
			strings.Join(s.Devices.PendingInitializers(txn), ", "))})
	}
	if !runtime.Connected {
		v.notReady = append(v.notReady, problem{reasonWaitingForNRI, runtime.Reason})
	}
	v.addKubelet(kubelet)

	watch.Add(allocationsChanged, reportsChanged, runtimeChanged, kubeletChanged)
	if !restored {
		watch.Add(restoredChanged)
	}
	if !discovered {
		watch.Add(discoveredChanged)
	}
	return v
}

// addKubelet adds how the driver stands with kubelet and the API server.
func (v *view) addKubelet(k dra.State) {
	switch {
	case k.GaveUp:
		v.notReady = append(v.notReady, problem{reasonRegistrationFailed,
			fmt.Sprintf("gave up after %d attempts to register with kubelet, restart the agent to try again: %v", k.Attempts, k.RegistrationError)})
	case !k.Registered && k.RegistrationError != nil:
		v.notReady = append(v.notReady, problem{reasonRegistering,
			fmt.Sprintf("attempt %d to register with kubelet failed: %v", k.Attempts, k.RegistrationError)})
	case !k.Registered:
		v.notReady = append(v.notReady, problem{reasonRegistering, "registering with kubelet"})
	}
	if p := k.PublicationProblem; p != nil {
		v.notReady = append(v.notReady, problem{reasonPublicationFailed, p.Message})
	}
	if k.Publication == nil {
		return
	}
	for pool, size := range k.Publication.Pools {
		v.advertised[pool] = size.Devices
	}
	for _, c := range k.Publication.Conflicts {
		if c.Prepared {
			v.degraded = append(v.degraded, problem{reasonPoolConflict,
				fmt.Sprintf("device %s is prepared in the pools %v and is not advertised", c.Device, c.Pools)})
		} else {
			v.degraded = append(v.degraded, problem{reasonPoolConflict,
				fmt.Sprintf("device %s matches the pools %v and is in %s", c.Device, c.Pools, c.Pool)})
		}
	}
	for _, o := range k.Publication.Omissions {
		v.degraded = append(v.degraded, problem{reasonNotRepresentable,
			fmt.Sprintf("pool %s, device %q, attribute %q is left out: %s", o.Pool, o.Device, o.Attribute, o.Reason)})
	}
}
