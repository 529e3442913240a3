// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

const (
	// writers is how many claims' statuses are written at the same time in the background.
	writers = 4
	// writeTimeout bounds one write in the background.
	writeTimeout = 15 * time.Second
	// coalesceTime is how long changes of a claim's rows are gathered before they are written.
	coalesceTime = 100 * time.Millisecond
	// permanentRetry is how long a refused write rests: somebody has to grant a right or update the driver.
	permanentRetry = 5 * time.Minute

	firstRetry, lastRetry = 200 * time.Millisecond, time.Minute
)

// WriterParams are what a [Writer] works with.
type WriterParams struct {
	Logger      *slog.Logger
	DB          *statedb.DB
	Allocations statedb.Table[*tables.DRAAllocation]
	// Faults are the devices that are not healthy. Nil: nothing is said of that.
	Faults statedb.Table[*tables.DeviceHealth]
	// Client is for Apply, whose callers wait.
	Client ClaimClient
	// Background is for Run, and has a limit of requests of its own. Nil: Client.
	Background ClaimClient
	// DriverName is the name under which the driver publishes devices.
	DriverName string
	NodeName   string
	// BootID is the kernel's boot id, which goes into the records.
	BootID string
	// JournalID returns the id of the node's journal, which goes there too. Nil: there is none.
	JournalID func() string
}

// Writer keeps the entries for this node's devices in the status of claims: at once when asked to by Apply, else in Run.
type Writer struct {
	WriterParams
	claims claimLocks // serialises writes and the use of a claim's *written

	mu        sync.Mutex // guards the fields below
	written   map[kubetypes.UID]*written
	withdrawn map[kubetypes.UID]Ref
	reported  map[cause]bool // causes of failures that were logged
	queue     workqueue.TypedRateLimitingInterface[Ref]
}

// cause is why writes fail, for logging it once; claim is empty for what is wrong with all of them.
type cause struct {
	reason string
	claim  kubetypes.UID
}

// written is what the writer knows of one claim.
type written struct {
	wanted []deviceStatus // what the rows asked for when they were last looked at
	known  bool           // whether server is what the server has
	server []deviceStatus
	since  transitions
}

// NewWriter makes a Writer.
func NewWriter(p WriterParams) *Writer {
	if p.Background == nil {
		p.Background = p.Client
	}
	return &Writer{
		WriterParams: p,
		written:      map[kubetypes.UID]*written{},
		withdrawn:    map[kubetypes.UID]Ref{},
		reported:     map[cause]bool{},
	}
}

var _ attachments.StatusWriter = (*Writer)(nil)

// Apply implements [attachments.StatusWriter].
func (w *Writer) Apply(ctx context.Context, claim Ref, rows []*tables.DRAAllocation) error {
	unlock, err := w.claims.lock(ctx, string(claim.UID))
	if err != nil {
		return err
	}
	defer unlock()
	w.mu.Lock()
	delete(w.withdrawn, claim.UID)
	w.mu.Unlock()

	statuses, err := w.statusesOf(rows)
	if err != nil {
		return err
	}
	err = w.write(ctx, w.Client, claim, w.knowledge(claim), statuses)
	if len(rows) > 0 {
		return err
	}
	if err != nil && !w.isGone(ctx, w.Client, claim, err) {
		return err
	}
	w.forget(claim)
	return nil
}

// Withdraw implements [attachments.StatusWriter].
func (w *Writer) Withdraw(claim Ref) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.withdrawn[claim.UID] = claim
	if w.queue != nil {
		w.queue.Add(claim)
	}
}

// Observe tells the writer what the claim's status says at a restart, and which rows were restored from it. They are
// not written back: until the runtime has been asked, the rows do not know yet that their links are in pods.
func (w *Writer) Observe(claim *resourceapi.ResourceClaim, rows []*tables.DRAAllocation) {
	statuses, err := w.statusesOf(rows)
	if err != nil {
		return // will be reported when it is written
	}
	server, since := statusesIn(claim.Status.Devices, w.owner())
	// How they are is not known either before they have been looked at.
	statuses = withHealth(statuses, server)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written[claim.UID] = &written{wanted: statuses, known: true, server: server, since: since}
}

