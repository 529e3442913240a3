// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command install-cni copies programs into a directory of the node, such as that of CNI plugins. Its image has no shell and
// no cp.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/cilium/networkdriver/pkg/version"
)

func main() {
	if err := command().Execute(); err != nil {
		os.Exit(1)
	}
}

func command() *cobra.Command {
	to := ""
	cmd := &cobra.Command{
		Use: "install-cni PROGRAM...", Short: "Copy programs to where the container runtime looks for them",
		Version: version.String(), SilenceUsage: true,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, programs []string) error {
			for _, program := range programs {
				target := filepath.Join(to, filepath.Base(program))
				if err := install(program, target); err != nil {
					return fmt.Errorf("install %s: %w", target, err)
				}
				fmt.Fprintln(cmd.OutOrStdout(), "Installed", target)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&to, "to", "/host/opt/cni/bin", "Directory of the node, by default that of CNI plugins")
	return cmd
}

// install replaces the target in one step: the runtime may be about to run it, and a running program cannot be written to.
func install(program, target string) error {
	in, err := os.Open(program)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Chmod(0o755), out.Sync(), out.Close()); err != nil {
		return err
	}
	return os.Rename(out.Name(), target)
}
