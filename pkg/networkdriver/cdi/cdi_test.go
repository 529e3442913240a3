// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cdi

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

const (
	driver = "networkdriver.cilium.io"
	claim  = kubetypes.UID("0b910db7-3b54-4e0c-9f32-6f5cba601fbf")
	other  = kubetypes.UID("c1a1b2c3-3b54-4e0c-9f32-6f5cba601fbf")
)

func newFiles(_ testing.TB, folder string) *Files {
	return NewFiles(Params{Logger: slog.New(slog.DiscardHandler), Folder: folder, Driver: driver})
}

func gateOf(claim kubetypes.UID, sandbox string, requests ...string) Gate {
	return Gate{Claim: claim, Sandbox: sandbox, Requests: requests}
}

// resolve does what a runtime does with the CDI devices of a container.
func resolve(t *testing.T, folder string, ids ...string) ([]Marker, error) {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(folder))
	require.NoError(t, err)
	require.Empty(t, cache.GetErrors())
	spec := &oci.Spec{Process: &oci.Process{Env: []string{"PATH=/bin"}}}
	_, err = cache.InjectDevices(spec, ids...)
	return MarkersIn(spec.Process.Env), err
}

// TestGate opens and closes a claim's gate. A container may list one of the requests, or all of them.
func TestGate(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "cdi")
	f := newFiles(t, folder)
	lan, wan := ID(driver, claim, "lan/fast"), ID(driver, claim, "wan")
	require.Equal(t, driver+"/claim="+string(claim)+"_lan", lan)
	f.CloseGate(claim) // of a claim that has none, without a folder

	require.NoError(t, f.OpenGate(gateOf(claim, "sandbox1", "wan", "lan/fast", "lan/slow")))
	for _, ids := range [][]string{{lan}, {wan}, {lan, wan}} {
		markers, err := resolve(t, folder, ids...)
		require.NoError(t, err)
		require.Equal(t, []Marker{{claim, "sandbox1"}}, markers)
	}
	_, err := resolve(t, folder, ID(driver, other, "lan"))
	require.ErrorContains(t, err, "unresolvable")

	// The next agent sees which sandbox the last one has opened it for.
	require.True(t, newFiles(t, folder).WasOpened(claim, "sandbox1"))
	require.False(t, newFiles(t, folder).WasOpened(claim, "sandbox"))
	require.False(t, newFiles(t, folder).WasOpened(other, "sandbox1"))

	require.NoError(t, f.OpenGate(gateOf(claim, "sandbox2", "lan")))
	markers, err := resolve(t, folder, lan)
	require.NoError(t, err)
	require.Equal(t, []Marker{{claim, "sandbox2"}}, markers)

	require.False(t, f.WasOpened(claim, "sandbox1"))
	f.CloseGate(claim)
	require.False(t, f.WasOpened(claim, "sandbox2"))
	_, err = resolve(t, folder, lan)
	require.ErrorContains(t, err, "unresolvable")
}

// TestMarkersOfOneEnvironment tells two claims of one pod apart.
func TestMarkersOfOneEnvironment(t *testing.T) {
	folder := t.TempDir()
	f := newFiles(t, folder)
	require.NoError(t, f.OpenGate(gateOf(claim, "s", "net")))
	require.NoError(t, f.OpenGate(gateOf(other, "s", "net")))
	markers, err := resolve(t, folder, ID(driver, claim, "net"), ID(driver, other, "net"))
	require.NoError(t, err)
	require.ElementsMatch(t, []Marker{{claim, "s"}, {other, "s"}}, markers)
	require.Empty(t, MarkersIn([]string{"A=b", markerPrefix + "X", markerPrefix + "X=y", "X" + markerPrefix + "X=y/z"}))
}

