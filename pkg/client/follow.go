// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/cilium/networkdriver/pkg/logonce"
)

// followBackoff is the delay between two attempts to list and watch.
var followBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 15 * time.Second}

// ListWatcher lists and watches the objects of a kind that the options select.
type ListWatcher struct {
	List  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	Watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// Follower follows the one object of a kind that has a name, at a cost for the API server that does not grow with the
// number of objects.
//
// While the API server cannot be asked, or does not know the resource, nothing changes: not knowing is no reason to drop
// what was known.
type Follower[T runtime.Object] struct {
	Logger *slog.Logger
	// What the object is called in messages, such as "the node config".
	What     string
	Resource schema.GroupResource
	Name     string
	ListWatcher
	// Changed is called with the object as soon as it is known, and again whenever it may have changed; with the zero
	// value, which is nil, when there is none. It must not change the object. Calls come one after the other.
	Changed func(T)
	// Backoff is the delay between two attempts to list and watch; zero for the usual one.
	Backoff wait.Backoff
}

// Run follows the object until the context ends. It is a job for Hive and tells health what it waits for.
func (f *Follower[T]) Run(ctx context.Context, health cell.Health) error {
	backoff := f.Backoff
	if backoff == (wait.Backoff{}) {
		backoff = followBackoff
	}
	var failing logonce.Problems[metav1.StatusReason]
	check := func(err error) {
		switch {
		case ctx.Err() != nil:
		case apierrors.IsResourceExpired(err), apierrors.IsGone(err): // cured by a new list
		case err == nil:
			health.OK("Watching")
			if failing.Solved() {
				f.Logger.Info("Watching " + f.What + " again")
			}
		default:
			message := "Cannot read " + f.What + ", trying again"
			if apierrors.IsNotFound(err) {
				message = fmt.Sprintf("Waiting for the CustomResourceDefinition %s to be installed", f.Resource)
			}
			health.Degraded(message, err)
			f.Logger.Log(ctx, failing.Level(apierrors.ReasonForError(err), slog.LevelWarn), message, "error", err)
		}
	}
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, f.Name).String()
	requests := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = selector
			if options.ResourceVersion == "0" {
				// One object costs little to read from the source, and a replica's cache may be older than what this
				// program has seen before it was started again.
				options.ResourceVersion = ""
			}
			list, err := f.List(ctx, options)
			if err != nil {
				check(err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = selector
			w, err := f.Watch(ctx, options)
			check(err)
			return w, err
		},
	}
	// What the reflector has to say is said by check, to the right log and once.
	silent := klog.Logger(logr.Discard())
	cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(requests, listFirst{}), *new(T), (*one[T])(f),
		cache.ReflectorOptions{Name: f.Name, Logger: &silent, Backoff: &backoff},
	).RunWithContext(klog.NewContext(ctx, silent))
	return nil
}

// listFirst has the reflector list before it watches, since a list of one object is simpler than its stream.
type listFirst struct{}

// IsWatchListSemanticsUnSupported is what client-go asks.
func (listFirst) IsWatchListSemanticsUnSupported() bool { return true }

// one is a reflector's store for one object, which it hands on.
type one[T runtime.Object] Follower[T]

var _ cache.ReflectorStore = (*one[*metav1.PartialObjectMetadata])(nil)

func (o *one[T]) Add(object any) error    { return o.Update(object) }
func (o *one[T]) Update(object any) error { o.Changed(object.(T)); return nil }
func (o *one[T]) Delete(any) error        { o.Changed(*new(T)); return nil }
func (o *one[T]) Resync() error           { return nil }

func (o *one[T]) Replace(objects []any, _ string) error {
	if len(objects) == 0 {
		return o.Delete(nil)
	}
	return o.Update(objects[0])
}
