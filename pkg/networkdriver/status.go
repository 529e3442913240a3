// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/hive/cell"
	"github.com/cilium/statedb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/dra"
	"github.com/cilium/networkdriver/pkg/networkdriver/inventory"
	"github.com/cilium/networkdriver/pkg/networkdriver/nodeconfig"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/rdma"
	"github.com/cilium/networkdriver/pkg/truncate"
)

// Reasons of the conditions Ready and Degraded.
const (
	reasonServing            = "Serving"
	reasonStarting           = "Starting"
	reasonInvalidConfig      = "InvalidConfig"
	reasonKubernetesVersion  = "UnsupportedKubernetes"
	reasonLastConfig         = "LastConfig"
	reasonRestoring          = "Restoring"
	reasonDiscovering        = "Discovering"
	reasonWaitingForNRI      = "WaitingForNRI"
	reasonRegistering        = "Registering"
	reasonRegistrationFailed = "RegistrationFailed"
	reasonPublicationFailed  = "PublicationFailed"

	reasonAsConfigured     = "AsConfigured"
	reasonRestartRequired  = "RestartRequired"
	reasonConfigNotMet     = "ConfigNotMet"
	reasonPoolConflict     = "PoolConflict"
	reasonNotRepresentable = "NotRepresentable"
	reasonDeviceFailed     = "DeviceFailed"
	reasonGateFailed       = "ContainerGateFailed"
	reasonGateHolds        = "Resolved"
	reasonGateNotSeen      = "NotSeen"
	reasonPartFailed       = "PartFailed"
	reasonOtherAgent       = "OtherAgent"
	reasonQuarantined      = "Quarantined"
	reasonRDMA             = "RDMAUnknown"
)

// problem is one reason for a condition, with its message.
type problem struct{ reason, message string }

// view is what the node config's status is made of.
type view struct {
	// generation is the node config's that the rest speaks of.
	generation int64
	driverName string
	// notReady are the reasons for not serving, the first cause first.
	notReady []problem
	// noMetadata is why pods read nothing about their devices, nil if they do.
	noMetadata error
	// gate is whether containers are held back and let go as their devices are.
	gate cdi.State
	// rdmaMode is what [rdma.Sysfs.Mode] says.
	rdmaMode string
	// degraded are the parts that do not work while the rest does.
	degraded []problem

	reports     []*inventory.Report
	allocations []*tables.DRAAllocation
	// pools are the configured pools' names.
	pools []string
	// withoutCounters are the PFs that tell no counters of VFs that programs drive.
	withoutCounters []string
	// advertised counts the devices that each pool advertises.
	advertised map[string]int
	// free counts those of them that are not prepared.
	free map[string]int
	// pfs are the physical functions that each pool's devices come from.
	pfs map[string][]string
}

// report updates the node config's status, and adds to the watch set what tells of something new to report.
func (d *driver) report(watch *statedb.WatchSet, health cell.Health) {
	v := view{}
	if d.session != nil {
		v = d.view(watch)
	}
	failures, failuresChanged := d.parts.state()
	watch.Add(failuresChanged)
	v.addFailures(failures)
	for _, p := range []*problem{d.tooOld, d.invalid} {
		if p != nil {
			v.notReady = append([]problem{*p}, v.notReady...)
		}
	}
	if d.waiting != nil && d.session == nil {
		v.notReady = append(v.notReady, *d.waiting)
	}
	for _, p := range []*problem{d.restart, d.last} {
		if p != nil {
			v.degraded = append(v.degraded, *p)
		}
	}
	switch {
	case len(v.notReady) > 0:
		health.Degraded(v.notReady[0].reason, errors.New(v.notReady[0].message))
		d.notReady.Store(&v.notReady[0])
	case d.session == nil:
		// A node without configuration has nothing to serve, which is no failure of the agent.
		health.OK("Waiting for a CiliumNetworkDriverNodeConfig named " + d.Config.NodeName)
		d.notReady.Store(nil)
	default:
		health.OK("Serving")
		d.notReady.Store(nil)
	}
	if d.active != nil {
		for _, p := range d.active.Pools {
			v.pools = append(v.pools, p.PoolName)
		}
	}
	d.metrics.inUse(v.allocations, v.poolStatus())
	if d.config == nil {
		return
	}
	v.generation = d.config.Generation
	v.keepPFs(d.config.Status.Pools)
	d.statuses.Update(d.config, v.status())
}

