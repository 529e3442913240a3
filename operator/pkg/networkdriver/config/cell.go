// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package config makes CiliumNetworkDriverNodeConfigs from CiliumNetworkDriverClusterConfigs and the labels of
// CiliumNodes.
//
// Data flows one way. Informers put the newest state of each object into an inbox. Events that come while a batch is
// worked on make up the next batch, so that a burst of events is no burst of work. The ledger takes in a batch: its
// assignment decides which cluster config governs which node, and what differs from the existing node configs is the
// work. Every replica does this much. The one that leads writes: a change is one request to the API server, made from
// what the ledger knows, and its answer goes into the ledger, so that nothing is read before a write or after it.
//
// A replica that loses its lease, as in an outage of the API server, drops all of this and starts over.
package config

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/pkg/health"
)

// Cell is the network driver's part of the operator. What it needs from the application around it is listed in [Params].
var Cell = cell.Module(
	"network-driver-config",
	"Makes node configs from cluster configs",

	cell.Config(defaultConfig),
	cell.ProvidePrivate(newTables),
	cell.Invoke(register),
)

// Config are the flags.
type Config struct {
	EnableNetworkDriver       bool
	EnableCiliumNetworkDriver bool

	K8sNamespace                string
	LeaderElectionLeaseDuration time.Duration
	LeaderElectionRenewDeadline time.Duration
	LeaderElectionRetryPeriod   time.Duration

	NetworkDriverRefreshInterval time.Duration
	NetworkDriverWriteQPS        float64
	NetworkDriverWriteBurst      int

	NetworkDriverAddressGracePeriod time.Duration
	NetworkDriverAgentSelector      string
}

var defaultConfig = Config{
	K8sNamespace:                 "kube-system",
	LeaderElectionLeaseDuration:  15 * time.Second,
	LeaderElectionRenewDeadline:  10 * time.Second,
	LeaderElectionRetryPeriod:    2 * time.Second,
	NetworkDriverRefreshInterval: 5 * time.Minute,
	NetworkDriverWriteQPS:        50,
	NetworkDriverWriteBurst:      100,

	NetworkDriverAddressGracePeriod: 5 * time.Minute,
	NetworkDriverAgentSelector:      "app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent",
}

// Flags implements [cell.Flagger].
func (c Config) Flags(flags *pflag.FlagSet) {
	flags.Bool("enable-network-driver", c.EnableNetworkDriver, "Make node configs from cluster configs")
	flags.Bool("enable-cilium-network-driver", c.EnableCiliumNetworkDriver, "Alias of --enable-network-driver")
	flags.String("k8s-namespace", c.K8sNamespace, "Namespace of the operator's lease")
	flags.Duration("leader-election-lease-duration", c.LeaderElectionLeaseDuration, "Time after which another replica takes over from one that is silent")
	flags.Duration("leader-election-renew-deadline", c.LeaderElectionRenewDeadline, "Time for which the leading replica tries to renew its lease, then it stops writing")
	flags.Duration("leader-election-retry-period", c.LeaderElectionRetryPeriod, "Time between attempts to get or renew the lease")
	flags.Duration("network-driver-refresh-interval", c.NetworkDriverRefreshInterval, "How often all node configs are read, to find changes that no watch has told of")
	flags.Float64("network-driver-write-qps", c.NetworkDriverWriteQPS, "Writes of node configs and statuses per second, on average")
	flags.Int("network-driver-write-burst", c.NetworkDriverWriteBurst, "Writes of node configs and statuses in a burst")
	flags.Duration("network-driver-address-grace-period", c.NetworkDriverAddressGracePeriod, "Time for which a Node has to be deleted or out of service before its addresses are given to others")
	flags.String("network-driver-agent-selector", c.NetworkDriverAgentSelector, "Labels of the agents' pods in --k8s-namespace, by which a NodeConfig is not ready any more when its node has none; empty: nobody looks")
}

// Enabled is true for either spelling of the flag.
func (c Config) Enabled() bool { return c.EnableNetworkDriver || c.EnableCiliumNetworkDriver }

func isSelector(s string) bool {
	_, err := labels.Parse(s)
	return err == nil
}

func (c Config) validate() error {
	switch {
	case c.NetworkDriverWriteQPS <= 0:
		return fmt.Errorf("--network-driver-write-qps: %v is not above 0", c.NetworkDriverWriteQPS)
	case c.NetworkDriverWriteBurst < 1:
		return fmt.Errorf("--network-driver-write-burst: %d is not at least 1", c.NetworkDriverWriteBurst)
	case c.NetworkDriverRefreshInterval < time.Second:
		return fmt.Errorf("--network-driver-refresh-interval: %v is not at least 1s", c.NetworkDriverRefreshInterval)
	case c.NetworkDriverAddressGracePeriod < time.Second:
		return fmt.Errorf("--network-driver-address-grace-period: %v is not at least 1s", c.NetworkDriverAddressGracePeriod)
	case !isSelector(c.NetworkDriverAgentSelector):
		return fmt.Errorf("--network-driver-agent-selector: %q is not a label selector", c.NetworkDriverAgentSelector)
	case c.LeaderElectionRetryPeriod <= 0:
		return fmt.Errorf("--leader-election-retry-period: %v is not above 0", c.LeaderElectionRetryPeriod)
	case c.LeaderElectionRenewDeadline <= c.LeaderElectionRetryPeriod*6/5:
		return fmt.Errorf("--leader-election-renew-deadline: %v is not above 1.2 times the retry period of %v", c.LeaderElectionRenewDeadline, c.LeaderElectionRetryPeriod)
	case c.LeaderElectionLeaseDuration <= c.LeaderElectionRenewDeadline:
		return fmt.Errorf("--leader-election-lease-duration: %v is not above the renew deadline of %v", c.LeaderElectionLeaseDuration, c.LeaderElectionRenewDeadline)
	case c.K8sNamespace == "":
		return fmt.Errorf("--k8s-namespace: a namespace is needed")
	}
	return nil
}

// Params are what the cell takes from the application. Another Hive application provides these and adds [Cell].
type Params struct {
	cell.In

	Config     Config
	Logger     *slog.Logger
	Jobs       job.Group
	RESTConfig *rest.Config
	Metrics    prometheus.Registerer
	Health     *health.Checks
	Tables     *tables
}

func register(p Params) error {
	if !p.Config.Enabled() {
		return nil
	}
	if err := p.Config.validate(); err != nil {
		return fmt.Errorf("network driver: %w", err)
	}
	o, err := newOperator(p)
	if err != nil {
		return fmt.Errorf("network driver: %w", err)
	}
	p.Jobs.Add(job.OneShot("node-configs", o.run))
	return nil
}
