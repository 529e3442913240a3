// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pools

import (
	"fmt"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// attributes returns the device's attributes as far as the API takes them, and the pool's own. The names of the former, and
// how many there are, are the device managers'; their strings come from the node, where an interface may have any bytes for a
// name. The schema of the node config checks the pool's.
func attributes(pool string, own Attributes, d *tables.DRADevice) (map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, []Omission) {
	given := d.Dev.Attrs()
	attrs := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, len(given)+len(own)+3)
	var omissions []Omission
	for name, value := range own {
		attrs[resourceapi.QualifiedName(name)] = resourceapi.DeviceAttribute{StringValue: (*string)(&value)}
	}
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
	if _, ok := attrs[types.AttributeMultusDeviceID]; ok {
		attrs[AttributeMultusResourceName] = resourceapi.DeviceAttribute{StringValue: &pool}
	}
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