// view describes the session for the node config's status, and adds to the watch set what tells of another view.
func (d *driver) view(watch *statedb.WatchSet) view {
	txn := d.DB.ReadTxn()
	allocations, allocationsChanged := d.Allocations.AllWatch(txn)
	reports, reportsChanged := d.Reports.AllWatch(txn)
	journaled, journalChanged := d.Journal.AllWatch(txn)
	restored, restoredChanged := d.Allocations.Initialized(txn)
	discovered, discoveredChanged := d.Devices.Initialized(txn)
	runtime, runtimeChanged := d.nri.Status()
	kubelet, kubeletChanged := d.session.kubelet.State()
	gate, gateChanged := d.session.gate.State()

	v := view{
		driverName:  d.session.spec.DriverName,
		gate:        gate,
		noMetadata:  d.session.metadata.Off(),
		allocations: statedb.Collect(allocations),
		reports:     statedb.Collect(reports),
	}
	var err error
	if v.rdmaMode, err = rdma.Sysfs(d.Config.SysfsPath).Mode(); err != nil {
		v.degraded = append(v.degraded, problem{reasonRDMA, err.Error()})
	}
	otherAgent, otherAgentChanged := d.session.otherAgent.get()
	if restored && otherAgent != "" {
		v.degraded = append(v.degraded, problem{reasonOtherAgent, otherAgent})
	}
	alone, aloneChanged := d.session.alone.get()
	if alone != "" {
		v.degraded = append(v.degraded, problem{reasonLastConfig, alone})
	}
	switch {
	case !restored:
		v.notReady = append(v.notReady, problem{reasonRestoring, cmp.Or(otherAgent, "reading the claims of the node's pods")})
	case !discovered:
		v.notReady = append(v.notReady, problem{reasonDiscovering, fmt.Sprintf("waiting for the first inventory of the device managers %s, the log says what keeps them",
			strings.Join(d.Devices.PendingInitializers(txn), ", "))})
	}
	if !runtime.Connected {
		v.notReady = append(v.notReady, problem{reasonWaitingForNRI, runtime.Reason})
	}
	v.addKubelet(kubelet)

	reasons := quarantined(journaled)
	for _, device := range slices.Sorted(maps.Keys(reasons)) {
		v.degraded = append(v.degraded, problem{reasonQuarantined, fmt.Sprintf("device %s: %s", device, reasons[device])})
	}
	d.metrics.quarantined.Set(float64(len(reasons)))

	var silentChanged <-chan struct{}
	v.withoutCounters, silentChanged = d.silent.get()
	watch.Add(silentChanged)
	watch.Add(otherAgentChanged, aloneChanged, journalChanged)
	watch.Add(allocationsChanged, reportsChanged, runtimeChanged, kubeletChanged, gateChanged)
	if !restored {
		watch.Add(restoredChanged)
	}
	if !discovered {
		watch.Add(discoveredChanged)
	}
	return v
}

// addFailures adds the parts of the driver that do not run as they should.
func (v *view) addFailures(failures []*failure) {
	for _, f := range failures {
		v.degraded = append(v.degraded, problem{reasonPartFailed,
			fmt.Sprintf("the part %s has ended and is started again: %v", f.part, f.err)})
	}
}

