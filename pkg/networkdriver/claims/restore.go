// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/crashpoint"
	apiclient "github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/journal"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// staticPodUID is the annotation of a static pod's object with the UID that the runtime knows it by.
const staticPodUID = "kubernetes.io/config.hash"

// readers is how many claims are read at the same time.
const readers = 8

// Observer is told what a claim's status says at a restart, and which rows came of it.
type Observer interface {
	Observe(claim *resourceapi.ResourceClaim, rows []*tables.DRAAllocation)
	// Withdraw is [attachments.StatusWriter]'s: it has the status say what the rows say, and nothing else.
	Withdraw(claim Ref)
}

// RestorerParams are what a [Restorer] works with.
type RestorerParams struct {
	Logger *slog.Logger
	// Room takes the rows.
	Room       *attachments.Room
	Claims     ClaimGetter
	Managers   []types.DeviceManager
	Observer   Observer
	Journal    Journal
	DriverName string
	NodeName   string
	// BootID is the kernel's present boot id. What was set up under another one is gone.
	BootID string
	// Networks looks up what a record says of a network, which the claim does not, and Pools and Classes say what claims may ask for.
	Networks Networks
	Pools    Pools
	Classes  Classes
	// Addresses says whether the addresses that a record has are the device's, and keeps those of a device that is left to its pod.
	Addresses interface {
		Holds(ctx context.Context, row *tables.DRAAllocation) error
		Leave(claim kubetypes.UID, device string)
	}
	// Restored, if it is not nil, is told of all rows before anybody else can see them.
	Restored func(rows []*tables.DRAAllocation)
}

// Restorer rebuilds the allocation table after a restart of the agent from the node's journal and the records in the
// claims' statuses.
type Restorer struct {
	RestorerParams
	managers map[types.DeviceManagerType]types.DeviceManager
	// alone says that there are rows, from the journal alone.
	alone bool
}

// NewRestorer makes a Restorer.
func NewRestorer(p RestorerParams) *Restorer {
	r := &Restorer{RestorerParams: p, managers: map[types.DeviceManagerType]types.DeviceManager{}}
	for _, m := range p.Managers {
		r.managers[m.Type()] = m
	}
	return r
}

// podClaim is a claim that pods of this node use.
type podClaim struct {
	namespace, name string
	pods            []podUse
	// live are the pods of the node that have not ended, by the UIDs that the API and the runtime know them by.
	live   map[kubetypes.UID]bool
	object *resourceapi.ResourceClaim // nil if it is gone
}

type podUse struct {
	pod       *corev1.Pod
	generated bool // from a template: the pod must own the claim
}

