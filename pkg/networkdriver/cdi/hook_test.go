// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package cdi

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/gatehook"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// newHooked returns the files of a driver with a hook, which is in place, and a gate that they can open.
func newHooked(t *testing.T) (*Files, Gate) {
	t.Helper()
	dir := t.TempDir()
	hook := filepath.Join(dir, "hook")
	require.NoError(t, os.WriteFile(hook, nil, 0o755))
	return NewFiles(Params{
			Logger: slog.New(slog.DiscardHandler), Folder: filepath.Join(dir, "cdi"), Driver: driver, Hook: hook, Places: filepath.Join(dir, "gates"),
		}), Gate{
			Claim: claim, Requests: []string{"lan", "wan"}, Sandbox: "s1", NetNS: testenv.NetNS(t), Hardware: []gatehook.Device{{Bus: "pci", Name: "0000:03:00.1"}}, ClaimName: "default/shared", Pod: "default/one",
		}
}

// hooksOf returns the hooks that a container gets which lists all requests of the claim.
func hooksOf(t *testing.T, f *Files, requests ...string) []oci.Hook {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(f.Folder))
	require.NoError(t, err)
	require.Empty(t, cache.GetErrors())
	var ids []string
	for _, r := range requests {
		ids = append(ids, ID(driver, claim, r))
	}
	spec := &oci.Spec{Process: &oci.Process{}}
	_, err = cache.InjectDevices(spec, ids...)
	require.NoError(t, err)
	require.Len(t, MarkersIn(spec.Process.Env), 1)
	if spec.Hooks == nil {
		return nil
	}
	require.Equal(t, &oci.Hooks{CreateRuntime: spec.Hooks.CreateRuntime}, spec.Hooks, "at another time")
	return spec.Hooks.CreateRuntime
}

// TestHook gives a container the hook once, and the hook what it needs to know, for as long as the gate is open.
func TestHook(t *testing.T) {
	f, g := newHooked(t)
	require.NoError(t, f.OpenGate(g))
	place := f.placePath(claim)
	timeout := gatehook.Timeout
	want := []oci.Hook{{Path: f.Hook, Args: []string{f.Hook, place}, Timeout: &timeout}}
	require.Equal(t, want, hooksOf(t, f, "lan"))
	require.Equal(t, want, hooksOf(t, f, "lan", "wan"))
	content, err := os.ReadFile(f.path(claim))
	require.NoError(t, err)
	require.Contains(t, string(content), `"cdiVersion":"0.5.0"`, "hooks need no newer one")

	ns, err := netnamespace.Open(g.NetNS)
	require.NoError(t, err)
	ns.Close()
	data, err := os.ReadFile(place)
	require.NoError(t, err)
	var said gatehook.Place
	require.NoError(t, json.Unmarshal(data, &said))
	require.Equal(t, gatehook.Place{NetNS: ns.ID, Sandbox: "s1", Hardware: g.Hardware, Claim: "default/shared", Pod: "default/one"}, said)

	// The next agent leaves both as they are.
	before := []os.FileInfo{stat(t, place), stat(t, f.path(claim))}
	next := NewFiles(f.Params)
	next.CloseOtherGates([]kubetypes.UID{claim})
	require.NoError(t, next.OpenGate(g))
	for i, path := range []string{place, f.path(claim)} {
		require.True(t, os.SameFile(before[i], stat(t, path)), path)
	}

	next.CloseGate(claim)
	require.NoFileExists(t, f.path(claim))
	require.NoFileExists(t, place)
}

func stat(t *testing.T, path string) os.FileInfo {
	t.Helper()
	info, err := os.Stat(path)
	require.NoError(t, err)
	return info
}

