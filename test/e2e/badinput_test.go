// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package e2e

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// TestNodeConfigRefused: what the schema can know is refused by the API server, which names the field.
func TestNodeConfigRefused(t *testing.T) {
	e := start(t)
	for name, tt := range map[string]struct{ spec, field string }{
		"duplicate pool":         {`{"pools": [{"name": "a"}, {"name": "a"}]}`, "spec.pools[1]"},
		"one ifName in two":      {`{"pools": [{"name": "a", "filter": {"ifNames": ["x0"]}}, {"name": "b", "filter": {"ifNames": ["x0"]}}]}`, "spec.pools"},
		"negative vfCount":       {`{"deviceManagerConfigs": {"sriov": {"enabled": true, "ifaces": [{"ifName": "ens1f0", "vfCount": -1}]}}}`, "spec.deviceManagerConfigs.sriov.ifaces[0].vfCount"},
		"vfCount beyond any NIC": {`{"deviceManagerConfigs": {"sriov": {"enabled": true, "ifaces": [{"ifName": "ens1f0", "vfCount": 100000}]}}}`, "spec.deviceManagerConfigs.sriov.ifaces[0].vfCount"},
		"no interface name":      {`{"deviceManagerConfigs": {"sriov": {"enabled": true, "ifaces": [{"ifName": "../ens1f0", "vfCount": 1}]}}}`, "spec.deviceManagerConfigs.sriov.ifaces[0].ifName"},
		"malformed PCI address":  {`{"pools": [{"name": "a", "filter": {"pciAddrs": ["03:00.1"]}}]}`, "spec.pools[0].filter.pciAddrs[0]"},
		"negative count":         {`{"deviceManagerConfigs": {"dummy": {"enabled": true, "count": -1}}}`, "spec.deviceManagerConfigs.dummy.count"},
		"count above 1024":       {`{"deviceManagerConfigs": {"dummy": {"enabled": true, "count": 1025}}}`, "spec.deviceManagerConfigs.dummy.count"},
		"wrong type":             {`{"deviceManagerConfigs": {"dummy": {"enabled": true, "count": "three"}}}`, "spec.deviceManagerConfigs.dummy.count"},
		"unknown manager":        {`{"pools": [{"name": "a", "filter": {"deviceManagers": ["infiniband"]}}]}`, "spec.pools[0].filter.deviceManagers[0]"},
	} {
		object := map[string]any{}
		require.NoError(e, json.Unmarshal([]byte(tt.spec), &object))
		_, err := e.Dynamic.Resource(nodeConfigs).Create(e.ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v2alpha1.SchemeGroupVersion.String(), "kind": v2alpha1.NodeConfigKind,
			"metadata": map[string]any{"name": e.node.Name()}, "spec": object,
		}}, metav1.CreateOptions{})
		require.True(e, apierrors.IsInvalid(err), "%s: %v", name, err)
		require.ErrorContains(e, err, tt.field, name)
	}
}
