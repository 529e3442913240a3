// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package crdcompat

import (
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

const things = `
metadata: {name: things.example.com}
spec:
  group: example.com
  names: {kind: Thing, listKind: ThingList, plural: things, singular: thing, shortNames: [th], categories: [all]}
  scope: Cluster
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    selectableFields: [{jsonPath: .spec.kind}]
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            required: [kind]
            x-kubernetes-validations: [{rule: "self.count > 1", message: more}]
            properties:
              kind: {type: string, enum: [a, b], default: a}
              name: {type: string, maxLength: 63, minLength: 1, pattern: "^[a-z]*$"}
              note: {type: string, nullable: true}
              count: {type: integer, format: int32, minimum: 1, maximum: 10}
              port: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
              any: {type: object, x-kubernetes-preserve-unknown-fields: true}
              list:
                type: array
                maxItems: 4
                x-kubernetes-list-type: map
                x-kubernetes-list-map-keys: [id]
                items: {type: object, properties: {id: {type: string}}}
              map: {type: object, maxProperties: 4, additionalProperties: {type: string}}
  - name: v1alpha1
    served: true
    storage: false
    schema: {openAPIV3Schema: {type: object}}
`

func load(t *testing.T) *apiextensionsv1.CustomResourceDefinition {
	crd := &apiextensionsv1.CustomResourceDefinition{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(things), crd))
	return crd
}

type (
	spec   = apiextensionsv1.CustomResourceDefinitionSpec
	schema = apiextensionsv1.JSONSchemaProps
)

// at changes the schema at a path of v1.
func at(change func(*schema), path ...string) func(*spec) {
	return func(s *spec) { within(s.Versions[0].Schema.OpenAPIV3Schema, change, path...) }
}

func within(s *schema, change func(*schema), path ...string) {
	switch {
	case len(path) == 0:
		change(s)
	case path[0] == "[]":
		within(s.Items.Schema, change, path[1:]...)
	case path[0] == "{}":
		within(s.AdditionalProperties.Schema, change, path[1:]...)
	default:
		field := s.Properties[path[0]]
		within(&field, change, path[1:]...)
		s.Properties[path[0]] = field
	}
}

func raw(s string) apiextensionsv1.JSON { return apiextensionsv1.JSON{Raw: []byte(s)} }

