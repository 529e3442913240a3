// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/pause"
)

const (
	// lookInterval is how soon a claim whose devices are out of their pod is looked at, and again each time after twice
	// as long, up to maxLookInterval.
	lookInterval    = time.Second
	maxLookInterval = 10 * time.Second
	// handOverTimeout bounds the work on one claim.
	handOverTimeout = 30 * time.Second
	// answerTime is more than an answer to kubelet takes.
	answerTime = 10 * time.Second
)

// Sandboxes are the pod sandboxes that the runtime has.
type Sandboxes interface {
	// Sandboxes returns those of the namespace's pods in the order in which they came.
	Sandboxes(namespace string) []attachments.Sandbox
}

// consumerOf returns the pod that has the claim's devices, or is to get them. A claim may be reserved for several pods: it
// is for the one that has had the devices, and at first for whichever has a sandbox. The others wait until the claim is no
// longer reserved for that one. What it is reserved for besides pods never gets them.
func (p *Preparer) consumerOf(claim *resourceapi.ResourceClaim, rows []*tables.DRAAllocation) (resourceapi.ResourceClaimConsumerReference, error) {
	var none resourceapi.ResourceClaimConsumerReference
	consumers := podsOf(claim)
	switch {
	case claim.Status.Allocation == nil:
		return none, errors.New("the claim is not allocated")
	case len(consumers) == 0:
		return none, errors.New("the claim is not reserved for a pod")
	case len(consumers) == 1:
		return consumers[0], nil
	}
	has := func(row func(*tables.DRAAllocation) bool) int {
		return slices.IndexFunc(consumers, func(c resourceapi.ResourceClaimConsumerReference) bool {
			return slices.ContainsFunc(rows, func(r *tables.DRAAllocation) bool { return r.PodUID == c.UID && row(r) })
		})
	}
	holder := has(func(*tables.DRAAllocation) bool { return true })
	if i := has(func(r *tables.DRAAllocation) bool { return r.Held }); i >= 0 {
		return consumers[i], nil
	}
	sandboxes := p.aliveIn(claim.Namespace)
	runs := func(c resourceapi.ResourceClaimConsumerReference) bool { return sandboxOf(sandboxes, c.UID) != nil }
	if holder >= 0 && runs(consumers[holder]) {
		return consumers[holder], nil
	}
	if i := slices.IndexFunc(consumers, runs); i >= 0 {
		return consumers[i], nil
	}
	return consumers[max(holder, 0)], nil
}

// aliveIn returns the sandboxes of the namespace's pods that devices can be attached to.
func (p *Preparer) aliveIn(namespace string) []attachments.Sandbox {
	return slices.DeleteFunc(p.Sandboxes.Sandboxes(namespace), func(s attachments.Sandbox) bool { return !p.Room.Alive(s) })
}

// sandboxOf returns the pod's newest sandbox, nil if it has none.
func sandboxOf(sandboxes []attachments.Sandbox, pod kubetypes.UID) *attachments.Sandbox {
	for i, s := range slices.Backward(sandboxes) {
		if s.PodUID == pod {
			return &sandboxes[i]
		}
	}
	return nil
}

// HandOver sees to claims whose devices are out of their pod while somebody waits for them. Kubelet prepares a claim once,
// and the runtime refuses a container whose claim's devices are not in its sandbox without asking anybody: neither
// would tell the driver that it is time to attach. So it tries again to attach to the pod's own sandbox, and passes
// devices on to the next pod of the claim when the claim is no longer reserved for the former one.
//
// A claim that has lost devices while kubelet takes it for prepared is owed them until it is prepared, unprepared or gone. That
// a pod has a sandbox says that kubelet takes all of its claims for prepared.
type HandOver struct {
	log      *slog.Logger
	preparer *Preparer
	claims   ClaimGetter
	events   attachments.Events
	now      func() time.Time
	waits    map[kubetypes.UID]*wait // those of the last look
}

// wait is a claim whose devices are out of their pod.
type wait struct {
	claim Ref
	next  time.Time
	delay time.Duration
}

// NewHandOver returns what hands over the claims that the preparer prepares.
func NewHandOver(log *slog.Logger, preparer *Preparer, claims ClaimGetter, events attachments.Events) *HandOver {
	return &HandOver{log: log, preparer: preparer, claims: claims, events: events, now: time.Now, waits: map[kubetypes.UID]*wait{}}
}

// Run looks at such claims until the context ends.
func (h *HandOver) Run(ctx context.Context) error {
	for pause.For(ctx, lookInterval) {
		h.look(ctx)
	}
	return nil
}

