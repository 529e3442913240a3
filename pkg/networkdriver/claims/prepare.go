// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/statedb"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/stage"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// Params are what a [Preparer] works with.
type Params struct {
	Logger      *slog.Logger
	DB          *statedb.DB
	Devices     statedb.Table[*tables.DRADevice]
	Allocations statedb.Table[*tables.DRAAllocation]
	// Room changes devices and allocations.
	Room *attachments.Room
	// DriverName is the name under which the driver publishes devices.
	DriverName string
	// NodeName is the first part of the names of this node's pools.
	NodeName string
	// Metrics may be nil.
	Metrics *Metrics
	// Sandboxes are those that run on the node.
	Sandboxes Sandboxes
	// Networks, Pools and Classes say what claims may ask for, and what it means.
	Networks Networks
	Pools    Pools
	Classes  Classes
	// Events may be nil.
	Events Events
	// Unhooked says that no hook is to look at containers before they start: nothing sees then that the node of an IOMMU group, which a
	// container is given by the group's number, is another device's by now.
	Unhooked bool
	// HolderPatience bounds [Preparer.AwaitDevices]; 0 means 10 seconds.
	HolderPatience time.Duration
}

// Preparer prepares and unprepares claims. Calls for different claims run at the same time, those for one claim one
// after the other.
type Preparer struct {
	Params
	reserved reservations
	// unprepared is when claims were unprepared whose answer kubelet may not have yet.
	unprepared times
}

// NewPreparer makes a Preparer.
func NewPreparer(p Params) *Preparer {
	if p.HolderPatience == 0 {
		p.HolderPatience = defaultHolderPatience
	}
	return &Preparer{Params: p}
}

// Result is the answer to Prepare.
type Result struct {
	Devices []PreparedDevice
}

// PreparedDevice is one prepared device in the terms of the claim's allocation.
type PreparedDevice struct {
	// Request is the request, or request/subrequest, that the device satisfies.
	Request string
	// Pool is the pool's published name, with the node.
	Pool string
	// Device is the device's name.
	Device string
}

// Prepare sets up all devices of ours that the claim was allotted: everything is checked before anything is touched,
// then come Setup, the claim's status and the allocation table, and when one of these fails, what this call has set
// up is freed again. A claim that is prepared already gets the same answer without any effect. The error names claim
// and request, and the present holder of a device that is taken.
func (p *Preparer) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (result Result, err error) {
	start := time.Now()
	defer func() { p.Metrics.done("prepare", start, err) }()

	held, err := p.Room.Lock(ctx, claim.UID)
	if err != nil {
		return Result{}, fmt.Errorf("prepare claim %s: %w", RefOf(claim), stage.In("lock", err))
	}
	defer held.Unlock()
	defer crashpoint.Here(crashpoint.Prepared)
	return p.prepareHeld(ctx, claim, held)
}

func (p *Preparer) prepareHeld(ctx context.Context, claim *resourceapi.ResourceClaim, held *attachments.Claim) (Result, error) {
	result, err := p.prepare(ctx, claim, held)
	if err != nil {
		hint := ""
		if IsPermanent(err) {
			hint = " (permanent: trying again does not help)"
		}
		return Result{}, fmt.Errorf("prepare claim %s: %w%s", RefOf(claim), err, hint)
	}
	p.unprepared.forget(claim.UID)
	p.Room.Settle(claim.UID)
	return result, nil
}

// wanted is one device that a claim is to have.
type wanted struct {
	request string
	ordinal int32  // of the device among those of the request, without subrequest
	pool    string // as configured
	name    string
	config  types.DeviceConfig
	asked   Asked                 // of the claim and its class, of which config is made
	row     *tables.DRAAllocation // of an earlier call for this claim and pod, or nil
	entry   *tables.DRADevice     // of the inventory; nil if the row needs nothing more
	device  types.Device          // to set up; nil if the row needs nothing more
	manager types.DeviceManagerType
}

