// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// mixedSpec offers the VFs of the PF in the pool sriov-pool and dummies in the pool fast-net.
func mixedSpec(dummies int32) v2alpha1.CiliumNetworkDriverNodeConfigSpec {
	spec := sriovSpec()
	other := dummySpec(dummies)
	spec.DeviceManagerConfigs.Dummy = other.DeviceManagerConfigs.Dummy
	spec.Pools = append(spec.Pools, other.Pools...)
	return spec
}

// logMark is a place in a daemon's log: what was written there later is what a test caused.
type logMark struct {
	path   string
	offset int64
}

// mark returns the present end of a daemon's log.
func (e *T) mark(n *lab.Node, daemon string) logMark {
	e.Helper()
	m := logMark{path: n.Log(daemon)}
	if info, err := os.Stat(m.path); err == nil {
		m.offset = info.Size()
	}
	return m
}

// since returns what the log has after the mark.
func (e *T) since(m logMark) string {
	e.Helper()
	data, err := os.ReadFile(m.path)
	require.NoError(e, err)
	return string(data[min(m.offset, int64(len(data))):])
}

// matching returns the lines after the mark that contain all the words.
func (e *T) matching(m logMark, words ...string) []string {
	e.Helper()
	var lines []string
next:
	for line := range strings.Lines(e.since(m)) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// logSays waits for a line after the mark that contains all the words.
func (e *T) logSays(m logMark, words ...string) {
	e.Helper()
	e.eventually("log "+m.path, func() string {
		if len(e.matching(m, words...)) > 0 {
			return ""
		}
		return fmt.Sprintf("no line says %q", words)
	})
}

// ipMonitor is the name of the daemon that prints changes of the host's links.
const ipMonitor = "ip-monitor"

// watchLinks records every change of the links in the node's own namespace, the PF's settings of its VFs among them.
// The returned function says what changed until it is called. Links that the pod network makes count too: the test
// must not start or stop pods meanwhile.
func (e *T) watchLinks(n *lab.Node) (changes func() string) {
	e.Helper()
	m := e.mark(n, ipMonitor)
	require.NoError(e, n.Start(e.ctx, ipMonitor, "ip", "-o", "monitor", "link"))
	stop := func(ctx context.Context) { _, _ = n.Kill(ctx, ipMonitor) }
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		stop(ctx)
	})
	// A change of our own shows that the monitor listens.
	e.eventually(ipMonitor, func() string {
		e.onNode(n, "ip link add fence0 type veth peer name fence0p && ip link del fence0")
		if len(e.matching(m, "Deleted", "fence0")) == 0 {
			return "has not seen a link of the test's own"
		}
		return ""
	})
	return func() string {
		e.Helper()
		e.onNode(n, "ip link add fence1 type veth peer name fence1p && ip link del fence1")
		e.logSays(m, "Deleted", "fence1")
		stop(e.ctx)
		var seen []string
		for line := range strings.Lines(e.since(m)) {
			if !strings.Contains(line, "fence") {
				seen = append(seen, line)
			}
		}
		return strings.Join(seen, "")
	}
}

// killAgent ends the node's agent without a word, and starts it again when the test ends before it did so itself.
func (e *T) killAgent(n *lab.Node) {
	e.Helper()
	_, err := n.Kill(e.ctx, deploy.Agent)
	require.NoError(e, err)
	e.startAgentFinally(n)
}

// stopAgent asks the node's agent to end.
func (e *T) stopAgent(n *lab.Node) {
	e.Helper()
	state, err := n.Stop(e.ctx, deploy.Agent)
	require.NoError(e, err)
	require.Zero(e, state.Exit, "the agent's exit status")
	e.startAgentFinally(n)
}

func (e *T) startAgentFinally(n *lab.Node) {
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if state, err := n.Process(ctx, deploy.Agent); err == nil && !state.Running {
			_ = e.StartAgent(ctx, n)
		}
	})
}

// startAgent starts the node's agent and waits until it serves.
func (e *T) startAgent(n *lab.Node) {
	e.Helper()
	m := e.mark(n, deploy.Agent)
	require.NoError(e, e.StartAgent(e.ctx, n))
	e.logSays(m, "Registered with kubelet")
}

// pause stops a daemon where it is until resume is called, or the test ends.
func (e *T) pause(n *lab.Node, daemon string) (resume func()) {
	e.Helper()
	require.NoError(e, n.Signal(e.ctx, daemon, unix.SIGSTOP))
	e.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = n.Signal(ctx, daemon, unix.SIGCONT)
	})
	return func() {
		e.Helper()
		require.NoError(e, n.Signal(e.ctx, daemon, unix.SIGCONT))
	}
}

// holdSandboxes keeps the node's sandboxes waiting for their network, which is after Prepare and before the hook, until
// the function that it returns is called. To stop the whole runtime instead would stop kubelet's loop with it.
func (e *T) holdSandboxes(n *lab.Node) (resume func()) {
	e.Helper()
	e.onNode(n, `cd /opt/cni/bin && touch /run/hold && cp ptp ptp.real &&
		printf '#!/bin/sh\nwhile [ -e /run/hold ]; do sleep 0.2; done\nexec /opt/cni/bin/ptp\n' > ptp.hold &&
		chmod +x ptp.hold && mv ptp.hold ptp`)
	resume = func() {
		e.Helper()
		e.onNode(n, "cd /opt/cni/bin && if [ -e ptp.real ]; then mv ptp.real ptp; fi && rm -f /run/hold")
	}
	e.atEnd(resume)
	return resume
}
