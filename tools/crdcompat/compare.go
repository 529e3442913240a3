// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package crdcompat says what of CustomResourceDefinitions breaks those who use them as they were released: objects that are stored, and
// manifests and programs that write and read them. Whatever is new and asked of nobody is not among it.
package crdcompat

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/utils/ptr"
)

// Break is one thing that does not go on as it was.
type Break struct {
	// CRD is the definition's name.
	CRD string `json:"crd"`
	// Version is the API version, empty for what concerns all of them.
	Version string `json:"version,omitempty"`
	// Field is the path, with [] for the items of a list and {} for the values of a map; empty for what concerns no field.
	Field string `json:"field,omitempty"`
	// What says what is different.
	What string `json:"what"`
}

func (b Break) String() string {
	where := "CRD " + b.CRD
	if b.Version != "" {
		where += ", version " + b.Version
	}
	if b.Field != "" {
		where += ", field " + b.Field
	}
	return where + ": " + b.What
}

// Compare returns what of the former definitions the present ones break, in the order of the former ones.
func Compare(former, present []*apiextensionsv1.CustomResourceDefinition) []Break {
	var breaks []Break
	for _, was := range former {
		c := comparison{crd: was.Name, breaks: &breaks}
		i := slices.IndexFunc(present, func(is *apiextensionsv1.CustomResourceDefinition) bool { return is.Name == was.Name })
		if i < 0 {
			c.add("the definition is gone")
			continue
		}
		c.definition(&was.Spec, &present[i].Spec)
	}
	return breaks
}

// comparison is a place in the two definitions.
type comparison struct {
	crd, version, field string
	breaks              *[]Break
}

func (c comparison) add(format string, args ...any) {
	*c.breaks = append(*c.breaks, Break{CRD: c.crd, Version: c.version, Field: c.field, What: fmt.Sprintf(format, args...)})
}

// same notes that what has this name is another.
func (c comparison) same(name string, was, is any) {
	if !reflect.DeepEqual(was, is) {
		c.add("%s was %s and is %s", name, show(was), show(is))
	}
}

// kept notes what is no longer among the values of this name.
func (c comparison) kept(name string, was, is []string) {
	for _, v := range was {
		if !slices.Contains(is, v) {
			c.add("%s %s is gone", name, v)
		}
	}
}

func (c comparison) definition(was, is *apiextensionsv1.CustomResourceDefinitionSpec) {
	c.same("the group", was.Group, is.Group)
	c.same("the scope", string(was.Scope), string(is.Scope))
	c.same("the kind", was.Names.Kind, is.Names.Kind)
	c.same("the kind of lists", was.Names.ListKind, is.Names.ListKind)
	c.same("the plural", was.Names.Plural, is.Names.Plural)
	c.same("the singular", was.Names.Singular, is.Names.Singular)
	c.kept("the short name", was.Names.ShortNames, is.Names.ShortNames)
	c.kept("the category", was.Names.Categories, is.Names.Categories)
	if conversion(was) != conversion(is) {
		c.same("the conversion", conversion(was), conversion(is))
	}
	if was.PreserveUnknownFields && !is.PreserveUnknownFields {
		c.add("unknown fields were kept and are dropped")
	}
	for _, old := range was.Versions {
		at := c
		at.version = old.Name
		i := slices.IndexFunc(is.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Name == old.Name })
		if i < 0 {
			at.add("the version is gone")
			continue
		}
		at.versions(&old, &is.Versions[i])
	}
	for _, v := range is.Versions {
		known := slices.ContainsFunc(was.Versions, func(old apiextensionsv1.CustomResourceDefinitionVersion) bool { return old.Name == v.Name })
		if v.Storage && !known {
			c.add("objects are stored in version %s, which the former definition does not have: there would be no way back to it", v.Name)
		}
	}
}

func conversion(d *apiextensionsv1.CustomResourceDefinitionSpec) string {
	if d.Conversion == nil {
		return string(apiextensionsv1.NoneConverter)
	}
	return string(d.Conversion.Strategy)
}

