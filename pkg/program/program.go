// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package program turns a Hive into a command with flags, environment, configuration directory, logging and signals,
// the same for each of the project's daemons.
//
// A flag is taken from the command line, else from the environment as CILIUM_<FLAG>, else from the file of its name
// in --config-dir (a mounted ConfigMap), else it has its default.
package program

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"k8s.io/klog/v2"

	"github.com/cilium/networkdriver/pkg/lastlog"
	"github.com/cilium/networkdriver/pkg/version"
)

const (
	envPrefix = "CILIUM_"
	// slowHook is how long a cell may take to start or stop before that is worth a line in the log.
	slowHook = 100 * time.Millisecond
)

// Command returns the command that runs the cells until a signal or a cell ends it.
func Command(name, short string, cells ...cell.Cell) *cobra.Command {
	opts := hive.DefaultOptions()
	opts.EnvPrefix = envPrefix
	opts.LogThreshold = slowHook
	// Each module gets a job group and a health scope of its own.
	opts.ModulePrivateProviders = cell.ModulePrivateProviders{
		func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
			return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
		},
	}
	lines := lastlog.New()
	h := hive.NewWithOptions(opts, append(cells, cell.Provide(func() *lastlog.Ring { return lines }))...)

	cmd := &cobra.Command{
		Use: name, Short: short, Version: version.String(),
		Args: cobra.NoArgs, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(h, cmd.Flags(), io.MultiWriter(lines, cmd.ErrOrStderr()))
		},
	}
	h.RegisterFlags(cmd.Flags())
	registerFlags(cmd.Flags(), h.Viper())
	return cmd
}

const (
	flagConfigDir = "config-dir"
	flagDebug     = "debug"
	flagLogFormat = "log-format"
)

func registerFlags(flags *pflag.FlagSet, settings *viper.Viper) {
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	own.String(flagConfigDir, "", "Directory with a file for each flag to set, named as the flag, such as a mounted ConfigMap")
	own.Bool(flagDebug, false, "Log debug messages too")
	own.String(flagLogFormat, formatText, "Format of the log: text or json")
	own.VisitAll(func(f *pflag.Flag) {
		// Neither fails with a name given.
		_ = settings.BindPFlag(f.Name, f)
		_ = settings.BindEnv(f.Name, envPrefix+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")))
	})
	flags.AddFlagSet(own)
}

func run(h *hive.Hive, flags *pflag.FlagSet, stderr io.Writer) error {
	settings := h.Viper()
	var unknown []string
	if dir := settings.GetString(flagConfigDir); dir != "" {
		values, rest, err := readConfigDir(dir, func(name string) bool { return flags.Lookup(name) != nil })
		if err != nil {
			return fmt.Errorf("--%s: %w", flagConfigDir, err)
		}
		unknown = rest
		if err := settings.MergeConfigMap(values); err != nil {
			return fmt.Errorf("--%s: %w", flagConfigDir, err)
		}
	}
	log, err := newLogger(stderr, settings.GetString(flagLogFormat), settings.GetBool(flagDebug))
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log)
	if len(unknown) > 0 {
		log.Debug("Ignoring files of the configuration directory that are not named as a flag", "files", unknown)
	}
	// The sockets are for root alone from the moment they are made.
	syscall.Umask(0o077)
	log.Info("Starting", "version", version.String())
	err = h.Run(log)
	var populate hive.ErrPopulate
	if errors.As(err, &populate) {
		log.Debug("The cells cannot be put together", "error", populate.Pretty())
	}
	return err
}
