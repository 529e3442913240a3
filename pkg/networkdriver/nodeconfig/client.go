// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package nodeconfig connects the agent with the one
// CiliumNetworkDriverNodeConfig that has its node's name: a Watcher hands its
// changes to the driver, a StatusWriter brings the driver's status back.
//
// Neither costs the API server anything that grows with the cluster. The
// watch is limited to the one name, and the status is written when it has
// changed, at a limited rate, without reading it before.
package nodeconfig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/client"
)

// errReplaced says that the object is gone and that there is another one by the
// same name.
var errReplaced = errors.New("there is another object by the same name")

// fieldManager is on record for the status fields that StatusWriter sets.
const fieldManager = "cilium-network-driver-agent"

// Client reads and writes node configs.
type Client struct {
	rest   rest.Interface
	params runtime.ParameterCodec
}

// NewClient returns a client for the API server of config, which is not
// changed.
func NewClient(config *rest.Config) (*Client, error) {
	custom, params, err := client.NewCustom(config)
	if err != nil {
		return nil, fmt.Errorf("node configs: %w", err)
	}
	return &Client{rest: custom, params: params}, nil
}

func (c *Client) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	list := &v2alpha1.CiliumNetworkDriverNodeConfigList{}
	err := c.rest.Get().
		Resource(v2alpha1.NodeConfigResource).
		VersionedParams(&options, c.params).
		Do(ctx).
		Into(list)
	return list, err
}

func (c *Client) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch = true
	return c.rest.Get().
		Resource(v2alpha1.NodeConfigResource).
		VersionedParams(&options, c.params).
		Watch(ctx)
}

// writeStatus replaces the status of the object with the name and the UID. A
// successor by the same name is left alone, and errReplaced returned. (Server-side
// apply would not do: it ignores the UID when it writes a status.)
func (c *Client) writeStatus(ctx context.Context, name string, uid types.UID, status *v2alpha1.CiliumNetworkDriverNodeConfigStatus) error {
	body, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": uid},
		{"op": "add", "path": "/status", "value": status},
	})
	if err != nil {
		return err
	}
	err = c.rest.Patch(types.JSONPatchType).
		Resource(v2alpha1.NodeConfigResource).
		Name(name).
		SubResource("status").
		VersionedParams(&metav1.PatchOptions{FieldManager: fieldManager}, c.params).
		Body(body).
		Do(ctx).
		Error()
	if client.IsPatchTestFailed(err) {
		return errReplaced
	}
	return err
}
