// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/stretchr/testify/require"
)

func TestNodeConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.json")
	read := func(content string) (*nodeConfig, error) {
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		return readNodeConfig(file)
	}
	absent, err := readNodeConfig(file)
	require.NoError(t, err)
	require.Equal(t, &nodeConfig{StateDir: "/var/lib/cni/amd-host-device", LogFiles: []string{"/var/log/amd-host-device*.log"}, file: file}, absent)
	empty, err := read(`{}`)
	require.NoError(t, err)
	require.Equal(t, absent, empty)
	full, err := read(`{"allowNodeNetwork": true, "stateDir": "/srv/cni", "logFiles": ["/var/log/cni/*.log"]}`)
	require.NoError(t, err)
	require.Equal(t, &nodeConfig{AllowNodeNetwork: true, StateDir: "/srv/cni", LogFiles: []string{"/var/log/cni/*.log"}, file: file}, full)

	for content, want := range map[string]string{
		``:                                "EOF",
		`{"stateDir": 1}`:                 "stateDir",
		`{"stateDir": ""}`:                "stateDir is \"\"",
		`{"stateDir": "srv"}`:             "allowed is an absolute path",
		`{"stateDir": "/a/../b"}`:         "allowed is an absolute path",
		`{"logDir": "/var/log"}`:          "allowed are the fields allowNodeNetwork, stateDir and logFiles",
		`{"allowNodeNetwork": "true"}`:    "allowNodeNetwork",
		`{"logFiles": ["*.log"]}`:         "logFiles",
		`{"logFiles": ["/var/log/*"]}`:    "logFiles",
		`{"logFiles": ["/var/[.log"]}`:    "logFiles",
		`{} {"allowNodeNetwork": true}`:   "something follows",
		`{"allowNodeNetwork": true} true`: "something follows",
	} {
		_, err := read(content)
		require.ErrorContains(t, err, "the node's file "+file, content)
		require.ErrorContains(t, err, want, content)
	}

	require.NoError(t, os.Chmod(file, 0o606))
	_, err = readNodeConfig(file)
	require.ErrorContains(t, err, "nobody else may write to")
	_, err = readNodeConfig(filepath.Dir(file))
	require.ErrorContains(t, err, "a regular file")
}

// A pattern allows files, not ways to others.
func TestLogFileIsNoLink(t *testing.T) {
	dir := t.TempDir()
	node := &nodeConfig{LogFiles: []string{dir + "/*.log"}}
	require.True(t, node.allowsLog(dir+"/x.log"))
	require.NoError(t, os.WriteFile(dir+"/x.log", nil, 0o600))
	require.True(t, node.allowsLog(dir+"/x.log"))
	require.NoError(t, os.Symlink(dir+"/x.log", dir+"/y.log"))
	require.False(t, node.allowsLog(dir+"/y.log"))
	require.False(t, node.allowsLog(dir+"/z/x.log"))
}

// What a network configuration asks for and the node does not allow is refused by ADD and does not keep DEL from ending
// the attachment.
func TestNodeDecides(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	elsewhere := filepath.Join(t.TempDir(), "x.log")
	greedy := b.single(`"stateDir": "`+filepath.Dir(elsewhere)+`"`, `"logFile": "`+elsewhere+`"`)
	_, _, failure := b.run(b.call("ADD", greedy))
	require.NotNil(t, failure)
	require.Equal(t, int(types.ErrInvalidNetworkConfig), int(failure.Code))
	for _, part := range []string{"stateDir", b.stateDir, "logFile", "/var/log/amd-host-device*.log", filepath.Join(b.bin, "node.json")} {
		require.Contains(t, failure.Msg, part)
	}
	b.requireHome(before)

	b.must("ADD", b.single())
	require.Contains(t, b.must("DEL", greedy), "Parts of the configuration are ignored")
	b.requireHome(before)
	require.NoFileExists(t, elsewhere)

	// A file that cannot be trusted decides nothing, and nothing goes on without it: the records may be elsewhere.
	b.must("ADD", b.single())
	require.NoError(t, os.Chmod(filepath.Join(b.bin, "node.json"), 0o666))
	for verb, code := range map[string]uint{"ADD": types.ErrIOFailure, "DEL": types.ErrIOFailure, "STATUS": types.ErrPluginNotAvailable} {
		_, _, failure = b.run(b.call(verb, b.single()))
		require.NotNil(t, failure, verb)
		require.Equal(t, int(code), int(failure.Code), verb)
		require.Contains(t, failure.Msg, "nobody else may write to", verb)
	}
	b.node()
	require.NoError(t, os.Chmod(filepath.Join(b.bin, "node.json"), 0o600))
	b.must("DEL", b.single())
	b.requireHome(before)
}
