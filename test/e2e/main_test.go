// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package e2e tests the network driver as users have it: real Kubernetes, kubelet, containerd with NRI, and an
// emulated SR-IOV NIC on each of two nodes. Nothing is mocked. Most tests share one cluster; each has a node for itself, or
// all of them, and leaves it as it found it, which is checked. The test of the chart has a cluster of its own meanwhile.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// upTimeout bounds the start of the cluster when everything is built.
const upTimeout = 10 * time.Minute

const (
	// keepEnv leaves the cluster up after the tests, to look at it or to run tests in it again.
	keepEnv = "NETWORKDRIVER_E2E_KEEP"
	// stateEnv names the directory of the cluster's data and logs, if it is not _out/e2e in the repository.
	stateEnv = "NETWORKDRIVER_E2E_STATE"
)

// cluster is the one of most tests; nil where there is no lab.
var cluster *deploy.Cluster

// freeNodes are the nodes that no test uses.
var freeNodes chan *lab.Node

// taking is held by the test that takes nodes next: two that want all of them would wait for each other.
var taking sync.Mutex

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if !strings.Contains(os.Getenv("NETWORKDRIVER_REQUIRE"), "lab") {
		fmt.Println("end-to-end tests are skipped: they boot virtual machines; NETWORKDRIVER_REQUIRE=lab runs them (make test-e2e)")
		return 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), upTimeout)
	defer cancel()
	var down func()
	var err error
	if cluster, down, err = up(ctx, ""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer down()
	if err := installDaemons(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "install the driver:", err)
		return 1
	}
	freeNodes = make(chan *lab.Node, len(cluster.Nodes()))
	for _, n := range cluster.Nodes() {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespaceOf(n)}}
		if _, err := cluster.Client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			fmt.Fprintln(os.Stderr, "make the namespace of a node's tests:", err)
			return 1
		}
		freeNodes <- n
	}
	return m.Run()
}

// repository is the repository's directory.
var repository = filepath.FromSlash("../..")

// installDaemons installs the driver as most tests have it: with an agent on each node that is no pod, and that a test
// can stop, kill and start at will.
func installDaemons(ctx context.Context) error {
	if err := cluster.Install(ctx, filepath.Join(repository, "bin")); err != nil {
		return err
	}
	for _, n := range cluster.Nodes() {
		if err := cluster.RestartAgent(ctx, n); err != nil {
			return fmt.Errorf("start the agent: %w", err)
		}
	}
	return nil
}

// up starts a cluster, or takes the one that an earlier run kept. The one that most tests share has no name. What down
// cannot stop it says.
func up(ctx context.Context, name string) (c *deploy.Cluster, down func(), err error) {
	state := os.Getenv(stateEnv)
	if state == "" {
		state = filepath.FromSlash("../../_out/e2e")
	}
	l, err := lab.Ensure(ctx, lab.Options{
		BuildOptions: lab.BuildOptions{Progress: os.Stdout},
		Nodes:        2,
		State:        state + name,
		Detach:       os.Getenv(keepEnv) != "",
	})
	if err != nil {
		return nil, nil, fmt.Errorf("start the lab: %w", err)
	}
	down = func() {
		if os.Getenv(keepEnv) != "" {
			return
		}
		if err := l.Down(); err != nil {
			fmt.Fprintln(os.Stderr, "stop the lab:", err)
		}
	}
	if c, err = deploy.Connect(l); err != nil {
		down()
		return nil, nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return c, down, nil
}