func TestCompare(t *testing.T) {
	const whole, v1 = "CRD things.example.com: ", "CRD things.example.com, version v1: "
	field := func(path, what string) string {
		return "CRD things.example.com, version v1, field " + path + ": " + what
	}
	tests := []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"nothing", func(*spec) {}, nil},
		{"group", func(s *spec) { s.Group = "x" }, []string{whole + `the group was "example.com" and is "x"`}},
		{"scope", func(s *spec) { s.Scope = "Namespaced" }, []string{whole + `the scope was "Cluster" and is "Namespaced"`}},
		{"kind", func(s *spec) { s.Names.Kind = "Item" }, []string{whole + `the kind was "Thing" and is "Item"`}},
		{"kind of lists", func(s *spec) { s.Names.ListKind = "Items" }, []string{whole + `the kind of lists was "ThingList" and is "Items"`}},
		{"plural", func(s *spec) { s.Names.Plural = "items" }, []string{whole + `the plural was "things" and is "items"`}},
		{"singular", func(s *spec) { s.Names.Singular = "item" }, []string{whole + `the singular was "thing" and is "item"`}},
		{"short name", func(s *spec) { s.Names.ShortNames = []string{"x"} }, []string{whole + `the short name th is gone`}},
		{"category", func(s *spec) { s.Names.Categories = nil }, []string{whole + `the category all is gone`}},
		{"conversion", func(s *spec) {
			s.Conversion = &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.WebhookConverter}
		}, []string{whole + `the conversion was "None" and is "Webhook"`}},
		{"version gone", func(s *spec) { s.Versions = s.Versions[:1] },
			[]string{"CRD things.example.com, version v1alpha1: the version is gone"}},
		{"version not served", func(s *spec) { s.Versions[1].Served = false },
			[]string{"CRD things.example.com, version v1alpha1: the version is no longer served"}},
		{"stored in a new version", func(s *spec) {
			s.Versions[0].Storage = false
			s.Versions = append(s.Versions, apiextensionsv1.CustomResourceDefinitionVersion{Name: "v2", Served: true, Storage: true})
		}, []string{whole + "objects are stored in version v2, which the former definition does not have: there would be no way back to it"}},
		{"status subresource", func(s *spec) { s.Versions[0].Subresources = nil },
			[]string{v1 + "the status subresource was true and is false"}},
		{"scale subresource", func(s *spec) {
			s.Versions[0].Subresources.Scale = &apiextensionsv1.CustomResourceSubresourceScale{SpecReplicasPath: ".a", StatusReplicasPath: ".b"}
		}, []string{v1 + `the scale subresource was none and is {"specReplicasPath":".a","statusReplicasPath":".b"}`}},
		{"selectable field", func(s *spec) { s.Versions[0].SelectableFields = nil },
			[]string{v1 + "the selectable field .spec.kind is gone"}},
		{"no schema", func(s *spec) { s.Versions[1].Schema = nil },
			[]string{`CRD things.example.com, version v1alpha1: the schema was {"openAPIV3Schema":{"type":"object"}} and is none`}},

		{"field gone", at(func(s *schema) { delete(s.Properties, "note") }, "spec"), []string{field("spec.note", "the field is gone")}},
		{"field of items gone", at(func(s *schema) { delete(s.Properties, "id") }, "spec", "list", "[]"),
			[]string{field("spec.list[].id", "the field is gone")}},
		{"type", at(func(s *schema) { s.Type = "integer" }, "spec", "map", "{}"),
			[]string{field("spec.map{}", `the type was "string" and is "integer"`)}},
		{"null", at(func(s *schema) { s.Nullable = false }, "spec", "note"), []string{field("spec.note", "null was allowed and is not")}},
		{"int or string", at(func(s *schema) { s.XIntOrString = false }, "spec", "port"),
			[]string{field("spec.port", "numbers and text were allowed and are not")}},
		{"alternatives", at(func(s *schema) { s.AnyOf = s.AnyOf[:1] }, "spec", "port"), []string{field("spec.port",
			`the schema differs: it was {"anyOf":[{"type":"integer"},{"type":"string"}]} and is {"anyOf":[{"type":"integer"}]}`)}},
		{"unknown fields", at(func(s *schema) { s.XPreserveUnknownFields = nil }, "spec", "any"),
			[]string{field("spec.any", "unknown fields were kept and are dropped")}},
		{"schema of what was anything", at(func(s *schema) { s.Properties = map[string]schema{"x": {Type: "string"}} }, "spec", "any"),
			[]string{field("spec.any.x", "the field could be anything and has a schema")}},
		{"required", at(func(s *schema) { s.Required = append(s.Required, "name") }, "spec"),
			[]string{field("spec.name", "the field could be left out and is required")}},
		{"new and required", at(func(s *schema) {
			s.Required = append(s.Required, "new")
			s.Properties["new"] = schema{Type: "string"}
		}, "spec"), []string{field("spec.new", "the field could be left out and is required")}},
		{"value gone", at(func(s *schema) { s.Enum = s.Enum[1:] }, "spec", "kind"),
			[]string{field("spec.kind", `the value "a" is no longer allowed`)}},
		{"values for anything", at(func(s *schema) { s.Enum = []apiextensionsv1.JSON{raw(`"x"`)} }, "spec", "note"),
			[]string{field("spec.note", `any value was allowed, and ["x"] are now`)}},
		{"default", at(func(s *schema) { s.Default = ptr.To(raw(`"b"`)) }, "spec", "kind"),
			[]string{field("spec.kind", `the default was "a" and is "b"`)}},
		{"no default", at(func(s *schema) { s.Default = nil }, "spec", "kind"),
			[]string{field("spec.kind", `the default was "a" and is none`)}},
		{"pattern", at(func(s *schema) { s.Pattern = "^a" }, "spec", "name"),
			[]string{field("spec.name", `the pattern was "^[a-z]*$" and is "^a"`)}},
		{"pattern for anything", at(func(s *schema) { s.Pattern = "^a" }, "spec", "note"),
			[]string{field("spec.note", `the pattern was none and is "^a"`)}},
		{"format", at(func(s *schema) { s.Format = "ipv4" }, "spec", "note"),
			[]string{field("spec.note", `the format was none and is "ipv4"`)}},
		{"maximum", at(func(s *schema) { s.Maximum = ptr.To(9.0) }, "spec", "count"),
			[]string{field("spec.count", "the maximum was 10 and is 9")}},
		{"minimum", at(func(s *schema) { s.Minimum = ptr.To(2.0) }, "spec", "count"),
			[]string{field("spec.count", "the minimum was 1 and is 2")}},
		{"below the maximum", at(func(s *schema) { s.ExclusiveMaximum = true }, "spec", "count"),
			[]string{field("spec.count", "the maximum itself was allowed and is not")}},
		{"above the minimum", at(func(s *schema) { s.ExclusiveMinimum = true }, "spec", "count"),
			[]string{field("spec.count", "the minimum itself was allowed and is not")}},
		{"multiple", at(func(s *schema) { s.MultipleOf = ptr.To(2.0) }, "spec", "count"),
			[]string{field("spec.count", "what the number is a multiple of was none and is 2")}},
		{"length", at(func(s *schema) { s.MaxLength, s.MinLength = ptr.To[int64](10), ptr.To[int64](2) }, "spec", "name"),
			[]string{field("spec.name", "the greatest length was 63 and is 10"), field("spec.name", "the least length was 1 and is 2")}},
		{"items", at(func(s *schema) { s.MaxItems, s.MinItems, s.UniqueItems = ptr.To[int64](3), ptr.To[int64](1), true }, "spec", "list"),
			[]string{field("spec.list", "the greatest number of items was 4 and is 3"),
				field("spec.list", "the least number of items was none and is 1"),
				field("spec.list", "items could be the same and must differ")}},
		{"map", at(func(s *schema) { s.MaxProperties, s.MinProperties = ptr.To[int64](3), ptr.To[int64](1) }, "spec", "map"),
			[]string{field("spec.map", "the greatest number of fields was 4 and is 3"),
				field("spec.map", "the least number of fields was none and is 1")}},
		{"no map", at(func(s *schema) { s.AdditionalProperties = nil }, "spec", "map"),
			[]string{field("spec.map{}", `it was {"type":"string"} and is nothing`)}},
		{"a map", at(func(s *schema) {
			s.AdditionalProperties = &apiextensionsv1.JSONSchemaPropsOrBool{Schema: &schema{Type: "string"}}
		}, "spec", "any"),
			[]string{field("spec.any{}", `it was nothing and is {"type":"string"}`)}},
		{"keys of a list", at(func(s *schema) { s.XListMapKeys = []string{"id", "x"} }, "spec", "list"), []string{field("spec.list",
			`the schema differs: it was {"x-kubernetes-list-map-keys":["id"],"x-kubernetes-list-type":"map"} and is `+
				`{"x-kubernetes-list-map-keys":["id","x"],"x-kubernetes-list-type":"map"}`)}},
		{"rule", at(func(s *schema) { s.XValidations[0].Rule = "self.count > 2" }, "spec"),
			[]string{field("spec", `the validation rule "self.count > 2" is new or was another`)}},
		{"rule for new objects", at(func(s *schema) { s.XValidations[0].OptionalOldSelf = ptr.To(true) }, "spec"),
			[]string{field("spec", `the validation rule "self.count > 1" is new or was another`)}},
		{"new rule", at(func(s *schema) { s.XValidations = apiextensionsv1.ValidationRules{{Rule: "self != ''"}} }, "spec", "name"),
			[]string{field("spec.name", `the validation rule "self != ''" is new or was another`)}},

		{"additive", func(s *spec) {
			s.Names.ShortNames = append(s.Names.ShortNames, "t")
			s.Versions = append(s.Versions, apiextensionsv1.CustomResourceDefinitionVersion{Name: "v2", Served: true})
			at(func(s *schema) {
				s.Properties["optional"] = schema{Type: "string", Pattern: "^a", XValidations: apiextensionsv1.ValidationRules{{Rule: "x"}}}
				s.Properties["defaulted"] = schema{Type: "string", Default: ptr.To(raw(`"a"`))}
				s.Required = append(slices.DeleteFunc(s.Required, func(f string) bool { return f == "kind" }), "defaulted")
				s.XValidations[0].Message = "another"
				s.Description = "another"
			}, "spec")(s)
			at(func(s *schema) { s.Enum = append(s.Enum, raw(`"c"`)) }, "spec", "kind")(s)
			at(func(s *schema) { s.MaxLength, s.MinLength, s.Pattern, s.Nullable = ptr.To[int64](64), nil, "", true }, "spec", "name")(s)
			at(func(s *schema) { s.Maximum, s.Minimum, s.Format, s.ExclusiveMaximum = ptr.To(11.0), nil, "", true }, "spec", "count")(s)
			at(func(s *schema) { s.Properties["new"] = schema{Type: "string"} }, "spec", "list", "[]")(s)
		}, nil},
		{"no rules", at(func(s *schema) { s.XValidations = nil }, "spec"), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			present := load(t)
			tt.change(&present.Spec)
			var got []string
			for _, b := range Compare([]*apiextensionsv1.CustomResourceDefinition{load(t)}, []*apiextensionsv1.CustomResourceDefinition{present}) {
				got = append(got, b.String())
			}
			require.Equal(t, tt.want, got)
		})
	}
	require.Equal(t, []Break{{CRD: "things.example.com", What: "the definition is gone"}},
		Compare([]*apiextensionsv1.CustomResourceDefinition{load(t)}, nil))
}

