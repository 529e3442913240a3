// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package dra

import (
	"errors"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/cilium/networkdriver/pkg/networkdriver/pools"
)

// State is how the driver stands with kubelet and the apiserver. It is shared: readers do not change it.
type State struct {
	// Registered is true while kubelet knows the driver and its sockets are in place.
	Registered bool
	// Attempts counts the attempts to register since the driver was registered last.
	Attempts int
	// RegistrationError is why the last attempt failed or the registration was lost; nil while registered.
	RegistrationError error
	// GaveUp is true from when the configured number of attempts was used up until the driver is registered.
	GaveUp bool

	// Publication is what the ResourceSlices are meant to say; nil before the first publication.
	Publication *Publication
	// PublicationProblem is why they do not say it; nil when they do.
	PublicationProblem *PublicationProblem
}

// Publication describes a set of ResourceSlices.
type Publication struct {
	// Pools are the numbers of devices of the advertised pools, by the pools' configured names.
	Pools map[string]int
	// Free are the numbers of those that are not prepared.
	Free map[string]int
	// PFs are the names of the physical functions that the pools' devices come from, also those that cannot serve. One that no device of the
	// node comes from any more is away, and its port still there: it stays until the pools are configured anew.
	PFs map[string][]string
	// Conflicts are the devices that more than one pool lays claim to.
	Conflicts []pools.Conflict
	// Omissions are what ResourceSlices cannot express.
	Omissions []pools.Omission
}

// The reasons of a [PublicationProblem].
const (
	// ReasonForbidden is a missing right. The message names the verb and the resource.
	ReasonForbidden = "Forbidden"
	// ReasonInvalid is a slice that the apiserver or a webhook refused.
	ReasonInvalid = "Invalid"
	// ReasonFieldsDropped is a field that the apiserver did not store, as a feature gate is off.
	ReasonFieldsDropped = "FieldsDropped"
	// ReasonFailed is any other error.
	ReasonFailed = "Failed"
)

// PublicationProblem is why ResourceSlices are not as they should be. Publication is tried again with backoff.
type PublicationProblem struct {
	// Reason is one of the Reason constants.
	Reason string
	// Message is the error in words.
	Message string
}

// problemOf says what kind of problem an error of publication is.
func problemOf(err error) *PublicationProblem {
	if err == nil {
		return nil
	}
	reason := ReasonFailed
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		reason = ReasonFieldsDropped
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		reason = ReasonForbidden
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsRequestEntityTooLargeError(err):
		reason = ReasonInvalid
	}
	return &PublicationProblem{Reason: reason, Message: err.Error()}
}

// tracker holds the state and wakes who waits for it to change.
type tracker struct {
	mu      sync.Mutex // guards the fields below
	state   State
	changed chan struct{}
}

func newTracker() *tracker { return &tracker{changed: make(chan struct{})} }

func (t *tracker) get() (State, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state, t.changed
}

func (t *tracker) update(change func(*State)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.state)
	close(t.changed)
	t.changed = make(chan struct{})
}

// problem remembers the problem of the publication, nil for none, and says whether that is new.
func (t *tracker) problem(p *PublicationProblem) bool {
	t.mu.Lock()
	old := t.state.PublicationProblem
	t.mu.Unlock()
	if (p == nil) == (old == nil) && (p == nil || *p == *old) {
		return false
	}
	t.update(func(s *State) { s.PublicationProblem = p })
	return true
}
