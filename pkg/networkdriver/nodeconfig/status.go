// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nodeconfig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/hive/cell"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/pause"
	"github.com/cilium/networkdriver/pkg/truncate"
)

const (
	// writeInterval and writeBurst limit the rate of writes: some at once
	// while a node starts, then one each interval with whatever has changed.
	writeInterval = 5 * time.Second
	writeBurst    = 10

	// leaveTimeout bounds how long the agent's end waits for the API server.
	leaveTimeout = 2 * time.Second

	// ReasonAgentStopped is that of Ready after the agent has ended.
	ReasonAgentStopped = "AgentStopped"

	// Limits of the API for a status.
	maxMessageLength = 32768
	maxPools         = 1024
)

// writeBackoff is the delay after a write that failed.
var writeBackoff = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.5, Steps: 10, Cap: time.Minute}

// statusClient is what StatusWriter needs of Client.
type statusClient interface {
	writeStatus(ctx context.Context, name string, uid types.UID, status *v2alpha1.CiliumNetworkDriverNodeConfigStatus) error
}

// StatusWriter writes the status of a node's config.
type StatusWriter struct {
	log    *slog.Logger
	client statusClient
	node   string
	wake   chan struct{} // has a token when there may be a pending update
	// Told, if set, is given each condition that has another status or reason than before, once that is written.
	Told func(config *v2alpha1.CiliumNetworkDriverNodeConfig, condition metav1.Condition)

	mu      sync.Mutex // guards the fields below
	pending *update
	latest  *update // pending or not
	written written
}

// update is a status to be written.
type update struct {
	config *v2alpha1.CiliumNetworkDriverNodeConfig
	status v2alpha1.CiliumNetworkDriverNodeConfigStatus
}

// written is the status that the API server has, as far as we know.
type written struct {
	uid    types.UID
	status v2alpha1.CiliumNetworkDriverNodeConfigStatus
}

// NewStatusWriter returns a writer that keeps updates until Run.
func NewStatusWriter(log *slog.Logger, client *Client, node string) *StatusWriter {
	return newStatusWriter(log, client, node)
}

func newStatusWriter(log *slog.Logger, client statusClient, node string) *StatusWriter {
	return &StatusWriter{
		log:    log.With("nodeConfig", node),
		client: client,
		node:   node,
		wake:   make(chan struct{}, 1),
	}
}

// Condition returns a condition for a status. Its generation and its time of
// transition are filled in by StatusWriter.
func Condition(conditionType string, holds bool, reason, message string) metav1.Condition {
	condition := metav1.Condition{Type: conditionType, Status: metav1.ConditionFalse, Reason: reason, Message: message}
	if holds {
		condition.Status = metav1.ConditionTrue
	}
	return condition
}

// Update has a status written to config, the object that the status speaks of
// as an Event brought it. It does not block. Of several updates in short time
// the last one counts, and one that changes nothing is not written.
//
// The caller need not care about the order of lists, about limits (what is too
// much is cut off) and about the times of conditions.
func (w *StatusWriter) Update(config *v2alpha1.CiliumNetworkDriverNodeConfig, status v2alpha1.CiliumNetworkDriverNodeConfigStatus) {
	w.mu.Lock()
	w.pending = &update{config: config, status: *status.DeepCopy()}
	w.latest = w.pending
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Seen is told the object as the API server has it now. A status that somebody else has written, such as the operator for an agent that
// seemed to be gone, is replaced.
func (w *StatusWriter) Seen(config *v2alpha1.CiliumNetworkDriverNodeConfig) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if config == nil || w.written.uid != config.UID || equality.Semantic.DeepEqual(w.written.status, config.Status) {
		return
	}
	w.written.status = *config.Status.DeepCopy()
	if w.pending == nil {
		w.pending = w.latest
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// leave says in the status that nobody serves any more. What is there stays otherwise as it was.
func (w *StatusWriter) leave() {
	w.mu.Lock()
	last := w.latest
	w.mu.Unlock()
	if last == nil {
		return
	}
	w.Told = nil // who is told may have ended
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	status := *last.status.DeepCopy()
	meta.RemoveStatusCondition(&status.Conditions, v2alpha1.ConditionReady)
	status.Conditions = append(status.Conditions, Condition(v2alpha1.ConditionReady, false, ReasonAgentStopped,
		"the agent has ended: pods keep their devices, and nothing is prepared until it runs again"))
	if err := w.write(ctx, &update{config: last.config, status: status}); err != nil {
		w.log.Info("The node config's status does not say that the agent has ended", "error", err)
	}
}

// Run writes until ctx ends, and says so in the end. It is a job for Hive.
func (w *StatusWriter) Run(ctx context.Context, health cell.Health) error {
	defer w.leave()
	limiter := rate.NewLimiter(rate.Every(writeInterval), writeBurst)
	backoff := writeBackoff
	var failing logonce.Problems[metav1.StatusReason]
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.wake:
		}
		if !w.changes() {
			continue
		}
		if err := limiter.Wait(ctx); err != nil {
			return nil
		}
		update := w.take()
		err := w.write(ctx, update)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			backoff = writeBackoff
			health.OK("Status is up to date")
			failing.Solved()
		default:
			level := failing.Level(apierrors.ReasonForError(err), slog.LevelWarn)
			w.log.Log(ctx, level, "Cannot write the node config's status, trying again", "error", err)
			health.Degraded("Cannot write the status", err)
			w.putBack(update)
			if !pause.For(ctx, backoff.Step()) {
				return nil
			}
		}
	}
}

