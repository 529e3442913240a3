// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command cilium-operator makes the network driver's node configs from cluster configs, and looks after networks. Two replicas are the norm, of
// which one works.
package main

import (
	"os"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/hive/shell"
	"github.com/cilium/statedb"

	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/metrics"
	"github.com/cilium/networkdriver/pkg/program"
)

func main() {
	cmd := program.Command("cilium-operator", "The network driver's operator, for the whole cluster",
		infrastructure,
		config.Cell,
		networks.Cell,
	)
	if err := cmd.Execute(); err != nil {
		os.Exit(1)
	}
}

// infrastructure is what the network driver's cell takes from the application it is in.
var infrastructure = cell.Group(
	job.Cell,
	cell.SimpleHealthCell,
	statedb.Cell,
	client.Cell,
	metrics.Cell,
	health.Cell,
	health.ServerCell,
	// The socket directory is made by the local API, which therefore comes before the shell.
	debugapi.Cell,
	shell.ServerCell(debugapi.DefaultShellSocketPath),
)
