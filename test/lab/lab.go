// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

// nodeReadyTimeout is how long a node may take from power-on to Ready. It
// takes 20 to 40 seconds in software emulation on two idle cores, minutes on busy ones.
const nodeReadyTimeout = 10 * time.Minute

// A machine that boots for longer than bootTimeout, or that is silent for longer
// than bootSilence meanwhile, counts as hung: its console says nothing and its
// agent does not answer. On a busy machine a boot takes minutes.
const (
	bootTimeout = 5 * time.Minute
	bootSilence = 100 * time.Second
)

// bootAttempts is how often a new node is switched on.
const bootAttempts = 3

// Options are the options of Up.
type Options struct {
	BuildOptions
	NodeOptions

	// Nodes is how many nodes to start, named node1, node2 and so on. Zero means
	// one.
	Nodes int

	// State is the directory of the lab's data, logs and record. Empty means
	// state below the cache. One lab can be up in it at a time.
	State string

	// Detach leaves the lab up when this program ends; Open finds it again.
	// Otherwise the kernel ends its processes then, also after a crash.
	Detach bool
}

// Lab is a running cluster.
type Lab struct {
	state    string
	arts     *Artifacts
	progress *progress
	network  network
	spawner  *proc.Spawner
	cp       *ControlPlane

	nodeOptions NodeOptions

	processes proc.Table // the control plane's and the nodes' machines

	mu    sync.Mutex // guards nodes and the record's file
	nodes []*Node
}

// record is what the state directory says of a lab, for a later program.
type record struct {
	Network      network
	Artifacts    *Artifacts
	NodeOptions  NodeOptions
	ControlPlane *controlPlaneRecord
	NodeNumbers  []int
	Processes    *proc.Table
}

func (l *Lab) recordPath() string { return filepath.Join(l.state, "lab.json") }

// stateDir returns the state directory of the options.
func stateDir(opts Options) (string, error) {
	if opts.State != "" {
		return filepath.Abs(opts.State)
	}
	b, err := newBuilder(opts.BuildOptions)
	if err != nil {
		return "", err
	}
	return filepath.Join(b.cache.Dir, "state"), nil
}

// Up builds what is missing and starts a cluster. It returns when all nodes
// are ready. On failure nothing is left running; the logs stay in the state
// directory, which the error names.
func Up(ctx context.Context, opts Options) (*Lab, error) {
	b, err := newBuilder(opts.BuildOptions)
	if err != nil {
		return nil, err
	}
	state, err := stateDir(opts)
	if err != nil {
		return nil, err
	}
	nodeOptions, err := opts.NodeOptions.withDefaults(b.opts.Containerd)
	if err != nil {
		return nil, err
	}
	if err := clearRemains(opts); err != nil {
		return nil, err
	}
	arts, err := b.artifacts(ctx)
	if err != nil {
		return nil, err
	}
	l := &Lab{state: state, arts: arts, nodeOptions: nodeOptions, progress: b.progress}
	if err := l.up(ctx, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("lab up: %w; logs are in %s", err, state), l.Down())
	}
	return l, nil
}

