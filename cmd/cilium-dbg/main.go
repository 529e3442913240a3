// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command cilium-dbg looks into a running agent or operator.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cilium/hive/shell"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/pkg/bugreport"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/version"
)

// Where the agent has its files if its flags say nothing else.
const (
	defaultJournalDir = "/run/cilium/networkdriver"
	defaultCDIDir     = "/var/run/cdi"
)

func main() {
	if err := command().Execute(); err != nil {
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use: "cilium-dbg", Short: "Look into a running agent or operator",
		Version: version.String(), SilenceUsage: true,
	}
	socket := root.PersistentFlags().String("socket-path", debugapi.DefaultSocketPath, "Path of the unix socket of the agent or operator")
	program := func() *debugapi.Client { return debugapi.NewClient(*socket) }
	root.AddCommand(statedbCommand(program), devicesCommand(program), statusCommand(program), bugreportCommand(program), shellCommand())
	return root
}

func statedbCommand(program func() *debugapi.Client) *cobra.Command {
	return &cobra.Command{
		Use: "statedb [TABLE]", Short: "Print all StateDB tables, or one, as JSON",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var raw json.RawMessage
			if len(args) == 0 {
				raw, err = program().Dump(cmd.Context())
			} else {
				raw, err = program().DumpTable(cmd.Context(), args[0])
			}
			if err != nil {
				return err
			}
			return printJSON(cmd.OutOrStdout(), raw)
		},
	}
}

func devicesCommand(program func() *debugapi.Client) *cobra.Command {
	output := ""
	cmd := &cobra.Command{
		Use: "networkdriver", Short: "Print the network devices and the pods that have them",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("--output: %q is neither table nor json", output)
			}
			devices, err := program().Devices(cmd.Context())
			if err != nil {
				return err
			}
			if output == "table" {
				return printDevices(cmd.OutOrStdout(), devices)
			}
			raw, err := json.Marshal(devices)
			if err != nil {
				return err
			}
			return printJSON(cmd.OutOrStdout(), raw)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "Format: table or json")
	return cmd
}

func statusCommand(program func() *debugapi.Client) *cobra.Command {
	liveness := false
	cmd := &cobra.Command{
		Use: "status", Short: "Say whether the program can serve, and if not why; fails when it cannot",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := program().Status(cmd.Context())
			if err != nil {
				return err
			}
			for _, f := range status.Failures {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", f.Check, f.Reason)
			}
			switch {
			case !status.Live:
				return errors.New("the program hangs and must be restarted")
			case !status.Ready && !liveness:
				return errors.New("the program is not ready")
			case status.Ready:
				fmt.Fprintln(cmd.OutOrStdout(), "Ready")
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&liveness, "liveness", false, "Fail only when a restart is needed")
	return cmd
}

func bugreportCommand(program func() *debugapi.Client) *cobra.Command {
	output := ""
	params := bugreport.Params{JournalDir: defaultJournalDir, CDIDir: defaultCDIDir, Links: bugreport.ReadLinks}
	cmd := &cobra.Command{
		Use: "bugreport", Short: "Pack what is to be known of the program and the node into one archive, without secrets",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			out := cmd.OutOrStdout()
			switch {
			case output != "-":
				file, createErr := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
				if createErr != nil {
					return createErr
				}
				defer func() { err = errors.Join(err, file.Close()) }()
				out = file
			case out == os.Stdout && isTerminal(os.Stdout):
				return errors.New("the archive is not for a terminal: name a file with --output, or write into one, as with > bugreport.tar.gz")
			}
			params.Program, params.Now = program(), time.Now()
			missing, err := bugreport.Write(cmd.Context(), out, params)
			for _, m := range missing {
				fmt.Fprintln(cmd.ErrOrStderr(), "Not in the archive:", m)
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&output, "output", "o", "-", "File to write, or - for the standard output")
	flags.StringVar(&params.JournalDir, "journal-dir", params.JournalDir, "The agent's journal, if the agent does not answer")
	flags.StringVar(&params.CDIDir, "cdi-spec-dir", params.CDIDir, "The folder of CDI spec files, if the agent does not answer")
	return cmd
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func shellCommand() *cobra.Command {
	cmd := shell.ShellCmd(debugapi.DefaultShellSocketPath, "cilium> ", nil)
	cmd.Short = "Run a command in the program's shell, or open the shell when none is given"
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		path, err := cmd.Flags().GetString(shell.ShellSockPathName)
		if err != nil {
			return err
		}
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("neither agent nor operator is running here: the shell's socket %s does not exist (--%s names another)",
				path, shell.ShellSockPathName)
		}
		return nil
	}
	return cmd
}

func printJSON(w io.Writer, raw json.RawMessage) error {
	var out bytes.Buffer
	if err := json.Indent(&out, bytes.TrimSpace(raw), "", "  "); err != nil {
		return fmt.Errorf("the answer is not JSON: %w", err)
	}
	out.WriteByte('\n')
	_, err := out.WriteTo(w)
	return err
}

func printDevices(w io.Writer, devices []debugapi.Device) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "DEVICE\tMANAGER\tPOOL\tCLAIM\tPOD\tINTERFACE\tVLAN\tNETWORK\tADDRESSES\tHEALTH\tSTATE")
	for _, d := range devices {
		vlan, state, health := "", d.State, "Healthy"
		if d.VLAN != 0 {
			vlan = strconv.Itoa(d.VLAN)
		}
		if d.Reason != "" {
			state += ": " + d.Reason
		}
		switch {
		case len(d.Faults) > 0:
			health = strings.Join(d.Faults, ",")
		case d.State == "NotOffered":
			health = "-"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Device, d.Manager, dash(d.Pool), dash(d.Claim), dash(d.Pod),
			dash(d.Interface), dash(vlan), dash(d.Network), dash(strings.Join(d.Addresses, ",")), health, state)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printPools(w, devices)
}

// printPools says how many devices of each pool are left.
func printPools(w io.Writer, devices []debugapi.Device) error {
	free, prepared, pools := map[string]int{}, map[string]int{}, map[string]bool{}
	for _, d := range devices {
		switch {
		case d.Pool == "":
			continue
		case d.Claim == "":
			free[d.Pool]++
		default:
			prepared[d.Pool]++
		}
		pools[d.Pool] = true
	}
	if len(pools) == 0 {
		return nil
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "\nPOOL\tPREPARED\tFREE")
	for _, pool := range slices.Sorted(maps.Keys(pools)) {
		fmt.Fprintf(table, "%s\t%d\t%d\n", pool, prepared[pool], free[pool])
	}
	return table.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
