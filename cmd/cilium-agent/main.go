// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command cilium-agent runs the network driver on a node.
package main

import (
	"os"
	"runtime/debug"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/hive/shell"
	"github.com/cilium/statedb"

	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/metrics"
	"github.com/cilium/networkdriver/pkg/networkdriver"
	"github.com/cilium/networkdriver/pkg/program"
)

// gcPercent has the heap, most of which is caches that stay, grow by half before it is collected. It is idle time of one node that this costs, and
// memory of every node that it saves. GOGC in the environment says otherwise.
const gcPercent = 50

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	cmd := program.Command("cilium-agent", "The network driver's agent, one on each node",
		infrastructure,
		networkdriver.Cell,
	)
	if err := cmd.Execute(); err != nil {
		os.Exit(1)
	}
}

// infrastructure is what the driver takes from the application it is in.
var infrastructure = cell.Group(
	job.Cell,
	cell.SimpleHealthCell,
	statedb.Cell,
	client.Cell,
	metrics.Cell,
	health.Cell,
	// The socket directory is made by the local API, which therefore comes before the shell.
	debugapi.Cell,
	shell.ServerCell(debugapi.DefaultShellSocketPath),
)