func (l *Lab) up(ctx context.Context, opts Options) error {
	// What an earlier lab left are its logs and disks.
	if err := clearState(l.state); err != nil {
		return err
	}
	if err := os.MkdirAll(l.ShareDir(), 0o755); err != nil {
		return err
	}
	var err error
	if l.network, err = createNetwork(l.state); err != nil {
		return err
	}
	if err := l.save(); err != nil {
		return err
	}
	if l.spawner, err = proc.NewSpawner(l.network.path(), opts.Detach); err != nil {
		return err
	}
	l.progress.step("starting the control plane")
	l.cp, err = prepareControlPlane(ControlPlaneOptions{
		Dir: filepath.Join(l.state, "control-plane"), Bin: []string{l.arts.Bin}, Controllers: true, Detach: opts.Detach,
		network: &controlPlaneNetwork{
			spawner: l.spawner, processes: &l.processes, advertise: managementAddress, addresses: []string{l.network.Address},
		},
	})
	if err != nil {
		return err
	}
	l.cp.onChange = l.save
	if err := l.cp.startAll(ctx); err != nil {
		return err
	}
	l.progress.step("API server is ready")
	var wg sync.WaitGroup
	errs := make([]error, max(1, opts.Nodes))
	for i := range errs {
		n, err := l.createNode(ctx, i+1)
		if err != nil {
			return err
		}
		wg.Go(func() { errs[i] = n.waitReady(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// clearRemains cleans up after a lab whose program crashed. One that is up is
// an error.
func clearRemains(opts Options) error {
	old, err := load(opts)
	if errors.Is(err, ErrNotUp) {
		return nil
	}
	if err != nil {
		return err
	}
	if old.alive() {
		return fmt.Errorf("a lab is up in %s: stop it first", old.state)
	}
	return old.Down()
}

// alive reports whether a node's machine runs.
func (l *Lab) alive() bool {
	return slices.ContainsFunc(l.nodes, func(n *Node) bool { return l.processes.Alive(n.Name()) })
}

// clearState empties a state directory, but for what is not the lab's.
func clearState(dir string) error {
	for _, d := range []string{"control-plane", "nodes", "share", "bin"} {
		if err := os.RemoveAll(filepath.Join(dir, d)); err != nil {
			return err
		}
	}
	return nil
}

// ErrNotUp says that no lab is up in the state directory.
var ErrNotUp = errors.New("no lab is up")

// Open returns the lab that another program left up in the state directory of
// the options.
func Open(opts Options) (*Lab, error) {
	l, err := load(opts)
	if err != nil {
		return nil, err
	}
	// What this program starts in it outlives the program, as the lab does.
	if l.spawner, err = proc.NewSpawner(l.network.path(), true); err != nil {
		return nil, err
	}
	if l.cp != nil {
		l.cp.spawner = l.spawner
	}
	return l, nil
}

// Ensure returns the lab that is up in the state directory of the options, and starts one where none is or only the
// remains of one whose program was killed. One that is up with other versions or nodes than wanted is an error.
func Ensure(ctx context.Context, opts Options) (*Lab, error) {
	l, err := Open(opts)
	if errors.Is(err, ErrNotUp) || err == nil && !l.alive() {
		return Up(ctx, opts)
	}
	if err != nil {
		return nil, err
	}
	return l, l.fits(opts)
}

// fits returns an error if the lab has other versions or nodes than the options say.
func (l *Lab) fits(opts Options) error {
	b, err := newBuilder(opts.BuildOptions)
	if err != nil {
		return err
	}
	nodeOptions, err := opts.NodeOptions.withDefaults(b.opts.Containerd)
	if err != nil {
		return err
	}
	describe := func(kubernetes, containerd string, o NodeOptions) string {
		return fmt.Sprintf("Kubernetes %s, containerd %s, CDI %q, PFs %d, CPUs %d", kubernetes, containerd, o.CDI, o.PFs, o.CPUs)
	}
	want := describe(b.opts.Kubernetes, b.opts.Containerd, nodeOptions)
	if have := describe(l.arts.Kubernetes, l.arts.Node.Containerd, l.nodeOptions); have != want {
		return fmt.Errorf("the lab that is up in %s has %s; wanted is %s: stop it first", l.state, have, want)
	}
	return nil
}

// load reads a lab's record, for what needs to start nothing.
func load(opts Options) (*Lab, error) {
	state, err := stateDir(opts)
	if err != nil {
		return nil, err
	}
	l := &Lab{state: state, progress: newProgress(opts.Progress)}
	data, err := os.ReadFile(l.recordPath())
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w in %s", ErrNotUp, state)
	}
	if err != nil {
		return nil, err
	}
	r := record{Processes: &l.processes}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("record %s: %w", l.recordPath(), err)
	}
	l.network, l.arts, l.nodeOptions = r.Network, r.Artifacts, r.NodeOptions
	for _, index := range r.NodeNumbers {
		l.nodes = append(l.nodes, l.newNode(index))
	}
	if r.ControlPlane != nil {
		if l.cp, err = openControlPlane(*r.ControlPlane, &l.processes); err != nil {
			return nil, err
		}
		l.cp.onChange = l.save
	}
	return l, nil
}

// save writes the record.
func (l *Lab) save() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := record{Network: l.network, Artifacts: l.arts, NodeOptions: l.nodeOptions, Processes: &l.processes}
	if l.cp != nil {
		r.ControlPlane = l.cp.record()
	}
	for _, n := range l.nodes {
		r.NodeNumbers = append(r.NodeNumbers, n.index)
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	partial := l.recordPath() + ".partial"
	if err := os.WriteFile(partial, data, 0o644); err != nil {
		return err
	}
	return os.Rename(partial, l.recordPath())
}

// Down ends everything that the lab started. The logs stay.
func (l *Lab) Down() error {
	var errs []error
	for _, n := range l.Nodes() {
		errs = append(errs, n.stopMachine(), os.RemoveAll(n.diskPath()))
	}
	if l.cp != nil {
		errs = append(errs, l.cp.Stop())
	}
	if l.spawner != nil {
		l.spawner.Close()
		l.spawner = nil
	}
	errs = append(errs, l.network.delete())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lab down: %w", err) // the record stays, for another try
	}
	return os.Remove(l.recordPath())
}

// ShareDir returns the directory of this machine that all nodes see, read-only,
// as /share. Replace a file there by renaming another over it.
func (l *Lab) ShareDir() string { return filepath.Join(l.state, "share") }

// StateDir returns the directory of the lab's data and logs.
func (l *Lab) StateDir() string { return l.state }

// ControlPlane returns the control plane, whose programs can be stopped and
// started.
func (l *Lab) ControlPlane() *ControlPlane { return l.cp }

// Kubeconfig returns the path of the administrator's kubeconfig, good on this
// machine.
func (l *Lab) Kubeconfig() string { return l.cp.Kubeconfig() }

// RESTConfig returns a client configuration with the administrator's rights.
func (l *Lab) RESTConfig() (*rest.Config, error) { return l.cp.RESTConfig() }

// Client returns a clientset with the administrator's rights.
func (l *Lab) Client() (*kubernetes.Clientset, error) { return l.cp.Client() }

// Nodes returns the nodes in the order of their numbers.
func (l *Lab) Nodes() []*Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.nodes)
}

