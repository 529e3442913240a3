// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

// Daemons of a node, as Node.Restart and the like name them.
const (
	Containerd = "containerd"
	Kubelet    = "kubelet"
)

// Uplink is the name of the SR-IOV PF on a node, and Uplink2 that of the second
// one, if there is one.
const (
	Uplink  = "ens1f0"
	Uplink2 = "ens2f0"
)

// AdminKubeconfig is the path of the administrator's kubeconfig on a node.
const AdminKubeconfig = "/etc/kubernetes/admin.kubeconfig"

// ShareDir is the path on a node of the directory Lab.ShareDir.
const ShareDir = guest.ShareDir

// stopGrace is how long a daemon may take to end when asked to.
const stopGrace = 10 * time.Second

// Daemon is a background process of a node.
type Daemon = guest.Daemon

// ProcessState is the state of a daemon.
type ProcessState = guest.Process

// Node is an emulated node. Its methods that act inside it need its agent,
// which runs soon after the machine is powered on.
type Node struct {
	lab   *Lab
	index int
	agent *agentClient
	front bool // see InFront
}

func (l *Lab) newNode(index int) *Node {
	n := &Node{lab: l, index: index}
	n.agent = newAgentClient(l.network.path(), n.Name(), n.Address())
	return n
}

// Name returns the node's name, as in the API.
func (n *Node) Name() string { return fmt.Sprintf("node%d", n.index) }

// Address returns the node's address on the management network.
func (n *Node) Address() string { return fmt.Sprintf("10.88.0.%d", 10+n.index) }

func (n *Node) managementMAC() string { return fmt.Sprintf("52:54:00:00:00:%02x", n.index) }
func (n *Node) podCIDR() string       { return fmt.Sprintf("10.244.%d.0/24", n.index) }

// dir is the node's directory; the guest sees what is in guestDir.
func (n *Node) dir() string      { return filepath.Join(n.lab.state, "nodes", n.Name()) }
func (n *Node) guestDir() string { return filepath.Join(n.dir(), "guest") }
func (n *Node) diskPath() string { return filepath.Join(n.dir(), "disk.img") }

// Log returns the path on this machine of a daemon's log, which grows as the
// daemon writes. It is appended to over restarts.
func (n *Node) Log(daemon string) string {
	return filepath.Join(n.guestDir(), "log", daemon+".log")
}

// ConsoleLog returns the path on this machine of the guest kernel's messages.
func (n *Node) ConsoleLog() string { return filepath.Join(n.dir(), "console.log") }

// Exec runs a shell script on the node and returns what it wrote and its exit
// status, 128+N if signal N ended it. The error is for a script that could not
// be run, or whose end was not seen; one that failed is none. The script is
// killed when the context ends.
func (n *Node) Exec(ctx context.Context, script string) (stdout, stderr string, exitCode int, err error) {
	var o, e bytes.Buffer
	exitCode, err = n.agent.exec(ctx, guest.ExecRequest{Script: script}, &o, &e)
	return o.String(), e.String(), exitCode, err
}

// Stream is Exec with input, and with output as it comes.
func (n *Node) Stream(ctx context.Context, script string, stdin []byte, stdout, stderr io.Writer) (exitCode int, err error) {
	return n.agent.exec(ctx, guest.ExecRequest{Script: script, Stdin: stdin}, stdout, stderr)
}

// Run is Exec for a script that must succeed: it returns the trimmed output.
func (n *Node) Run(ctx context.Context, script string) (string, error) {
	stdout, stderr, code, err := n.Exec(ctx, script)
	if err != nil {
		return "", err
	}
	if code != 0 {
		return "", fmt.Errorf("node %s: script %q failed with status %d: %s", n.Name(), script, code, strings.TrimSpace(stderr+stdout))
	}
	return strings.TrimSpace(stdout), nil
}

// GetSocket returns what an HTTP server on a unix socket of the node answers to a GET. It costs the node much less than
// a program that asks.
func (n *Node) GetSocket(ctx context.Context, socket, path string) ([]byte, error) {
	answer, err := n.agent.do(ctx, http.MethodGet, "/socket", url.Values{"socket": {socket}, "path": {path}}, nil)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	return io.ReadAll(answer)
}

// Start starts a daemon, which must not run already. Its output goes to Log.
func (n *Node) Start(ctx context.Context, name string, args ...string) error {
	return n.StartDaemon(ctx, Daemon{Name: name, Args: args})
}

// StartDaemon is Start with an environment and a readiness check, which is
// waited for. A daemon without arguments is started as it was last time.
func (n *Node) StartDaemon(ctx context.Context, d Daemon) error {
	return n.agent.call(ctx, http.MethodPut, "/daemon/"+url.PathEscape(d.Name), nil, d, nil)
}

// Signal sends a signal to a daemon.
func (n *Node) Signal(ctx context.Context, name string, sig unix.Signal) error {
	return n.agent.signal(ctx, name, sig)
}

