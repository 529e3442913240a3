// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// syncDelay is how long after a change made by someone else the slices are checked. Kubelet removes all slices of
	// the node when it starts, and people delete them by hand: they have to be back within seconds.
	syncDelay = 2 * time.Second

	// The backoff between two attempts to write a pool's slices. It ends soon enough that a right that was given
	// back, or an apiserver that is up again, shows without a restart.
	minWriteBackoff = 100 * time.Millisecond
	maxWriteBackoff = 30 * time.Second

	// featureTaints is the feature gate of taints, as [resourceslice.DroppedFieldsError] calls it.
	featureTaints = "DRADeviceTaints"
)

// sliceWriter keeps the node's ResourceSlices at the apiserver as they should be, by way of the controller of the DRA
// library. It uses the controller directly and not the kubelet plugin helper's, which has no way to learn that writing
// works again, repairs after half a minute only, and starts anew with every attempt to register.
type sliceWriter struct {
	log     *slog.Logger
	client  kubernetes.Interface
	driver  string
	node    string
	state   *tracker
	metrics *Metrics
	// taintless is called once when the apiserver is found to keep no taints.
	taintless func()

	controller *resourceslice.Controller

	mu sync.Mutex // guards the fields below
	// last is the error that the controller reported last. The next call of the queue says of which pool.
	last error
	// failing has the error of each pool whose slices could not be written.
	failing map[string]error
	// dropped has the error of each pool of which the apiserver did not store everything. It stands until there is
	// something else to write.
	dropped map[string]error
}

// syncQueue tells the writer how the work on a pool ended.
type syncQueue struct {
	workqueue.TypedRateLimitingInterface[string]
	writer *sliceWriter
}

// Forget is called by the controller after it brought the pool's slices up to date.
func (q syncQueue) Forget(pool string) {
	q.writer.ended(pool, false)
	q.TypedRateLimitingInterface.Forget(pool)
}

// AddRateLimited is called by the controller after it failed to.
func (q syncQueue) AddRateLimited(pool string) {
	q.writer.ended(pool, true)
	q.TypedRateLimitingInterface.AddRateLimited(pool)
}

// begin returns once slices can be written, with the times of the taints in the present ones. The controller's informer would wait for
// that in silence.
func (w *sliceWriter) begin(ctx context.Context) (taintTimes, error) {
	for backoff := minWriteBackoff; ; backoff = min(2*backoff, maxWriteBackoff) {
		present, err := w.checkAccess(ctx)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		w.report(err)
		if err == nil {
			return timesIn(present), nil
		}
		w.metrics.synced(problemOf(err))
		if !pause.For(ctx, backoff) {
			return nil, ctx.Err()
		}
	}
}

// write makes the apiserver's slices what resources say, some time later. The first call, after begin, blocks until the present slices are
// known.
func (w *sliceWriter) write(ctx context.Context, resources *resourceslice.DriverResources) error {
	w.mu.Lock()
	clear(w.dropped)
	w.mu.Unlock()
	if w.controller != nil {
		w.controller.Update(resources)
		return nil
	}
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](minWriteBackoff, maxWriteBackoff)
	queue := workqueue.NewTypedRateLimitingQueueWithConfig(limiter,
		workqueue.TypedRateLimitingQueueConfig[string]{Name: "networkdriver_resourceslices"})
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   w.driver,
		KubeClient:   w.client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: w.node},
		Resources:    resources,
		Queue:        syncQueue{queue, w},
		SyncDelay:    ptr.To(syncDelay),
		ErrorHandler: w.handleError,
	})
	if err != nil {
		queue.ShutDown()
		return fmt.Errorf("start publishing ResourceSlices: %w", err)
	}
	w.controller = controller
	return nil
}

// stop ends the writing. The slices stay.
func (w *sliceWriter) stop() {
	w.controller.Stop()
	w.controller = nil
}

// checkAccess returns the node's slices if they can be listed and watched.
func (w *sliceWriter) checkAccess(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	selector := fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   w.driver,
		resourceapi.ResourceSliceSelectorNodeName: w.node,
	}.String()
	client := w.client.ResourceV1().ResourceSlices()
	list, err := client.List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices of the node: %w", err)
	}
	watch, err := client.Watch(ctx, metav1.ListOptions{
		FieldSelector: selector, ResourceVersion: list.ResourceVersion, TimeoutSeconds: ptr.To[int64](1),
	})
	if err != nil {
		return nil, fmt.Errorf("watch ResourceSlices of the node: %w", err)
	}
	watch.Stop()
	return list.Items, nil
}

// handleError takes the errors of the controller, which tries again by itself.
func (w *sliceWriter) handleError(_ context.Context, err error, msg string) {
	err = fmt.Errorf("%s: %w", msg, err)
	w.mu.Lock()
	defer w.mu.Unlock()
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) {
		if slices.Equal(dropped.DisabledFeatures(), []string{featureTaints}) {
			w.taintless()
			return
		}
		w.dropped[dropped.PoolName] = err
		w.metrics.synced(problemOf(err))
		return
	}
	w.last = err
}

func (w *sliceWriter) ended(pool string, failed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if failed {
		w.failing[pool] = w.last
		w.metrics.synced(problemOf(w.last))
	} else {
		delete(w.failing, pool)
		if w.dropped[pool] == nil {
			w.metrics.synced(nil)
		}
	}
	// A failure weighs more than a dropped field; of several, the first pool's is told.
	w.report(cmp.Or(first(w.failing), first(w.dropped)))
}

func first(errs map[string]error) error {
	if len(errs) == 0 {
		return nil
	}
	return errs[slices.Min(slices.Collect(maps.Keys(errs)))]
}

// report remembers the problem for the node config's status, and logs it when it is new.
func (w *sliceWriter) report(err error) {
	p := problemOf(err)
	w.metrics.isFailing(p != nil)
	switch {
	case !w.state.problem(p):
	case p == nil:
		w.log.Info("Publication of ResourceSlices works again")
	default:
		w.log.Error("ResourceSlices cannot be published, trying again",
			slog.String("reason", p.Reason), slog.String("error", p.Message))
	}
}
