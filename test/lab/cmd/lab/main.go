// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command lab builds, starts and stops the lab. See the package lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	err := newCommand().ExecuteContext(ctx)
	var exit exitError
	if errors.As(err, &exit) {
		os.Exit(int(exit))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	opts := lab.Options{BuildOptions: lab.BuildOptions{Progress: os.Stderr}}
	root := &cobra.Command{
		Use:           "lab",
		Short:         "A real Kubernetes cluster with emulated SR-IOV nodes",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&opts.State, "state", "", "directory of the lab's data and logs (default: in the cache)")
	flags.StringVar(&opts.Cache, "cache", "", "directory of what is built (default $"+lab.CacheEnv+", or .cache/lab in the repository)")
	flags.StringVar(&opts.Kubernetes, "kubernetes", "", "Kubernetes version, such as 1.34.4 (default $"+lab.KubernetesEnv+", or "+lab.DefaultKubernetes+")")
	flags.StringVar(&opts.Containerd, "containerd", "", "containerd version, such as 1.7.35 (default $"+lab.ContainerdEnv+", or "+lab.DefaultContainerd+")")
	root.AddCommand(
		buildCommand(&opts), binDirCommand(&opts), upCommand(&opts), downCommand(&opts), execCommand(&opts),
		envCommand(&opts), logsCommand(&opts), statusCommand(&opts), versionsCommand(), pinCommand(),
	)
	return root
}

func buildCommand(opts *lab.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build and fetch what the lab runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := lab.Build(cmd.Context(), opts.BuildOptions)
			return err
		},
	}
	cmd.Flags().BoolVar(&opts.ControlPlaneOnly, "control-plane", false, "only what the control plane needs")
	return cmd
}

func upCommand(opts *lab.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the cluster and leave it up",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Detach = true
			if _, err := lab.Up(cmd.Context(), *opts); err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "The cluster is up. Use it: eval $(go run ./test/lab/cmd/lab env)\nStop it: go run ./test/lab/cmd/lab down\n")
			return nil
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&opts.Nodes, "nodes", 1, "how many nodes")
	flags.IntVar(&opts.PFs, "pfs", 0, "SR-IOV NICs of a node, 1 or 2 (default $"+lab.PFsEnv+", or 1)")
	flags.IntVar(&opts.CPUs, "cpus", 0, "processors of a node (default $"+lab.CPUsEnv+", or 1 in emulation and 2 with KVM)")
	flags.StringVar(&opts.CDI, "cdi", "", "CDI on or off in containerd's configuration (default $"+lab.CDIEnv+", or as containerd has it)")
	return cmd
}

func versionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "versions",
		Short: "List the versions of Kubernetes and containerd that are pinned",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			kubernetes, containerd, err := lab.Versions()
			if err != nil {
				return err
			}
			fmt.Printf("kubernetes %s\ncontainerd %s\n", strings.Join(kubernetes, " "), strings.Join(containerd, " "))
			return nil
		},
	}
}

func pinCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "pin kubernetes|containerd VERSION",
		Short: "Pin one more version, in components/",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return lab.Pin(cmd.Context(), args[0], args[1])
		},
	}
}

func binDirCommand(opts *lab.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "bin-dir",
		Short: "Print the directory with the built programs of the control plane",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			arts, err := lab.Built(opts.BuildOptions)
			if err != nil {
				return err
			}
			fmt.Println(arts.Bin)
			return nil
		},
	}
}

func downCommand(opts *lab.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop the cluster; its logs stay",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := lab.Open(*opts)
			if errors.Is(err, lab.ErrNotUp) {
				return nil
			}
			if err != nil {
				return err
			}
			return l.Down()
		},
	}
}

// exitError carries the exit status of a script on a node.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func execCommand(opts *lab.Options) *cobra.Command {
	useStdin := false
	cmd := &cobra.Command{
		Use:   "exec NODE -- COMMAND...",
		Short: "Run a shell command on a node, with its output and exit status",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Open(*opts)
			if err != nil {
				return err
			}
			node := l.Node(args[0])
			if node == nil {
				return fmt.Errorf("the lab has no node %s", args[0])
			}
			var stdin []byte
			if useStdin {
				if stdin, err = io.ReadAll(os.Stdin); err != nil {
					return err
				}
			}
			code, err := node.Stream(cmd.Context(), strings.Join(args[1:], " "), stdin, os.Stdout, os.Stderr)
			if err != nil {
				return err
			}
			if code != 0 {
				return exitError(code)
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&useStdin, "stdin", "i", false, "read standard input to its end and pass it on")
	return cmd
}

func envCommand(opts *lab.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "Print shell commands that make kubectl and helm use the cluster: eval $(lab env)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := lab.Open(*opts)
			if err != nil {
				return err
			}
			return l.WriteEnv(os.Stdout)
		},
	}
}

func logsCommand(opts *lab.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "logs [NAME]",
		Short: "List the logs, or print one: of a program, NODE/console or NODE/DAEMON",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			logs, err := lab.Logs(*opts)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				for _, name := range slices.Sorted(maps.Keys(logs)) {
					fmt.Printf("%-32s %s\n", name, logs[name])
				}
				return nil
			}
			path, ok := logs[args[0]]
			if !ok {
				return fmt.Errorf("no log %s: want one of %s", args[0], strings.Join(slices.Sorted(maps.Keys(logs)), ", "))
			}
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(os.Stdout, f)
			return err
		},
	}
}

func statusCommand(opts *lab.Options) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Say what runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(*opts)
			if err != nil {
				return err
			}
			return l.Status(cmd.Context(), os.Stdout)
		},
	}
}