// TestExposed gives a container the devices of the requests that it lists, and of no others.
func TestExposed(t *testing.T) {
	folder := t.TempDir()
	f := newFiles(t, folder)
	gate := gateOf(claim, "s", "lan/fast", "wan", "net")
	gate.Exposed = []Exposed{ // nodes that any machine has
		{"lan/fast", "my-nets", types.Exposure{Address: "0000:01:10.0", Nodes: []string{"/dev/null", "/dev/zero"}}},
		{"lan/fast", "my-nets", types.Exposure{Address: "0000:01:10.2", Nodes: []string{"/dev/null", "/dev/full"}}},
		{"wan", "example.com/mlnx_rdma-dp.v2", types.Exposure{Address: "0000:02:10.0", Nodes: []string{"/dev/null", "/dev/random"}}},
	}
	require.NoError(t, f.OpenGate(gate))
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(folder))
	require.NoError(t, err)
	require.Empty(t, cache.GetErrors())
	for _, tt := range []struct {
		request    string
		env, nodes []string
	}{
		{"lan", []string{"PCIDEVICE_MY_NETS_LAN=0000:01:10.0,0000:01:10.2"}, []string{"/dev/full", "/dev/null", "/dev/zero"}},
		{"wan", []string{"PCIDEVICE_EXAMPLE_COM_MLNX_RDMA_DP_V2=0000:02:10.0"}, []string{"/dev/null", "/dev/random"}},
		{"net", nil, nil},
	} {
		spec := &oci.Spec{Process: &oci.Process{User: oci.User{UID: 1000, GID: 1000}}}
		_, err = cache.InjectDevices(spec, ID(driver, claim, tt.request))
		require.NoError(t, err)
		require.ElementsMatch(t, tt.env, spec.Process.Env[1:], "beside the marker")
		var nodes []string
		if spec.Linux == nil {
			spec.Linux = &oci.Linux{}
		}
		for _, d := range spec.Linux.Devices {
			nodes = append(nodes, d.Path)
			require.Equal(t, uint32(1000), *d.UID, "the container's user can open it")
		}
		require.Equal(t, tt.nodes, nodes)
		if tt.nodes == nil {
			continue
		}
		require.Len(t, spec.Linux.Resources.Devices, len(nodes))
		require.Equal(t, "rw", spec.Linux.Resources.Devices[0].Access)
	}
	require.True(t, f.WasOpened(claim, "s"))
}

// TestVersion is the lowest that holds what is written, as older runtimes refuse what they do not know.
func TestVersion(t *testing.T) {
	folder := t.TempDir()
	f := newFiles(t, folder)
	for uid, want := range map[kubetypes.UID]string{claim: "0.5.0", other: "0.3.0"} {
		require.NoError(t, f.OpenGate(gateOf(uid, "s", "net")))
		content, err := os.ReadFile(f.path(uid))
		require.NoError(t, err)
		require.Contains(t, string(content), `"cdiVersion":"`+want+`"`)
		require.NotContains(t, f.path(uid), "_metadata_")
	}
}

// TestVendor makes a kind of a driver's name that begins with a digit.
func TestVendor(t *testing.T) {
	folder := t.TempDir()
	f := NewFiles(Params{Logger: slog.New(slog.DiscardHandler), Folder: folder, Driver: "10g.example.com"})
	require.NoError(t, f.OpenGate(gateOf(claim, "s", "net")))
	_, err := resolve(t, folder, ID("10g.example.com", claim, "net"))
	require.NoError(t, err)
}

// TestUnchanged leaves a file alone that is right already.
func TestUnchanged(t *testing.T) {
	f := newFiles(t, t.TempDir())
	require.NoError(t, f.OpenGate(gateOf(claim, "s", "net")))
	before, err := os.Stat(f.path(claim))
	require.NoError(t, err)
	require.NoError(t, newFiles(t, f.Folder).OpenGate(gateOf(claim, "s", "net")))
	after, err := os.Stat(f.path(claim))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after))
}

// TestCloseOtherGates removes what a former agent has left, and nothing else.
func TestCloseOtherGates(t *testing.T) {
	f := newFiles(t, filepath.Join(t.TempDir(), "cdi"))
	f.CloseOtherGates(nil)
	require.NoError(t, f.OpenGate(gateOf(claim, "s", "net")))
	require.NoError(t, f.OpenGate(gateOf(other, "s", "net")))
	foreign := filepath.Join(f.Folder, driver+"_metadata_"+string(other)+".json")
	require.NoError(t, os.WriteFile(foreign, nil, 0o644))
	named := filepath.Join(f.Folder, driver+"-claim_metadata_"+string(other)+"_net.json")
	require.NoError(t, os.WriteFile(named, nil, 0o644), "of a driver whose name ends in -claim")

	newFiles(t, f.Folder).CloseOtherGates([]kubetypes.UID{claim})
	require.FileExists(t, f.path(claim))
	require.NoFileExists(t, f.path(other))
	require.FileExists(t, foreign)
	require.FileExists(t, named)
}