// changes returns whether the pending update differs from what is written,
// and drops it if not.
func (w *StatusWriter) changes() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pending == nil {
		return false
	}
	known := w.known(w.pending.config)
	if equality.Semantic.DeepEqual(complete(w.pending.status, known, metav1.Now()), known) {
		w.pending = nil
		return false
	}
	return true
}

func (w *StatusWriter) take() *update {
	w.mu.Lock()
	defer w.mu.Unlock()
	update := w.pending
	w.pending = nil
	return update
}

// putBack makes an update pending again unless a newer one is.
func (w *StatusWriter) putBack(update *update) {
	w.mu.Lock()
	if w.pending == nil {
		w.pending = update
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// known, of which the caller has the lock, returns the status that the API server has for an object: the one last
// written, or for an object not written before the one it came with. That is
// why an agent that starts again finds nothing to write.
func (w *StatusWriter) known(config *v2alpha1.CiliumNetworkDriverNodeConfig) v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	if w.written.uid == config.UID {
		return w.written.status
	}
	return config.Status
}

func (w *StatusWriter) write(ctx context.Context, update *update) error {
	w.mu.Lock()
	known := w.known(update.config)
	w.mu.Unlock()
	status := complete(update.status, known, metav1.Now())
	if equality.Semantic.DeepEqual(status, known) {
		return nil
	}
	uid := update.config.UID
	err := w.client.writeStatus(ctx, w.node, uid, &status)
	if apierrors.IsNotFound(err) || errors.Is(err, errReplaced) {
		// There is nothing to write it to. A new object brings a new update.
		w.log.Info("The node config is gone, its status is not written", "uid", uid)
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing the status of %s %s: %w", v2alpha1.NodeConfigKind, w.node, err)
	}
	w.mu.Lock()
	w.written = written{uid: uid, status: status}
	w.mu.Unlock()
	for _, condition := range status.Conditions {
		before := meta.FindStatusCondition(known.Conditions, condition.Type)
		if w.Told != nil && (before == nil || before.Status != condition.Status || before.Reason != condition.Reason) {
			w.Told(update.config, condition)
		}
	}
	return nil
}

// complete returns the status as it is written when the API server has the
// known one: in a fixed order, within the API's limits, with generation and
// time in each condition. The time changes only with the condition's status.
func complete(status, known v2alpha1.CiliumNetworkDriverNodeConfigStatus, now metav1.Time) v2alpha1.CiliumNetworkDriverNodeConfigStatus {
	status = *status.DeepCopy()
	slices.SortFunc(status.Conditions, func(a, b metav1.Condition) int { return cmp.Compare(a.Type, b.Type) })
	for i := range status.Conditions {
		condition := &status.Conditions[i]
		condition.Message = truncate.UTF8(condition.Message, maxMessageLength)
		condition.ObservedGeneration = status.ObservedGeneration
		condition.LastTransitionTime = now
		before := meta.FindStatusCondition(known.Conditions, condition.Type)
		if before != nil && before.Status == condition.Status {
			condition.LastTransitionTime = before.LastTransitionTime
		}
	}
	slices.SortFunc(status.Managers, func(a, b v2alpha1.DeviceManagerStatus) int { return cmp.Compare(a.Manager, b.Manager) })
	slices.SortFunc(status.Pools, func(a, b v2alpha1.DevicePoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	status.Pools = status.Pools[:min(len(status.Pools), maxPools)]
	for i := range status.Pools {
		pool := &status.Pools[i]
		slices.Sort(pool.PFs)
		pool.PFs = pool.PFs[:min(len(pool.PFs), v2alpha1.MaxPoolPFs)]
	}
	slices.SortFunc(status.SkippedDevices, func(a, b v2alpha1.SkippedDevice) int {
		return cmp.Or(cmp.Compare(a.Manager, b.Manager), cmp.Compare(a.Device, b.Device))
	})
	status.SkippedDevices = status.SkippedDevices[:min(len(status.SkippedDevices), v2alpha1.MaxSkippedDevices)]
	for i := range status.SkippedDevices {
		device := &status.SkippedDevices[i]
		device.Reason = truncate.UTF8(device.Reason, v2alpha1.MaxReasonLength)
	}
	return status
}
