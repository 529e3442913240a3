// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

// group is a part of the report.
type group struct {
	name, title, says string
	// notes says that the rounds' notes are shown.
	notes bool
}

var groups = []group{
	{"agent", "The agent ends, stops or is deleted", "Kubelet goes on meanwhile. The move into a pod, the name there and the link's way up are one request to the kernel.", true},
}

// allJobs returns everything that can be tried.
func allJobs() []job { return matrix() }

// coveredFault is a fault that an end-to-end test tries.
type coveredFault struct{ fault, test string }

var covered = []coveredFault{}
