// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1_test

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel/model"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/api/v2alpha1/internal/speccases"
)

// server validates objects of one kind with the API server's own code.
type server struct {
	structural *schema.Structural
	schema     validation.SchemaValidator
	rules      *cel.Validator
}

func newServer(t *testing.T, kind string) *server {
	t.Helper()
	for _, object := range crds.Objects() {
		if object.Spec.Names.Kind != kind {
			continue
		}
		props := &apiextensions.JSONSchemaProps{}
		require.NoError(t, apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(object.Spec.Versions[0].Schema.OpenAPIV3Schema, props, nil))
		structural, err := schema.NewStructural(props)
		require.NoError(t, err)
		require.Empty(t, schema.ValidateStructural(nil, structural))
		validator, _, err := validation.NewSchemaValidator(props)
		require.NoError(t, err)
		return &server{structural: structural, schema: validator, rules: cel.NewValidator(structural, true, celconfig.PerCallLimit)}
	}
	t.Fatalf("no definition of %s", kind)
	return nil
}

// admit fills in defaults and returns what the server would refuse.
func (s *server) admit(t *testing.T, object map[string]any) field.ErrorList {
	t.Helper()
	defaulting.Default(object, s.structural)
	errs := validation.ValidateCustomResource(nil, object, s.schema)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s.structural, object)...)
	if len(errs) > 0 {
		return errs
	}
	errs, _ = s.rules.Validate(t.Context(), nil, s.structural, object, nil, celconfig.RuntimeCELCostBudget)
	return errs
}

// TestValidate checks that the schema and Validate agree on every case, for
// node configs and for cluster configs, and name the field at fault.
func TestValidate(t *testing.T) {
	nodeConfigs := newServer(t, v2alpha1.NodeConfigKind)
	clusterConfigs := newServer(t, v2alpha1.ClusterConfigKind)

	for _, test := range speccases.All {
		t.Run(test.Name, func(t *testing.T) {
			t.Run("node config", func(t *testing.T) {
				object := decode(t, v2alpha1.NodeConfigKind, test.Node(), test.YAML, "spec")
				requireRefused(t, nodeConfigs.admit(t, object), "spec", test.Field)
				if test.SchemaOnly {
					return
				}
				config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
				convert(t, object, config)
				requireRefused(t, fieldErrors(t, config.Validate()), "spec", test.Field)
			})
			if test.NodeName != "" {
				return // the name counts in node configs only
			}
			t.Run("cluster config", func(t *testing.T) {
				object := decode(t, v2alpha1.ClusterConfigKind, "workers", test.YAML, "spec", "spec")
				requireRefused(t, clusterConfigs.admit(t, object), "spec.spec", test.Field)
				if test.SchemaOnly {
					return
				}
				config := &v2alpha1.CiliumNetworkDriverClusterConfig{}
				convert(t, object, config)
				requireRefused(t, fieldErrors(t, config.Validate()), "spec.spec", test.Field)
			})
		})
	}
}

// TestValidateNetwork checks the same for networks.
func TestValidateNetwork(t *testing.T) {
	server := newServer(t, v2alpha1.NetworkKind)
	for _, test := range speccases.Networks {
		t.Run(test.Name, func(t *testing.T) {
			object := decode(t, v2alpha1.NetworkKind, test.Node(), test.YAML, "spec")
			if test.GoOnly {
				require.Empty(t, server.admit(t, object))
			} else {
				requireRefused(t, server.admit(t, object), "", test.Field)
			}
			if test.SchemaOnly {
				return
			}
			network := &v2alpha1.CiliumNetworkDriverNetwork{}
			convert(t, object, network)
			requireRefused(t, fieldErrors(t, network.Validate()), "", test.Field)
		})
	}
}

// TestAddresses checks that the schema takes an address under its own name only,
// which is the one that AddressName gives.
func TestAddresses(t *testing.T) {
	server := newServer(t, v2alpha1.AddressKind)
	for _, test := range speccases.Addresses {
		t.Run(test.Name, func(t *testing.T) {
			object := decode(t, v2alpha1.AddressKind, test.Node(), test.Address(), "spec")
			requireRefused(t, server.admit(t, object), "", test.Field)
			if test.Field != "" {
				return
			}
			address := &v2alpha1.CiliumNetworkDriverAddress{}
			convert(t, object, address)
			require.Equal(t, address.Name, v2alpha1.AddressName(address.Spec.Network, netip.MustParseAddr(address.Spec.Address)))
		})
	}
	for addr, block := range map[string]string{
		"192.0.2.255": "192.0.2.0", "2001:db8::ff": "2001-0db8-0000-0000-0000-0000-0000-0000", "2001:db8::1:100": "2001-0db8-0000-0000-0000-0000-0001-0100",
	} {
		require.Equal(t, block, v2alpha1.AddressBlock(netip.MustParseAddr(addr)))
	}
}

