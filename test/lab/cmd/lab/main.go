// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command lab builds, starts and stops the lab. See the package lab.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "lab",
		Short:         "A real Kubernetes cluster with emulated SR-IOV nodes",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(buildCommand())
	return root
}

func buildCommand() *cobra.Command {
	opts := lab.BuildOptions{Progress: os.Stderr}
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build and fetch what the lab runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := lab.Build(cmd.Context(), opts)
			return err
		},
	}
	cmd.Flags().StringVar(&opts.Kubernetes, "kubernetes", "", "Kubernetes version, such as 1.34.4 (default $"+lab.KubernetesEnv+" or "+lab.DefaultKubernetes+")")
	return cmd
}
