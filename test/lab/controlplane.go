// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/cilium/networkdriver/test/lab/internal/pki"
	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

// Programs of a control plane, as ControlPlane.Start and Stop name them.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	Scheduler         = "kube-scheduler"
	ControllerManager = "kube-controller-manager"
)

// readyTimeout is how long the API server may take to serve. It takes about
// three seconds on an idle machine; a busy CI may need many more.
const readyTimeout = 2 * time.Minute

// ControlPlaneOptions are the options of StartControlPlane.
type ControlPlaneOptions struct {
	// Dir gets the data, certificates and logs. It is made if it is missing.
	Dir string

	// Bin lists directories with the programs. Empty means those that Build
	// made; ErrNotBuilt is returned if it has not.
	Bin []string

	// Controllers also starts the scheduler and the controller manager. Without
	// them no pod is scheduled and no service account is made, so the
	// ServiceAccount admission plugin is off and pods can be created as they are.
	Controllers bool

	// Detach leaves the processes running when this program ends. Otherwise the
	// kernel kills them then, also when it crashes.
	Detach bool

	// network is where the control plane listens: on loopback ports of its
	// own if nil.
	network *controlPlaneNetwork
}

// controlPlaneNetwork is the place of a control plane that nodes can reach.
type controlPlaneNetwork struct {
	spawner   *proc.Spawner // of the network namespace
	processes *proc.Table
	advertise string   // address for the nodes
	addresses []string // all addresses that the serving certificate names; the first is the host's way in
}

// ControlPlane is a running etcd and API server, with scheduler and controller
// manager if asked for.
type ControlPlane struct {
	dir       string
	ca        *pki.CA
	endpoint  string // URL for this program
	etcd      string // URL
	commands  []proc.Command
	processes *proc.Table // by program, and of a lab also its nodes
	spawner   *proc.Spawner
	close     func()       // ends a spawner of its own
	onChange  func() error // records the processes
}

// StartControlPlane starts a control plane and returns when its API server is
// ready. On failure nothing is left running and the logs stay in Dir/log.
func StartControlPlane(ctx context.Context, opts ControlPlaneOptions) (*ControlPlane, error) {
	cp, err := prepareControlPlane(opts)
	if err != nil {
		return nil, fmt.Errorf("control plane: %w", err)
	}
	if err := cp.startAll(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("control plane: %w", err), cp.Stop())
	}
	return cp, nil
}

func prepareControlPlane(opts ControlPlaneOptions) (*ControlPlane, error) {
	if opts.Dir == "" {
		return nil, errors.New("no directory given")
	}
	dir, err := filepath.Abs(opts.Dir)
	if err != nil {
		return nil, err
	}
	bin := opts.Bin
	if len(bin) == 0 {
		arts, err := Built(BuildOptions{})
		if err != nil {
			return nil, err
		}
		bin = []string{arts.Bin}
	}
	cp := &ControlPlane{
		dir:       dir,
		processes: &proc.Table{},
		onChange:  func() error { return nil },
	}
	for _, d := range []string{dir, cp.pkiDir(), cp.logDir()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	layout, err := newLayout(opts.network)
	if err != nil {
		return nil, err
	}
	cp.endpoint = "https://" + net.JoinHostPort(layout.host, strconv.Itoa(layout.apiPort))
	cp.etcd = fmt.Sprintf("http://127.0.0.1:%d", layout.etcdPort)
	if err := cp.writeFiles(layout); err != nil {
		return nil, err
	}
	if cp.commands, err = cp.commandLines(layout, bin, opts.Controllers); err != nil {
		return nil, err
	}
	if opts.network != nil {
		cp.spawner, cp.processes = opts.network.spawner, opts.network.processes
		return cp, nil
	}
	if cp.spawner, err = proc.NewSpawner("", opts.Detach); err != nil {
		return nil, err
	}
	cp.close = cp.spawner.Close
	return cp, nil
}

// controlPlaneRecord is what another program needs to know of a control plane.
type controlPlaneRecord struct {
	Dir, Endpoint string
	Commands      []proc.Command
}

// EtcdURL is where etcd answers, for tests that need more objects than they have
// time to create one by one. It is empty for a control plane that another
// program has started.
func (cp *ControlPlane) EtcdURL() string { return cp.etcd }

func (cp *ControlPlane) record() *controlPlaneRecord {
	return &controlPlaneRecord{Dir: cp.dir, Endpoint: cp.endpoint, Commands: cp.commands}
}

// openControlPlane returns the control plane that another program started.
func openControlPlane(r controlPlaneRecord, processes *proc.Table) (*ControlPlane, error) {
	cp := &ControlPlane{dir: r.Dir, endpoint: r.Endpoint, commands: r.Commands, processes: processes}
	var err error
	cp.ca, err = pki.Load(cp.pkiDir())
	return cp, err
}

func (cp *ControlPlane) startAll(ctx context.Context) error {
	for _, c := range cp.commands {
		if err := cp.Start(ctx, c.Name); err != nil {
			return err
		}
	}
	return nil
}

// Start starts one of the programs, which Stop stopped, with the options it
// had. For the API server it returns when that is ready.
func (cp *ControlPlane) Start(ctx context.Context, name string) error {
	for _, c := range cp.commands {
		if c.Name != name {
			continue
		}
		p, err := cp.spawner.Start(c)
		if err != nil {
			return err
		}
		cp.processes.Set(name, p)
		if err := cp.onChange(); err != nil {
			return err
		}
		if name == APIServer {
			return cp.waitReady(ctx)
		}
		return nil
	}
	return fmt.Errorf("the control plane has no %s", name)
}

// waitReady returns when the API server says that it is ready.
func (cp *ControlPlane) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client, err := cp.Client()
	if err != nil {
		return err
	}
	for {
		err := client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		if err == nil {
			return nil
		}
		for _, name := range []string{Etcd, APIServer} {
			if p := cp.processes.Get(name); p != nil && !p.Alive() {
				return fmt.Errorf("%s ended; the end of %s:\n%s", name, p.Log, p.Tail(10))
			}
		}
		if wait(ctx, 50*time.Millisecond) != nil {
			return fmt.Errorf("API server is not ready: %w; logs are in %s", err, cp.logDir())
		}
	}
}

