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
	"os/exec"
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
	c, err := deploy.Install(ctx, l, "bin")
	if err != nil {
		return err
	}
	for _, n := range l.Nodes() {
		if err := c.RestartAgent(ctx, n); err != nil {
			return err
		}
	}
	d := &demo{Cluster: c}
	if err := d.use(ctx); err != nil {
		return err
	}
	return d.show(ctx)
}

// demo uses the driver as a user would, by kubectl.
type demo struct {
	*deploy.Cluster
	env string
}

// use applies the examples and waits for their pods.
func (d *demo) use(ctx context.Context) error {
	var env strings.Builder
	if err := d.WriteEnv(&env); err != nil {
		return err
	}
	d.env = env.String()

	config, err := os.ReadFile("examples/nodeconfig-both.yaml")
	if err != nil {
		return fmt.Errorf("run the demo in the repository: %w", err)
	}
	for _, n := range d.Nodes() {
		forNode := strings.Replace(string(config), "name: node1 ", "name: "+n.Name()+" ", 1)
		if err := d.Apply(ctx, []byte(forNode)); err != nil {
			return err
		}
	}
	files := []string{"deviceclasses", "claimtemplates", "pods-vlan", "pod-dummy"}
	for _, file := range files {
		manifest, err := os.ReadFile(filepath.Join("examples", file+".yaml"))
		if err != nil {
			return err
		}
		if err := d.Apply(ctx, manifest); err != nil {
			return err
		}
	}
	return d.shell(ctx, "kubectl wait --for=condition=Ready --timeout=180s pod/app-a pod/app-b pod/app-c pod/dummy")
}

// show runs the commands that show what became of it.
func (d *demo) show(ctx context.Context) error {
	steps := []struct{ title, command string }{
		{"Nodes and their configuration", "kubectl get nodes; kubectl get ndnc"},
		{"What the scheduler sees", "kubectl get resourceslices"},
		{"Pods and their claims", "kubectl get pods -o wide; kubectl get resourceclaims"},
		{"A VF in a pod", "kubectl exec app-a -- ip -d link show sriov0"},
		{"A dummy link in a pod", "kubectl exec dummy -- ip -d link show net1"},
		{"Two pods in VLAN 1001 reach each other", "kubectl exec app-a -- ping -c 3 192.0.2.2"},
		{"A pod in VLAN 1002 is not reached", "! kubectl exec app-a -- ping -c 3 -W 1 192.0.2.3"},
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
		if err := d.onNode(ctx, n, filepath.Join(lab.ShareDir, "cilium-dbg")+" networkdriver"); err != nil {
			return err
		}
		for _, table := range []string{"networkdriver-dra-devices", "networkdriver-dra-allocations"} {
			fmt.Printf("\n### StateDB table %s on %s\n", table, n.Name())
			out, err := d.Dbg(ctx, n, "statedb", table)
			if err != nil {
				return err
			}
			fmt.Println(shorten(out, 40))
		}
	}
	fmt.Print(`
The cluster is up. Use it:    eval $(bin/lab env)
                              kubectl get pods
A shell command on a node:    bin/lab exec node1 -- 'ip link'
The agent's state:            bin/lab exec node1 -- /share/cilium-dbg networkdriver
Logs:                         bin/lab logs
Stop it:                      make demo-down
`)
	return nil
}

// shell runs a command with kubectl set up, and shows both the command and what it prints.
func (d *demo) shell(ctx context.Context, command string) error {
	fmt.Println("$", strings.TrimPrefix(command, "! "))
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", d.env+command)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
	if err := cmd.Run(); err != nil {
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

// shorten cuts a long text after some lines and says so.
func shorten(s string, lines int) string {
	all := strings.Split(s, "\n")
	if len(all) <= lines {
		return s
	}
	return strings.Join(all[:lines], "\n") + fmt.Sprintf("\n... and %d more lines", len(all)-lines)
}
