// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package lab runs real Kubernetes clusters for this repository's tests and
// demo: a control plane of etcd, API server, scheduler and controller manager
// as processes of this machine, and nodes that are small virtual machines with
// kubelet, containerd and an SR-IOV NIC. QEMU's igb model is such a NIC for
// Linux's own igb and igbvf drivers, with seven VFs whose VLANs isolate.
//
// StartControlPlane alone serves tests that need only a real API server.
//
// Everything is built from Go modules and Debian packages, see Build, and kept
// in a cache. README.md tells what is where, and the pitfalls.
package lab