// TestRepair makes up for a folder that cannot be written, and for files that somebody removed.
func TestRepair(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "cdi")
	require.NoError(t, os.WriteFile(folder, nil, 0o644), "a file in the place of the folder")
	f := newFiles(t, folder)
	_, changed := f.State()
	require.ErrorContains(t, f.OpenGate(gateOf(claim, "s", "net")), folder)
	<-changed
	state, changed := f.State()
	require.ErrorContains(t, state.Problem, folder)
	f.Repair()
	again, stillOpen := f.State()
	require.Equal(t, state, again, "the same failure is no news")
	require.Equal(t, changed, stillOpen)

	require.NoError(t, os.Remove(folder))
	f.Repair()
	<-changed
	state, _ = f.State()
	require.NoError(t, state.Problem)
	require.FileExists(t, f.path(claim))

	require.NoError(t, os.RemoveAll(folder))
	f.Repair()
	require.FileExists(t, f.path(claim))

	// What cannot be removed is seen, and removed later.
	require.NoError(t, os.Remove(f.path(claim)))
	require.NoError(t, os.MkdirAll(filepath.Join(f.path(claim), "full"), 0o755))
	f.CloseGate(claim)
	state, _ = f.State()
	require.ErrorContains(t, state.Problem, "remove CDI spec file")
	require.NoError(t, os.Remove(filepath.Join(f.path(claim), "full")))
	f.Repair()
	state, _ = f.State()
	require.NoError(t, state.Problem)
	require.NoFileExists(t, f.path(claim))
}

// TestReadMarkers sees that the runtime does not resolve CDI devices, and that it does again.
func TestReadMarkers(t *testing.T) {
	f := newFiles(t, t.TempDir())
	marker := Marker{claim, "s"}
	foreign := "gpu.example.com/claim=x"
	require.Empty(t, f.ReadMarkers([]string{"A=b"}, nil))
	require.Empty(t, f.ReadMarkers([]string{"A=b"}, []string{foreign}))
	state, changed := f.State()
	require.Equal(t, State{}, state)

	require.Equal(t, []Marker{marker}, f.ReadMarkers([]string{"A=b", marker.variable()}, nil))
	<-changed
	state, changed = f.State()
	require.Equal(t, State{Resolved: true}, state)

	require.Empty(t, f.ReadMarkers([]string{"A=b"}, []string{foreign, ID(driver, claim, "net")}))
	<-changed
	state, changed = f.State()
	require.False(t, state.Resolved)
	require.ErrorContains(t, state.Problem, "enable CDI")
	f.ReadMarkers([]string{"A=b"}, nil)
	require.NotEmpty(t, f.ReadMarkers([]string{marker.variable()}, []string{ID(driver, claim, "net")}))
	<-changed
	state, _ = f.State()
	require.Equal(t, State{Resolved: true}, state)
}

// A container's environment is its pod's to write. What is a marker in it is one of the driver's, or of somebody who plays it,
// and a claim's file marks containers with what it was opened for, whatever the names are.
func FuzzMarkers(f *testing.F) {
	f.Add(string(claim), "sandbox", "net", markerPrefix+"X=a/b")
	f.Add("a/b", "", "net/fast", markerPrefix)
	f.Add(string(other), "s=1", "", markerPrefix+"=/")
	f.Add(`"`, "\n", "{}", "=")
	files := newFiles(f, f.TempDir())
	f.Fuzz(func(t *testing.T, claim, sandbox, request, variable string) {
		for _, m := range MarkersIn([]string{variable}) {
			require.True(t, strings.HasPrefix(variable, markerPrefix))
			require.True(t, strings.HasSuffix(variable, "="+string(m.Claim)+"/"+m.Sandbox))
			require.NotContains(t, m.Claim, "/")
		}
		if strings.ContainsFunc(sandbox, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return // runtimes make IDs of letters and digits
		}
		content, err := files.spec(gateOf(kubetypes.UID(claim), sandbox, request), specs.ContainerEdits{})
		if err != nil {
			return // not a name that CDI takes
		}
		spec, err := cdi.ParseSpec(content)
		require.NoError(t, err)
		require.Len(t, spec.Devices, 1)
		require.Equal(t, ID(driver, kubetypes.UID(claim), request), spec.Kind+"="+spec.Devices[0].Name)
		require.Equal(t, []Marker{{kubetypes.UID(claim), sandbox}}, MarkersIn(spec.Devices[0].ContainerEdits.Env))
	})
}

// BenchmarkRuntime is what a change of one file costs a runtime, which reads the whole folder again, with the files of 256
// claims; and what it costs the driver.
func BenchmarkRuntime(b *testing.B) {
	folder := b.TempDir()
	f := newFiles(b, folder)
	for i := range 256 {
		require.NoError(b, f.OpenGate(gateOf(kubetypes.UID(fmt.Sprintf("%08x-3b54-4e0c-9f32-6f5cba601fbf", i)), strings.Repeat("s", 64), "net")))
	}
	b.Run("rescan", func(b *testing.B) {
		cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(folder))
		require.NoError(b, err)
		for b.Loop() {
			require.NoError(b, cache.Refresh())
		}
	})
	b.Run("open and close", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, f.OpenGate(gateOf(claim, "s", "net")))
			f.CloseGate(claim)
		}
	})
}
