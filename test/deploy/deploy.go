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

	authenticationv1 "k8s.io/api/authentication/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/cilium/networkdriver/api/crds"
	manifests "github.com/cilium/networkdriver/install/kubernetes"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/test/lab"
)

// Agent is the name of the agent as a daemon of a node, and of its program.
const Agent = "cilium-agent"

const (
	dbg            = "cilium-dbg"
	kubeconfigPath = "/etc/kubernetes/cilium-network-driver.kubeconfig"
	account        = "cilium-network-driver"
	namespace      = "kube-system"
	// tokenSeconds is how long an agent's token is good for: longer than a demo is looked at.
	tokenSeconds = 7 * 24 * 3600
)

// Cluster is a lab in which the driver is installed.
type Cluster struct {
	*lab.Lab
	Client  kubernetes.Interface
	Dynamic dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

// Install takes the programs that make build has put into a directory to the lab's nodes, and installs what the
// cluster needs. No agent runs yet.
func Install(ctx context.Context, l *lab.Lab, programs string) (*Cluster, error) {
	c, config, err := connect(l)
	if err != nil {
		return nil, err
	}
	if err := copyPrograms(programs, l.ShareDir()); err != nil {
		return nil, err
	}
	extensions, err := apiextensionsclient.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	if err := crds.Install(ctx, extensions); err != nil {
		return nil, err
	}
	if err := c.Apply(ctx, manifests.RBAC); err != nil {
		return nil, fmt.Errorf("install the agent's rights: %w", err)
	}
	for _, n := range l.Nodes() {
		if err := c.writeKubeconfig(ctx, config, n); err != nil {
			return nil, fmt.Errorf("kubeconfig of the agent on %s: %w", n.Name(), err)
		}
	}
	return c, nil
}

// connect returns the lab with clients for it.
func connect(l *lab.Lab) (*Cluster, *rest.Config, error) {
	config, err := l.RESTConfig()
	if err != nil {
		return nil, nil, err
	}
	c := &Cluster{Lab: l}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, err
	}
	c.Client = client
	if c.Dynamic, err = dynamic.NewForConfig(config); err != nil {
		return nil, nil, err
	}
	c.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	return c, config, nil
}

// copyPrograms copies the programs into the directory that all nodes see. A file that a node runs is not written to
// but replaced.
func copyPrograms(from, to string) error {
	for _, name := range []string{Agent, dbg} {
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

// writeKubeconfig gives the node's agent an identity.
func (c *Cluster) writeKubeconfig(ctx context.Context, config *rest.Config, n *lab.Node) error {
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
	return n.WriteFile(ctx, kubeconfigPath, data, 0o600)
}

// StartAgent starts the agent on a node. Flags are added to those it needs there.
func (c *Cluster) StartAgent(ctx context.Context, n *lab.Node, flags ...string) error {
	args := append([]string{
		filepath.Join(lab.ShareDir, Agent), "--enable-network-driver", "--node-name=" + n.Name(),
		"--k8s-kubeconfig-path=" + kubeconfigPath, "--prometheus-serve-addr=127.0.0.1:9962",
	}, flags...)
	return n.Start(ctx, Agent, args...)
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

// Dbg runs cilium-dbg on a node and returns what it prints.
func (c *Cluster) Dbg(ctx context.Context, n *lab.Node, args ...string) (string, error) {
	return n.Run(ctx, filepath.Join(lab.ShareDir, dbg)+" "+strings.Join(args, " "))
}

// DumpTable returns the rows of a StateDB table of a node's agent.
func (c *Cluster) DumpTable(ctx context.Context, n *lab.Node, table string) (json.RawMessage, error) {
	body, err := n.GetSocket(ctx, debugapi.DefaultSocketPath, "/dump/"+table)
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
		mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
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