func (p *Preparer) prepare(ctx context.Context, claim *resourceapi.ResourceClaim, held *attachments.Claim) (Result, error) {
	ref := RefOf(claim)
	rows := held.Rows()
	if err := p.checkReservation(claim, rows); err != nil {
		return Result{}, stage.In("claim", err)
	}
	pod, err := p.consumerOf(claim, rows)
	if err != nil {
		return Result{}, stage.In("claim", err)
	}
	devices, err := p.wantedDevices(claim)
	if err != nil {
		return Result{}, stage.In("parameters", err)
	}
	stale := matchRows(rows, pod, devices)
	if err := p.checkMisdirected(claim, pod, devices); err != nil {
		return Result{}, stage.In("parameters", err)
	}
	if err := p.join(ctx, claim, devices); err != nil {
		return Result{}, stage.In("network", err)
	}
	stale = append(stale, splitChanged(devices)...)
	if len(stale) == 0 && !slices.ContainsFunc(devices, func(w *wanted) bool { return w.row == nil || w.row.Releasing || needsSetup(w.row) }) {
		return p.resultOf(devices), nil
	}

	// Reserve first and look at the tables then: whoever had a reservation until now has left its rows there.
	release, err := p.reserve(ref, pod, devices)
	if err != nil {
		return Result{}, stage.In("device", err)
	}
	defer release()
	if err := p.check(ref, pod, devices); err != nil {
		return Result{}, stage.In("device", err)
	}
	if err := p.checkStale(pod, stale); err != nil {
		return Result{}, stage.In("device", err)
	}
	plan := attachments.Plan{Claim: ref, Stale: stale}
	for _, w := range devices {
		if w.device == nil {
			plan.Keep = append(plan.Keep, w.row)
		} else {
			row := newRow(ref, pod, w)
			if row.PodClaim, err = p.podClaimOf(ctx, claim, w); err != nil {
				return Result{}, err
			}
			plan.SetUp = append(plan.SetUp, row)
		}
	}
	if err := held.Prepare(ctx, plan); err != nil {
		return Result{}, err
	}
	return p.resultOf(devices), nil
}

// wantedDevices checks and returns what the claim asks of this driver and node.
func (p *Preparer) wantedDevices(claim *resourceapi.ResourceClaim) ([]*wanted, error) {
	results := resultsOf(claim, p.DriverName)
	if len(results) == 0 {
		return nil, permanentError{fmt.Errorf("the claim has no device of driver %s", p.DriverName)}
	}
	var devices []*wanted
	ordinals := map[string]int32{}
	for _, result := range results {
		pool, ours := pools.Configured(p.NodeName, result.Pool)
		switch {
		case !ours:
			return nil, permanentError{fmt.Errorf("request %q: device %s is in pool %s, which is not a pool of this node, %s",
				result.Request, result.Device, result.Pool, p.NodeName)}
		case ptr.Deref(result.AdminAccess, false):
			// Such a device may be another pod's; setting it up would break that pod.
			return nil, permanentError{fmt.Errorf("request %q: adminAccess to device %s is not supported: a network device is given to one pod or not at all",
				result.Request, result.Device)}
		case result.ShareID != nil:
			return nil, permanentError{fmt.Errorf("request %q: device %s was allocated as a share, but cannot be shared", result.Request, result.Device)}
		}
		request := resourceclaim.BaseRequestRef(result.Request)
		devices = append(devices, &wanted{request: result.Request, ordinal: ordinals[request], pool: pool, name: result.Device})
		ordinals[request]++
	}
	configs, err := ResolveConfigs(claim, p.DriverName)
	if err != nil {
		return nil, err
	}
	for i, config := range configs {
		devices[i].config, devices[i].asked = config.DeviceConfig, config
	}
	return devices, nil
}

// matchRows gives every wanted device its row if it is among the claim's. What it returns are the rows that the pod
// does not want: from a pod that had the claim before, or from an earlier allocation.
func matchRows(rows []*tables.DRAAllocation, pod resourceapi.ResourceClaimConsumerReference, devices []*wanted) (stale []*tables.DRAAllocation) {
	for _, row := range rows {
		i := slices.IndexFunc(devices, func(w *wanted) bool {
			return row.PodUID == pod.UID && row.Pool == w.pool && row.DeviceName == w.name
		})
		if i < 0 {
			stale = append(stale, row)
			continue
		}
		devices[i].row = row
	}
	return stale
}

// needsSetup is true for a row of a device that could not be freed or attached: Setup brings it into shape again.
func needsSetup(row *tables.DRAAllocation) bool {
	return (row.Error != "" || row.Releasing) && row.Attachment == nil
}

// ifName is the name that the device's link will have in the pod; empty for a device without one.
func ifName(config types.DeviceConfig, device types.Device) string {
	if config.Driver != "" {
		return ""
	}
	if config.PodIfName != "" {
		return config.PodIfName
	}
	return device.KernelIfName()
}

