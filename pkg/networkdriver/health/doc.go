// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package health says which devices are not healthy, and since when. Link events and one question for each PF tell of faults; a fault
// counts once it has lasted, and is over once it has been gone for a while, so that a link that flaps costs nobody anything. What comes of
// it is the table networkdriver-health: publication makes taints of it, claims get a condition, kubelet and pods are told.
package health