func (c comparison) versions(was, is *apiextensionsv1.CustomResourceDefinitionVersion) {
	if was.Served && !is.Served {
		c.add("the version is no longer served")
	}
	c.same("the status subresource", hasStatus(was), hasStatus(is))
	c.same("the scale subresource", scale(was), scale(is))
	c.kept("the selectable field", selectable(was), selectable(is))
	if was.Schema == nil || was.Schema.OpenAPIV3Schema == nil || is.Schema == nil || is.Schema.OpenAPIV3Schema == nil {
		c.same("the schema", was.Schema, is.Schema)
		return
	}
	c.schema(was.Schema.OpenAPIV3Schema, is.Schema.OpenAPIV3Schema)
}

func hasStatus(v *apiextensionsv1.CustomResourceDefinitionVersion) bool {
	return v.Subresources != nil && v.Subresources.Status != nil
}

func scale(v *apiextensionsv1.CustomResourceDefinitionVersion) *apiextensionsv1.CustomResourceSubresourceScale {
	if v.Subresources == nil {
		return nil
	}
	return v.Subresources.Scale
}

func selectable(v *apiextensionsv1.CustomResourceDefinitionVersion) []string {
	var paths []string
	for _, f := range v.SelectableFields {
		paths = append(paths, f.JSONPath)
	}
	return paths
}

// within is the place of a part of the field.
func (c comparison) within(part string) comparison {
	if c.field != "" && part[0] != '[' && part[0] != '{' {
		part = "." + part
	}
	c.field += part
	return c
}

// schema compares what a field may be. What it does not know must not differ, so that a keyword that nobody thought of is not passed over.
func (c comparison) schema(was, is *apiextensionsv1.JSONSchemaProps) {
	c.same("the type", was.Type, is.Type)
	if was.Nullable && !is.Nullable {
		c.add("null was allowed and is not")
	}
	if was.XIntOrString && !is.XIntOrString {
		c.add("numbers and text were allowed and are not")
	}
	if ptr.Deref(was.XPreserveUnknownFields, false) && !ptr.Deref(is.XPreserveUnknownFields, false) {
		c.add("unknown fields were kept and are dropped")
	}
	c.limits(was, is)
	c.values(was, is)
	c.rules(was.XValidations, is.XValidations)
	c.parts(was, is)
	if old, now := rest(*was), rest(*is); !reflect.DeepEqual(old, now) {
		c.add("the schema differs: it was %s and is %s", show(old), show(now))
	}
}

// limits notes bounds that are narrower.
func (c comparison) limits(was, is *apiextensionsv1.JSONSchemaProps) {
	atMost(c, "the maximum", was.Maximum, is.Maximum)
	atMost(c, "the greatest length", was.MaxLength, is.MaxLength)
	atMost(c, "the greatest number of items", was.MaxItems, is.MaxItems)
	atMost(c, "the greatest number of fields", was.MaxProperties, is.MaxProperties)
	atLeast(c, "the minimum", was.Minimum, is.Minimum)
	atLeast(c, "the least length", was.MinLength, is.MinLength)
	atLeast(c, "the least number of items", was.MinItems, is.MinItems)
	atLeast(c, "the least number of fields", was.MinProperties, is.MinProperties)
	if is.ExclusiveMaximum && !was.ExclusiveMaximum && ptr.Equal(was.Maximum, is.Maximum) {
		c.add("the maximum itself was allowed and is not")
	}
	if is.ExclusiveMinimum && !was.ExclusiveMinimum && ptr.Equal(was.Minimum, is.Minimum) {
		c.add("the minimum itself was allowed and is not")
	}
	if is.UniqueItems && !was.UniqueItems {
		c.add("items could be the same and must differ")
	}
	if is.MultipleOf != nil && !ptr.Equal(was.MultipleOf, is.MultipleOf) {
		c.same("what the number is a multiple of", was.MultipleOf, is.MultipleOf)
	}
}

func atMost[T cmp.Ordered](c comparison, name string, was, is *T) {
	if is != nil && (was == nil || *is < *was) {
		c.same(name, was, is)
	}
}

func atLeast[T cmp.Ordered](c comparison, name string, was, is *T) {
	if is != nil && (was == nil || *is > *was) {
		c.same(name, was, is)
	}
}

