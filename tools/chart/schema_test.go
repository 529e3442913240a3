// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/strvals"
)

// TestSchema sets one value as --set would, and looks for its name in what Helm says.
func TestSchema(t *testing.T) {
	for _, test := range []struct{ set, path, why string }{
		{"networkDriver.enabled=yes", "/networkDriver/enabled", "want boolean"},
		{"networkdriver.enabled=true", "", "'networkdriver' not allowed"},
		{"networkDriver.enable=true", "/networkDriver", "'enable' not allowed"},
		{"driverNames=networkdriver.cilium.io", "/driverNames", "want array"},
		{"driverNames={}", "/driverNames/0", "does not match pattern"},
		{"driverNames={Nics}", "/driverNames/0", "does not match pattern"},
		{"driverNames={a.b,a.b}", "/driverNames", "items at"},
		{"image.pullPolicy=Sometimes", "/image/pullPolicy", "must be one of 'Always', 'IfNotPresent', 'Never'"},
		{"image.tag=a b", "/image/tag", "does not match pattern"},
		{"logFormat=xml", "/logFormat", "must be one of 'text', 'json'"},
		{"ciliumNodes.create=yes", "/ciliumNodes/create", "must be one of 'auto', true, false"},
		{"agent.image.digest=sha256:1", "/agent/image/digest", "does not match pattern"},
		{"agent.kubeletRootDir=var/lib/kubelet", "/agent/kubeletRootDir", "does not match pattern"},
		{"agent.prometheus.port=99999", "/agent/prometheus/port", "want 65,535"},
		{"agent.prometheus.port=metrics", "/agent/prometheus/port", "want integer"},
		{"agent.updateStrategy.rollingUpdate.maxSurge=1", "/agent/updateStrategy/rollingUpdate/maxSurge", "must be one of 0"},
		{"agent.nriPluginIndex=5", "/agent/nriPluginIndex", "want string"},
		{"agent.extraConfig.a.b=c", "/agent/extraConfig/a", "got object"},
		{"agent.capabilities={cap_net_admin}", "/agent/capabilities/0", "does not match pattern"},
		{"agent.kubeletRootDir=/var/lib/kubelet #b", "/agent/kubeletRootDir", "does not match pattern"},
		{"agent.nriSocketPath=/nri.sock", "/agent/nriSocketPath", "does not match pattern"},
		{"agent.gateHook=true", "/agent/gateHook", "want object"},
		{"agent.gateHook.hostDir=/", "/agent/gateHook/hostDir", "does not match pattern"},
		{"agent.gateHook.hostDir=/usr/bin", "/agent/gateHook/hostDir", "not"}, // the agent's own is there
		{"agent.priorityClassName=a: b", "/agent/priorityClassName", "does not match pattern"},
		{`agent.podLabels.app\.kubernetes\.io/name=x`, "/agent/podLabels/app.kubernetes.io~1name", "false schema"},
		{"operator.podAnnotations.checksum/config=x", "/operator/podAnnotations/checksum~1config", "false schema"},
		{"networkDriver=null", "", "missing property 'networkDriver'"},
		{"driverNames=null", "", "missing property 'driverNames'"},
		{"admissionPolicies.agents=null", "/admissionPolicies", "missing property 'agents'"},
		{"operator.replicas=0", "/operator/replicas", "minimum"},
		{"operator.leaderElection.leaseDuration=15", "/operator/leaderElection/leaseDuration", "want string"},
		{"operator.leaderElection.leaseDuration=15 s", "/operator/leaderElection/leaseDuration", "does not match pattern"},
		{"operator.serviceAccount.name=Operator", "/operator/serviceAccount/name", "does not match pattern"},
		{"amdHostDevice.cniBinDir=", "/amdHostDevice/cniBinDir", "does not match pattern"},
		{"prometheus.podMonitor.interval=often", "/prometheus/podMonitor/interval", "does not match pattern"},
	} {
		t.Run(test.set, func(t *testing.T) {
			values, err := strvals.Parse(test.set)
			require.NoError(t, err)
			_, err = Render(values, Options{})
			require.ErrorContains(t, err, "at '"+test.path+"'")
			require.ErrorContains(t, err, test.why)
		})
	}
}

// TestNoValue takes away one value after the other, as `--set value=null` does, and as `--reuse-values` does with those
// that a new version of the chart has added. It must not be without the admission policies in silence.
func TestNoValue(t *testing.T) {
	c, err := Load()
	require.NoError(t, err)
	var try func(path []string, values map[string]any)
	try = func(path []string, values map[string]any) {
		for name, value := range values {
			here := append(slices.Clone(path), name)
			without := map[string]any{name: nil}
			for _, outer := range slices.Backward(path) {
				without = map[string]any{outer: without}
			}
			_, err := Render(without, Options{})
			if mayLack[name] {
				require.NoError(t, err, here)
				continue
			}
			require.ErrorContains(t, err, "missing property '"+name+"'", here)
			if group, ok := value.(map[string]any); ok {
				try(here, group)
			}
		}
	}
	try(nil, c.Values)
}

// mayLack are the values that may be missing: those with Kubernetes' form, which has its own defaults, and those that
// are empty by default.
var mayLack = map[string]bool{
	"tag": true, "digest": true, "imagePullSecrets": true, "annotations": true, "labels": true, "extraConfig": true, "extraEnv": true,
	"appArmorProfile": true, "seLinuxOptions": true, "updateStrategy": true, "nodeSelector": true, "affinity": true, "tolerations": true,
	"resources": true, "podAnnotations": true, "podLabels": true,
}

// TestSchemaIsComplete compares the schema's properties with the default values. The other direction is the
// schema's own work, as it allows nothing that it does not have.
func TestSchemaIsComplete(t *testing.T) {
	c, err := Load()
	require.NoError(t, err)
	var schema map[string]any
	require.NoError(t, json.Unmarshal(c.Schema, &schema))
	var compare func(path []string, schema map[string]any, value any)
	compare = func(path []string, schema map[string]any, value any) {
		properties, _ := schema["properties"].(map[string]any)
		values, isMap := value.(map[string]any)
		if !isMap || len(properties) == 0 || schema["additionalProperties"] != false {
			return
		}
		for _, name := range slices.Sorted(maps.Keys(properties)) {
			here := append(slices.Clone(path), name)
			full := strings.Join(here, ".")
			if full == "global" || optional[full] {
				continue // what Helm adds, and parts of values whose form is Kubernetes'
			}
			require.Contains(t, values, name, "values.yaml lacks %s", full)
			compare(here, properties[name].(map[string]any), values[name])
		}
	}
	compare(nil, schema, c.Values)
}

// optional are parts of values that have Kubernetes' form and no default.
var optional = map[string]bool{
	"agent.appArmorProfile.localhostProfile": true, "agent.seLinuxOptions.role": true, "agent.seLinuxOptions.user": true,
	"agent.resources.limits": true, "operator.resources.limits": true,
}
