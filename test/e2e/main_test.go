// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package e2e tests the network driver as users have it: real Kubernetes, kubelet, containerd with NRI, and an
// emulated SR-IOV NIC on each of two nodes. Nothing is mocked. All tests share one cluster and run one after the other;
// each leaves the nodes as it found them, which is checked.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// upTimeout bounds the start of the cluster when everything is built.
const upTimeout = 10 * time.Minute

// keepEnv leaves the cluster up after the tests, to look at it.
const keepEnv = "NETWORKDRIVER_E2E_KEEP"

// stateDir is where the cluster's data and logs are, below the repository.
const stateDir = "../../_out/e2e"

// cluster is the one cluster of all tests; nil where there is no lab.
var cluster *deploy.Cluster

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if !strings.Contains(os.Getenv("NETWORKDRIVER_REQUIRE"), "lab") {
		fmt.Println("end-to-end tests are skipped: they boot virtual machines; NETWORKDRIVER_REQUIRE=lab runs them (make test-e2e)")
		return 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), upTimeout)
	defer cancel()
	l, err := lab.Up(ctx, lab.Options{
		BuildOptions: lab.BuildOptions{Progress: os.Stdout},
		Nodes:        2,
		State:        filepath.FromSlash(stateDir),
		Detach:       os.Getenv(keepEnv) != "",
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "start the lab:", err)
		return 1
	}
	if os.Getenv(keepEnv) == "" {
		defer func() {
			if err := l.Down(); err != nil {
				fmt.Fprintln(os.Stderr, "stop the lab:", err)
			}
		}()
	}
	if cluster, err = deploy.Install(ctx, l); err != nil {
		fmt.Fprintln(os.Stderr, "install the driver:", err)
		return 1
	}
	for _, n := range l.Nodes() {
		if err := cluster.StartAgent(ctx, n); err != nil {
			fmt.Fprintln(os.Stderr, "start the agent:", err)
			return 1
		}
	}
	return m.Run()
}
