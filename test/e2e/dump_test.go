// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"os"
	"strings"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// requireAgents starts the agents that a failed test has stopped, for the sake of the tests after it.
func (e *T) requireAgents() {
	for _, n := range e.nodes {
		if state, err := n.Process(e.ctx, deploy.Agent); err == nil && !state.Running {
			require.NoError(e, e.StartAgent(e.ctx, n))
		}
	}
}

// dump shows what a failed test left, before it is cleaned up.
func (e *T) dump() {
	if pods, err := e.Client.CoreV1().Pods(e.ns).List(e.ctx, metav1.ListOptions{}); err == nil {
		for _, p := range pods.Items {
			e.Logf("--- pod %s is %s; events:\n%s", p.Name, p.Status.Phase, strings.Join(e.events(p.Name), "\n"))
		}
	}
	for _, n := range e.nodes {
		for daemon, lines := range map[string]int{deploy.Agent: 40, lab.Kubelet: 20, lab.Containerd: 10} {
			if log, err := os.ReadFile(n.Log(daemon)); err == nil {
				e.Logf("--- last lines of %s\n%s", n.Log(daemon), tail(string(log), lines))
			}
		}
		out, _, _, _ := n.Exec(e.ctx, "ip -d -br link; ip link show "+lab.Uplink)
		e.Logf("--- links of %s\n%s", n.Name(), out)
	}
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