// StopProgram ends one of the programs: Etcd, APIServer, Scheduler or
// ControllerManager. Start starts it again with its data.
func (cp *ControlPlane) StopProgram(name string) error {
	p := cp.processes.Get(name)
	if p == nil {
		return fmt.Errorf("the control plane has no running %s", name)
	}
	if err := p.Stop(10 * time.Second); err != nil {
		return err
	}
	cp.processes.Set(name, nil)
	return cp.onChange()
}

// Stop ends all programs. The data and logs stay.
func (cp *ControlPlane) Stop() error {
	var errs []error
	// Clients before servers, each without grace: the data is not kept for a
	// next start, and an API server waits long for its open watches.
	for _, name := range []string{Scheduler, ControllerManager, APIServer, Etcd} {
		if p := cp.processes.Get(name); p != nil {
			errs = append(errs, p.Stop(0))
			cp.processes.Set(name, nil)
		}
	}
	if cp.close != nil {
		cp.close()
		cp.close = nil
	}
	return errors.Join(errs...)
}

// Kubeconfig returns the path of the administrator's kubeconfig.
func (cp *ControlPlane) Kubeconfig() string { return filepath.Join(cp.dir, "kubeconfig") }

// RESTConfig returns a client configuration with the administrator's rights
// and without a tight rate limit: tests and demos create and poll much.
func (cp *ControlPlane) RESTConfig() (*rest.Config, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", cp.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("kubeconfig of the control plane: %w", err)
	}
	cfg.QPS, cfg.Burst = 200, 400
	return cfg, nil
}

// Client returns a clientset with the administrator's rights.
func (cp *ControlPlane) Client() (*kubernetes.Clientset, error) {
	cfg, err := cp.RESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(cfg)
}

// UserKubeconfig returns a kubeconfig for a user of the given name and groups,
// who may do what RBAC grants. A node is system:node:NAME in system:nodes, a
// service account is best given a token instead.
func (cp *ControlPlane) UserKubeconfig(user string, groups ...string) ([]byte, error) {
	return cp.ca.Kubeconfig(cp.endpoint, user, groups...)
}

// UserRESTConfig is UserKubeconfig as a client configuration.
func (cp *ControlPlane) UserRESTConfig(user string, groups ...string) (*rest.Config, error) {
	data, err := cp.UserKubeconfig(user, groups...)
	if err != nil {
		return nil, err
	}
	return clientcmd.RESTConfigFromKubeConfig(data)
}

// AuditLog returns the path of the API server's audit log: one JSON object per
// finished request, with its user, user agent, verb and URI.
func (cp *ControlPlane) AuditLog() string { return filepath.Join(cp.logDir(), "audit.log") }

func (cp *ControlPlane) pkiDir() string { return filepath.Join(cp.dir, "pki") }
func (cp *ControlPlane) logDir() string { return filepath.Join(cp.dir, "log") }