// Node returns the node of a name, or nil.
func (l *Lab) Node(name string) *Node {
	for _, n := range l.Nodes() {
		if n.Name() == name {
			return n
		}
	}
	return nil
}

// AddNode starts one more node and returns when it is ready.
func (l *Lab) AddNode(ctx context.Context) (*Node, error) {
	index := 1
	for _, n := range l.Nodes() {
		index = max(index, n.index+1)
	}
	n, err := l.createNode(ctx, index)
	if err != nil {
		return nil, err
	}
	return n, n.waitReady(ctx)
}

// createNode prepares a node and powers it on.
func (l *Lab) createNode(ctx context.Context, index int) (*Node, error) {
	n := l.newNode(index)
	if err := n.prepare(ctx); err != nil {
		return nil, fmt.Errorf("node %s: %w", n.Name(), err)
	}
	l.mu.Lock()
	l.nodes = append(l.nodes, n)
	l.mu.Unlock()
	l.progress.step("%s: booting", n.Name())
	return n, n.startMachine(ctx)
}

// waitFirstBoot returns when the node has booted. A machine that hangs or ends meanwhile, which happens under software
// emulation, is switched off and on again. It gets a new disk: on the old one are files half written.
func (n *Node) waitFirstBoot(ctx context.Context) error {
	for attempt := 1; ; attempt++ {
		booting, cancel := context.WithTimeout(ctx, bootTimeout)
		err := n.waitBooted(booting, "", bootSilence)
		cancel()
		if err == nil || attempt == bootAttempts || ctx.Err() != nil {
			return err
		}
		n.lab.progress.step("%s: switched off and on again: %v", n.Name(), err)
		if err := n.PowerOff(); err != nil {
			return err
		}
		if err := n.makeDisk(ctx); err != nil {
			return err
		}
		if err := n.startMachine(ctx); err != nil {
			return err
		}
	}
}

// waitReady returns when the node has booted and is Ready in the API.
func (n *Node) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodeReadyTimeout)
	defer cancel()
	if err := n.waitFirstBoot(ctx); err != nil {
		return err
	}
	n.lab.progress.step("%s: booted, kubelet is started", n.Name())
	client, err := n.lab.Client()
	if err != nil {
		return err
	}
	for {
		ready, why := nodeReady(ctx, client, n.Name())
		if ready {
			n.lab.progress.step("%s: Ready", n.Name())
			return nil
		}
		if wait(ctx, 200*time.Millisecond) != nil {
			return fmt.Errorf("node %s is not ready: %s", n.Name(), why)
		}
	}
}

func nodeReady(ctx context.Context, client kubernetes.Interface, name string) (bool, string) {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, "kubelet has not registered it"
	}
	if err != nil {
		return false, err.Error()
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue, c.Message
		}
	}
	return false, "it has no Ready condition"
}

// Status writes a line for each process and node.
func (l *Lab) Status(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "network namespace %s, state %s\n", l.network.Namespace, l.state)
	fmt.Fprintf(w, "Kubernetes %s, containerd %s\n", l.arts.Kubernetes, l.arts.Node.Containerd)
	for _, name := range []string{Etcd, APIServer, ControllerManager, Scheduler} {
		fmt.Fprintf(w, "%-24s %s\n", name, processState(l.processes.Get(name)))
	}
	client, err := l.Client()
	if err != nil {
		return err
	}
	for _, n := range l.Nodes() {
		state := processState(l.processes.Get(n.Name()))
		ready, why := nodeReady(ctx, client, n.Name())
		if !ready {
			state += ", not ready: " + why
		} else {
			state += ", Ready"
		}
		fmt.Fprintf(w, "%-24s %s\n", n.Name(), state)
	}
	return nil
}

func processState(p *proc.Process) string {
	switch {
	case p == nil:
		return "stopped"
	case p.Alive():
		return fmt.Sprintf("running (pid %d)", p.PID)
	default:
		return "ended; log " + p.Log
	}
}
