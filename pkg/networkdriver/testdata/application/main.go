// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command application is a Hive application that has the network driver in it and brings what the driver takes from it.
package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/networkdriver"
)

func main() {
	opts := hive.DefaultOptions()
	opts.ModulePrivateProviders = cell.ModulePrivateProviders{
		func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
			return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
		},
	}
	h := hive.NewWithOptions(opts,
		job.Cell,
		cell.SimpleHealthCell,
		statedb.Cell,
		cell.Provide(
			func() *rest.Config { return &rest.Config{Host: "https://api.example"} },
			func(config *rest.Config) (kubernetes.Interface, error) { return kubernetes.NewForConfig(config) },
			func() prometheus.Registerer { return prometheus.NewRegistry() },
			func() *health.Checks { return &health.Checks{} },
		),
		networkdriver.Cell,
	)
	// A program would call Run.
	if err := h.Populate(slog.Default()); err != nil {
		fmt.Fprintln(os.Stderr, "application:", err)
		os.Exit(1)
	}
}