// Run writes the status of every claim whose rows change, until the context ends. It writes nothing that the API
// server has already.
func (w *Writer) Run(ctx context.Context) error {
	txn := w.DB.WriteTxn(w.Allocations)
	changes, err := w.Allocations.Changes(txn)
	txn.Commit()
	if err != nil {
		return fmt.Errorf("watch table %s: %w", w.Allocations.Name(), err)
	}
	defer changes.Close()

	queue := w.startQueue()
	var running sync.WaitGroup
	for range writers {
		running.Go(func() { w.work(ctx, queue) })
	}
	defer running.Wait()
	defer queue.ShutDown()
	if w.Faults != nil {
		running.Go(func() { w.followFaults(ctx, queue) })
	}

	for {
		batch, watch := changes.Next(w.DB.ReadTxn())
		for change := range batch {
			queue.AddAfter(change.Object.ClaimRef(), coalesceTime)
		}
		select {
		case <-watch:
		case <-ctx.Done():
			return nil
		}
	}
}

// followFaults has the status of claims written whose devices are otherwise than before.
func (w *Writer) followFaults(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Ref]) {
	_, initialized := w.Faults.Initialized(w.DB.ReadTxn())
	select {
	case <-initialized:
	case <-ctx.Done():
		return
	}
	known := map[string]*tables.DeviceHealth{}
	for first := true; ; first = false {
		txn := w.DB.ReadTxn()
		rows, changed := w.Faults.AllWatch(txn)
		now := map[string]*tables.DeviceHealth{}
		for row := range rows {
			now[row.Device] = row
		}
		for row := range w.Allocations.All(txn) {
			if first || known[row.DeviceName] != now[row.DeviceName] {
				queue.AddAfter(row.ClaimRef(), coalesceTime)
			}
		}
		known = now
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func (w *Writer) startQueue() workqueue.TypedRateLimitingInterface[Ref] {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[Ref](firstRetry, lastRetry))
	for _, claim := range w.withdrawn {
		w.queue.Add(claim)
	}
	return w.queue
}

func (w *Writer) work(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Ref]) {
	for {
		claim, shutdown := queue.Get()
		if shutdown {
			return
		}
		switch err := w.reconcile(ctx, claim); {
		case err == nil:
			queue.Forget(claim)
		case ctx.Err() != nil:
		case isRefused(err):
			w.report(claim, err, "Claim status is refused, and will not be up to date until the cause is removed")
			queue.Forget(claim)
			queue.AddAfter(claim, permanentRetry)
		default:
			w.report(claim, err, "Claim status could not be written, trying again")
			queue.AddRateLimited(claim)
		}
		queue.Done(claim)
	}
}

// reconcile makes the claim's status say what its rows say.
func (w *Writer) reconcile(ctx context.Context, claim Ref) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	unlock, err := w.claims.lock(ctx, string(claim.UID))
	if err != nil {
		return err
	}
	defer unlock()

	rows := statedb.Collect(w.Allocations.List(w.DB.ReadTxn(), tables.AllocationsByClaim(claim.UID)))
	withdrawn := w.takeWithdrawn(claim)
	if len(rows) == 0 && !withdrawn {
		return nil // a Prepare may have written the status and be about to insert the rows
	}
	if err := w.update(ctx, claim, rows, withdrawn); err != nil {
		if withdrawn {
			w.mu.Lock()
			w.withdrawn[claim.UID] = claim
			w.mu.Unlock()
		}
		return err
	}
	if len(rows) == 0 {
		w.forget(claim)
	}
	return nil
}

// update writes what the rows ask for unless they ask for nothing new or the server has it; the caller holds the
// claim's lock.
func (w *Writer) update(ctx context.Context, claim Ref, rows []*tables.DRAAllocation, withdrawn bool) error {
	statuses, err := w.statusesOf(rows)
	if err != nil {
		return err
	}
	k := w.knowledge(claim)
	if !withdrawn && equalStatuses(statuses, k.wanted) {
		return nil
	}
	wanted := statuses
	if k.known && !equalStatuses(statuses, k.wanted) && equalStatuses(k.wanted, withHealth(statuses, k.wanted)) {
		// Nothing but the devices' health is new. What rows that were restored do not know yet stays as it is.
		statuses = withHealth(k.server, statuses)
	}
	if k.known && equalStatuses(statuses, k.server) {
		k.wanted = wanted
		return nil
	}
	if err = w.write(ctx, w.Background, claim, k, statuses); err == nil {
		k.wanted = wanted
	}
	if err != nil && w.isGone(ctx, w.Background, claim, err) {
		w.Logger.Debug("Claim is gone or not allotted to this node any more, its status needs no update", "claim", claim, "uid", claim.UID)
		w.forget(claim)
		return nil
	}
	return err
}