// TestSubnetAddresses counts what is given out.
func TestSubnetAddresses(t *testing.T) {
	for _, test := range []struct {
		subnet v2alpha1.NetworkSubnet
		count  int64
		some   string
	}{
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/24"}, 254, "192.0.2.1"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/24", Gateway: "192.0.2.1", Exclude: []string{"192.0.2.2", "192.0.2.128/25"}}, 125, "192.0.2.3"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/31"}, 2, "192.0.2.0"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/30"}, 2, "192.0.2.1"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.7/32"}, 1, "192.0.2.7"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/24", Ranges: []v2alpha1.AddressRange{{From: "192.0.2.0", To: "192.0.2.9"}, {From: "192.0.2.5", To: "192.0.2.19"}}}, 19, "192.0.2.1"},
		{v2alpha1.NetworkSubnet{CIDR: "192.0.2.0/24", Ranges: []v2alpha1.AddressRange{{From: "192.0.2.254", To: "192.0.2.255"}}}, 1, "192.0.2.254"},
		{v2alpha1.NetworkSubnet{CIDR: "2001:db8::/120"}, 255, "2001:db8::1"},
		{v2alpha1.NetworkSubnet{CIDR: "2001:db8::/64"}, math.MaxInt64, "2001:db8::1"},
	} {
		set, err := test.subnet.Addresses()
		require.NoError(t, err)
		require.Equal(t, test.count, v2alpha1.CountAddresses(set), "%+v", test.subnet)
		require.Equal(t, test.some, set.Ranges()[0].From().String(), "%+v", test.subnet)
	}
}

// TestRoutersAreNotGivenOut leaves out the next hops of a network's routes.
func TestRoutersAreNotGivenOut(t *testing.T) {
	spec := v2alpha1.CiliumNetworkDriverNetworkSpec{
		NamespaceSelector: &v2alpha1.LabelSelector{},
		Subnets:           []v2alpha1.NetworkSubnet{{CIDR: "192.0.2.0/29"}, {CIDR: "2001:db8::/125"}, {CIDR: "198.51.100.0/31"}},
		Routes:            []v2alpha1.NetworkRoute{{To: "0.0.0.0/0", Via: "192.0.2.1"}, {To: "::/0", Via: "2001:db8::7"}},
		PolicyRouting:     &v2alpha1.NetworkPolicyRouting{Derive: &v2alpha1.DerivedRoutes{NexthopNetAddrOffset: 6, RouteDstPrefixLen: 16}},
	}
	given := func(i int) []string {
		t.Helper()
		set, err := spec.Addresses(i)
		require.NoError(t, err)
		var ranges []string
		for _, r := range set.Ranges() {
			ranges = append(ranges, r.String())
		}
		return ranges
	}
	require.Equal(t, []string{"192.0.2.2-192.0.2.5"}, given(0))
	require.Equal(t, []string{"2001:db8::1-2001:db8::6"}, given(1))
	require.Equal(t, []string{"198.51.100.0-198.51.100.1"}, given(2))
	for _, offset := range []int64{0, 7, 8, math.MaxUint32} {
		spec.PolicyRouting.Derive.NexthopNetAddrOffset = offset
		require.Equal(t, []string{"192.0.2.2-192.0.2.6"}, given(0))
	}

	network := v2alpha1.CiliumNetworkDriverNetwork{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: spec}
	network.Spec.PolicyRouting = nil
	require.NoError(t, network.Validate())
	network.Spec.Subnets[0].Ranges = []v2alpha1.AddressRange{{From: "192.0.2.1", To: "192.0.2.1"}}
	require.ErrorContains(t, network.Validate(), "spec.subnets[0]: Invalid value: \"192.0.2.0/29\": has no address that could be given out")
}

// TestRulesOnOldestServer compiles the rules as Kubernetes 1.34 does, the oldest
// that the driver works with: a new rule may use what 1.33 has.
func TestRulesOnOldestServer(t *testing.T) {
	env := environment.MustBaseEnvSet(version.MajorMinor(1, 33))
	for _, kind := range []string{v2alpha1.NodeConfigKind, v2alpha1.ClusterConfigKind, v2alpha1.NetworkKind, v2alpha1.AddressKind} {
		requireRulesCompile(t, env, newServer(t, kind).structural, kind, true)
	}
}

