// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	corev1 "k8s.io/api/core/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
	"github.com/cilium/networkdriver/test/nodestate"
)

const (
	driverName = v2alpha1.DefaultDriverName
	// patience is how long it may take until everything is as it has to be. Kubelet tries again after a minute and a half.
	patience = 3 * time.Minute
	poll     = 200 * time.Millisecond
	// vfCount is how many VFs the PF has, and dummyCount how many dummies there are.
	vfCount, dummyCount = 7, 4
)

var nodeConfigs = schema.GroupVersionResource{Group: v2alpha1.GroupName, Version: "v2alpha1", Resource: v2alpha1.NodeConfigResource}

// bench is a node with what faults are tried on. Two pods stay on it all the time, whose devices nothing may change.
type bench struct {
	*deploy.Cluster
	node *lab.Node
	ns   string
	out  string
	rand *rand.Rand
	// agentInPod says that the agent is a pod.
	agentInPod bool
	reader     *nodestate.Reader
	// beside is another node's, for jobs that take two; nil if there is none.
	beside *bench
	// idle is the node without any pod, before is the node as every round has to leave it, and witnesses what the pods that
	// stay have.
	idle, before nodestate.Snapshot
	witnesses    string
	pods         int // how many were made, for their names

	// faultAt is when the fault happened, and took how long it was until all was well again; zero: until the round's end.
	faultAt time.Time
	took    time.Duration
	notes   []string
	seen    containers
	mark    int64 // where the agent's log ended before the round
}

func newBench(c *deploy.Cluster, n *lab.Node, o options) *bench {
	b := &bench{Cluster: c, node: n, ns: "faults-" + n.Name(), out: o.out, rand: rand.New(rand.NewPCG(uint64(o.seed), uint64(len(n.Name()))))}
	b.reader = &nodestate.Reader{Client: c.Client, Node: n, Driver: driverName, Socket: b.socket}
	return b
}

// objects are the node's configuration, and what pods ask for.
const objects = `
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE}
---
apiVersion: cilium.io/v2alpha1
kind: CiliumNetworkDriverNodeConfig
metadata: {name: NODE}
spec:
  deviceManagerConfigs:
    sriov: {enabled: true, ifaces: [{ifName: PF, vfCount: VFS}]}
    dummy: {enabled: true, count: DUMMIES}
  pools:
  - {name: sriov-pool, filter: {deviceManagers: [sr-iov], pfNames: [PF]}}
  - {name: fast-net, filter: {deviceManagers: [dummy]}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: vf}
spec: {selectors: [{cel: {expression: 'device.driver == "DRIVER" && device.attributes["DRIVER"].pool == "sriov-pool"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: dummy}
spec: {selectors: [{cel: {expression: 'device.driver == "DRIVER" && device.attributes["DRIVER"].pool == "fast-net"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: dummy, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: dummy}}],
  config: [{opaque: {driver: DRIVER, parameters: {podIfName: net0}}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: unnamed, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: dummy}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: vfio, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: vf}}],
  config: [{opaque: {driver: DRIVER, parameters: {driver: vfio-pci, vlan: 1001}}}]}}}
`

// networkObjects are networks of all benches, and templates of claims that join them.
const networkObjects = `
---
apiVersion: cilium.io/v2alpha1
kind: CiliumNetworkDriverNetwork
metadata: {name: NET_VF}
spec:
  namespaceSelector: {}
  pools: [sriov-pool]
  vlan: NET_VLAN
  subnets:
  - {cidr: 198.51.100.0/24, ranges: [{from: 198.51.100.10, to: 198.51.100.33}]}
  - {cidr: "2001:db8:51::/64", ranges: [{from: "2001:db8:51::10", to: "2001:db8:51::27"}]}
---
apiVersion: cilium.io/v2alpha1
kind: CiliumNetworkDriverNetwork
metadata: {name: NET_DUMMY}
spec:
  namespaceSelector: {}
  pools: [fast-net]
  subnets:
  - {cidr: 203.0.113.0/24, ranges: [{from: 203.0.113.10, to: 203.0.113.21}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: NET_VF, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: vf}}],
  config: [{opaque: {driver: DRIVER, parameters: {podIfName: net0, network: NET_VF}}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: NET_DUMMY, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: dummy}}],
  config: [{opaque: {driver: DRIVER, parameters: {podIfName: net0, network: NET_DUMMY}}}]}}}
`

