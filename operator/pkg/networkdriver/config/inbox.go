// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// event is the newest state of an object.
type event[T client.Object] struct {
	// object is nil for a deleted object whose last state is not known.
	object T
	gone   bool
}

// listing has all node configs as they were at one time.
type listing struct {
	items           []*nodeConfig
	resourceVersion string
	// newestKnown is the newest resource version that was known before the listing.
	newestKnown string
}

// batch has the events since the last batch, for each object the newest one only.
type batch struct {
	nodes          map[string]event[*metav1.PartialObjectMetadata]
	clusterConfigs map[string]event[*clusterConfig]
	nodeConfigs    map[string]event[*nodeConfig]
	listing        *listing
}

func newBatch() *batch {
	return &batch{
		nodes:          map[string]event[*metav1.PartialObjectMetadata]{},
		clusterConfigs: map[string]event[*clusterConfig]{},
		nodeConfigs:    map[string]event[*nodeConfig]{},
	}
}

// losesAny says whether a CiliumNode or a cluster config is gone.
func (b *batch) losesAny() bool { return losesAny(b.nodes) || losesAny(b.clusterConfigs) }

func losesAny[T client.Object](events map[string]event[T]) bool {
	for _, event := range events {
		if event.gone {
			return true
		}
	}
	return false
}

// inbox collects events until the ledger takes them.
type inbox struct {
	mu    sync.Mutex // guards batch
	batch *batch
	// wake has an element when there is something in the batch.
	wake chan struct{}
}

func newInbox() *inbox { return &inbox{batch: newBatch(), wake: make(chan struct{}, 1)} }

func (i *inbox) add(change func(*batch)) {
	i.mu.Lock()
	change(i.batch)
	i.mu.Unlock()
	select {
	case i.wake <- struct{}{}:
	default:
	}
}

// take returns the batch, and begins another one.
func (i *inbox) take() *batch {
	i.mu.Lock()
	defer i.mu.Unlock()
	b := i.batch
	i.batch = newBatch()
	return b
}

// handler returns an event handler that puts what it is told into one of the batch's maps. Updates that do not matter
// are left out.
func handler[T client.Object](i *inbox, events func(*batch) map[string]event[T], matters func(old, new T) bool) cache.ResourceEventHandler {
	put := func(object T) {
		i.add(func(b *batch) { events(b)[object.GetName()] = event[T]{object: object} })
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if object, ok := obj.(T); ok {
				put(object)
			}
		},
		UpdateFunc: func(oldObj, newObj any) {
			old, ok1 := oldObj.(T)
			object, ok2 := newObj.(T)
			if ok1 && ok2 && matters(old, object) {
				put(object)
			}
		},
		DeleteFunc: func(obj any) {
			gone := event[T]{gone: true}
			name := ""
			switch deleted := obj.(type) {
			case T:
				gone.object, name = deleted, deleted.GetName()
			case cache.DeletedFinalStateUnknown:
				name = deleted.Key // the objects have no namespace
			}
			i.add(func(b *batch) { events(b)[name] = gone })
		},
	}
}

func always[T any](T, T) bool { return true }

func otherLabels(old, new *metav1.PartialObjectMetadata) bool {
	return !maps.Equal(old.Labels, new.Labels) || old.UID != new.UID
}