// Whatever a schema has is compared, but for what is for readers: a keyword that appears is a difference.
func TestEveryKeywordCounts(t *testing.T) {
	forReaders := []string{"Description", "Title", "Example", "ExternalDocs"}
	wider := []string{"Nullable", "XIntOrString", "XPreserveUnknownFields", "Default", "Properties"} // nothing is lost by them
	// What a value of the field's type at random does not do for.
	only := map[string]any{
		"Required": []string{"x"}, "Items": &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &schema{}},
		"AdditionalProperties": &apiextensionsv1.JSONSchemaPropsOrBool{Schema: &schema{}},
		"XValidations":         apiextensionsv1.ValidationRules{{Rule: "x"}},
		"Enum":                 []apiextensionsv1.JSON{raw("1")}, "AllOf": []schema{{}}, "AnyOf": []schema{{}}, "OneOf": []schema{{}},
	}
	fields := reflect.TypeFor[schema]()
	for i := range fields.NumField() {
		name := fields.Field(i).Name
		is := &schema{}
		value := reflect.ValueOf(is).Elem().Field(i)
		switch v, special := only[name]; {
		case special:
			value.Set(reflect.ValueOf(v))
		case value.Kind() == reflect.Pointer:
			value.Set(reflect.New(value.Type().Elem()))
		case value.Kind() == reflect.Map:
			value.Set(reflect.MakeMap(value.Type()))
			value.SetMapIndex(reflect.ValueOf("x"), reflect.Zero(value.Type().Elem()))
		case value.Kind() == reflect.Slice:
			value.Set(reflect.MakeSlice(value.Type(), 1, 1))
		case value.Kind() == reflect.Bool:
			value.SetBool(true)
		default:
			value.SetString("x")
		}
		var breaks []Break
		comparison{breaks: &breaks}.schema(&schema{}, is)
		switch {
		case slices.Contains(forReaders, name), slices.Contains(wider, name):
			require.Empty(t, breaks, name)
		case name == "ExclusiveMaximum", name == "ExclusiveMinimum":
			require.Len(t, breaks, 1, name)
		default:
			require.NotEmpty(t, breaks, name)
		}
	}
}