// values notes values that are no longer allowed, or are no longer what they were when left out.
func (c comparison) values(was, is *apiextensionsv1.JSONSchemaProps) {
	if is.Pattern != "" {
		c.same("the pattern", was.Pattern, is.Pattern)
	}
	if is.Format != "" {
		c.same("the format", was.Format, is.Format)
	}
	if is.Enum != nil && was.Enum == nil {
		c.add("any value was allowed, and %s are now", show(is.Enum))
	}
	for _, v := range was.Enum {
		if is.Enum != nil && !slices.ContainsFunc(is.Enum, func(w apiextensionsv1.JSON) bool { return string(v.Raw) == string(w.Raw) }) {
			c.add("the value %s is no longer allowed", v.Raw)
		}
	}
	if was.Default != nil {
		c.same("the default", was.Default, is.Default)
	}
}

// rules notes validation rules that were not there as they are.
func (c comparison) rules(was, is apiextensionsv1.ValidationRules) {
	for _, rule := range is {
		known := slices.ContainsFunc(was, func(old apiextensionsv1.ValidationRule) bool {
			return old.Rule == rule.Rule && ptr.Deref(old.OptionalOldSelf, false) == ptr.Deref(rule.OptionalOldSelf, false)
		})
		if !known {
			c.add("the validation rule %q is new or was another", rule.Rule)
		}
	}
}

// parts compares fields, items and values of maps.
func (c comparison) parts(was, is *apiextensionsv1.JSONSchemaProps) {
	for _, name := range slices.Sorted(maps.Keys(was.Properties)) {
		old, at := was.Properties[name], c.within(name)
		if now, there := is.Properties[name]; there {
			at.schema(&old, &now)
		} else {
			at.add("the field is gone")
		}
	}
	for _, name := range is.Required {
		_, known := was.Properties[name]
		if !slices.Contains(was.Required, name) && (known || is.Properties[name].Default == nil) {
			c.within(name).add("the field could be left out and is required")
		}
	}
	if ptr.Deref(was.XPreserveUnknownFields, false) {
		for _, name := range slices.Sorted(maps.Keys(is.Properties)) {
			if _, known := was.Properties[name]; !known {
				c.within(name).add("the field could be anything and has a schema")
			}
		}
	}
	c.element("[]", items(was), items(is))
	c.element("{}", mapValues(was), mapValues(is))
}

// element compares what the items of a list or the values of a map may be, nil where there is no such thing.
func (c comparison) element(part string, was, is *apiextensionsv1.JSONSchemaProps) {
	at := c.within(part)
	switch {
	case was != nil && is != nil:
		at.schema(was, is)
	case was != nil:
		at.add("it was %s and is nothing", show(was))
	case is != nil:
		at.add("it was nothing and is %s", show(is))
	}
}

func items(s *apiextensionsv1.JSONSchemaProps) *apiextensionsv1.JSONSchemaProps {
	if s.Items == nil {
		return nil
	}
	return s.Items.Schema
}

func mapValues(s *apiextensionsv1.JSONSchemaProps) *apiextensionsv1.JSONSchemaProps {
	if s.AdditionalProperties == nil {
		return nil
	}
	return s.AdditionalProperties.Schema
}

// rest is a schema without what is compared by itself, and without what is for readers only.
func rest(s apiextensionsv1.JSONSchemaProps) *apiextensionsv1.JSONSchemaProps {
	s.Description, s.Title, s.Example, s.ExternalDocs = "", "", nil, nil
	s.Type, s.Nullable, s.XIntOrString, s.XPreserveUnknownFields = "", false, false, nil
	s.Maximum, s.ExclusiveMaximum, s.Minimum, s.ExclusiveMinimum, s.MultipleOf = nil, false, nil, false, nil
	s.MaxLength, s.MinLength, s.MaxItems, s.MinItems, s.UniqueItems, s.MaxProperties, s.MinProperties = nil, nil, nil, nil, false, nil, nil
	s.Pattern, s.Format, s.Enum, s.Default, s.XValidations, s.Properties, s.Required = "", "", nil, nil, nil, nil, nil
	if s.Items != nil && s.Items.Schema != nil {
		s.Items = nil
	}
	if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
		s.AdditionalProperties = nil
	}
	return &s
}

// show writes a value as the definitions do.
func show(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	switch s := string(raw); s {
	case "null", `""`, "[]":
		return "none"
	default:
		return s
	}
}
