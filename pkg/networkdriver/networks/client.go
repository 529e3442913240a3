// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// NewClient returns the client for a real API server. It works by the client of another group, so that one budget of requests
// counts for both.
func NewClient(core coreclient.CoreV1Interface) Client { return Client{core} }

// Client reads networks, and reads and writes addresses.
type Client struct{ core coreclient.CoreV1Interface }

var (
	_ Reader  = Client{}
	_ Objects = Client{}
)

// do sends a request for objects of the API group below the path, and decodes the answer into out, if that is not nil.
func (c Client) do(ctx context.Context, request *rest.Request, out any, path ...string) error {
	version := v2alpha1.SchemeGroupVersion
	raw, err := request.AbsPath(append([]string{"apis", version.Group, version.Version}, path...)...).
		SetHeader("Accept", runtime.ContentTypeJSON). // custom resources are not served as protobuf
		SetHeader("Content-Type", runtime.ContentTypeJSON).
		Do(ctx).Raw()
	if err != nil || out == nil {
		return err
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("decode %s: %w", strings.Join(path, "/"), err)
	}
	return nil
}

// GetNetwork implements [Reader].
func (c Client) GetNetwork(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverNetwork, error) {
	network := &v2alpha1.CiliumNetworkDriverNetwork{}
	return network, c.do(ctx, c.core.RESTClient().Get(), network, v2alpha1.NetworkResource, name)
}

// Create implements [Objects].
func (c Client) Create(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	body, err := json.Marshal(address)
	if err != nil {
		return err
	}
	return c.do(ctx, c.core.RESTClient().Post().Body(body), nil, v2alpha1.AddressResource)
}

// Get implements [Objects].
func (c Client) Get(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverAddress, error) {
	address := &v2alpha1.CiliumNetworkDriverAddress{}
	return address, c.do(ctx, c.core.RESTClient().Get(), address, v2alpha1.AddressResource, name)
}

// InBlock implements [Objects].
func (c Client) InBlock(ctx context.Context, network, block string) ([]string, error) {
	list := &metav1.PartialObjectMetadataList{}
	selector := labels.Set{v2alpha1.LabelNetwork: network, v2alpha1.LabelBlock: block}.String()
	err := c.do(ctx, c.core.RESTClient().Get().Param("labelSelector", selector), list, v2alpha1.AddressResource)
	names := make([]string, len(list.Items))
	for i := range list.Items {
		names[i] = list.Items[i].Name
	}
	return names, err
}

// OfNode implements [Objects].
func (c Client) OfNode(ctx context.Context, node string) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	list := &v2alpha1.CiliumNetworkDriverAddressList{}
	selector := fields.OneTermEqualSelector("spec.node", node).String()
	err := c.do(ctx, c.core.RESTClient().Get().Param("fieldSelector", selector), list, v2alpha1.AddressResource)
	if apierrors.IsNotFound(err) {
		return nil, nil // a cluster without the definition has no addresses
	}
	return list.Items, err
}

// Delete implements [Objects].
func (c Client) Delete(ctx context.Context, name string, uid kubetypes.UID) error {
	body, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil {
		return err
	}
	err = c.do(ctx, c.core.RESTClient().Delete().Body(body), nil, v2alpha1.AddressResource, name)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // it is gone, or another one by now
	}
	return err
}

// NamespaceLabels implements [Reader].
func (c Client) NamespaceLabels(ctx context.Context, namespace string) (labels.Set, error) {
	found, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return found.Labels, nil
}
