// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/policyroute"
)

const (
	// subPlugin is the plugin that moves the NIC.
	subPlugin = "host-device"
	// staticIPAM is the IPAM plugin that gives the NIC its addresses in the pod.
	staticIPAM = "static"
	// defaultStateDir is where attachments are recorded.
	defaultStateDir = "/var/lib/cni/amd-host-device"
)

// The fields that are this plugin's own. All others are for the sub-plugin, and reach it as they came.
const (
	fieldOffset      = "nexthopNetAddrOffset"
	fieldPrefixLen   = "routeDstPrefixLen"
	fieldAllow       = "allowNodeNetwork"
	fieldStateDir    = "stateDir"
	fieldLogFile     = "logFile"
	fieldLogLevel    = "logLevel"
	fieldAttachments = "cni.dev/valid-attachments"
)

// ownFields do not reach the sub-plugin.
var ownFields = []string{fieldOffset, fieldPrefixLen, fieldAllow, fieldStateDir, fieldLogFile, fieldLogLevel}

// readFields are the sub-plugin's that this plugin reads as well. The sub-plugin takes them in any spelling of upper and
// lower case, so that it could be made to take another NIC than the one that was chosen and looked at here.
var readFields = []string{"cniVersion", "name", "type", "device", "hwaddr", "kernelpath", "deviceID", "pciBusID",
	"runtimeConfig", "ipam", "useInterfaceNetwork", "prevResult", fieldAttachments}

// config is the network configuration that the runtime passes.
type config struct {
	cniVersion string
	name       string

	// routes says which policy routes are wanted, nil for none.
	routes *policyroute.Config
	// alone is the name of the one field of the two that came without the other.
	alone string
	// allowNodeNetwork lets a NIC go into a pod that the node itself needs: the node allows it too.
	allowNodeNetwork bool
	logFile          string // empty: none
	logLevel         slog.Level

	// What the NIC is chosen by, as the sub-plugin takes it.
	device     string // interface name on the host
	hwAddr     net.HardwareAddr
	kernelPath string // below /sys/devices
	deviceID   string // PCI address or name on the auxiliary bus
	// deviceField is the field that deviceID is from.
	deviceField string

	ipamType            string // empty: none given
	useInterfaceNetwork bool
	prevResult          json.RawMessage
	validAttachments    []types.GCAttachment
	hasAttachments      bool

	// raw is everything that was passed.
	raw map[string]json.RawMessage
}

// parseConfig reads the configuration. Without an error in the first place, the second is about fields that break a
// rule; each of them has its default then, so that an attachment can be ended whatever has become of its
// configuration.
func parseConfig(stdin []byte, node *nodeConfig) (*config, error, error) {
	c := &config{}
	if err := json.Unmarshal(stdin, &c.raw); err != nil {
		return nil, errorf(types.ErrDecodingFailure, "read the network configuration: %w", err), nil
	}
	if c.raw == nil {
		return nil, errorf(types.ErrDecodingFailure, "the network configuration is null"), nil
	}
	f := fields{raw: c.raw}
	c.cniVersion = f.string("cniVersion")
	c.name = f.string("name")
	c.parseOwn(&f, node)
	c.parseSelectors(&f)

	var ipam struct {
		Type string `json:"type"`
	}
	f.decode("ipam", &ipam, "an object whose type is a string")
	c.ipamType = ipam.Type
	f.decode("useInterfaceNetwork", &c.useInterfaceNetwork, "true or false")
	if raw := c.raw["prevResult"]; !isNull(raw) {
		c.prevResult = raw
	}
	if raw, ok := c.raw[fieldAttachments]; ok {
		c.hasAttachments = f.decode(fieldAttachments, &c.validAttachments, "a list of objects with containerID and ifname") || isNull(raw)
	}
	if len(f.errs) > 0 {
		return c, nil, errorf(types.ErrInvalidNetworkConfig, "network %q: %w", c.name, errors.Join(f.errs...))
	}
	return c, nil, nil
}