// look deals with the claims that it is time for.
func (h *HandOver) look(ctx context.Context) {
	now := h.now()
	home := map[kubetypes.UID][]*tables.DRAAllocation{}
	for row := range h.preparer.Allocations.All(h.preparer.DB.ReadTxn()) {
		home[row.ClaimUID] = append(home[row.ClaimUID], row)
	}
	h.settle(now)
	waiting := h.owed()
	for uid, rows := range home {
		if !slices.ContainsFunc(rows, func(row *tables.DRAAllocation) bool { return row.Attachment != nil }) {
			waiting[uid] = rows[0].ClaimRef()
		}
	}
	maps.DeleteFunc(h.waits, func(uid kubetypes.UID, _ *wait) bool { return waiting[uid] == Ref{} })
	for uid, claim := range waiting {
		if h.waits[uid] == nil {
			h.waits[uid] = &wait{claim: claim, next: now.Add(lookInterval), delay: lookInterval}
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(h.waits)) {
		w := h.waits[uid]
		if now.Before(w.next) {
			continue
		}
		w.delay = min(2*w.delay, maxLookInterval)
		w.next = now.Add(w.delay)
		if err := h.serve(ctx, w.claim, home[uid]); err != nil {
			h.log.Warn("Devices of a claim are not in a pod, and somebody waits for them; it is tried again",
				"claim", w.claim, "error", err, "after", w.delay)
		}
	}
}

// owed returns the claims that are owed devices by their UIDs, without those that kubelet has unprepared.
func (h *HandOver) owed() map[kubetypes.UID]Ref {
	owed := map[kubetypes.UID]Ref{}
	for _, claim := range h.preparer.Room.OwedClaims() {
		owed[claim.UID] = claim
	}
	for claim := range h.preparer.unprepared.all() {
		delete(owed, claim)
	}
	return owed
}

// settle forgets claims that kubelet has unprepared, once it has the answer. Until then a new life of the agent has to know
// that kubelet takes them for prepared.
func (h *HandOver) settle(now time.Time) {
	all := h.preparer.unprepared.all()
	for _, claim := range slices.Sorted(maps.Keys(all)) {
		if now.Sub(all[claim]) >= answerTime {
			h.preparer.unprepared.forget(claim)
			h.preparer.Room.Settle(claim)
		}
	}
}

// serve finds out who waits for the claim's devices, which are at home but for those of a claim that is owed some, and
// attaches them if that is right.
func (h *HandOver) serve(ctx context.Context, ref Ref, rows []*tables.DRAAllocation) error {
	sandboxes := h.preparer.aliveIn(ref.Namespace)
	_, owed := h.owed()[ref.UID]
	if len(sandboxes) == 0 && !owed {
		return nil // a claim that is owed may be gone, whoever runs
	}
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	if len(rows) > 0 && !owed {
		if own := sandboxOf(sandboxes, rows[0].PodUID); own != nil && !rows[0].Releasing {
			return h.attach(ctx, *own)
		}
	}
	claim, err := h.claims.GetClaim(ctx, ref.Namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err) || err == nil && claim.UID != ref.UID:
		h.preparer.Room.Settle(ref.UID)
		h.preparer.Room.Undescribe(ref)
		return nil
	case err != nil:
		return err
	}
	waits := func(c resourceapi.ResourceClaimConsumerReference) bool { return sandboxOf(sandboxes, c.UID) != nil }
	if !slices.ContainsFunc(claim.Status.ReservedFor, waits) {
		return nil // the other pods have nothing to do with the claim
	}
	pod, err := h.preparer.consumerOf(claim, rows)
	if err != nil {
		return err
	}
	if len(rows) > 0 && pod.UID == rows[0].PodUID && !owed {
		h.tell(claim, rows[0], sandboxes)
		return nil
	}
	err = h.passOn(ctx, claim)
	if s := sandboxOf(sandboxes, pod.UID); err != nil && s != nil {
		h.events.Warn(*s, attachments.ReasonFailedPrepare, err.Error())
	}
	return err
}

// tell tells the pods that wait whom they wait for.
func (h *HandOver) tell(claim *resourceapi.ResourceClaim, holder *tables.DRAAllocation, sandboxes []attachments.Sandbox) {
	for _, c := range claim.Status.ReservedFor {
		if s := sandboxOf(sandboxes, c.UID); s != nil && c.UID != holder.PodUID {
			h.events.Warn(*s, attachments.ReasonClaimInUse, attachments.InUse(holder).Error())
		}
	}
}

// passOn frees what the former pod had, sets up what the claim is allotted now, and attaches it to the pod that is next.
func (h *HandOver) passOn(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	// One claim comes after the other here: those of other tenants do not wait for a network that is full.
	pod, err := h.prepareNext(networks.AtOnce(ctx), claim)
	if err != nil {
		return err
	}
	s := sandboxOf(h.preparer.aliveIn(claim.Namespace), pod)
	if s == nil {
		return nil // unprepared meanwhile, or its next sandbox will ask
	}
	h.log.Info("Claim is passed on to the next pod that it is reserved for", "claim", RefOf(claim), "pod", s.Pod())
	return h.attach(ctx, *s)
}

// prepareNext prepares the claim for the pod that is next, and returns that; none if the claim was unprepared meanwhile.
func (h *HandOver) prepareNext(ctx context.Context, claim *resourceapi.ResourceClaim) (kubetypes.UID, error) {
	held, err := h.preparer.Room.Lock(ctx, claim.UID)
	if err != nil {
		return "", err
	}
	defer held.Unlock()
	if _, owed := h.owed()[claim.UID]; len(held.Rows()) == 0 && !owed {
		return "", nil
	}
	if _, err := h.preparer.prepareHeld(ctx, claim, held); err != nil {
		return "", err
	}
	return held.Rows()[0].PodUID, nil
}

// attach attaches to a sandbox that may have ended meanwhile.
func (h *HandOver) attach(ctx context.Context, s attachments.Sandbox) error {
	err := h.preparer.Room.AttachLate(ctx, s, func() bool {
		return slices.ContainsFunc(h.preparer.Sandboxes.Sandboxes(s.PodNamespace), func(o attachments.Sandbox) bool { return o.ID == s.ID })
	})
	if err != nil {
		h.events.Warn(s, attachments.ReasonFailedAttach, err.Error())
	}
	return err
}