const vfTemplate = `
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: vf-VLAN, namespace: NAMESPACE}
spec: {spec: {devices: {requests: [{name: net, exactly: {deviceClassName: vf}}],
  config: [{opaque: {driver: DRIVER, parameters: {podIfName: net0, vlan: VLAN}}}]}}}
`

// prepare makes the node what faults are tried on, with the agent as it is installed.
func (b *bench) prepare(ctx context.Context) error {
	b.agentInPod = b.agentIsPod(ctx)
	fill := strings.NewReplacer("NAMESPACE", b.ns, "NODE", b.node.Name(), "PF", lab.Uplink, "VFS", fmt.Sprint(vfCount),
		"DUMMIES", fmt.Sprint(dummyCount), "DRIVER", driverName, "NET_VF", netVF, "NET_DUMMY", netDummy, "NET_VLAN", fmt.Sprint(netVLAN))
	manifest := objects + networkObjects
	for _, vlan := range vlans {
		manifest += strings.ReplaceAll(vfTemplate, "VLAN", fmt.Sprint(vlan))
	}
	if err := b.Apply(ctx, []byte(fill.Replace(manifest))); err != nil {
		return err
	}
	if !b.agentInPod {
		if err := b.startAgent(ctx); err != nil {
			return err
		}
	}
	if _, err := b.node.Run(ctx, "mkdir -p "+seenDir+" "+crashDir+" && rm -f "+seenDir+"/* "+crashDir+"/*"); err != nil {
		return err
	}
	if err := b.eventually(ctx, "node config", b.configured); err != nil {
		return err
	}
	if err := b.delete(ctx, 0, b.podNames(ctx)...); err != nil {
		return err
	}
	err := b.eventually(ctx, "node without pods", func(ctx context.Context) string {
		var unsettled string
		b.idle, unsettled = b.settled(ctx)
		if unsettled == "" && len(b.idle.Rows)+len(b.idle.Journal)+len(b.idle.Prepared) > 0 {
			return fmt.Sprintf("it has %+v, %+v, %v", b.idle.Rows, b.idle.Journal, b.idle.Prepared)
		}
		return unsettled
	})
	if err != nil {
		return err
	}
	return b.begin(ctx)
}

// settled returns the node when it has been the same for some time: what is told of a device, such as its MTU, comes a little
// later. Else it says what is missing.
func (b *bench) settled(ctx context.Context) (nodestate.Snapshot, string) {
	first, err := b.reader.Read(ctx)
	if err != nil {
		return first, err.Error()
	}
	time.Sleep(2 * time.Second)
	second, err := b.reader.Read(ctx)
	if err != nil {
		return second, err.Error()
	}
	if n := len(second.Slices[b.node.Name()+"/sriov-pool"]); n != vfCount {
		return second, fmt.Sprintf("%d VFs are offered", n)
	}
	if i := slices.IndexFunc(second.Files, owed); i >= 0 {
		return second, "a claim that was unprepared is not settled: " + second.Files[i]
	}
	return second, nodestate.Difference(first, second)
}

// owed says whether a file of a snapshot is the journal's of a claim that may be owed its devices. It stays for a while after
// kubelet has unprepared the claim.
func owed(file string) bool { return strings.HasSuffix(file, ".claim") }