// Stop asks a daemon to end, waits for it, and returns its last state. One
// that does not end in ten seconds is killed, which is an error.
func (n *Node) Stop(ctx context.Context, name string) (ProcessState, error) {
	if err := n.agent.signal(ctx, name, unix.SIGTERM); err != nil {
		return ProcessState{}, err
	}
	state, err := n.agent.process(ctx, name, stopGrace)
	if err != nil || !state.Running {
		return state, err
	}
	_, err = n.Kill(ctx, name)
	return state, errors.Join(fmt.Errorf("node %s: %s did not end within %v of being asked to", n.Name(), name, stopGrace), err)
}

// Kill kills a daemon and waits until it is gone.
func (n *Node) Kill(ctx context.Context, name string) (ProcessState, error) {
	if err := n.agent.signal(ctx, name, unix.SIGKILL); err != nil {
		return ProcessState{}, err
	}
	state, err := n.agent.process(ctx, name, stopGrace)
	if err == nil && state.Running {
		err = fmt.Errorf("node %s: %s survives being killed", n.Name(), name)
	}
	return state, err
}

// Restart stops a daemon and starts it as it was.
func (n *Node) Restart(ctx context.Context, name string) error {
	if _, err := n.Stop(ctx, name); err != nil {
		return err
	}
	return n.StartDaemon(ctx, Daemon{Name: name})
}

// Process returns the state of a daemon.
func (n *Node) Process(ctx context.Context, name string) (ProcessState, error) {
	return n.agent.process(ctx, name, 0)
}

// ReadFile returns a file of the node.
func (n *Node) ReadFile(ctx context.Context, path string) ([]byte, error) {
	body, err := n.agent.do(ctx, http.MethodGet, "/file", url.Values{"path": {path}}, nil)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// WriteFile replaces a file of the node, making its directory if need be.
func (n *Node) WriteFile(ctx context.Context, path string, data []byte, mode os.FileMode) error {
	return n.upload(ctx, path, bytes.NewReader(data), mode)
}

// CopyFile replaces a file of the node by one of this machine.
func (n *Node) CopyFile(ctx context.Context, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return n.upload(ctx, to, f, info.Mode().Perm())
}

func (n *Node) upload(ctx context.Context, path string, r io.Reader, mode os.FileMode) error {
	q := url.Values{"path": {path}, "mode": {strconv.FormatUint(uint64(mode.Perm()), 8)}}
	body, err := n.agent.do(ctx, http.MethodPut, "/file", q, r)
	if err != nil {
		return err
	}
	return body.Close()
}

// BootID returns the node's boot ID, which differs after each boot.
func (n *Node) BootID(ctx context.Context) (string, error) {
	h, err := n.agent.health(ctx)
	return h.BootID, err
}

// WaitBooted returns when the node has booted and started its daemons, with
// another boot ID than the given one.
func (n *Node) WaitBooted(ctx context.Context, otherThan string) error {
	ctx, cancel := context.WithTimeout(ctx, nodeReadyTimeout)
	defer cancel()
	return n.waitBooted(ctx, otherThan, nodeReadyTimeout)
}

// waitBooted is WaitBooted that gives up when the machine is silent for too
// long.
func (n *Node) waitBooted(ctx context.Context, otherThan string, silence time.Duration) error {
	said, heard := int64(0), time.Now()
	for {
		h, err := n.agent.health(ctx)
		if info, statErr := os.Stat(n.ConsoleLog()); err == nil || statErr == nil && info.Size() != said {
			heard = time.Now()
			if statErr == nil {
				said = info.Size()
			}
		}
		switch {
		case err == nil && h.Error != "":
			return fmt.Errorf("node %s cannot boot: %s", n.Name(), h.Error)
		case err == nil && h.Booted && h.BootID != otherThan:
			return nil
		case !n.lab.processes.Alive(n.Name()):
			return fmt.Errorf("node %s: its machine ended; console: %s", n.Name(), tail(n.ConsoleLog()))
		case err != nil && time.Since(heard) > silence:
			return fmt.Errorf("node %s has said nothing for %v: %w; console: %s", n.Name(), silence, err, tail(n.ConsoleLog()))
		}
		if wait(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("node %s did not boot: %w; console: %s", n.Name(), errors.Join(err, ctx.Err()), tail(n.ConsoleLog()))
		}
	}
}

// Reboot restarts the node cleanly and returns when it has booted again.
// Daemons that a test started are not started again.
func (n *Node) Reboot(ctx context.Context) error { return n.reboot(ctx, url.Values{}) }

// Reset restarts the node at once, as a crash does: nothing ends cleanly and
// nothing is written out.
func (n *Node) Reset(ctx context.Context) error { return n.reboot(ctx, url.Values{"hard": {"1"}}) }

func (n *Node) reboot(ctx context.Context, q url.Values) error {
	before, err := n.BootID(ctx)
	if err != nil {
		return err
	}
	if err := n.agent.call(ctx, http.MethodPost, "/reboot", q, nil, nil); err != nil {
		return err
	}
	n.agent.http.CloseIdleConnections()
	return n.WaitBooted(ctx, before)
}

// PowerOff cuts the node's power. Its disk stays.
func (n *Node) PowerOff() error { return n.stopMachine() }

// PowerOn starts the node after PowerOff and returns when it has booted.
func (n *Node) PowerOn(ctx context.Context) error {
	if err := n.startMachine(ctx); err != nil {
		return err
	}
	return n.WaitBooted(ctx, "")
}

// InFront says whether the node has, from the next PowerOn on, another NIC of
// the PFs' kind in a slot in front of theirs: the PFs and their VFs get other
// PCI addresses, and that NIC, which has no cable, those that the first PF
// would have. A lab that is opened anew does not know of it.
func (n *Node) InFront(is bool) { n.front = is }

// Destroy cuts the node's power and removes it with its disk. Its Node object
// stays in the API, as that of a machine that burned down. Its logs stay too.
func (n *Node) Destroy(ctx context.Context) error {
	if err := n.stopMachine(); err != nil {
		return err
	}
	n.lab.forget(n)
	return errors.Join(
		os.Remove(n.diskPath()),
		n.lab.network.deleteTap(n.managementTap()),
		n.deleteUplinkTaps(),
		n.lab.save(),
	)
}

func (n *Node) managementTap() string { return fmt.Sprintf("mgmt%d", n.index) }

// prepare writes what the node needs to boot.
func (n *Node) prepare(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Join(n.guestDir(), "log"), 0o755); err != nil {
		return err
	}
	if err := n.makeDisk(ctx); err != nil {
		return err
	}
	bridges := map[string]string{n.managementTap(): managementBridge}
	for _, pf := range n.pfs() {
		bridges[pf.tap] = uplinkBridge
	}
	for tap, bridge := range bridges {
		if err := n.lab.network.addTap(tap, bridge); err != nil {
			return err
		}
	}
	files, err := n.files()
	if err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(n.guestDir(), name), content, 0o600); err != nil {
			return err
		}
	}
	return n.lab.network.routeTo(n.podCIDR(), n.Address())
}

