// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command demo boots a cluster with emulated SR-IOV NICs, installs the network driver, applies the examples, and shows
// what a user wants to see. It leaves the cluster up.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

func main() {
	nodes := flag.Int("nodes", 1, "how many nodes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, *nodes); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, nodes int) error {
	l, err := lab.Ensure(ctx, lab.Options{
		BuildOptions: lab.BuildOptions{Progress: os.Stderr},
		Nodes:        nodes,
		Detach:       true,
	})
	if err != nil {
		return err
	}
	c, err := deploy.Connect(l)
	if err != nil {
		return err
	}
	if err := c.ImportImages(ctx, filepath.Join("_out", "images")); err != nil {
		return err
	}
	d := &demo{Cluster: c}
	if err := d.install(ctx); err != nil {
		return err
	}
	if err := d.use(ctx); err != nil {
		return err
	}
	return d.show(ctx)
}

// demo uses the driver as a user would, by helm and kubectl.
type demo struct {
	*deploy.Cluster
}

// install installs the driver by its chart.
func (d *demo) install(ctx context.Context) error {
	for _, command := range []string{
		"helm upgrade --install network-driver ./install/helm/cilium-network-driver -n kube-system --set networkDriver.enabled=true",
		"kubectl -n kube-system rollout status daemonset/cilium-network-driver --timeout=5m",
	} {
		if err := d.shell(ctx, command); err != nil {
			return err
		}
	}
	return nil
}

// use applies the examples and waits for their pods.
func (d *demo) use(ctx context.Context) error {
	var commands []string
	for _, n := range d.Nodes() {
		commands = append(commands, "sed 's/name: node1 /name: "+n.Name()+" /' examples/nodeconfig-both.yaml | kubectl apply -f -")
	}
	commands = append(commands,
		"kubectl apply -f examples/deviceclasses.yaml -f examples/claimtemplates.yaml",
		"kubectl apply -f examples/networks.yaml -f examples/pods-network.yaml -f examples/pod-dummy.yaml",
		"kubectl wait --for=condition=Ready --timeout=180s pod/server pod/client pod/outsider pod/dummy")
	for _, command := range commands {
		if err := d.shell(ctx, command); err != nil {
			return err
		}
	}
	return nil
}

// show runs the commands that show what became of it.
func (d *demo) show(ctx context.Context) error {
	steps := []struct{ title, command string }{
		{"Nodes and their configuration", "kubectl get nodes; kubectl get ndnc"},
		{"What the scheduler sees", "kubectl get resourceslices"},
		{"Pods and their claims", "kubectl get pods -o wide; kubectl get resourceclaims"},
		{"Networks and who has which address", "kubectl get ndnet; kubectl get ndaddr"},
		{"A VF in a pod", "kubectl exec client -- ip addr show sriov0; kubectl exec client -- ip route"},
		{"A dummy link in a pod", "kubectl exec dummy -- ip -d link show net1"},
		{"Two pods in one network reach each other by their addresses", "kubectl exec client -- ping -c 3 10.77.1.10"},
		{"A pod in another VLAN is not reached", "! kubectl exec client -- ping -c 3 -W 1 10.77.1.30"},
		{"The claim tells the interface", `kubectl get resourceclaims -o jsonpath='{range .items[*]}{.metadata.name}{": "}{.status.devices[0].networkData}{"\n"}{end}'`},
	}
	for _, s := range steps {
		fmt.Printf("\n### %s\n", s.title)
		if err := d.shell(ctx, s.command); err != nil {
			return err
		}
	}
	for _, n := range d.Nodes() {
		fmt.Printf("\n### The PF's table of VFs on %s\n", n.Name())
		if err := d.onNode(ctx, n, "ip link show "+lab.Uplink); err != nil {
			return err
		}
		fmt.Printf("\n### What the agent on %s knows\n", n.Name())
		// The agent on a node is asked by the name of its pod.
		agent := fmt.Sprintf("$(kubectl -n kube-system get pod -o name -l app.kubernetes.io/name=cilium-network-driver,app.kubernetes.io/component=agent --field-selector spec.nodeName=%s)", n.Name())
		exec := "kubectl -n kube-system exec " + agent + " -c cilium-agent -- cilium-dbg "
		if err := d.shell(ctx, exec+"networkdriver"); err != nil {
			return err
		}
		for _, table := range []string{"networkdriver-dra-devices", "networkdriver-dra-allocations"} {
			fmt.Printf("\n### StateDB table %s on %s\n", table, n.Name())
			if err := d.shell(ctx, exec+"statedb "+table+" | sed -n 1,40p"); err != nil {
				return err
			}
		}
	}
	fmt.Print(`
The cluster is up. Use it:    eval $(bin/lab env)
                              kubectl get pods
A shell command on a node:    bin/lab exec node1 -- 'ip link'
An agent's state:             kubectl -n kube-system exec ds/cilium-network-driver -c cilium-agent -- cilium-dbg networkdriver
                              (of any node; above is how to name one)
Logs:                         bin/lab logs; bin/lab logs node1/kubelet
Stop it:                      make demo-down
`)
	return nil
}

// shell runs a command with kubectl set up, and shows both the command and what it prints.
func (d *demo) shell(ctx context.Context, command string) error {
	fmt.Println("$", strings.TrimPrefix(command, "! "))
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if _, err := d.Shell(ctx, ".", command, os.Stdout); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return nil
}

func (d *demo) onNode(ctx context.Context, n *lab.Node, command string) error {
	fmt.Printf("%s$ %s\n", n.Name(), command)
	out, err := n.Run(ctx, command)
	fmt.Println(out)
	return err
}