// begin starts the pods that stay, and remembers the node with them.
func (b *bench) begin(ctx context.Context) error {
	for _, k := range []kind{{template: "vf", vlan: staysVLAN}, {template: "dummy"}} {
		if err := b.create(ctx, "stays-"+k.template, k); err != nil {
			return err
		}
	}
	if err := b.running(ctx, stays...); err != nil {
		return err
	}
	return b.eventually(ctx, "node", func(ctx context.Context) string {
		var unsettled string
		var err error
		if b.before, unsettled = b.settled(ctx); unsettled != "" {
			return unsettled
		}
		if b.witnesses, err = b.look(ctx); err != nil {
			return err.Error()
		}
		return ""
	})
}

// leave deletes what prepare has made.
func (b *bench) leave(ctx context.Context) error {
	if err := b.delete(ctx, 0, b.podNames(ctx)...); err != nil {
		return err
	}
	if err := b.eventually(ctx, "rows", func(ctx context.Context) string {
		rows, err := b.reader.Table(ctx, "networkdriver-dra-allocations")
		if err != nil {
			return err.Error()
		}
		if len(rows) > 0 {
			return fmt.Sprintf("%+v are left", rows)
		}
		return ""
	}); err != nil {
		return err
	}
	return b.Dynamic.Resource(nodeConfigs).Delete(ctx, b.node.Name(), metav1.DeleteOptions{})
}

// configured says what the node's config lacks to be in force, and the namespace to have pods.
func (b *bench) configured(ctx context.Context) string {
	object, err := b.Dynamic.Resource(nodeConfigs).Get(ctx, b.node.Name(), metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	// Pods are refused until their namespace has it.
	if _, err := b.Client.CoreV1().ServiceAccounts(b.ns).Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err.Error()
	}
	var config v2alpha1.CiliumNetworkDriverNodeConfig
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &config); err != nil {
		return err.Error()
	}
	if !meta.IsStatusConditionTrue(config.Status.Conditions, v2alpha1.ConditionReady) {
		return fmt.Sprintf("%+v", config.Status.Conditions)
	}
	return ""
}

// eventually waits until check says nothing; what it says is what is missing.
func (b *bench) eventually(ctx context.Context, what string, check func(context.Context) string) error {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	missing := ""
	for {
		if now := check(ctx); now == "" {
			return nil
		} else if ctx.Err() == nil {
			missing = now
		}
		select {
		case <-time.After(poll):
		case <-ctx.Done():
			return fmt.Errorf("%s, after %v: %s", what, time.Since(start).Round(time.Second), missing)
		}
	}
}

// try does one round of a job. What is left then is in the result; the error is for a bench that cannot go on.
func (b *bench) try(ctx context.Context, j job, number int) (round, error) {
	start := time.Now()
	capture, err := b.CaptureUplinks()
	if err != nil {
		return round{}, err
	}
	b.faultAt, b.took, b.notes, b.seen = start, 0, nil, containers{}
	benches := []*bench{b}
	if j.two {
		benches = append(benches, b.beside)
	}
	for _, bench := range benches {
		bench.mark = bench.logSize()
	}
	err = j.run(ctx, b, number)
	for _, bench := range benches {
		if err == nil {
			err = bench.restored(ctx)
		}
	}
	if b.took == 0 {
		b.took = time.Since(b.faultAt)
	}
	done := round{Seconds: b.took.Seconds()}
	capture.Close()
	for _, bench := range benches {
		err = errors.Join(err, strayFrames(capture.Frames(), bench.node.Name(), bench.vfsAtHome()), b.readSeen(ctx, bench.node))
	}
	done.Notes, done.Containers = b.notes, b.seen
	if ctx.Err() != nil {
		return done, ctx.Err()
	}
	if err == nil {
		return done, nil
	}
	done.Left = err.Error()
	fmt.Printf("%s %s has left something, and %s is repaired\n", time.Now().Format(time.TimeOnly), j.name(), b.node.Name())
	for _, bench := range benches {
		bench.keepLogs(ctx, j, number, done.Left)
		if err := bench.repair(ctx); err != nil {
			return done, fmt.Errorf("repair the node after what was left: %w; left was: %s", err, done.Left)
		}
	}
	return done, nil
}

