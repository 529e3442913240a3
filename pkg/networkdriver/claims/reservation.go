// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// ReasonReservedForGroup is that of a claim that is reserved for a group of pods, or for whatever else is not a pod.
const ReasonReservedForGroup = "ReservedForGroup"

// IsPod says whether a claim's consumer is a pod.
func IsPod(consumer resourceapi.ResourceClaimConsumerReference) bool {
	return consumer.APIGroup == "" && consumer.Resource == "pods"
}

func isOther(consumer resourceapi.ResourceClaimConsumerReference) bool { return !IsPod(consumer) }

// podsOf returns the pods that the claim is reserved for.
func podsOf(claim *resourceapi.ResourceClaim) []resourceapi.ResourceClaimConsumerReference {
	return slices.DeleteFunc(slices.Clone(claim.Status.ReservedFor), isOther)
}

// checkReservation refuses a claim that is reserved for something that is not a pod: neither the claim nor kubelet's call says which pod of
// a group is to have the device, and whichever comes first would keep the others waiting for ever. A pod that has devices of the
// claim keeps them and may be prepared again: it has done nothing wrong, and the group's pods are held back by the gate.
func (p *Preparer) checkReservation(claim *resourceapi.ResourceClaim, rows []*tables.DRAAllocation) error {
	i := slices.IndexFunc(claim.Status.ReservedFor, isOther)
	if i < 0 {
		return nil
	}
	consumer := claim.Status.ReservedFor[i]
	err := reservedForOther(consumer)
	if p.Events != nil {
		p.Events.WarnClaim(RefOf(claim), consumer, ReasonReservedForGroup, err.Error())
	}
	for _, pod := range podsOf(claim) {
		if slices.ContainsFunc(rows, func(r *tables.DRAAllocation) bool { return r.PodUID == pod.UID }) {
			return nil
		}
	}
	return permanentError{err}
}

// reservedForOther says in words for people what a claim is reserved for that is not a pod, and what to do.
func reservedForOther(consumer resourceapi.ResourceClaimConsumerReference) error {
	if consumer.APIGroup == schedulingapi.GroupName && consumer.Resource == "podgroups" {
		return fmt.Errorf("the claim is reserved for PodGroup %q, all of whose pods share it, and a network device can only be given to one "+
			"pod: take it out of spec.resourceClaims of the PodGroup, and name a ResourceClaimTemplate in that of the pods alone", consumer.Name)
	}
	resource := consumer.Resource
	if consumer.APIGroup != "" {
		resource += "." + consumer.APIGroup
	}
	return fmt.Errorf("the claim is reserved for %s %q, a network device can only be given to a pod", resource, consumer.Name)
}
