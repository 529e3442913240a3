// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// After a reboot NICs are on the host as the boot has set them up. What was recorded before does not count, and does not
// keep a new pod from its NIC.
func TestReboot(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	b.must("ADD", b.single())
	file := filepath.Join(b.stateDir, "attachments", attachment{"c1", "net1"}.file())
	old, err := os.ReadFile(file)
	require.NoError(t, err)
	boot, err := bootID()
	require.NoError(t, err)
	stale := []byte(strings.Replace(string(old), boot, "00000000-0000-0000-0000-000000000000", 1))
	require.NotEqual(t, old, stale)
	b.must("DEL", b.single())

	b.host.address(nicName, "10.1.2.177/25") // by the new boot
	before := b.host.snapshot()
	require.NoError(t, os.WriteFile(file, stale, 0o600))
	call := b.call("ADD", b.single())
	call.containerID = "c2"
	_, _, failure := b.run(call)
	require.Nil(t, failure)
	require.Equal(t, []string{attachment{"c2", "net1"}.file()}, b.recorded())
	b.must("DEL", b.single()) // the old sandbox's, late
	require.NotNil(t, b.pod.link("net1"))
	call.verb = "DEL"
	_, _, failure = b.run(call)
	require.Nil(t, failure)
	b.requireHome(before)

	require.NoError(t, os.WriteFile(file, stale, 0o600))
	b.must("DEL", b.single())
	b.requireHome(before)
}

// A configuration that became wrong after ADD does not keep the pod from ending.
func TestDelWithBrokenConfiguration(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	log := b.must("DEL", b.single(`"nexthopNetAddrOffset": "x", "routeDstPrefixLen": 99, "deviceID": 7, "logLevel": "loud"`))
	require.Contains(t, log, "Parts of the configuration are ignored")
	b.requireHome(before)
}

// ADD for a new sandbox comes before the old one's DEL, after the kernel has thrown the NIC out of the dead one.
func TestNewSandboxBeforeOldDel(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25", "2001:db8::5/64")
	before := b.host.snapshot()
	b.must("ADD", b.single())
	b.throwHome()
	next := newSpace(t)
	call := b.call("ADD", strings.Replace(b.single(), `"device": "eth1"`, fmt.Sprintf(`"hwaddr": %q`, b.host.mustLink("net1").Attrs().HardwareAddr), 1))
	call.containerID, call.netns = "c2", next.path
	_, _, failure := b.run(call)
	require.Nil(t, failure)
	b.must("DEL", b.single()) // the old one's
	require.NotNil(t, next.link("net1"))
	call.verb = "DEL"
	_, _, failure = b.run(call)
	require.Nil(t, failure)
	b.requireHome(before)
}

// sbr ends with an error where the runtime has no namespace to give, so that this plugin is not called. GC, or the next
// ADD, brings the NIC home.
func TestChainWithoutNamespace(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	list := b.list("1.1.0", b.plugin(routeFields(1, 19)), sbr)
	b.add(list)
	b.throwHome()
	path := b.pod.path
	b.pod.path = ""
	require.Error(t, b.tryDel(list))
	b.pod.path = path
	require.NotEmpty(t, b.recorded())
	_, _, failure := b.run(rawCall{verb: "GC", conf: b.single(`"cni.dev/valid-attachments": []`)})
	require.Nil(t, failure)
	b.requireHome(before)

	b.add(list)
	b.throwHome()
	require.NotNil(t, b.host.link("net1"))
	next := newSpace(t)
	call := b.call("ADD", strings.Replace(b.single(), `"device": "eth1"`, fmt.Sprintf(`"hwaddr": %q`, b.host.mustLink("net1").Attrs().HardwareAddr), 1))
	call.containerID, call.netns = "c2", next.path
	_, _, failure = b.run(call)
	require.Nil(t, failure)
	call.verb = "DEL"
	_, _, failure = b.run(call)
	require.Nil(t, failure)
	b.requireHome(before)
}