// parseOwn reads the fields that are not the sub-plugin's.
func (c *config) parseOwn(f *fields, node *nodeConfig) {
	for _, name := range slices.Sorted(maps.Keys(c.raw)) {
		for _, known := range slices.Concat(ownFields, readFields) {
			if name != known && strings.EqualFold(name, known) {
				f.fail("%.64q is not a field: it is written %s", name, known)
			}
		}
	}
	var routes policyroute.Config
	hasOffset := f.decode(fieldOffset, &routes.NexthopOffset, "an integer of 64 bits")
	hasPrefixLen := f.decode(fieldPrefixLen, &routes.DstPrefixLen, "an integer from 0 to 32")
	if hasPrefixLen && (routes.DstPrefixLen < 0 || routes.DstPrefixLen > 32) {
		hasPrefixLen = false
		f.fail("%s is %d: allowed is an integer from 0 to 32", fieldPrefixLen, routes.DstPrefixLen)
	}
	switch {
	case hasOffset && hasPrefixLen:
		c.routes = &routes
	case hasOffset:
		c.alone = fieldOffset
	case hasPrefixLen:
		c.alone = fieldPrefixLen
	}
	f.decode(fieldAllow, &c.allowNodeNetwork, "true or false")
	c.allowNodeNetwork = c.allowNodeNetwork && node.AllowNodeNetwork
	if dir := f.string(fieldStateDir); dir != "" && dir != node.StateDir {
		f.fail("%s is %q, but the node says where attachments are recorded: %s; leave the field out, or put the directory into %s on each node",
			fieldStateDir, dir, node.StateDir, node.file)
	}
	if file := f.string(fieldLogFile); file != "" {
		if path.Clean(file) != file || !node.allowsLog(file) {
			f.fail("%s is %q, which the node does not allow: allowed are regular files that match %s; %s on each node can allow others (logFiles)",
				fieldLogFile, file, strings.Join(node.LogFiles, ", "), node.file)
		} else {
			c.logFile = file
		}
	}
	if level := f.string(fieldLogLevel); level != "" {
		if err := c.logLevel.UnmarshalText([]byte(level)); err != nil {
			f.fail("%s is %.64q: allowed are debug, info, warn and error", fieldLogLevel, level)
		}
	}
}

// parseSelectors reads what the NIC is chosen by.
func (c *config) parseSelectors(f *fields) {
	if c.device = f.string("device"); c.device != "" {
		if err := nic.ValidateName(c.device); err != nil {
			f.fail("device: %w", err)
			c.device = ""
		}
	}
	if hwAddr := f.string("hwaddr"); hwAddr != "" {
		var err error
		if c.hwAddr, err = net.ParseMAC(hwAddr); err != nil {
			f.fail("hwaddr is %.64q: allowed is a hardware address such as 02:00:5e:10:00:01", hwAddr)
		}
	}
	if c.kernelPath = f.string("kernelpath"); c.kernelPath != "" {
		if !strings.HasPrefix(c.kernelPath, "/sys/devices/") || path.Clean(c.kernelPath) != c.kernelPath {
			f.fail("kernelpath is %.256q: allowed is a path below /sys/devices without . and ..", c.kernelPath)
			c.kernelPath = ""
		}
	}
	var runtime struct {
		DeviceID string `json:"deviceID"`
	}
	f.decode("runtimeConfig", &runtime, "an object whose deviceID is a string")
	// The runtime's choice comes first, as the sub-plugin has it.
	for _, from := range []struct{ field, value string }{
		{"runtimeConfig.deviceID", runtime.DeviceID},
		{"deviceID", f.string("deviceID")},
		{"pciBusID", f.string("pciBusID")},
	} {
		switch {
		case from.value == "":
		case !nic.IsDeviceName(from.value):
			f.fail("%s is %.64q: allowed is a PCI address such as 0000:03:00.1, or a name on the auxiliary bus", from.field, from.value)
		case c.deviceID == "":
			c.deviceID, c.deviceField = from.value, from.field
		}
	}
}

// hasSelector says whether the configuration chooses a NIC at all.
func (c *config) hasSelector() bool {
	return c.device != "" || c.hwAddr != nil || c.kernelPath != "" || c.deviceID != ""
}

// forSubPlugin is the configuration for the sub-plugin: without the fields that are this plugin's own, with the NIC's
// name (empty for a device that has none) and IPAM configuration (nil: as given). All else is as it was passed.
func (c *config) forSubPlugin(device string, ipam *ipamConfig) ([]byte, error) {
	out := maps.Clone(c.raw)
	for _, own := range ownFields {
		delete(out, own)
	}
	set := map[string]any{"type": subPlugin}
	if device != "" {
		// So that both plugins take the same NIC.
		set["device"] = device
	} else if c.deviceID != "" {
		set["pciBusID"] = c.deviceID
	}
	if ipam != nil {
		set["ipam"] = ipam
	}
	for name, value := range set {
		raw, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("write field %s for %s: %w", name, subPlugin, err)
		}
		out[name] = raw
	}
	return json.Marshal(out)
}

// fields reads single fields of an object and collects what is wrong with them.
type fields struct {
	raw  map[string]json.RawMessage
	errs []error
}

func (f *fields) fail(format string, args ...any) {
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}

// decode reads a field and says whether it is there and right. Null is as good as not there.
func (f *fields) decode(name string, into any, allowed string) bool {
	raw := f.raw[name]
	if isNull(raw) {
		return false
	}
	if err := json.Unmarshal(raw, into); err != nil {
		f.fail("%s is %.64s: allowed is %s", name, raw, allowed)
		return false
	}
	return true
}

func (f *fields) string(name string) (value string) {
	f.decode(name, &value, "a string")
	return value
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || bytes.Equal(raw, []byte("null")) }
