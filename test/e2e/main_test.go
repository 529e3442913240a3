// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package e2e tests the network driver as users have it: real Kubernetes, kubelet, containerd with NRI, and an
// emulated SR-IOV NIC on each of two nodes. Nothing is mocked. All tests share one cluster; each has a node for itself, or
// all of them, and leaves it as it found it, which is checked.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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

// cluster is the one cluster of all tests; nil where there is no lab.
var cluster *deploy.Cluster

// freeNodes are the nodes that no test uses.
var freeNodes chan *lab.Node

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if !strings.Contains(os.Getenv("NETWORKDRIVER_REQUIRE"), "lab") {
		fmt.Println("end-to-end tests are skipped: they boot virtual machines; NETWORKDRIVER_REQUIRE=lab runs them (make test-e2e)")
		return 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), upTimeout)
	defer cancel()
	l, err := up(ctx)
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
	if cluster, err = deploy.Connect(l); err != nil {
		fmt.Fprintln(os.Stderr, "connect to the cluster:", err)
		return 1
	}
	if err := installDaemons(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "install the driver:", err)
		return 1
	}
	freeNodes = make(chan *lab.Node, len(l.Nodes()))
	for _, n := range l.Nodes() {
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

// up starts the cluster, or takes the one that an earlier run kept.
func up(ctx context.Context) (*lab.Lab, error) {
	state := os.Getenv(stateEnv)
	if state == "" {
		state = filepath.FromSlash("../../_out/e2e")
	}
	return lab.Ensure(ctx, lab.Options{
		BuildOptions: lab.BuildOptions{Progress: os.Stdout},
		Nodes:        2,
		State:        state,
		Detach:       os.Getenv(keepEnv) != "",
	})
}
