// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/version"
)

// pageSize is how many objects are asked for at once. A slice of 64 devices has about 50 kB.
const pageSize = 100

// ViewerRole is the ClusterRole that the chart makes for those who use the plugin.
const ViewerRole = "cilium-network-driver-viewer"

// cluster reads the API server.
type cluster struct {
	kube       kubernetes.Interface
	custom     rest.Interface
	parameters runtime.ParameterCodec
}

func connect(config *genericclioptions.ConfigFlags) (*cluster, error) {
	restConfig, err := config.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	restConfig = rest.CopyConfig(restConfig)
	restConfig.UserAgent = "kubectl-ndev/" + version.Version
	// One page is asked for after the other; the API server limits by itself what is too much for it.
	restConfig.QPS = -1
	custom, parameters, err := client.NewCustom(restConfig)
	if err != nil {
		return nil, err
	}
	restConfig.ContentType = runtime.ContentTypeProtobuf
	restConfig.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	kube, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	return &cluster{kube: kube, custom: custom, parameters: parameters}, nil
}

// each visits the objects that a list has, page by page, so that no more than two pages are in memory. What it visits must not be kept.
func each[T any](ctx context.Context, what string, options metav1.ListOptions,
	list func(context.Context, metav1.ListOptions) (runtime.Object, error), visit func(*T),
) error {
	pages := pager.New(list)
	pages.PageSize, pages.PageBufferSize = pageSize, 1
	err := pages.EachListItem(ctx, options, func(object runtime.Object) error {
		item, ok := any(object).(*T)
		if !ok {
			return fmt.Errorf("%T is not what was asked for", object)
		}
		visit(item)
		return nil
	})
	return explain("list "+what, err)
}

func (c *cluster) customList(resource string, into func() runtime.Object) func(context.Context, metav1.ListOptions) (runtime.Object,
	error) {
	return func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		list := into()
		err := c.custom.Get().Resource(resource).VersionedParams(&options, c.parameters).Do(ctx).Into(list)
		return list, err
	}
}

// nodeConfigs visits that of the node, or all of them where the node is empty.
func (c *cluster) nodeConfigs(ctx context.Context, node string, visit func(*v2alpha1.CiliumNetworkDriverNodeConfig)) error {
	var options metav1.ListOptions
	if node != "" {
		options.FieldSelector = fields.OneTermEqualSelector("metadata.name", node).String()
	}
	list := c.customList(v2alpha1.NodeConfigResource, func() runtime.Object { return &v2alpha1.CiliumNetworkDriverNodeConfigList{} })
	return each(ctx, "NodeConfigs", options, list, visit)
}

func (c *cluster) networks(ctx context.Context, visit func(*v2alpha1.CiliumNetworkDriverNetwork)) error {
	list := c.customList(v2alpha1.NetworkResource, func() runtime.Object { return &v2alpha1.CiliumNetworkDriverNetworkList{} })
	return each(ctx, "Networks", metav1.ListOptions{}, list, visit)
}

// addresses visits those of the node.
func (c *cluster) addresses(ctx context.Context, node string, visit func(*v2alpha1.CiliumNetworkDriverAddress)) error {
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.node", node).String()}
	list := c.customList(v2alpha1.AddressResource, func() runtime.Object { return &v2alpha1.CiliumNetworkDriverAddressList{} })
	return each(ctx, "Addresses", options, list, visit)
}

// explain says what to do about a refusal.
func explain(attempt string, err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return fmt.Errorf("%s: %w; whoever uses the plugin needs the ClusterRole %s", attempt, err, ViewerRole)
	case apierrors.IsResourceExpired(err):
		return fmt.Errorf("%s: it took longer than the API server keeps a list, try again: %w", attempt, err)
	case isAbsent(err):
		return fmt.Errorf("%s: the cluster does not have this resource, is the network driver installed? %w", attempt, err)
	}
	return fmt.Errorf("%s: %w", attempt, err)
}

// isAbsent says whether a list failed for want of the resource as such.
func isAbsent(err error) bool { return apierrors.IsNotFound(err) || meta.IsNoMatchError(err) }