// Restore inserts a row for every device of the journal, and for every one that a record proves to be prepared for one of
// the pods, which are those of this node; pods that have ended are left out.
//
// The journal knows what was done on this node since it was booted, and so decides: a device with an entry is set up
// for the entry's claim, and is given back if the claim is not for it any more; a record that names the journal counts
// for nothing without an entry. The one exception is a record that another agent, without the journal, has made since:
// then the entry is dropped. Records without a journal are those of a former version of the agent, and get an entry.
//
// A record counts only where it fits the claim's allocation on this
// node, its reservation and the device it names, for whoever may edit the status may write records. A device whose
// record does not count is left to its pod, with a warning. A record of another boot is no row: Prepare sets the
// device up again.
//
// Of two claims that are both allocated the same device in the same pool, the older one gets the row, with a warning
// for the other; in different pools both get one, and the publication deals with the conflict.
//
// After [Restorer.RestoreAlone] it finds out the same, and corrects what has rows since; no claim may be prepared meanwhile.
//
// An API server that does not answer is asked again until the context ends, and nothing is restored then.
func (r *Restorer) Restore(ctx context.Context, pods []*corev1.Pod) error {
	claims, err := r.readAll(ctx, withClaimsOf(r.Journal.Entries(), claimsOf(pods)))
	if err != nil {
		return err
	}
	journaled, err := r.journaled(func(e *journal.Entry) bool {
		return slices.ContainsFunc(claims, func(c *podClaim) bool {
			return r.isHolders(c.object, e)
		})
	})
	if err != nil {
		return err
	}
	slices.SortFunc(claims, func(a, b *podClaim) int {
		return cmp.Or(a.object.CreationTimestamp.Compare(b.object.CreationTimestamp.Time), cmp.Compare(a.object.UID, b.object.UID))
	})

	holders := map[string]*tables.DRAAllocation{}
	var rows []*tables.DRAAllocation
	var outdated []Ref // claims whose status has to be written anew
	for _, c := range claims {
		first := len(rows)
		proved, upToDate, err := r.rowsOf(ctx, c, journaled)
		if err != nil {
			return fmt.Errorf("restore claim %s: %w", RefOf(c.object), err)
		}
		for _, row := range proved {
			key := tables.AllocationKey(row.Pool, row.DeviceName)
			if other := holders[key]; other != nil {
				r.Logger.Warn("Device is recorded for two claims and restored for the older one only", "device", row.DeviceName, "pool", row.Pool,
					"claim", other.Claim(), "pod", other.Pod(), "otherClaim", row.Claim(), "otherPod", row.Pod())
				continue
			}
			noted, err := r.claimEntry(ctx, row, journaled)
			if err != nil {
				return err
			}
			upToDate = upToDate && noted
			holders[key] = row
			rows = append(rows, row)
		}
		// Before the rows can be seen, so that whoever watches them does not write back what was just read.
		if len(rows) > first && !r.alone {
			r.Observer.Observe(c.object, rows[first:])
		}
		if !upToDate {
			outdated = append(outdated, RefOf(c.object))
		}
	}
	for _, row := range journaled {
		rows = append(rows, row)
	}
	crashpoint.Here(crashpoint.RestoreBefore)
	if err := r.insert(ctx, rows); err != nil {
		return fmt.Errorf("restore devices: %w", err)
	}
	crashpoint.Here(crashpoint.RestoreRows)
	for _, claim := range outdated { // now that its rows are there
		r.Observer.Withdraw(claim)
	}
	r.Logger.Info("Prepared devices restored", "devices", len(rows), "claims", len(claims), "pods", len(pods))
	return nil
}

// RestoreAlone inserts a row for every device of the journal, for an API server that does not answer: so pods keep their devices,
// and devices can be given back. What was never promised to kubelet, or is not any more, is to be given back; it must not be
// before [Restorer.Restore] has compared it with the claims, for an agent without a journal may have prepared it since.
func (r *Restorer) RestoreAlone() error {
	if r.alone {
		return nil
	}
	journaled, err := r.journaled(func(*journal.Entry) bool { return true })
	if err != nil {
		return err
	}
	var rows []*tables.DRAAllocation
	for _, row := range journaled {
		row.Held = !row.Releasing // whether it was in the pod is not known
		rows = append(rows, row)
	}
	if err := r.insert(context.Background(), rows); err != nil {
		return fmt.Errorf("restore devices from the journal: %w", err)
	}
	r.alone = true
	r.Logger.Warn("The API server does not answer: devices are restored from the node's journal alone", "devices", len(rows))
	return nil
}