// addKubelet adds how the driver stands with kubelet and the API server.
func (v *view) addKubelet(k dra.State) {
	switch {
	case k.GaveUp:
		v.notReady = append(v.notReady, problem{reasonRegistrationFailed,
			fmt.Sprintf("kubelet has not registered the driver in the configured number of attempts, it is tried again less often: %v", k.RegistrationError)})
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
	v.pfs = k.Publication.PFs
	v.advertised, v.free = k.Publication.Pools, k.Publication.Free
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

// keepPFs takes the PFs of pools from the status that is there, which the agent before has left, until all devices are known: pools that
// are one wire would be several meanwhile.
func (v *view) keepPFs(before []v2alpha1.DevicePoolStatus) {
	if v.pfs != nil {
		return
	}
	v.pfs = map[string][]string{}
	for _, p := range before {
		if len(p.PFs) > 0 {
			v.pfs[p.Name] = p.PFs
		}
	}
}

// status makes the node config's status. The writer sorts and bounds its lists.
func (v view) status() v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	s := v2alpha1.CiliumNetworkDriverNodeConfigStatus{
		ObservedGeneration: v.generation,
		DriverName:         v.driverName,
		RDMAMode:           v.rdmaMode,
		AllocatedDevices:   int32(len(v.allocations)),
	}
	degraded := slices.Clone(v.degraded)
	for _, r := range v.reports {
		s.Managers = append(s.Managers, v2alpha1.DeviceManagerStatus{
			Manager: r.Manager.String(), Devices: int32(r.Devices), Skipped: int32(len(r.Skipped)),
		})
		s.SkippedDevices = append(s.SkippedDevices, skippedDevices(r)...)
		for _, p := range r.Problems {
			degraded = append(degraded, problem{reasonConfigNotMet, p.Field + ": " + p.Message})
		}
	}
	for _, a := range v.allocations {
		if a.Error != "" {
			degraded = append(degraded, problem{reasonDeviceFailed,
				fmt.Sprintf("device %s of claim %s: %s", a.DeviceName, a.Claim(), a.Error)})
		}
	}
	if err := v.gate.Problem; err != nil {
		degraded = append(degraded, problem{reasonGateFailed, err.Error()})
	}
	s.Pools = v.poolStatus()
	var uses []string
	for _, p := range s.Pools {
		s.Devices += p.Devices
		uses = append(uses, fmt.Sprintf("%s %d/%d", p.Name, p.Free, p.Devices))
	}
	s.PoolUse = truncate.UTF8(strings.Join(uses, ", "), maxPoolUse)
	s.WithoutCounters = v.withoutCounters

	ready := problem{reasonServing, fmt.Sprintf("%d devices are offered in %d pools", s.Devices, len(v.advertised))}
	if len(v.notReady) > 0 {
		ready = v.notReady[0]
	}
	s.Conditions = []metav1.Condition{
		nodeconfig.Condition(v2alpha1.ConditionReady, len(v.notReady) == 0, ready.reason, ready.message),
		degradedCondition(degraded),
		v.gateCondition(),
	}
	return s
}

// gateCondition is unknown before a container with a claim was created: not every runtime says what it does not do.
func (v view) gateCondition() metav1.Condition {
	if err := v.gate.Problem; err != nil {
		return nodeconfig.Condition(v2alpha1.ConditionContainerGate, false, reasonGateFailed, err.Error())
	}
	c := nodeconfig.Condition(v2alpha1.ConditionContainerGate, true, reasonGateHolds, "containers that list a claim start while its devices are in their pod")
	if !v.gate.Resolved {
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, reasonGateNotSeen, "the runtime has not created a container that lists a claim, or does not resolve CDI devices"
	}
	if v.noMetadata != nil {
		c.Message += "; " + v.noMetadata.Error()
	}
	return c
}

// maxPoolUse is the longest text that the API takes for the use of pools.
const maxPoolUse = 1024

// maxDeviceName is the longest name that the API takes for a skipped device.
const maxDeviceName = 63

// skippedDevices lists each skipped device once, as the API's list is keyed by it.
func skippedDevices(r *inventory.Report) []v2alpha1.SkippedDevice {
	seen := map[string]bool{}
	var list []v2alpha1.SkippedDevice
	for _, d := range r.Skipped {
		name := truncate.UTF8(d.Device, maxDeviceName)
		if name == "" || seen[name] {
			continue
		}
		seen[name] = true
		list = append(list, v2alpha1.SkippedDevice{Manager: r.Manager.String(), Device: name, Reason: d.Reason})
	}
	return list
}

// degradedCondition has the reason of the first problem and the messages of all.
func degradedCondition(problems []problem) metav1.Condition {
	if len(problems) == 0 {
		return nodeconfig.Condition(v2alpha1.ConditionDegraded, false, reasonAsConfigured, "all of the configuration is applied")
	}
	messages := make([]string, len(problems))
	for i, p := range problems {
		messages[i] = p.message
	}
	return nodeconfig.Condition(v2alpha1.ConditionDegraded, true, problems[0].reason, strings.Join(messages, "; "))
}

// poolStatus counts the devices of configured pools, and of former ones that still have devices.
func (v view) poolStatus() []v2alpha1.DevicePoolStatus {
	counts := map[string]*v2alpha1.DevicePoolStatus{}
	pool := func(name string) *v2alpha1.DevicePoolStatus {
		if counts[name] == nil {
			counts[name] = &v2alpha1.DevicePoolStatus{Name: name}
		}
		return counts[name]
	}
	for _, name := range v.pools {
		pool(name)
	}
	for name, n := range v.advertised {
		pool(name).Devices, pool(name).Free = int32(n), int32(v.free[name])
	}
	for _, a := range v.allocations {
		pool(a.Pool).Allocated++
	}
	for name, pfs := range v.pfs {
		pool(name).PFs = pfs
	}
	list := make([]v2alpha1.DevicePoolStatus, 0, len(counts))
	for _, p := range counts {
		list = append(list, *p)
	}
	slices.SortFunc(list, func(a, b v2alpha1.DevicePoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
