// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networks

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// NewReader returns the reader for a real API server.
func NewReader(core coreclient.CoreV1Interface) Reader { return client{core} }

type client struct{ core coreclient.CoreV1Interface }

// GetNetwork implements [Reader], by the client of another group, so that the budget of its requests counts for both.
func (c client) GetNetwork(ctx context.Context, name string) (*v2alpha1.CiliumNetworkDriverNetwork, error) {
	version := v2alpha1.SchemeGroupVersion
	raw, err := c.core.RESTClient().Get().
		AbsPath("apis", version.Group, version.Version, v2alpha1.NetworkResource, name).
		SetHeader("Accept", runtime.ContentTypeJSON). // custom resources are not served as protobuf
		Do(ctx).Raw()
	if err != nil {
		return nil, err
	}
	network := &v2alpha1.CiliumNetworkDriverNetwork{}
	if err := json.Unmarshal(raw, network); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	return network, nil
}

// NamespaceLabels implements [Reader].
func (c client) NamespaceLabels(ctx context.Context, namespace string) (labels.Set, error) {
	found, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return found.Labels, nil
}