// insert inserts the rows, or corrects those that are there since [Restorer.RestoreAlone]. A device that was given back meanwhile
// has no entry in the journal any more, and gets no row.
func (r *Restorer) insert(ctx context.Context, rows []*tables.DRAAllocation) error {
	if !r.alone {
		if r.Restored != nil {
			r.Restored(rows)
		}
		return r.Room.Restore(rows)
	}
	for _, row := range rows {
		claim, err := r.Room.Lock(ctx, row.ClaimUID)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(r.Journal.Entries(), func(e *journal.Entry) bool { return e.Name == row.DeviceName && e.ClaimUID == row.ClaimUID }) {
			err = claim.Restore(row)
		}
		claim.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// Allotted says whether any of the pods, which are those of this node, uses a claim that is allotted one of the driver's
// devices here, prepared or not. An API server that does not answer is asked again until the context ends, which is the
// only error.
func (r *Restorer) Allotted(ctx context.Context, pods []*corev1.Pod) (bool, error) {
	claims, err := r.readAll(ctx, claimsOf(pods))
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(claims, func(c *podClaim) bool { return r.isHere(c.object) }), nil
}

// isHere says whether the claim is allotted a device of the driver on this node.
func (r *Restorer) isHere(claim *resourceapi.ResourceClaim) bool {
	return Owner{Driver: r.DriverName, Node: r.NodeName}.isAllotted(claim)
}

// readAll reads the claims, without those that are gone.
func (r *Restorer) readAll(ctx context.Context, claims []*podClaim) ([]*podClaim, error) {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	for _, c := range claims {
		group.Go(func() (err error) {
			c.object, err = r.read(groupCtx, c)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(claims, func(c *podClaim) bool { return c.object == nil }), nil
}

// claimsOf returns the claims of all pods that have not ended: named in the pod, made from a template, or made for
// extended resources.
func claimsOf(pods []*corev1.Pod) []*podClaim {
	type key struct{ namespace, name string }
	byName := map[key]*podClaim{}
	var claims []*podClaim
	live := map[kubetypes.UID]bool{}
	for _, pod := range pods {
		if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		live[pod.UID] = true
		live[kubetypes.UID(pod.Annotations[staticPodUID])] = true
		for name, generated := range resourceclaim.PodClaims(pod) {
			k := key{pod.Namespace, name}
			c := byName[k]
			if c == nil {
				c = &podClaim{namespace: k.namespace, name: k.name, live: live}
				byName[k] = c
				claims = append(claims, c)
			}
			c.pods = append(c.pods, podUse{pod, generated})
		}
	}
	return claims
}

// read gets the claim, nil if it is gone.
func (r *Restorer) read(ctx context.Context, c *podClaim) (claim *resourceapi.ResourceClaim, err error) {
	log := r.Logger.With("claim", c.namespace+"/"+c.name)
	asked := insist(ctx, func() (again bool) {
		claim, err = r.Claims.GetClaim(ctx, c.namespace, c.name)
		return err != nil && !apierrors.IsNotFound(err)
	}, func(delay time.Duration) {
		log.Warn("Claim of a pod cannot be read; the driver starts when it could be", "retryIn", delay, "error", err)
	})
	switch {
	case asked != nil:
		return nil, fmt.Errorf("restore claim %s/%s: %w", c.namespace, c.name, errors.Join(asked, err))
	case err != nil:
		log.Info("Claim of a pod is gone, nothing is restored from it")
		return nil, nil
	}
	return claim, nil
}

// insist asks again and again while that is to be done, and says so before each pause. The error is the context's.
func insist(ctx context.Context, ask func() (again bool), say func(delay time.Duration)) error {
	for delay := firstRetry; ask(); delay = min(2*delay, lastRetry) {
		if ctx.Err() == nil {
			say(delay)
		}
		select {
		case <-time.After(delay + rand.N(delay/4)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// claimEntry makes the journal's entry of a device the row's. Another claim's is dropped: an agent that has no journal
// was here meanwhile. noted says whether there was an entry, and so the record names the journal.
func (r *Restorer) claimEntry(ctx context.Context, row *tables.DRAAllocation, journaled map[string]*tables.DRAAllocation) (noted bool, err error) {
	if other := journaled[row.DeviceName]; other != nil && other.ClaimUID != row.ClaimUID {
		r.Logger.Warn("Journal entry of a device is dropped: another agent has prepared the device for another claim since",
			"device", row.DeviceName, "claim", row.Claim(), "pod", row.Pod(), "otherClaim", other.Claim(), "otherPod", other.Pod())
		delete(journaled, row.DeviceName)
		if err := r.drop(ctx, other); err != nil {
			return false, err
		}
	}
	if journaled[row.DeviceName] != nil {
		delete(journaled, row.DeviceName)
		return true, nil
	}
	return false, r.Journal.Note(row, !row.Releasing)
}

// drop forgets the entry, and the row that was made of it.
func (r *Restorer) drop(ctx context.Context, row *tables.DRAAllocation) error {
	claim, err := r.Room.Lock(ctx, row.ClaimUID)
	if err != nil {
		return err
	}
	defer claim.Unlock()
	if err := r.Journal.Forget(row); err != nil {
		return err
	}
	return claim.Drop(ctx, row)
}

// rowsOf returns the rows of the claim that the journal or the claim's records prove, and logs why others do not. What
// the journal has to be given back is not among them. upToDate is false when the claim's status has other records than it should.
// The error is the context's.
func (r *Restorer) rowsOf(ctx context.Context, c *podClaim, journaled map[string]*tables.DRAAllocation) (rows []*tables.DRAAllocation, upToDate bool, err error) {
	claim := c.object
	log := r.Logger.With("claim", RefOf(claim))
	results := resultsOf(claim, r.DriverName)
	upToDate = true
	if !r.isHere(claim) {
		return nil, upToDate, nil
	}
	configs, configErr := ResolveConfigs(claim, r.DriverName)

	entries := map[string]*resourceapi.AllocatedDeviceStatus{}
	for i, entry := range claim.Status.Devices {
		if entry.Driver == r.DriverName && entry.ShareID == nil {
			entries[entry.Pool+"/"+entry.Device] = &claim.Status.Devices[i]
		}
	}
	for i, result := range results {
		pool, ours := pools.Configured(r.NodeName, result.Pool)
		entry := entries[result.Pool+"/"+result.Device]
		delete(entries, result.Pool+"/"+result.Device)
		if !ours || result.AdminAccess != nil && *result.AdminAccess || result.ShareID != nil {
			continue
		}
		noted := journaled[result.Device]
		if noted != nil && noted.ClaimUID == claim.UID {
			if !noted.Releasing {
				noted.Held = true // whether it was in the pod is not known
				rows = append(rows, noted)
				upToDate = upToDate && r.namesJournal(entry)
			}
			continue
		}
		if entry == nil || entry.Data == nil || len(entry.Data.Raw) == 0 {
			log.Warn("Device is allotted to a pod of this node, but there is no record that it was prepared; if the agent was stopped "+
				"while it did, the device may require manual cleanup", "device", result.Device, "pods", podNames(c))
			continue
		}
		row, err := r.restore(c, result.Device, entry.Data.Raw)
		if err == nil {
			row.Pool, row.Request = pool, result.Request
			row.PodClaim = c.podClaim(row)
		}
		switch {
		case errors.Is(err, errGivenBack):
			log.Info("Device was given back, its record does not count any more", "device", result.Device)
			upToDate = false
			continue
		case errors.As(err, &otherBootError{}):
			log.Info("Device was prepared before the node was booted; it will be set up again", "device", result.Device)
			continue
		case err == nil && configErr == nil && !reflect.DeepEqual(row.Config.Asked(), configs[i].DeviceConfig):
			err = errors.New("the record's configuration is not what the claim asks for")
		case err == nil:
			asked := insist(ctx, func() (again bool) {
				switch rule, limited := r.Pools.ClaimParameters(pool); {
				case !limited || rule == v2alpha1.ClaimsAny:
					err = nil // also for parameters of a newer version, or without a node config: there is nothing that claims may not ask for
				case configErr != nil:
					err = configErr
				default:
					err = newPermission(r.Pools, r.Classes, r.DriverName).check(ctx, pool, configs[i])
				}
				if err == nil && row.Config.Joined != nil {
					err = r.proveNetwork(ctx, row)
				}
				return apiclient.IsUnanswered(err)
			}, func(delay time.Duration) {
				log.Warn("What the record of a device says cannot be compared; the driver starts when it could be", "device", result.Device,
					"retryIn", delay, "error", err)
			})
			if asked != nil {
				return nil, false, errors.Join(asked, err)
			}
		}
		if err != nil {
			r.Addresses.Leave(claim.UID, result.Device)
			log.Warn("Record of a device does not count; the device is left to its pod and may require manual cleanup",
				"device", result.Device, "pods", podNames(c), "error", err)
			continue
		}
		rows = append(rows, row)
	}
	for _, entry := range entries {
		log.Warn("Record of a device that the claim is not allocated is ignored", "device", entry.Device, "pool", entry.Pool)
	}
	return rows, upToDate, nil
}

// namesJournal says whether the entry, which may be nil, has a record that names the journal.
func (r *Restorer) namesJournal(entry *resourceapi.AllocatedDeviceStatus) bool {
	if entry == nil || entry.Data == nil {
		return false
	}
	record, err := types.DecodeRecord(entry.Data.Raw)
	return err == nil && record.Journal == r.Journal.ID()
}

// proveNetwork says why the record's network is not to be believed. That the journal, which is, has no entry happens when
// somebody has removed it.
func (r *Restorer) proveNetwork(ctx context.Context, row *tables.DRAAllocation) error {
	found, err := r.Networks.Resolve(ctx, []networks.Query{{Network: row.Config.Network, Namespace: row.ClaimNamespace, Pool: row.Pool}})
	if err != nil {
		return fmt.Errorf("the record's network cannot be compared: %w", err)
	}
	now, recorded := *found[0], *row.Config.Joined
	now.Offer, recorded.Addresses, recorded.Routes, recorded.Reservation = nil, nil, nil, nil
	if !reflect.DeepEqual(now, recorded) {
		return fmt.Errorf("the record has network %s other than it is", row.Config.Network)
	}
	return r.Addresses.Holds(ctx, row)
}

// otherBootError is a record of a device that was set up before the node was booted.
type otherBootError struct{}

func (otherBootError) Error() string { return "the record is from another boot" }

// errGivenBack is a record whose device the journal knows to be given back, or to be another claim's.
var errGivenBack = errors.New("the node's journal says otherwise")

// restore returns the row that the record proves, without pool and request.
func (r *Restorer) restore(c *podClaim, device string, data []byte) (*tables.DRAAllocation, error) {
	record, err := types.DecodeRecord(data)
	if err != nil {
		return nil, err
	}
	podName, former, err := c.user(record.PodUID)
	if err != nil {
		return nil, err
	}
	manager := r.managers[record.Manager]
	if manager == nil {
		return nil, fmt.Errorf("the record names device manager %.64q, which this agent does not have", record.Manager)
	}
	if record.BootID != r.BootID {
		return nil, otherBootError{}
	}
	if record.Journal != "" && record.Journal == r.Journal.ID() && !r.isQuarantined(device) {
		return nil, errGivenBack
	}
	prepared, err := manager.RestoreDevice(record.Device)
	if err != nil {
		return nil, fmt.Errorf("restore the device: %w", err)
	}
	if name := prepared.IfName(); name != device {
		return nil, fmt.Errorf("the record is for device %.64q", name)
	}
	if err := prepared.Validate(record.Config); err != nil {
		return nil, fmt.Errorf("the device cannot have been prepared for the record's configuration: %w", err)
	}
	return &tables.DRAAllocation{
		DeviceName:     device,
		Manager:        record.Manager,
		PreparedDevice: prepared,
		PodUID:         record.PodUID,
		ClaimUID:       c.object.UID,
		Config:         record.Config,
		ClaimNamespace: c.object.Namespace,
		ClaimName:      c.object.Name,
		PodName:        podName,
		Held:           true,
		Releasing:      former,
	}, nil
}

// user returns the name of the pod of this UID if the claim is reserved for it. If it is reserved for another pod of this
// node by now, former is true: the device is to be given back by the one and passed on to the other, which kubelet does
// not ask for. The former pod may be gone, and its UID has to do for a name then. A pod that has nothing to do with the claim is
// not believed to have had it: what is done about a claim holds up its pod.
func (c *podClaim) user(uid kubetypes.UID) (name string, former bool, err error) {
	uses := false
	name = string(uid)
	err = fmt.Errorf("the record is for a pod with uid %.64q, which does not use the claim on this node", uid)
	for _, use := range c.pods {
		if use.generated {
			if ownerErr := resourceclaim.IsForPod(use.pod, c.object, false); ownerErr != nil {
				if use.pod.UID == uid {
					return "", false, ownerErr
				}
				continue
			}
		}
		reserved := resourceclaim.IsReservedForPod(use.pod, c.object, false)
		switch {
		case use.pod.UID == uid && reserved:
			return use.pod.Name, false, nil
		case use.pod.UID == uid:
			uses, name = true, use.pod.Name
			err = fmt.Errorf("the claim is not reserved for pod %s/%s (uid %s)", use.pod.Namespace, use.pod.Name, uid)
		case reserved:
			former = true
		}
	}
	if former && (uses || !c.live[uid]) {
		return name, true, nil
	}
	return "", false, err
}

// podClaim is what the pod calls the claim of the row's device, as [Preparer] finds it.
func (c *podClaim) podClaim(row *tables.DRAAllocation) string {
	if row.Config.Driver == "" && !row.Config.RDMA {
		return ""
	}
	for _, use := range c.pods {
		status := use.pod.Status.ExtendedResourceClaimStatus
		if status == nil || status.ResourceClaimName != c.name {
			continue
		}
		for _, m := range status.RequestMappings {
			if m.RequestName == resourceclaim.BaseRequestRef(row.Request) {
				return m.ResourceName
			}
		}
	}
	return c.object.Annotations[resourceapi.PodResourceClaimAnnotation]
}

func podNames(c *podClaim) []string {
	var names []string
	for _, use := range c.pods {
		names = append(names, use.pod.Namespace+"/"+use.pod.Name)
	}
	return names
}