// reserve looks the devices up in the inventory and keeps concurrent calls from taking them, or their names in the pod.
func (p *Preparer) reserve(claim Ref, pod resourceapi.ResourceClaimConsumerReference, devices []*wanted) (release func(), err error) {
	txn := p.DB.ReadTxn()
	things := map[string]string{}
	clashes := map[string]func(holder) error{}
	for _, w := range devices {
		if w.row != nil && !needsSetup(w.row) {
			continue
		}
		entry, _, found := p.Devices.Get(txn, tables.DeviceByName(w.name))
		if !found {
			return nil, fmt.Errorf("request %q: device %s is gone: the node has no such device that can serve now", w.request, w.name)
		}
		w.entry, w.device, w.manager = entry, entry.Dev, entry.Manager
		if w.row != nil {
			w.device = w.row.PreparedDevice // it remembers how the link was found
		}
		key := "device/" + w.name
		things[key] = w.request
		clashes[key] = func(by holder) error {
			return fmt.Errorf("request %q: device %s is being prepared for claim %s (uid %s)", w.request, w.name, by.claim, by.claim.UID)
		}
		if name := ifName(w.config, w.device); name != "" {
			// The other claim is the same pod's, so that this does not pass: who came second has nothing to wait for.
			key := "name/" + string(pod.UID) + "/" + name
			things[key] = w.request
			clashes[key] = func(by holder) error { return errNameTaken(w.request, name, by) }
		}
	}
	release, taken, by := p.reserved.take(claim, things)
	if release == nil {
		return nil, clashes[taken](by)
	}
	return release, nil
}

// errNameTaken is for a name that another claim of the same pod has.
func errNameTaken(request, name string, by holder) error {
	return permanentError{fmt.Errorf("request %q: podIfName: %q is also what request %q of claim %s has in the same pod",
		request, name, by.request, by.claim)}
}

// check refuses devices that others hold or that have left the pool they were allotted from, names that clash in the pod, and configurations that a device cannot do.
func (p *Preparer) check(claim Ref, pod resourceapi.ResourceClaimConsumerReference, devices []*wanted) error {
	txn := p.DB.ReadTxn()
	for _, w := range devices {
		if _, row := holdersOf(p.Allocations.List(txn, tables.AllocationsByDevice(w.name)), claim.UID); row != nil {
			return fmt.Errorf("request %q: device %s is still held by claim %s (uid %s) of pod %s (uid %s)",
				w.request, w.name, row.Claim(), row.ClaimUID, row.Pod(), row.PodUID)
		}
		if w.entry == nil {
			continue
		}
		if pool := p.poolOf(txn, w.entry); pool != w.pool {
			now := "it is in none now"
			if pool != "" {
				now = "it is in pool " + pool + " now"
			}
			return fmt.Errorf("request %q: device %s is not in pool %s any more, which it was allotted from, %s: "+
				"have the pool's filter take it again, or delete the pod to get another device", w.request, w.name, w.pool, now)
		}
	}

	names := map[string]holder{}
	for row := range p.Allocations.List(txn, tables.AllocationsByPod(pod.UID)) {
		if row.ClaimUID == claim.UID {
			continue
		}
		if name := ifName(row.Config, row.PreparedDevice); name != "" {
			names[name] = holder{row.ClaimRef(), row.Request}
		}
	}
	for _, w := range devices {
		device := w.device
		if device == nil {
			device = w.row.PreparedDevice
		}
		name := ifName(w.config, device)
		other, clash := names[name]
		switch {
		case name == "":
		case clash && other.claim != claim:
			return errNameTaken(w.request, name, other)
		case clash && other.request == w.request:
			return permanentError{fmt.Errorf("request %q: podIfName: %q would name two devices of this one request; "+
				"use a request of its own for each device, each with its podIfName", w.request, name)}
		case clash:
			return permanentError{fmt.Errorf("request %q: podIfName: %q is also the interface name of request %q",
				w.request, name, other.request)}
		default:
			names[name] = holder{claim, w.request}
		}
	}

	if err := checkAddresses(devices); err != nil {
		return err
	}
	if err := p.checkRoutes(txn, claim, pod, devices); err != nil {
		return err
	}
	for _, w := range devices {
		if w.device == nil {
			continue
		}
		if err := p.Room.Validate(w.device, w.config); err != nil {
			return permanentError{fmt.Errorf("request %q: device %s: parameters: %w", w.request, w.name, err)}
		}
		if p.Unhooked && w.config.Driver == types.DriverVFIO {
			return permanentError{fmt.Errorf("request %q: device %s: parameters: driver: %s needs the gate hook, which is off on this node "+
				"(agent.gateHook.enabled, --gate-hook-path): a container could be given another device's node", w.request, w.name, types.DriverVFIO)}
		}
		if name := ifName(w.config, w.device); w.config.PodIfName == "" && name != "" {
			if err := types.ValidatePodIfName(name); err != nil {
				return permanentError{fmt.Errorf("request %q: device %s: parameters: podIfName is needed, since the interface's own name cannot be kept: %w",
					w.request, w.name, err)}
			}
		}
	}
	return nil
}

// poolOf is the pool that the device is offered in. One that is prepared is in the pool that it was allotted from; the filters of others
// may have changed since the scheduler chose.
func (p *Preparer) poolOf(txn statedb.ReadTxn, device *tables.DRADevice) string {
	return p.Pools.Of(device, statedb.ToSeq(p.Allocations.List(txn, tables.AllocationsByDevice(device.Name))))
}

