// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// The record is gone or damaged: the NIC comes home with what it has in the pod and what the runtime remembers.
func TestDelWithoutRecord(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(file string) error{
		"missing":   os.Remove,
		"empty":     func(file string) error { return os.Truncate(file, 0) },
		"truncated": func(file string) error { return os.Truncate(file, 100) },
		"garbage": func(file string) error {
			return os.WriteFile(file, []byte(`{"version": 1, "state": {"name": "../x"}}`), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host.address(nicName, "10.1.2.130/25", "10.1.2.131/25", "2001:db8::5/64")
			before := b.host.snapshot()
			list := b.list("1.0.0", b.plugin())
			b.add(list)
			file := filepath.Join(b.stateDir, "attachments", attachment{"c1", "net1"}.file())
			require.NoError(t, spoil(file))
			// The pod has removed an address, which is in the runtime's result.
			addr, err := netlink.ParseAddr("10.1.2.131/25")
			require.NoError(t, err)
			require.NoError(t, b.pod.AddrDel(b.pod.mustLink("net1"), addr))
			b.del(list)
			// Labels and flags are not known to anybody any more.
			require.Equal(t, stripped(before), stripped(b.host.snapshot()))
			require.Empty(t, b.recorded())
			b.del(list)
		})
	}
}

// stripped is a snapshot without what a result of CNI cannot say.
func stripped(snapshot []string) []string {
	out := make([]string, len(snapshot))
	for i, s := range snapshot {
		var st hostState
		if err := json.Unmarshal([]byte(s), &st); err != nil {
			panic(err) // it was made by this test
		}
		for j := range st.Addresses {
			st.Addresses[j].Label, st.Addresses[j].Flags = "", 0
		}
		text, _ := json.Marshal(st)
		out[i] = string(text)
	}
	return out
}

// The NIC of a pod that an earlier version made is in it under its host name, and there is no record.
func TestDelOfEarlierVersion(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	mac := b.host.mustLink(nicName).Attrs().HardwareAddr.String()
	ns, err := netns.GetFromPath(b.pod.path)
	require.NoError(t, err)
	defer ns.Close()
	require.NoError(t, b.host.LinkSetNsFd(b.host.mustLink(nicName), int(ns)))
	b.pod.up(nicName)
	b.pod.address(nicName, "10.1.2.130/25")
	b.must("DEL", strings.Replace(b.single(), `"device": "eth1"`, fmt.Sprintf(`"hwaddr": %q`, mac), 1))
	require.Equal(t, stripped(before), stripped(b.host.snapshot()))

	// By name alone, a virtual link of the pod is not taken for the NIC.
	b.pod.veth("eth9", b.leaf, "port2")
	b.must("DEL", strings.Replace(b.single(), `"eth1"`, `"eth9"`, 1))
	require.NotNil(t, b.pod.link("eth9"))
}

// The kernel left the NIC on the host under the pod's name, and the record is gone.
func TestDelWithoutRecordAndNamespace(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host.address(nicName, "10.1.2.130/25")
	before := b.host.snapshot()
	list := b.list("1.0.0", b.plugin())
	b.add(list)
	require.NoError(t, os.RemoveAll(b.stateDir))
	b.throwHome()
	b.pod.die()
	b.del(list)
	require.Equal(t, stripped(before), stripped(b.host.snapshot()))
}
