// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command networkdriver-hook is an OCI createRuntime hook of containers that list a claim. It refuses one that is not
// in the sandbox that has the claim's devices. Its arguments are the file that says which that is, and the IOMMU groups whose nodes the
// container gets.
package main

import (
	"fmt"
	"os"

	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "networkdriver-hook is run by the container runtime, with the file of a claim")
		os.Exit(2)
	}
	if err := gatehook.Run(os.Stdin, os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