// checkAddresses refuses addresses that are asked for by two requests: a network has each of them once, and so has a pod.
func checkAddresses(devices []*wanted) error {
	asked := map[netip.Addr]string{}
	for _, w := range devices {
		for _, a := range w.config.Addresses {
			if other, ok := asked[a.Addr]; ok {
				return permanentError{fmt.Errorf("request %q: parameters: addresses: %s is also what request %q asks for", w.request, a.Addr, other)}
			}
			asked[a.Addr] = w.request
		}
	}
	return nil
}

// checkRoutes refuses routes of which the pod's main table would have two, as far as they are known before addresses are chosen. The
// rest is refused when the second one is set.
func (p *Preparer) checkRoutes(txn statedb.ReadTxn, claim Ref, pod resourceapi.ResourceClaimConsumerReference, devices []*wanted) error {
	taken := map[types.RouteKey]holder{}
	for row := range p.Allocations.List(txn, tables.AllocationsByPod(pod.UID)) {
		if row.ClaimUID == claim.UID {
			continue
		}
		for _, route := range row.Config.MainRoutes() {
			taken[route] = holder{row.ClaimRef(), row.Request}
		}
	}
	for _, w := range devices {
		for _, route := range w.config.MainRoutes() {
			other, clash := taken[route]
			switch {
			case clash && other == holder{claim, w.request}:
				return permanentError{fmt.Errorf("request %q: routes: two devices of this one request would have a route to %s; "+
					"a network with policyRouting gives each a table of its own", w.request, route.To)}
			case clash:
				return permanentError{fmt.Errorf("request %q: routes: request %q of claim %s has one to %s already, with the same metric; "+
					"another metric is needed, or a network with policyRouting", w.request, other.request, other.claim, route.To)}
			}
			taken[route] = holder{claim, w.request}
		}
	}
	return nil
}

// checkStale refuses to take a device from an earlier pod that has its link, and so may use it. Kubelet does not unprepare
// a claim that is passed on from one pod to the next, so nobody else gives back what that pod had. Of a device without a link nothing tells
// whether an earlier pod that runs has it, once the agent was started again.
func (p *Preparer) checkStale(pod resourceapi.ResourceClaimConsumerReference, stale []*tables.DRAAllocation) error {
	for _, row := range stale {
		linkless := row.PreparedDevice.Link().IsZero() && row.PodUID != pod.UID
		if row.Attachment != nil || linkless && sandboxOf(p.aliveIn(row.ClaimNamespace), row.PodUID) != nil {
			return fmt.Errorf("device %s is still in pod %s (uid %s), which had this claim before pod %s (uid %s)",
				row.DeviceName, row.Pod(), row.PodUID, pod.Name, pod.UID)
		}
	}
	return nil
}

// newRow is the row that the device is to have, with the device as it is before it is set up.
func newRow(claim Ref, pod resourceapi.ResourceClaimConsumerReference, w *wanted) *tables.DRAAllocation {
	return &tables.DRAAllocation{
		DeviceName:     w.name,
		Manager:        w.manager,
		PreparedDevice: w.device,
		Pool:           w.pool,
		PodUID:         pod.UID,
		ClaimUID:       claim.UID,
		Config:         w.config,
		ClaimNamespace: claim.Namespace,
		ClaimName:      claim.Name,
		PodName:        pod.Name,
		Request:        w.request,
	}
}

// podClaimOf is what the pod calls the device's claim, as far as that can be told: one that was made from a template says so, and the
// device class of one that the scheduler made says which extended resource the pod asked for. It is for programs that open a device
// themselves.
func (p *Preparer) podClaimOf(ctx context.Context, claim *resourceapi.ResourceClaim, w *wanted) (string, error) {
	switch {
	case w.config.Driver == "" && !w.config.RDMA:
		return "", nil
	case claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true":
		return claim.Annotations[resourceapi.PodResourceClaimAnnotation], nil
	}
	for _, request := range claim.Spec.Devices.Requests {
		if request.Name != resourceclaim.BaseRequestRef(w.request) || request.Exactly == nil {
			continue
		}
		class, err := p.Classes.GetClass(ctx, request.Exactly.DeviceClassName)
		if err != nil {
			return "", fmt.Errorf("request %q: %w", w.request, err)
		}
		return ptr.Deref(class.Spec.ExtendedResourceName, resourceapi.ResourceDeviceClassPrefix+class.Name), nil
	}
	return "", nil
}

func (p *Preparer) resultOf(devices []*wanted) Result {
	var result Result
	for _, w := range devices {
		result.Devices = append(result.Devices, PreparedDevice{
			Request: w.request, Pool: pools.Name(p.NodeName, w.pool), Device: w.name,
		})
	}
	return result
}