// makeDisk gives the node the disk of a new one.
func (n *Node) makeDisk(ctx context.Context) error {
	// Sparse, so that it takes no longer than its content.
	return run(ctx, n.dir(), nil, "cp", "--sparse=always", "--reflink=auto", n.lab.arts.Node.Disk, n.diskPath())
}

// files returns the node's configuration files.
func (n *Node) files() (map[string][]byte, error) {
	server := "https://" + managementAddress
	kubelet, err := n.lab.cp.ca.Kubeconfig(server, "system:node:"+n.Name(), "system:nodes")
	if err != nil {
		return nil, err
	}
	admin, err := n.lab.cp.ca.Kubeconfig(server, "admin", "system:masters")
	if err != nil {
		return nil, err
	}
	config, err := json.MarshalIndent(n.config(), "", "  ")
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		"node.json":          config,
		"kubelet.yaml":       []byte(kubeletConfig),
		"kubelet.kubeconfig": kubelet,
		"admin.kubeconfig":   admin,
		"containerd.toml":    []byte(containerdConfig(n.lab.arts.Node.Containerd, n.lab.nodeOptions.CDI)),
		"ptp.conflist":       []byte(fmt.Sprintf(ptpConfig, n.podCIDR())),
	}, nil
}

func (n *Node) config() guest.Config {
	uplinks := map[string]string{}
	for _, pf := range n.pfs() {
		uplinks[pf.mac] = pf.name
	}
	return guest.Config{
		Name:          n.Name(),
		ManagementMAC: n.managementMAC(),
		Address:       fmt.Sprintf("%s/%d", n.Address(), managementPrefix),
		Gateway:       managementAddress,
		Uplinks:       uplinks,
		Files: map[string]string{
			"kubelet.yaml":       "/etc/kubernetes/kubelet.yaml",
			"kubelet.kubeconfig": "/etc/kubernetes/kubelet.kubeconfig",
			"admin.kubeconfig":   AdminKubeconfig,
			"containerd.toml":    "/etc/containerd/config.toml",
			"ptp.conflist":       "/etc/cni/net.d/10-ptp.conflist",
		},
		Daemons: []guest.Daemon{
			{Name: Containerd, Args: []string{"containerd"}, Env: lazyGC, Socket: "/run/containerd/containerd.sock"},
			{Name: Kubelet, Args: []string{
				"kubelet", "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
				"--hostname-override=" + n.Name(), "--node-ip=" + n.Address(), "--v=2",
			}, Env: lazyGC},
		},
	}
}

// lazyGC makes Go programs collect garbage less often, which takes a good part
// of the time that they need to start in emulation.
var lazyGC = []string{"GOGC=400"}

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
resolvConf: ""
clusterDNS: [10.96.0.10]
failSwapOn: false
registerWithTaints: []
# A pod whose devices could not be prepared is tried again after this, and half as much more at most: a minute by default.
syncFrequency: 10s
`

const ptpConfig = `{"cniVersion": "1.0.0", "name": "pod", "plugins": [{"type": "ptp", "ipam": {
  "type": "host-local", "ranges": [[{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`
