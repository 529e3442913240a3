// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package deploy puts the network driver into a lab cluster: CRDs, rights, and an agent on each node with a service
// account token that is bound to the node, as a DaemonSet's would be. The demo and the end-to-end tests share it.
package deploy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/cilium/networkdriver/api/crds"
	manifests "github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/test/lab"
)

// Agent and Operator are the names of these as daemons of a node, and of their programs.
const (
	Agent    = "cilium-agent"
	Operator = "cilium-operator"
)

// Service accounts. On each node there is a kubeconfig for them.
const (
	agentAccount    = "cilium-network-driver"
	operatorAccount = "cilium-network-driver-operator"
)

// HookPath is the gate hook's on the nodes, which is the chart's.
const HookPath = "/opt/cilium-network-driver/networkdriver-hook"

const (
	dbg       = "cilium-dbg"
	namespace = "kube-system"
	// tokenSeconds is how long an agent's token is good for: longer than a demo is looked at.
	tokenSeconds  = 7 * 24 * 3600
	ciliumNodeCRD = "ciliumnodes.cilium.io"
)

// Cluster is a lab's cluster, for the driver to be installed in.
type Cluster struct {
	*lab.Lab
	Client  kubernetes.Interface
	Dynamic dynamic.Interface

	extensions *apiextensionsclient.ApiextensionsV1Client
	mapper     *restmapper.DeferredDiscoveryRESTMapper
}

// neededManifests are what agent and operator need in a cluster, besides the driver's CRDs.
var neededManifests = [][]byte{manifests.CiliumNodeCRD, manifests.RBAC, manifests.OperatorRBAC}

// Connect returns a lab's cluster, in which there is no driver yet.
func Connect(l *lab.Lab) (*Cluster, error) {
	config, err := l.RESTConfig()
	if err != nil {
		return nil, err
	}
	c := &Cluster{Lab: l}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c.Client = client
	if c.Dynamic, err = dynamic.NewForConfig(config); err != nil {
		return nil, err
	}
	if c.extensions, err = apiextensionsclient.NewForConfig(config); err != nil {
		return nil, err
	}
	c.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	return c, nil
}

// Install takes the programs that make build has put into a directory to the lab's nodes, to be run there as daemons,
// and installs what the cluster needs. No agent runs yet.
func (c *Cluster) Install(ctx context.Context, programs string) error {
	if err := copyPrograms(programs, c.ShareDir()); err != nil {
		return err
	}
	if err := crds.Install(ctx, c.extensions); err != nil {
		return err
	}
	for _, manifest := range neededManifests {
		if err := c.Apply(ctx, manifest); err != nil {
			return fmt.Errorf("install what agent and operator need: %w", err)
		}
	}
	for _, n := range c.Nodes() {
		if err := n.CopyFile(ctx, filepath.Join(programs, filepath.Base(HookPath)), HookPath); err != nil {
			return fmt.Errorf("gate hook of %s: %w", n.Name(), err)
		}
		for _, account := range []string{agentAccount, operatorAccount} {
			if err := c.writeKubeconfig(ctx, n, account); err != nil {
				return fmt.Errorf("kubeconfig of %s on %s: %w", account, n.Name(), err)
			}
		}
	}
	return nil
}

// Uninstall stops the agents on all nodes, takes the gate hook from these, and deletes what Install has made in the cluster.
func (c *Cluster) Uninstall(ctx context.Context) error {
	for _, n := range c.Nodes() {
		if state, err := n.Process(ctx, Agent); err == nil && state.Running {
			if _, err := n.Stop(ctx, Agent); err != nil {
				return fmt.Errorf("stop the agent on %s: %w", n.Name(), err)
			}
		}
		if _, err := n.Run(ctx, "rm -rf "+filepath.Dir(HookPath)); err != nil {
			return fmt.Errorf("gate hook of %s: %w", n.Name(), err)
		}
	}
	for _, manifest := range neededManifests {
		if err := c.Delete(ctx, manifest); err != nil {
			return fmt.Errorf("delete what agent and operator need: %w", err)
		}
	}
	return c.DeleteCRDs(ctx)
}

// DeleteCRDs deletes the CRDs that the driver uses with all objects of theirs, and returns when they are gone.
func (c *Cluster) DeleteCRDs(ctx context.Context) error {
	names := []string{ciliumNodeCRD}
	for _, crd := range crds.Objects() {
		names = append(names, crd.Name)
	}
	for _, name := range names {
		definitions := c.extensions.CustomResourceDefinitions()
		err := wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			err := definitions.Delete(ctx, name, metav1.DeleteOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return false, err
		})
		if err != nil {
			return fmt.Errorf("delete CRD %s: %w", name, err)
		}
	}
	c.mapper.Reset()
	return nil
}