// TestHookIsToldOfGroups has a container's hook look for the groups whose nodes the container was given, whatever the files say by then.
func TestHookIsToldOfGroups(t *testing.T) {
	f, g := newHooked(t)
	g.Exposed = []Exposed{
		{Request: "lan", PodClaim: "nic", Exposure: types.Exposure{Address: "0000:03:00.1", Nodes: []string{"/dev/vfio/15"}, IOMMUGroup: new(int64(15))}},
		{Request: "wan", PodClaim: "nic", Exposure: types.Exposure{Address: "0000:03:00.2", Nodes: []string{"/dev/infiniband/uverbs0"}}},
	}
	o, err := f.contents(g)
	require.NoError(t, err)
	spec := specs.Spec{}
	require.NoError(t, json.Unmarshal(o.hooked, &spec))
	require.Equal(t, []string{f.Hook, f.placePath(claim), "0000:03:00.1=15"}, spec.ContainerEdits.Hooks[0].Args)
}

// TestHookIsToldFirst never has a spec file with the hook that has nothing to read.
func TestHookIsToldFirst(t *testing.T) {
	f, g := newHooked(t)
	require.NoError(t, os.WriteFile(f.Places, nil, 0o600), "a file in the place of the folder")
	require.ErrorContains(t, f.OpenGate(g), f.Places)
	require.NoFileExists(t, f.path(claim))
	require.NoError(t, os.Remove(f.Places))
	f.Repair()
	require.FileExists(t, f.placePath(claim))
	require.Len(t, hooksOf(t, f, "lan"), 1)

	// And repairs what somebody removed.
	require.NoError(t, os.RemoveAll(f.Places))
	f.Repair()
	require.FileExists(t, f.placePath(claim))

	// One that cannot be removed does not keep the gate open.
	require.NoError(t, os.Remove(f.placePath(claim)))
	require.NoError(t, os.MkdirAll(filepath.Join(f.placePath(claim), "full"), 0o755))
	f.CloseGate(claim)
	require.NoFileExists(t, f.path(claim))
	state, _ := f.State()
	require.ErrorContains(t, state.Problem, "gate hook reads")
}

// TestGateOfADeadSandbox is closed: nothing can be in it.
func TestGateOfADeadSandbox(t *testing.T) {
	f, g := newHooked(t)
	require.NoError(t, f.OpenGate(g))
	g.NetNS += ".gone"
	require.ErrorIs(t, f.OpenGate(g), netnamespace.ErrNone)
	require.NoFileExists(t, f.path(claim))
	require.NoFileExists(t, f.placePath(claim))
}

// TestLeftForTheHook removes what a killed agent has left without a spec file, too.
func TestLeftForTheHook(t *testing.T) {
	f, g := newHooked(t)
	require.NoError(t, f.OpenGate(g))
	g.Claim = other
	require.NoError(t, f.OpenGate(g))
	require.NoError(t, os.Remove(f.path(other)))
	NewFiles(f.Params).CloseOtherGates([]kubetypes.UID{claim})
	require.FileExists(t, f.placePath(claim))
	require.NoFileExists(t, f.placePath(other))
}

// TestMissingHook does not keep containers from starting, as a runtime that does not find it would, and is seen.
func TestMissingHook(t *testing.T) {
	f, g := newHooked(t)
	require.NoError(t, os.Remove(f.Hook))
	require.NoError(t, f.OpenGate(g))
	require.Empty(t, hooksOf(t, f, "lan"))
	state, changed := f.State()
	require.ErrorContains(t, state.Problem, "the gate hook is not in place")

	require.NoError(t, os.WriteFile(f.Hook, nil, 0o755))
	f.Repair()
	<-changed
	state, changed = f.State()
	require.NoError(t, state.Problem)
	require.Len(t, hooksOf(t, f, "lan"), 1)

	require.NoError(t, os.Chmod(f.Hook, 0o644))
	f.Repair()
	<-changed
	state, changed = f.State()
	require.ErrorContains(t, state.Problem, "is not a program")
	require.Empty(t, hooksOf(t, f, "lan"))
	f.Repair()
	_, still := f.State()
	require.Equal(t, changed, still, "the same is no news")

	// An agent without a hook, or an older one, makes it a gate without.
	f.Hook = ""
	require.NoError(t, NewFiles(f.Params).OpenGate(g))
	require.Empty(t, hooksOf(t, f, "lan"))
}
