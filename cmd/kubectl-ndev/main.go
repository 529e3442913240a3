// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command kubectl-ndev is the kubectl plugin ndev: the network driver's devices of all nodes, and what becomes of a pod's.
package main

import (
	"os"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/cilium/networkdriver/pkg/ndev"
)

func main() {
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	if err := ndev.Command(streams).Execute(); err != nil {
		os.Exit(1)
	}
}
