// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/test/deploy"
)

const (
	crashDir = crashpoint.Dir
	// agentLabels select the agents' pods.
	agentLabels = "app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent"
	system      = metav1.NamespaceSystem
)

// asDaemon installs the driver with an agent on each node that is no pod.
func asDaemon(ctx context.Context, c *deploy.Cluster, o options) error {
	return c.Install(ctx, o.programs)
}

// asPod installs the driver as its users do, with agents that have crash points.
func asPod(ctx context.Context, c *deploy.Cluster, o options) error {
	if err := c.Uninstall(ctx); err != nil {
		return err
	}
	if err := c.ImportImages(ctx, filepath.Dir(o.programs)); err != nil {
		return err
	}
	out, err := c.Shell(ctx, ".", `helm upgrade --install network-driver ./install/helm/cilium-network-driver -n kube-system --set networkDriver.enabled=true
kubectl -n kube-system rollout status daemonset/cilium-network-driver --timeout=5m`, nil)
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// agentPod returns the agent's pod on the node that is not being deleted.
func (b *bench) agentPod(ctx context.Context) (*corev1.Pod, error) {
	list, err := b.Client.CoreV1().Pods(system).List(ctx, metav1.ListOptions{LabelSelector: agentLabels, FieldSelector: "spec.nodeName=" + b.node.Name()})
	if err != nil {
		return nil, err
	}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			return &p, nil
		}
	}
	return nil, fmt.Errorf("node %s has no pod of the agent", b.node.Name())
}

func (b *bench) agentIsPod(ctx context.Context) bool {
	_, err := b.agentPod(ctx)
	return err == nil
}

// socket is the path on the node of the agent's socket.
func (b *bench) socket(ctx context.Context) (string, error) {
	if !b.agentInPod {
		return debugapi.DefaultSocketPath, nil
	}
	pod, err := b.agentPod(ctx)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/var/lib/kubelet/pods/%s/volumes/kubernetes.io~empty-dir/run/%s", pod.UID, filepath.Base(debugapi.DefaultSocketPath)), nil
}

// startAgent starts the agent if it does not run, and returns when it serves.
func (b *bench) startAgent(ctx context.Context) error {
	state, err := b.node.Process(ctx, deploy.Agent)
	if err != nil || !state.Running {
		mark := b.logSize()
		if err := b.StartAgent(ctx, b.node); err != nil {
			return err
		}
		return b.registered(ctx, mark)
	}
	return nil
}

// registered waits until the agent says so in its log after a mark.
func (b *bench) registered(ctx context.Context, mark int64) error {
	return b.eventually(ctx, "agent", func(context.Context) string {
		log, err := os.ReadFile(b.node.Log(deploy.Agent))
		if err == nil && strings.Contains(string(log[min(mark, int64(len(log))):]), "Registered with kubelet") {
			return ""
		}
		return "is not registered"
	})
}

// arm has the agent do something when it comes to the point, once.
func (b *bench) arm(ctx context.Context, p crashpoint.Point, order string) error {
	return b.node.WriteFile(ctx, filepath.Join(crashDir, string(p)), []byte(order), 0o600)
}

func (b *bench) disarm(ctx context.Context) error {
	_, err := b.node.Run(ctx, "rm -f "+crashDir+"/*")
	return err
}

// reached waits until the agent has come to the point.
func (b *bench) reached(ctx context.Context, p crashpoint.Point) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		_, _, code, err := b.node.Exec(ctx, fmt.Sprintf("[ -e %s/%s%s ]", crashDir, p, crashpoint.Reached))
		if err == nil && code == 0 {
			b.faultAt = time.Now()
			return nil
		}
		select {
		case <-time.After(poll / 2):
		case <-ctx.Done():
			return fmt.Errorf("the agent has not come to %s", p)
		}
	}
}

// dead waits until the agent's process is gone.
func (b *bench) dead(ctx context.Context) error {
	return b.eventually(ctx, "agent", func(ctx context.Context) string {
		state, err := b.node.Process(ctx, deploy.Agent)
		if err != nil {
			return err.Error()
		}
		if state.Running {
			return "runs"
		}
		return ""
	})
}

// killAgent ends the agent without a word.
func (b *bench) killAgent(ctx context.Context) error {
	_, err := b.node.Kill(ctx, deploy.Agent)
	return err
}
