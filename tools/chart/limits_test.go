// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
	drivertypes "github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// createClass tries to create a DeviceClass whose configurations have these parameters of a driver, byte by byte.
func (c *cluster) createClass(t *testing.T, driver string, parameters ...string) error {
	t.Helper()
	configs := make([]string, len(parameters))
	for i, p := range parameters {
		configs[i] = fmt.Sprintf(`{"opaque":{"driver":%q,"parameters":%s}}`, driver, p)
	}
	return c.ResourceV1().RESTClient().Post().Resource("deviceclasses").Param("dryRun", "All").SetHeader("Content-Type", "application/json").
		Body(fmt.Appendf(nil, `{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"x"},"spec":{"config":[%s]}}`,
			strings.Join(configs, ","))).Do(t.Context()).Error()
}

// testNumberForms has numbers that YAML cannot say: what the policy lets pass is what the agent takes.
func (c *cluster) testNumberForms(t *testing.T) {
	for _, number := range []string{"-0", "4094", "1e3", "1E2", "5.0", "0.5e1", "-0.0", "4.094e3", "99999999999999999999", "-99999999999999999999", "1e308"} {
		parameters := fmt.Sprintf(`{"vlan":%s}`, number)
		_, wrong := drivertypes.ParseDeviceConfig([]byte(parameters))
		err := c.createClass(t, v2alpha1.DefaultDriverName, parameters)
		if wrong == nil {
			require.NoError(t, err, number)
			continue
		}
		require.ErrorContains(t, err, "is not a whole number from 0 to 4094", number)
		require.NoError(t, c.createClass(t, "other.example.com", parameters), "not ours: %s", number)
	}
}

// testLargestParameters has as many and as large configurations as the API server takes. Checking an object has a
// budget, and one that needs more is refused, whosever it is.
func (c *cluster) testLargestParameters(t *testing.T) {
	const size = resourceapi.OpaqueParametersMaxLength
	repeated := func(parameters string) []string {
		all := make([]string, resourceapi.DeviceConfigMaxSize)
		for i := range all {
			all[i] = parameters
		}
		return all
	}
	manyFields := func(value string) string {
		var fields []string
		for n, i := 0, 0; n < size-100; i++ {
			fields = append(fields, fmt.Sprintf(`"k%d":%s`, i, value))
			n += len(fields[i]) + 1
		}
		return "{" + strings.Join(fields, ",") + "}"
	}
	longField := fmt.Sprintf(`{%q:1}`, strings.Repeat("k", size-100))
	longName := fmt.Sprintf(`{"podIfName":%q}`, strings.Repeat("n", size-100))
	longValue := fmt.Sprintf(`{"vlan":%q}`, strings.Repeat("n", size-100))
	nested := `{"a":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}"
	for _, parameters := range []string{manyFields("1"), manyFields(`[{"a":null}]`), longField, longName, longValue, nested} {
		require.True(t, json.Valid([]byte(parameters)))
		require.NoError(t, c.createClass(t, "other.example.com", repeated(parameters)...), "not ours: %.40s", parameters)
	}
	require.NoError(t, c.createClass(t, v2alpha1.DefaultDriverName, repeated(`{"vlan":4094,"podIfName":"0123456789abcde"}`)...))
	list := func(n int, item string) string { return "[" + strings.Repeat(item+",", n-1) + item + "]" }
	most := `{"vlan":4094,"addresses":` + list(16, `"2001:db8:ffff:ffff:ffff:ffff:ffff:1/112"`) +
		`,"routes":` + list(64, `{"to":"2001:db8:eeee:eeee:eeee:eeee:eeee:1/128","via":"2001:db8:ffff:ffff:ffff:ffff:ffff:2","metric":2147483647}`) + `}`
	require.NoError(t, c.createClass(t, v2alpha1.DefaultDriverName, repeated(most)...))
	longAddress := fmt.Sprintf(`{"addresses":[%q]}`, strings.Repeat("1", size-100))
	longRoute := fmt.Sprintf(`{"routes":[{"to":%q,"via":"192.0.2.1"}]}`, strings.Repeat("1", size-100))
	for _, parameters := range []string{manyFields("1"), longField, longName, longValue, longAddress, longRoute, `{"addresses":` + list(size/8, `"1"`) + `}`} {
		_, wrong := drivertypes.ParseDeviceConfig([]byte(parameters))
		require.Error(t, wrong)
		words := wrong.Error()
		if parameters == manyFields("1") {
			words = `unknown field "k` // any of them
		}
		require.ErrorContains(t, c.createClass(t, v2alpha1.DefaultDriverName, parameters), words, "%.40s", parameters)
		require.ErrorContains(t, c.createClass(t, v2alpha1.DefaultDriverName, repeated(parameters)...), words, "%.40s", parameters)
	}
}
