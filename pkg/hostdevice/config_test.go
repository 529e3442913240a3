// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/policyroute"
)

// nodeDefaults is what a node without a file has.
func nodeDefaults(t *testing.T) *nodeConfig {
	t.Helper()
	node, err := readNodeConfig("/nowhere/amd-host-device.json")
	require.NoError(t, err)
	return node
}

func parse(t *testing.T, text string) *config {
	t.Helper()
	c, err, invalid := parseConfig([]byte(text), nodeDefaults(t))
	require.NoError(t, err)
	require.NoError(t, invalid)
	return c
}

func TestParseConfig(t *testing.T) {
	c := parse(t, `{"cniVersion": "0.3.1", "name": "n", "type": "amd-host-device", "nexthopNetAddrOffset": 1, "routeDstPrefixLen": 19,
		"deviceID": "0000:03:00.1", "pciBusID": "0000:03:00.2", "runtimeConfig": {"deviceID": "0000:03:00.3"}}`)
	require.Equal(t, &policyroute.Config{NexthopOffset: 1, DstPrefixLen: 19}, c.routes)
	require.Equal(t, "0000:03:00.3", c.deviceID, "the runtime's choice comes first")
	require.Equal(t, "runtimeConfig.deviceID", c.deviceField)

	c = parse(t, `{"deviceID": "mlx5_core.sf.2", "pciBusID": "0000:03:00.2", "nexthopNetAddrOffset": 0, "routeDstPrefixLen": 0}`)
	require.Equal(t, "mlx5_core.sf.2", c.deviceID)
	require.Equal(t, &policyroute.Config{}, c.routes, "zeros are there")
	require.Equal(t, "0000:03:00.2", parse(t, `{"deviceID": "", "pciBusID": "0000:03:00.2"}`).deviceID)
	require.Equal(t, int64(1)<<32, parse(t, `{"nexthopNetAddrOffset": 4294967296, "routeDstPrefixLen": 0}`).routes.NexthopOffset)

	require.Equal(t, &policyroute.Config{NexthopOffset: -5}, parse(t, `{"nexthopNetAddrOffset": -5, "routeDstPrefixLen": 0}`).routes,
		"whether an offset fits depends on the address")

	require.Equal(t, fieldOffset, parse(t, `{"nexthopNetAddrOffset": 0}`).alone)
	require.Equal(t, fieldPrefixLen, parse(t, `{"routeDstPrefixLen": 0}`).alone)
	require.Empty(t, parse(t, `{}`).alone)
	require.False(t, parse(t, `{}`).hasSelector(), "no deviceID is no panic")
}

func TestParseConfigRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`{"routeDstPrefixLen": 1e1}`:                     "routeDstPrefixLen is 1e1: allowed is an integer from 0 to 32",
		`{"routeDstPrefixLen": 19.0}`:                    "routeDstPrefixLen is 19.0",
		`{"routeDstPrefixLen": true}`:                    "routeDstPrefixLen is true",
		`{"routeDstPrefixLen": [19]}`:                    "routeDstPrefixLen is [19]",
		`{"nexthopNetAddrOffset": -0.0}`:                 "nexthopNetAddrOffset",
		`{"nexthopNetAddrOffset": 1e400}`:                "nexthopNetAddrOffset",
		`{"nexthopNetAddrOffset": "01"}`:                 `nexthopNetAddrOffset is "01": allowed is an integer of 64 bits`,
		`{"nexthopNetAddrOffset": 1.5}`:                  "nexthopNetAddrOffset is 1.5",
		`{"nexthopNetAddrOffset": 9223372036854775808}`:  "nexthopNetAddrOffset is 9223372036854775808",
		`{"nexthopNetAddrOffset": -9223372036854775809}`: "nexthopNetAddrOffset is -9223372036854775809",
		`{"routeDstPrefixLen": 33}`:                      "routeDstPrefixLen is 33: allowed is an integer from 0 to 32",
		`{"routeDstPrefixLen": -1}`:                      "routeDstPrefixLen is -1: allowed is an integer from 0 to 32",
		`{"NEXTHOPNETADDROFFSET": 1}`:                    "it is written nexthopNetAddrOffset",
		`{"device": "eth1", "pcibusid": "0000:00:03.0"}`: `"pcibusid" is not a field: it is written pciBusID`,
		`{"runtimeConfig": {}, "runtimeconfig": {}}`:     `"runtimeconfig" is not a field`,
		`{"deviceID": ".."}`:                             "deviceID",
		`{"deviceID": "0000:03:00.1/../../class"}`:       "deviceID",
		`{"device": "a/b"}`:                              "device",
		`{"kernelpath": "/proc/self"}`:                   "kernelpath",
		`{"runtimeConfig": []}`:                          "runtimeConfig",
		`{"ipam": {"type": 1}}`:                          "ipam",
		`{"allowNodeNetwork": "yes"}`:                    "allowNodeNetwork",
		`{"stateDir": "/var/../etc"}`:                    "stateDir",
		`{"stateDir": "/srv/cni"}`:                       "the node says where attachments are recorded: /var/lib/cni/amd-host-device",
		`{"logFile": "/etc/x.log"}`:                      "allowed are regular files that match /var/log/amd-host-device*.log",
		`{"logFile": "/var/log/kern.log"}`:               "logFile",
		`{"logFile": "/var/log/amd-host-device/x.log"}`:  "logFile",
		`{"cni.dev/valid-attachments": {}}`:              "cni.dev/valid-attachments",
	} {
		c, err, invalid := parseConfig([]byte(text), nodeDefaults(t))
		require.NoError(t, err, text)
		require.ErrorContains(t, invalid, want, text)
		require.Equal(t, int(types.ErrInvalidNetworkConfig), int(asCNI(invalid).(*types.Error).Code))
		require.NotNil(t, c)
		require.Nil(t, c.routes, "what is wrong has its default")
		require.Empty(t, c.logFile)
		require.False(t, c.allowNodeNetwork)
		require.Empty(t, c.deviceID)
	}
	for _, text := range []string{``, `null`, `[]`, `"x"`, `{`, `{"a": 1} {}`} {
		_, err, _ := parseConfig([]byte(text), nodeDefaults(t))
		require.Error(t, err, text)
		require.Equal(t, int(types.ErrDecodingFailure), int(asCNI(err).(*types.Error).Code), text)
	}
	// All that is wrong is said at once.
	_, _, invalid := parseConfig([]byte(`{"name": "n", "routeDstPrefixLen": -1, "device": 1, "logLevel": "x"}`), nodeDefaults(t))
	for _, part := range []string{`network "n"`, "routeDstPrefixLen", "device", "logLevel"} {
		require.ErrorContains(t, invalid, part)
	}
}