// copyPrograms copies the programs into the directory that all nodes see. A file that a node runs is not written to
// but replaced.
func copyPrograms(from, to string) error {
	for _, name := range []string{Agent, Operator, dbg} {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return fmt.Errorf("%w: make build makes it", err)
		}
		next := filepath.Join(to, name+".new")
		if err := os.WriteFile(next, data, 0o755); err != nil {
			return err
		}
		if err := os.Rename(next, filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

func kubeconfigPath(account string) string { return "/etc/kubernetes/" + account + ".kubeconfig" }

// writeKubeconfig gives what runs on the node as the service account an identity, as a pod there has it.
func (c *Cluster) writeKubeconfig(ctx context.Context, n *lab.Node, account string) error {
	node, err := c.Client.CoreV1().Nodes().Get(ctx, n.Name(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	seconds := int64(tokenSeconds)
	token, err := c.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: &seconds,
			BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a token: %w", err)
	}
	admin, err := n.ReadFile(ctx, lab.AdminKubeconfig)
	if err != nil {
		return err
	}
	kubeconfig, err := clientcmd.Load(admin)
	if err != nil {
		return err
	}
	for name := range kubeconfig.AuthInfos {
		kubeconfig.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	}
	data, err := clientcmd.Write(*kubeconfig)
	if err != nil {
		return err
	}
	return n.WriteFile(ctx, kubeconfigPath(account), data, 0o600)
}

// StartAgent starts the agent on a node. Flags are added to those it needs there.
func (c *Cluster) StartAgent(ctx context.Context, n *lab.Node, flags ...string) error {
	return n.Start(ctx, Agent, AgentCommand(n, flags...)...)
}

// AgentCommand is the agent's command line on a node. Flags are added to those it needs there.
func AgentCommand(n *lab.Node, flags ...string) []string {
	return append([]string{
		filepath.Join(lab.ShareDir, Agent), "--enable-network-driver", "--node-name=" + n.Name(),
		"--k8s-kubeconfig-path=" + kubeconfigPath(agentAccount), "--prometheus-serve-addr=127.0.0.1:9962",
		"--gate-hook-path=" + HookPath,
	}, flags...)
}

// RestartAgent starts the agent on a node after stopping one that runs there.
func (c *Cluster) RestartAgent(ctx context.Context, n *lab.Node, flags ...string) error {
	if state, err := n.Process(ctx, Agent); err == nil && state.Running {
		if _, err := n.Stop(ctx, Agent); err != nil {
			return fmt.Errorf("stop the agent on %s: %w", n.Name(), err)
		}
	}
	return c.StartAgent(ctx, n, flags...)
}

// StartOperator starts the operator on a node, with these flags too. As in a pod, it does not share its socket directory with the agent.
func (c *Cluster) StartOperator(ctx context.Context, n *lab.Node, flags ...string) error {
	return n.Start(ctx, Operator, "unshare", "--mount", "sh", "-c", fmt.Sprintf(
		"mkdir -p /run/cilium && mount -t tmpfs operator /run/cilium && exec %s --enable-network-driver --k8s-kubeconfig-path=%s %s",
		filepath.Join(lab.ShareDir, Operator), kubeconfigPath(operatorAccount), strings.Join(flags, " ")))
}

// StopOperator stops the operator on a node.
func (c *Cluster) StopOperator(ctx context.Context, n *lab.Node) error {
	if _, err := n.Stop(ctx, Operator); err != nil {
		return fmt.Errorf("stop the operator on %s: %w", n.Name(), err)
	}
	return nil
}

// Dbg runs cilium-dbg on a node and returns what it prints.
func (c *Cluster) Dbg(ctx context.Context, n *lab.Node, args ...string) (string, error) {
	return n.Run(ctx, filepath.Join(lab.ShareDir, dbg)+" "+strings.Join(args, " "))
}

// DumpTable returns the rows of a StateDB table of a node's agent.
func (c *Cluster) DumpTable(ctx context.Context, n *lab.Node, table string) (json.RawMessage, error) {
	return DumpTable(ctx, n, debugapi.DefaultSocketPath, table)
}

// DumpTable returns the rows of a StateDB table of the agent whose socket is at a path of the node.
func DumpTable(ctx context.Context, n *lab.Node, socket, table string) (json.RawMessage, error) {
	body, err := n.GetSocket(ctx, socket, "/dump/"+table)
	if err != nil {
		return nil, err
	}
	var tables map[string]json.RawMessage
	if err := json.Unmarshal(body, &tables); err != nil {
		return nil, fmt.Errorf("table %s of %s: %w", table, n.Name(), err)
	}
	return tables[table], nil
}

// Apply applies YAML documents. Objects of a namespaced kind without a namespace go to the default one.
func (c *Cluster) Apply(ctx context.Context, yaml []byte) error {
	return c.each(ctx, yaml, func(objects dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		_, err := objects.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: "lab", Force: true})
		return err
	})
}

// Delete deletes the objects of YAML documents; what is gone already is no error.
func (c *Cluster) Delete(ctx context.Context, yaml []byte) error {
	return c.each(ctx, yaml, func(objects dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		err := objects.Delete(ctx, object.GetName(), metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// mappingOf finds the resource of a kind. The API server tells of a kind some time after its definition is established.
func (c *Cluster) mappingOf(ctx context.Context, kind schema.GroupVersionKind) (mapping *meta.RESTMapping, err error) {
	_ = wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, 30*time.Second, true, func(context.Context) (done bool, _ error) {
		if mapping, err = c.mapper.RESTMapping(kind.GroupKind(), kind.Version); meta.IsNoMatchError(err) {
			c.mapper.Reset()
			return false, nil
		}
		return true, nil
	})
	return mapping, err
}

func (c *Cluster) each(ctx context.Context, yaml []byte, do func(dynamic.ResourceInterface, *unstructured.Unstructured) error) error {
	decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(yaml), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("decode manifest: %w", err)
		}
		if len(object.Object) == 0 {
			continue
		}
		kind := object.GroupVersionKind()
		mapping, err := c.mappingOf(ctx, kind)
		if err != nil {
			return fmt.Errorf("%s %s: %w", kind.Kind, object.GetName(), err)
		}
		var objects dynamic.ResourceInterface = c.Dynamic.Resource(mapping.Resource)
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			ns := object.GetNamespace()
			if ns == "" {
				ns = metav1.NamespaceDefault
			}
			objects = c.Dynamic.Resource(mapping.Resource).Namespace(ns)
		}
		if err := do(objects, object); err != nil {
			return fmt.Errorf("%s %s: %w", kind.Kind, object.GetName(), err)
		}
	}
}
