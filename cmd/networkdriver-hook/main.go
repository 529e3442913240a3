// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command networkdriver-hook is an OCI createRuntime hook of containers that list a claim. It refuses one that is not
// in the sandbox that has the claim's devices. Its argument is the file that says which that is.
package main

import (
	"fmt"
	"os"

	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "networkdriver-hook is run by the container runtime, with the file of a claim")
		os.Exit(2)
	}
	if err := gatehook.Run(os.Stdin, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