func (w *Writer) statusesOf(rows []*tables.DRAAllocation) ([]deviceStatus, error) {
	journal := ""
	if w.JournalID != nil {
		journal = w.JournalID()
	}
	statuses, err := statusesOf(rows, w.NodeName, w.BootID, journal)
	if err != nil || w.Faults == nil {
		return statuses, err
	}
	txn := w.DB.ReadTxn()
	for i := range statuses {
		row, _, _ := w.Faults.Get(txn, tables.HealthByDevice(statuses[i].Device))
		statuses[i].Health = healthOf(row)
	}
	return statuses, nil
}

// withHealth returns the statuses with the health that others of the same devices have.
func withHealth(statuses, others []deviceStatus) []deviceStatus {
	healths := map[string]deviceHealth{}
	for _, s := range others {
		healths[s.key()] = s.Health
	}
	statuses = slices.Clone(statuses)
	for i := range statuses {
		statuses[i].Health = healths[statuses[i].key()]
	}
	return statuses
}

// takeWithdrawn says whether the claim's entries are to be withdrawn, and forgets it.
func (w *Writer) takeWithdrawn(claim Ref) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, withdrawn := w.withdrawn[claim.UID]
	delete(w.withdrawn, claim.UID)
	return withdrawn
}

// knowledge returns what is known of the claim; the caller holds the claim's lock.
func (w *Writer) knowledge(claim Ref) *written {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.written[claim.UID]
	if k == nil {
		k = &written{}
		w.written[claim.UID] = k
	}
	return k
}

func (w *Writer) forget(claim Ref) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.written, claim.UID)
}

func (w *Writer) owner() Owner { return Owner{Driver: w.DriverName, Node: w.NodeName} }

// write applies the statuses; the caller holds the claim's lock.
func (w *Writer) write(ctx context.Context, client ClaimClient, claim Ref, k *written, statuses []deviceStatus) error {
	since := transitionsOf(statuses, k.since, time.Now())
	k.known = false // after a failure it is not known what the server has
	if err := client.ApplyClaimStatus(ctx, applyConfigOf(claim, w.DriverName, statuses, since), w.owner()); err != nil {
		return w.explain(err)
	}
	*k = written{wanted: statuses, known: true, server: statuses, since: since}
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.reported, func(c cause, _ bool) bool { return c.claim == "" || c.claim == claim.UID })
	return nil
}

// explain adds to a refusal for want of rights what is missing.
func (w *Writer) explain(err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	return fmt.Errorf("the driver's service account needs the verbs patch and update on resourceclaims/status in resource.k8s.io, and with "+
		"Kubernetes 1.36 or later associated-node:patch and associated-node:update on resourceclaims/driver named %s: %w", w.DriverName, err)
}

// isRefused is true for a write that the API server understood and will refuse again.
func isRefused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) }

// isGone says whether the write failed because the claim is no longer this node's: it is gone, its name is another
// claim's, or its allocation has ended, so that the API server has dropped the entries and takes none.
func (w *Writer) isGone(ctx context.Context, client ClaimClient, claim Ref, err error) bool {
	switch {
	case apierrors.IsNotFound(err):
		return true
	case apierrors.IsConflict(err), apierrors.IsInvalid(err):
		present, err := client.GetClaim(ctx, claim.Namespace, claim.Name)
		return apierrors.IsNotFound(err) || err == nil && (present.UID != claim.UID || !w.owner().isAllotted(present))
	default:
		return false
	}
}

// report logs a failure once per cause, until a write succeeds.
func (w *Writer) report(claim Ref, err error, message string) {
	c := cause{reason: string(apierrors.ReasonForError(err))}
	if apierrors.IsInvalid(err) || c.reason == "" {
		c.claim = claim.UID // the fault is in this claim's entries
	}
	w.mu.Lock()
	known := w.reported[c]
	w.reported[c] = true
	w.mu.Unlock()
	if !known {
		w.Logger.Warn(message, "claim", claim, "error", err)
	}
}

func equalStatuses(a, b []deviceStatus) bool {
	return slices.EqualFunc(a, b, func(x, y deviceStatus) bool {
		ips := slices.Equal(x.IPs, y.IPs) // no addresses may be nil or empty
		x.IPs, y.IPs = nil, nil
		return ips && reflect.DeepEqual(x, y)
	})
}
