// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nri connects the driver to the container runtime through the Node Resource Interface. Its hooks pass on that
// a pod's sandbox starts or stops, and refuse a container whose pod misses a device; its connection outlives the
// runtime's restarts. What becomes of the devices is the business of [Pods].
//
// Hooks answer in time, whatever the kernel does: a runtime drops a plugin that does not.
package nri