func requireRulesCompile(t *testing.T, env *environment.EnvSet, s *schema.Structural, path string, root bool) {
	t.Helper()
	results, err := cel.Compile(s, model.SchemaDeclType(s, root), celconfig.PerCallLimit, env, cel.NewExpressionsEnvLoader())
	require.NoError(t, err, path)
	for i, result := range results {
		require.Nil(t, result.Error, "%s: %s: %v", path, s.XValidations[i].Rule, result.Error)
	}
	if s.Items != nil {
		requireRulesCompile(t, env, s.Items, path+"[]", false)
	}
	for name, property := range s.Properties {
		requireRulesCompile(t, env, &property, path+"."+name, false)
	}
}

// TestMessages checks that Validate says what the schema's rules say.
func TestMessages(t *testing.T) {
	var said []string
	for _, test := range speccases.All {
		if test.SchemaOnly {
			continue
		}
		config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
		convert(t, decode(t, v2alpha1.NodeConfigKind, test.Node(), test.YAML, "spec"), config)
		for _, err := range fieldErrors(t, config.Validate()) {
			said = append(said, err.Detail)
		}
	}
	for _, test := range speccases.Selectors {
		if test.SchemaOnly {
			continue
		}
		config := &v2alpha1.CiliumNetworkDriverClusterConfig{}
		convert(t, withSelector(t, test), config)
		config.Spec.Spec.Default()
		if err := config.Validate(); err != nil {
			for _, err := range fieldErrors(t, err) {
				said = append(said, err.Detail)
			}
		}
	}
	for _, test := range speccases.Networks {
		if test.SchemaOnly {
			continue
		}
		network := &v2alpha1.CiliumNetworkDriverNetwork{}
		convert(t, decode(t, v2alpha1.NetworkKind, test.Node(), test.YAML, "spec"), network)
		for _, err := range fieldErrors(t, network.Validate()) {
			said = append(said, err.Detail)
		}
	}
	for _, kind := range []string{v2alpha1.NodeConfigKind, v2alpha1.ClusterConfigKind, v2alpha1.NetworkKind} {
		messages := ruleMessages(newServer(t, kind).structural)
		require.NotEmpty(t, messages)
		for _, message := range messages {
			require.True(t, slices.ContainsFunc(said, func(detail string) bool { return strings.HasPrefix(detail, message) }),
				"no case makes Validate say %q", message)
		}
	}
}

func ruleMessages(s *schema.Structural) []string {
	var messages []string
	for _, rule := range s.XValidations {
		messages = append(messages, rule.Message)
	}
	if s.Items != nil {
		messages = append(messages, ruleMessages(s.Items)...)
	}
	for _, property := range s.Properties {
		messages = append(messages, ruleMessages(&property)...)
	}
	return messages
}

// TestValidateSelector checks that the schema and Validate agree on node
// selectors too.
func TestValidateSelector(t *testing.T) {
	server := newServer(t, v2alpha1.ClusterConfigKind)
	for _, test := range speccases.Selectors {
		t.Run(test.Name, func(t *testing.T) {
			object := withSelector(t, test)
			requireRefused(t, server.admit(t, object), "spec.nodeSelector", test.Field)
			if test.SchemaOnly {
				return
			}
			config := &v2alpha1.CiliumNetworkDriverClusterConfig{}
			convert(t, object, config)
			requireRefused(t, fieldErrors(t, config.Validate()), "spec.nodeSelector", test.Field)
			if test.Field == "" {
				_, err := metav1.LabelSelectorAsSelector(config.Spec.NodeSelector.AsLabelSelector())
				require.NoError(t, err)
			}
		})
	}

	config := &v2alpha1.CiliumNetworkDriverClusterConfig{}
	config.Spec.Spec.Default()
	require.NoError(t, config.Validate(), "no selector")
	require.Nil(t, config.Spec.NodeSelector.AsLabelSelector())

	// A rule of the schema cannot afford to look at the keys of a map.
	config.Spec.NodeSelector = &v2alpha1.LabelSelector{MatchLabels: map[string]v2alpha1.LabelValue{"a b": ""}}
	require.ErrorContains(t, config.Validate(), `spec.nodeSelector.matchLabels: Invalid value: "a b": must be a label key`)
}