// restored waits until the node is as it was before.
func (b *bench) restored(ctx context.Context) error {
	return b.eventually(ctx, "node", func(ctx context.Context) string {
		now, err := b.reader.Read(ctx)
		if err != nil {
			return err.Error()
		}
		if diff := nodestate.Difference(b.before, now); diff != "" {
			return diff
		}
		looked, err := b.look(ctx)
		if err != nil {
			return err.Error()
		}
		if looked != b.witnesses {
			return fmt.Sprintf("the pods that stay have %q, had %q", looked, b.witnesses)
		}
		addresses, err := b.addresses(ctx)
		if err != nil {
			return err.Error()
		}
		if len(addresses) > 0 {
			return fmt.Sprintf("addresses are not given back: %v", addresses)
		}
		return ""
	})
}

// repair makes the node fit for the next round, which the driver should have done.
func (b *bench) repair(ctx context.Context) error {
	names := b.podNames(ctx)
	stay := !slices.ContainsFunc(stays, func(name string) bool { return !slices.Contains(names, name) })
	names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(stays, name) })
	err := b.disarm(ctx)
	if err == nil {
		err = b.delete(ctx, 0, names...)
	}
	if err == nil && !b.agentInPod {
		err = b.startAgent(ctx)
	}
	if err == nil && stay {
		err = b.restored(ctx)
	}
	if err == nil && stay || b.agentInPod {
		return err
	}
	return b.renew(ctx, err)
}

// renew boots the node and begins anew on it.
func (b *bench) renew(ctx context.Context, cause error) error {
	first, _, _ := strings.Cut(fmt.Sprint(cause), "\n")
	fmt.Printf("%s is begun anew: %s\n", b.node.Name(), first)
	if err := b.delete(ctx, 0, b.podNames(ctx)...); err != nil {
		return err
	}
	if err := b.node.Reset(ctx); err != nil {
		return err
	}
	if err := b.eventually(ctx, "node after its boot", func(ctx context.Context) string {
		n, err := b.Client.CoreV1().Nodes().Get(ctx, b.node.Name(), metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue && time.Since(c.LastHeartbeatTime.Time) < time.Minute {
				return ""
			}
		}
		return "is not ready"
	}); err != nil {
		return err
	}
	return b.prepare(ctx)
}

// logSize is where the agent's log ends.
func (b *bench) logSize() int64 {
	info, err := os.Stat(b.node.Log(deploy.Agent))
	if err != nil {
		return 0
	}
	return info.Size()
}

// keepLogs writes down what there is to know of a round that left something.
func (b *bench) keepLogs(ctx context.Context, j job, number int, left string) {
	dir := filepath.Join(b.out, "left")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return
	}
	data, _ := os.ReadFile(b.node.Log(deploy.Agent))
	kubelet, _ := os.ReadFile(b.node.Log(lab.Kubelet))
	containerd, _ := os.ReadFile(b.node.Log(lab.Containerd))
	events := ""
	if list, err := b.Client.CoreV1().Events(b.ns).List(ctx, metav1.ListOptions{}); err == nil {
		for _, e := range list.Items {
			if e.LastTimestamp.After(b.faultAt.Add(-time.Minute)) {
				events += fmt.Sprintf("%s %s %s: %s\n", e.LastTimestamp.Format(time.TimeOnly), e.InvolvedObject.Name, e.Reason, e.Message)
			}
		}
	}
	text := fmt.Sprintf("%s round %d\n%s\n\n--- agent\n%s\n--- events\n%s\n--- kubelet\n%s\n--- containerd\n%s\n", j.name(), number, left,
		data[min(b.mark, int64(len(data))):], events, lastLines(kubelet, 150), lastLines(containerd, 80))
	name := strings.NewReplacer(" ", "-", "/", "-", ":", "").Replace(j.name())
	_ = os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d-%s.log", name, number, b.node.Name())), []byte(text), 0o644)
}

func lastLines(data []byte, n int) string {
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
