// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// semver is the grammar of a version attribute (semver.org 2.0.0).
var semver = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?` +
	`(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$`)

// attributeChecker knows what of attributes can be published. The rules are those of the ResourceSlice API, and that
// the driver's own names are reserved.
type attributeChecker struct {
	driver string
	// names remembers what is wrong with a name, or nothing: thousands of devices share a dozen names.
	names map[resourceapi.QualifiedName]string
}

// check returns why an attribute of a device is not published, or nothing.
func (c *attributeChecker) check(name resourceapi.QualifiedName, value resourceapi.DeviceAttribute) string {
	reason, known := c.names[name]
	if !known {
		reason = checkAttributeName(c.driver, string(name))
		c.names[name] = reason
	}
	if reason != "" {
		return reason
	}
	values := 0
	if value.IntValue != nil {
		values++
	}
	if value.BoolValue != nil {
		values++
	}
	if s := value.StringValue; s != nil {
		values++
		if reason := checkAttributeString(*s); reason != "" {
			return reason
		}
	}
	if v := value.VersionValue; v != nil {
		values++
		if reason := checkAttributeString(*v); reason != "" {
			return reason
		}
		if !semver.MatchString(*v) {
			return fmt.Sprintf("%q is not a semantic version", *v)
		}
	}
	switch {
	case len(value.IntValues)+len(value.BoolValues)+len(value.StringValues)+len(value.VersionValues) > 0:
		return "a list needs the feature gate DRAListTypeAttributes"
	case values != 1:
		return fmt.Sprintf("it has %d values, exactly one is allowed", values)
	}
	return ""
}

func checkAttributeName(driver, name string) string {
	domain, id, qualified := strings.Cut(name, "/")
	if !qualified {
		domain, id = driver, name
	}
	switch {
	case len(id) > resourceapi.DeviceMaxIDLength:
		return fmt.Sprintf("the name is longer than %d characters", resourceapi.DeviceMaxIDLength)
	case !isCIdentifier(id):
		return "the name is not a C identifier"
	case len(domain) > resourceapi.DeviceMaxDomainLength || len(validation.IsDNS1123Subdomain(domain)) > 0:
		return fmt.Sprintf("the name's domain is not a DNS subdomain of at most %d characters", resourceapi.DeviceMaxDomainLength)
	case domain == driver && qualified:
		return "a name in the driver's domain is written without the domain"
	case domain == driver && (id == string(AttributePool) || id == string(AttributeDeviceManager)):
		return "the name is reserved"
	}
	return ""
}

func checkAttributeString(s string) string {
	switch {
	case len(s) > resourceapi.DeviceAttributeMaxValueLength:
		return fmt.Sprintf("the value is longer than %d characters", resourceapi.DeviceAttributeMaxValueLength)
	case !utf8.ValidString(s):
		return "the value is not valid UTF-8"
	}
	return ""
}

// isCIdentifier is a plain loop because it runs for every attribute of every device.
func isCIdentifier(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c == '_', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
		case '0' <= c && c <= '9' && i > 0:
		default:
			return false
		}
	}
	return s != ""
}