// withSelector makes a cluster config with a case's selector.
func withSelector(t *testing.T, test speccases.Case) map[string]any {
	t.Helper()
	object := decode(t, v2alpha1.ClusterConfigKind, "workers", "{}", "spec", "spec")
	selector := map[string]any{}
	require.NoError(t, yaml.Unmarshal([]byte(test.YAML), &selector))
	object["spec"].(map[string]any)["nodeSelector"] = selector
	return object
}

// TestDefault checks that Default and the schema give the same.
func TestDefault(t *testing.T) {
	object := decode(t, v2alpha1.NodeConfigKind, "worker", "deviceManagerConfigs: {dummy: {enabled: true}}", "spec")
	require.Empty(t, newServer(t, v2alpha1.NodeConfigKind).admit(t, object))
	byServer := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	convert(t, object, byServer)

	spec := v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DeviceManagerConfigs: &v2alpha1.CiliumNetworkDriverDeviceManagerConfig{
			Dummy: &v2alpha1.DummyDeviceManagerConfig{Enabled: true},
		},
	}
	spec.Default()
	require.Equal(t, byServer.Spec, spec)
	require.NoError(t, spec.Validate())

	set := v2alpha1.CiliumNetworkDriverNodeConfigSpec{
		DriverName: "nics.example.com", DraRegistrationRetryInterval: 2, DraRegistrationTimeout: 3, DraRegistrationMaxAttempts: 4,
	}
	kept := set
	kept.Default()
	require.Equal(t, set, kept, "fields that are set stay as they are")
}

// TestFilterSurvives checks that no filter and an empty one stay different
// things through the Go types.
func TestFilterSurvives(t *testing.T) {
	object := decode(t, v2alpha1.NodeConfigKind, "worker", "pools: [{name: none}, {name: all, filter: {}}]", "spec")
	config := &v2alpha1.CiliumNetworkDriverNodeConfig{}
	convert(t, object, config)
	require.Nil(t, config.Spec.Pools[0].Filter)
	require.NotNil(t, config.Spec.Pools[1].Filter)

	raw, err := yaml.Marshal(config.Spec.Pools)
	require.NoError(t, err)
	require.YAMLEq(t, "[{name: none}, {name: all, filter: {}}]", string(raw))
}

// decode makes an object of a kind with a spec given as YAML at a path.
func decode(t *testing.T, kind, name, manifest string, path ...string) map[string]any {
	t.Helper()
	spec := map[string]any{}
	require.NoError(t, yaml.Unmarshal([]byte(manifest), &spec))
	object := map[string]any{
		"apiVersion": v2alpha1.SchemeGroupVersion.String(),
		"kind":       kind,
		"metadata":   map[string]any{"name": name},
	}
	at := object
	for _, step := range path[:len(path)-1] {
		next := map[string]any{}
		at[step], at = next, next
	}
	at[path[len(path)-1]] = integers(spec)
	return object
}

// integers turns the numbers of decoded YAML into what the API server's
// decoder makes of them.
func integers(value any) any {
	switch value := value.(type) {
	case map[string]any:
		for key, item := range value {
			value[key] = integers(item)
		}
	case []any:
		for i, item := range value {
			value[i] = integers(item)
		}
	case float64:
		if whole := int64(value); float64(whole) == value {
			return whole
		}
	}
	return value
}

func convert(t *testing.T, object map[string]any, into any) {
	t.Helper()
	raw, err := yaml.Marshal(object)
	require.NoError(t, err)
	require.NoError(t, yaml.UnmarshalStrict(raw, into))
}

func fieldErrors(t *testing.T, err error) field.ErrorList {
	t.Helper()
	if err == nil {
		return nil
	}
	var aggregate utilerrors.Aggregate
	require.True(t, errors.As(err, &aggregate))
	var errs field.ErrorList
	for _, err := range aggregate.Errors() {
		var fieldError *field.Error
		require.True(t, errors.As(err, &fieldError), "%v has no field", err)
		errs = append(errs, fieldError)
	}
	return errs
}

// requireRefused checks that there is an error at the field under prefix, or
// below it, and none elsewhere. No field means no error.
func requireRefused(t *testing.T, errs field.ErrorList, prefix, wanted string) {
	t.Helper()
	if wanted == "" {
		require.Empty(t, errs)
		return
	}
	require.NotEmpty(t, errs, "nothing refused, wanted an error at %s", wanted)
	wanted = strings.TrimPrefix(fmt.Sprintf("%s.%s", prefix, wanted), ".")
	for _, err := range errs {
		require.True(t, strings.HasPrefix(err.Field, wanted), "%v is not about %s", err, wanted)
	}
}
