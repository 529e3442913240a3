// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/networkdriver/test/lab/internal/pki"
	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

// layout is the addresses and ports that a control plane uses.
type layout struct {
	host                        string // address that this program connects to
	bind, advertise             string
	hosts                       []string
	apiPort, etcdPort, peerPort int
	schedulerPort, managerPort  int
	reconciler                  string
}

func newLayout(network *controlPlaneNetwork) (layout, error) {
	if network != nil {
		return layout{
			host: network.addresses[0], bind: "0.0.0.0", advertise: network.advertise,
			hosts:   append([]string{network.advertise}, network.addresses...),
			apiPort: 443, etcdPort: 2379, peerPort: 2380, schedulerPort: 10259, managerPort: 10257,
			reconciler: "lease",
		}, nil
	}
	ports, err := freePorts(5)
	if err != nil {
		return layout{}, err
	}
	return layout{
		host: "127.0.0.1", bind: "127.0.0.1",
		// The endpoints of the kubernetes service may not be loopback addresses:
		// an address for documentation, kept out of the endpoints.
		advertise: "192.0.2.1", reconciler: "none",
		apiPort: ports[0], etcdPort: ports[1], peerPort: ports[2], schedulerPort: ports[3], managerPort: ports[4],
	}, nil
}

// freePorts returns TCP ports of the loopback that nobody listens on.
func freePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("finding a free port: %w", err)
		}
		defer l.Close() // held until all are found, so that they differ
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`

func (cp *ControlPlane) writeFiles(l layout) error {
	var err error
	if cp.ca, err = pki.New(cp.pkiDir()); err != nil {
		return err
	}
	hosts := append([]string{"localhost", "127.0.0.1", "kubernetes.default.svc", serviceAddress}, l.hosts...)
	if err := cp.ca.WriteServing(cp.pkiDir(), "apiserver", hosts...); err != nil {
		return err
	}
	if err := pki.WriteSigningKey(cp.pkiDir(), "service-account"); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(cp.dir, "audit-policy.yaml"), []byte(auditPolicy), 0o644); err != nil {
		return err
	}
	for name, id := range map[string][]string{
		"kubeconfig":                      {"admin", "system:masters"},
		ControllerManager + ".kubeconfig": {"system:kube-controller-manager"},
		Scheduler + ".kubeconfig":         {"system:kube-scheduler"},
	} {
		data, err := cp.ca.Kubeconfig(cp.endpoint, id[0], id[1:]...)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(cp.dir, name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (cp *ControlPlane) commandLines(l layout, bin []string, controllers bool) ([]proc.Command, error) {
	pki := func(name string) string { return filepath.Join(cp.pkiDir(), name) }
	etcd := fmt.Sprintf("http://127.0.0.1:%d", l.etcdPort)
	peer := fmt.Sprintf("http://127.0.0.1:%d", l.peerPort)
	kubeconfig := func(name string) string { return filepath.Join(cp.dir, name+".kubeconfig") }
	lines := [][]string{
		{
			Etcd, "--name=lab", "--data-dir=" + filepath.Join(cp.dir, "etcd"), "--unsafe-no-fsync",
			"--listen-client-urls=" + etcd, "--advertise-client-urls=" + etcd,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=lab=" + peer,
			"--log-level=warn",
		},
		{
			APIServer, "--etcd-servers=" + etcd,
			"--bind-address=" + l.bind, fmt.Sprintf("--secure-port=%d", l.apiPort),
			"--advertise-address=" + l.advertise, "--endpoint-reconciler-type=" + l.reconciler,
			"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"),
			"--client-ca-file=" + pki("ca.crt"), "--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + pki("service-account.key"),
			"--service-account-signing-key-file=" + pki("service-account.key"),
			"--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true",
			"--kubelet-preferred-address-types=InternalIP",
			"--audit-policy-file=" + filepath.Join(cp.dir, "audit-policy.yaml"), "--audit-log-path=" + cp.AuditLog(),
		},
	}
	if controllers {
		lines = append(lines, []string{
			ControllerManager, "--kubeconfig=" + kubeconfig(ControllerManager), "--leader-elect=false",
			"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", l.managerPort),
			"--service-account-private-key-file=" + pki("service-account.key"), "--root-ca-file=" + pki("ca.crt"),
			"--use-service-account-credentials=true", "--controllers=*,-nodeipam",
		}, []string{
			Scheduler, "--kubeconfig=" + kubeconfig(Scheduler), "--leader-elect=false",
			"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", l.schedulerPort),
		})
	} else {
		lines[1] = append(lines[1], "--disable-admission-plugins=ServiceAccount")
	}
	commands := make([]proc.Command, 0, len(lines))
	for _, args := range lines {
		name := args[0]
		path, err := lookup(bin, name)
		if err != nil {
			return nil, err
		}
		args[0] = path
		commands = append(commands, proc.Command{Name: name, Args: args, Log: filepath.Join(cp.logDir(), name+".log")})
	}
	return commands, nil
}

// lookup finds a program in a list of directories.
func lookup(dirs []string, name string) (string, error) {
	for _, d := range dirs {
		path := filepath.Join(d, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("program %s is not in %s", name, strings.Join(dirs, ", "))
}
