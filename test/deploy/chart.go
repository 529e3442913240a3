// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package deploy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/cilium/networkdriver/test/chart"
	"github.com/cilium/networkdriver/test/lab"
)

const (
	daemonSet     = "cilium-network-driver"
	agentSelector = "app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent"
	// rolloutTimeout is how long agents may take until they are ready, on emulated nodes.
	rolloutTimeout = 3 * time.Minute
)

// InstallChart installs the driver as a user does: the images that make images has put into a directory go to each
// node, and what the chart makes of the values is applied in Helm's order. It returns when the agents are ready.
func InstallChart(ctx context.Context, l *lab.Lab, images string, values map[string]any) (*Cluster, error) {
	c, _, err := connect(l)
	if err != nil {
		return nil, err
	}
	if err := c.importImages(ctx, images); err != nil {
		return nil, err
	}
	if err := c.ApplyChart(ctx, values, false); err != nil {
		return nil, err
	}
	return c, c.WaitRollout(ctx)
}

// ApplyChart applies what the chart makes of the values, for a release that is new or exists. Objects that only a
// former version of the release has are left.
func (c *Cluster) ApplyChart(ctx context.Context, values map[string]any, upgrade bool) error {
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	rendered, err := chart.Render(values, chart.Options{Namespace: namespace, Upgrade: upgrade, Cluster: config})
	if err != nil {
		return fmt.Errorf("render the chart: %w", err)
	}
	if err := c.Apply(ctx, rendered.YAML()); err != nil {
		return fmt.Errorf("apply the chart: %w", err)
	}
	return nil
}

// importImages imports all images for the nodes' architecture.
func (c *Cluster) importImages(ctx context.Context, dir string) error {
	images, err := filepath.Glob(filepath.Join(dir, "*-linux-amd64.tar"))
	if err != nil {
		return err
	}
	if len(images) == 0 {
		return fmt.Errorf("%s has no images: make images makes them", dir)
	}
	for _, image := range images {
		name := filepath.Base(image)
		data, err := os.ReadFile(image)
		if err != nil {
			return err
		}
		shared := filepath.Join(c.ShareDir(), name)
		if err := os.WriteFile(shared, data, 0o644); err != nil {
			return err
		}
		for _, n := range c.Nodes() {
			if _, err := n.Run(ctx, "ctr --namespace k8s.io images import --local "+filepath.Join(lab.ShareDir, name)); err != nil {
				return fmt.Errorf("import %s on %s: %w", name, n.Name(), err)
			}
		}
		if err := os.Remove(shared); err != nil {
			return err
		}
	}
	return nil
}

// WaitRollout returns when the newest agent is ready on each node.
func (c *Cluster) WaitRollout(ctx context.Context) error {
	var last appsv1.DaemonSetStatus
	err := wait.PollUntilContextTimeout(ctx, time.Second, rolloutTimeout, true, func(ctx context.Context) (bool, error) {
		set, err := c.Client.AppsV1().DaemonSets(namespace).Get(ctx, daemonSet, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		last = set.Status
		return last.ObservedGeneration == set.Generation && last.DesiredNumberScheduled == int32(len(c.Nodes())) &&
			last.UpdatedNumberScheduled == last.DesiredNumberScheduled && last.NumberReady == last.DesiredNumberScheduled, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the agents (%d wanted, %d new, %d ready): %w", last.DesiredNumberScheduled,
			last.UpdatedNumberScheduled, last.NumberReady, err)
	}
	return nil
}

// AgentPod returns the chart's agent on a node.
func (c *Cluster) AgentPod(ctx context.Context, n *lab.Node) (*corev1.Pod, error) {
	pods, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: agentSelector, FieldSelector: "spec.nodeName=" + n.Name(),
	})
	if err != nil {
		return nil, err
	}
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp == nil {
			return &pod, nil
		}
	}
	return nil, errors.New("no agent runs on " + n.Name())
}
