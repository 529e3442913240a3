// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools

import (
	"fmt"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
)

// attributes returns the device's attributes as far as the API takes them. Their names, and how many there are, are the
// device managers' own; their strings come from the node, where an interface may have any bytes for a name.
func attributes(pool string, d *tables.DRADevice) (map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, []Omission) {
	given := d.Dev.Attrs()
	attrs := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, len(given)+2)
	var omissions []Omission
	for name, value := range given {
		if reason := checkAttribute(value); reason != "" {
			omissions = append(omissions, Omission{Pool: pool, Device: d.Name, Attribute: name, Reason: reason})
			continue
		}
		attrs[name] = value
	}
	manager := d.Manager.String()
	attrs[AttributePool] = resourceapi.DeviceAttribute{StringValue: &pool}
	attrs[AttributeDeviceManager] = resourceapi.DeviceAttribute{StringValue: &manager}
	return attrs, omissions
}

// checkAttribute returns why an attribute is not published, or nothing.
func checkAttribute(a resourceapi.DeviceAttribute) string {
	switch s := a.StringValue; {
	case s == nil:
	case len(*s) > resourceapi.DeviceAttributeMaxValueLength:
		return fmt.Sprintf("the value is longer than %d characters", resourceapi.DeviceAttributeMaxValueLength)
	case !utf8.ValidString(*s):
		return "the value is not valid UTF-8"
	}
	return ""
}
