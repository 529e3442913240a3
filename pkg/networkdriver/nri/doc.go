// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nri connects the driver to the container runtime through the Node Resource Interface. Its hooks move
// prepared devices into a pod's network namespace when the sandbox starts and bring them home when it stops; its
// connection outlives the runtime's restarts.
//
// The allocation table says which devices a pod has, keyed by the pod's UID. How a link is moved is the business of
// a [Linker].
package nri
