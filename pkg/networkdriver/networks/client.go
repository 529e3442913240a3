// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
)

// Client reads networks, and reads and writes addresses.
type Client struct {
	core   coreclient.CoreV1Interface
	custom rest.Interface
	params runtime.ParameterCodec
}

var (
	_ Reader  = (*Client)(nil)
	_ Objects = (*Client)(nil)
)

// NewClient returns the client for the API server of the configuration. Its requests count together with those of core.
func NewClient(config *rest.Config, core coreclient.CoreV1Interface) (*Client, error) {
	config = rest.CopyConfig(config)
	config.RateLimiter = core.RESTClient().GetRateLimiter()
	custom, params, err := client.NewCustom(config)
	if err != nil {
		return nil, fmt.Errorf("networks: %w", err)
	}
	return &Client{core: core, custom: custom, params: params}, nil
}

// ListNetworks implements [Reader].
func (c *Client) ListNetworks(ctx context.Context) ([]v2alpha1.CiliumNetworkDriverNetwork, error) {
	list := &v2alpha1.CiliumNetworkDriverNetworkList{}
	err := c.custom.Get().Resource(v2alpha1.NetworkResource).Do(ctx).Into(list)
	return list.Items, err
}

// NamespaceLabels implements [Reader].
func (c *Client) NamespaceLabels(ctx context.Context, namespace string) (labels.Set, error) {
	found, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return found.Labels, nil
}

// Create implements [Objects].
func (c *Client) Create(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	return c.custom.Post().Resource(v2alpha1.AddressResource).Body(address).Do(ctx).Error()
}

// Get implements [Objects].
func (c *Client) Get(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverAddress, error) {
	address := &v2alpha1.CiliumNetworkDriverAddress{}
	return address, c.custom.Get().Resource(v2alpha1.AddressResource).Name(name).Do(ctx).Into(address)
}

// InBlock implements [Objects]. An API server that is asked for no version looks into its cache at once. Else it asks etcd for the
// present one, waits until its cache has that, and, where that takes seconds, reads all addresses from etcd.
func (c *Client) InBlock(ctx context.Context, network, block string, fresh bool) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	selector := labels.Set{v2alpha1.LabelBlock: block}
	if network != "" {
		selector[v2alpha1.LabelNetwork] = network
	}
	options := metav1.ListOptions{LabelSelector: selector.String()}
	if !fresh {
		options.ResourceVersion = "0"
	}
	return c.list(ctx, options)
}

// Reserved implements [Objects].
func (c *Client) Reserved(ctx context.Context, network, reservation string) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	selector := labels.Set{v2alpha1.LabelNetwork: network, v2alpha1.LabelReservation: reservation}.String()
	return c.list(ctx, metav1.ListOptions{LabelSelector: selector})
}

// OfNode implements [Objects].
func (c *Client) OfNode(ctx context.Context, node string) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	list, err := c.list(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.node", node).String()})
	if apierrors.IsNotFound(err) {
		return nil, nil // a cluster without the definition has no addresses
	}
	return list, err
}

func (c *Client) list(ctx context.Context, options metav1.ListOptions) ([]v2alpha1.CiliumNetworkDriverAddress, error) {
	list := &v2alpha1.CiliumNetworkDriverAddressList{}
	err := c.custom.Get().Resource(v2alpha1.AddressResource).VersionedParams(&options, c.params).Do(ctx).Into(list)
	return list.Items, err
}

// Update implements [Objects].
func (c *Client) Update(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	return c.custom.Put().Resource(v2alpha1.AddressResource).Name(address.Name).Body(address).Do(ctx).Error()
}

// Delete implements [Objects].
func (c *Client) Delete(ctx context.Context, address *v2alpha1.CiliumNetworkDriverAddress) error {
	options := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &address.UID, ResourceVersion: &address.ResourceVersion}}
	err := c.custom.Delete().Resource(v2alpha1.AddressResource).Name(address.Name).Body(options).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