func configSeeds() [][]byte {
	var seeds [][]byte
	for _, seed := range []string{
		`{"cniVersion": "0.3.1", "name": "n", "plugins": [{"type": "amd-host-device", "nexthopNetAddrOffset": 1, "routeDstPrefixLen": 19}, {"type": "sbr"}]}`,
		`{"cniVersion": "1.1.0", "name": "n", "type": "amd-host-device", "deviceID": "0000:03:00.1", "nexthopNetAddrOffset": 1, "routeDstPrefixLen": 0, "ipam": {"type": "static"}}`,
		`{"runtimeConfig": {"deviceID": null}, "hwaddr": "02:00:00:00:00:01", "kernelpath": "/sys/devices/pci0000:00", "logLevel": "warn+1"}`,
		`{"cni.dev/valid-attachments": [{"containerID": "c", "ifname": "net1"}], "prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.3/24"}]}}`,
		`{"device": {"device": []}, "stateDir": "/", "logFile": "/.log", "nexthopNetAddrOffset": 18446744073709551616}`,
		`null`, `[]`, `{"":null}`,
	} {
		seeds = append(seeds, []byte(seed))
	}
	return seeds
}

// requireConfigSound checks what holds for whatever a runtime passes.
func requireConfigSound(t *testing.T, data []byte) {
	t.Helper()
	c, err, invalid := parseConfig(data, nodeDefaults(t))
	if err != nil {
		return
	}
	require.True(t, c.routes == nil || c.routes.DstPrefixLen >= 0 && c.routes.DstPrefixLen <= 32)
	require.NotContains(t, c.deviceID, "/")
	require.NotEqual(t, "..", c.deviceID)
	require.True(t, c.logFile == "" || strings.HasPrefix(c.logFile, "/var/log/amd-host-device") && strings.HasSuffix(c.logFile, ".log"))
	require.NotContains(t, strings.TrimPrefix(c.logFile, "/var/log/"), "/")
	require.False(t, c.allowNodeNetwork)
	out, err := c.forSubPlugin("eth1", staticConfig(nil, nil))
	require.NoError(t, err)
	var sub map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(out, &sub))
	require.JSONEq(t, `"host-device"`, string(sub["type"]))
	require.JSONEq(t, `"eth1"`, string(sub["device"]))
	for _, own := range []string{fieldOffset, fieldPrefixLen, fieldStateDir, fieldLogFile} {
		require.NotContains(t, sub, own)
	}
	if invalid == nil && c.prevResult != nil {
		call := &call{conf: c}
		_, _ = call.previousResult()
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, seed := range configSeeds() {
		f.Add(seed)
	}
	f.Fuzz(requireConfigSound)
}

func TestConfigsOfAnyContent(t *testing.T) { mutate(t, configSeeds(), requireConfigSound) }
