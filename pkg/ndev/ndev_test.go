// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

var update = flag.Bool("update", false, "write the golden files")

// run runs kubectl ndev against the API.
func (a *fakeAPI) run(args ...string) (stdout, stderr string, err error) {
	streams, _, out, errOut := genericiooptions.NewTestIOStreams()
	print := newPrinting()
	print.now = func() time.Time { return time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC) }
	cmd := command(streams, print)
	cmd.SetArgs(append(args, "--server", a.url, "--kubeconfig", os.DevNull))
	err = cmd.ExecuteContext(a.t.Context())
	return out.String(), errOut.String(), err
}

func requireGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s, write it with -update if it is wanted (-want +got):\n%s", path, diff)
	}
}

// TestOutput compares what is printed for the fixtures with the golden files.
func TestOutput(t *testing.T) {
	for _, tt := range []struct{ golden, args string }{
		{"devices.txt", ""},
		{"devices-wide.txt", "-o wide"},
		{"devices.json", "-o json"},
		{"devices-unhealthy.txt", "--unhealthy --no-headers"},
		{"pod-app.txt", "pod default/app -o wide"},
		{"pod-app.yaml", "pod app -n default -o yaml"},
		{"pod-second.txt", "pod default/second"},
		{"pod-away.txt", "pod default/away"},
		{"pod-pending.txt", "pod default/pending"},
		{"pod-plain.txt", "pod default/plain"},
	} {
		t.Run(tt.golden, func(t *testing.T) {
			out, errOut, err := newFakeAPI(t, "testdata/cluster.yaml").run(strings.Fields(tt.args)...)
			require.NoError(t, err)
			require.Empty(t, errOut)
			requireGolden(t, tt.golden, out)
		})
	}
}

// A claim of a pod group is not told to wait for another pod.
func TestGroup(t *testing.T) {
	out, _, err := newFakeAPI(t, "testdata/group.yaml").run("pod", "default/member")
	require.NoError(t, err)
	require.Contains(t, out, "claim net: it is reserved for podgroup workers, and a network device can only be given to one pod\n"+
		"   -> take the claim out of spec.resourceClaims of the PodGroup, and name a ResourceClaimTemplate in that of the pods alone\n"+
		"   see Documentation/use.md#pod-groups\n")
	require.NotContains(t, out, "another pod uses the claim")
}

// TestSelectors: each selector leaves the devices that it names.
func TestSelectors(t *testing.T) {
	for _, tt := range []struct {
		args string
		want []string
	}{
		{"--node node2", []string{"node2/0000-03-00-1", "node2/0000-03-00-9"}},
		{"--pool fast-net", []string{"node1/dummy0"}},
		{"--network storage", []string{"node1/0000-03-00-1"}},
		{"-n default --node node1", []string{"node1/0000-03-00-1", "node1/0000-03-00-2"}},
		{"--driver gpu.example.com", []string{"node1/gpu-0"}},
		{"--node node3", nil},
	} {
		t.Run(tt.args, func(t *testing.T) {
			api := newFakeAPI(t, "testdata/cluster.yaml")
			out, errOut, err := api.run(append(strings.Fields(tt.args), "-o", "json")...)
			require.NoError(t, err)
			require.Empty(t, errOut)
			var list DeviceList
			require.NoError(t, json.Unmarshal([]byte(out), &list))
			var got []string
			for _, d := range list.Items {
				got = append(got, d.Node+"/"+d.Device)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// TestPages: lists are read by pages, and all of them.
func TestPages(t *testing.T) {
	api := newFakeAPI(t, "testdata/cluster.yaml")
	_, _, err := api.run()
	require.NoError(t, err)
	require.Equal(t, map[string]int{"ciliumnetworkdrivernodeconfigs": 1, "resourceslices": 2, "resourceclaims": 4}, api.pages)
}

// TestRights: what the reader may not read is said; only what would make the answer wrong ends it.
func TestRights(t *testing.T) {
	for _, tt := range []struct{ denied, args, told, fails string }{
		{denied: "ciliumnetworkdrivernodeconfigs", args: "--unhealthy", told: "whether the nodes' agents are at work"},
		{denied: "resourceslices", fails: "list ResourceSlices: "},
		{denied: "resourceclaims", fails: "list ResourceClaims: "},
		{denied: "resourceslices", args: "pod default/app", told: "what the node offers"},
		{denied: "ciliumnetworkdrivernetworks", args: "pod default/app", told: "the networks that the claims name"},
		{denied: "ciliumnetworkdriveraddresses", args: "pod default/app", told: "the addresses of the node's devices"},
		{denied: "events", args: "pod default/app", told: "events"},
		{denied: "namespaces", args: "pod default/app", told: "the labels of the pod's namespace"},
		{denied: "ciliumnetworkdrivernodeconfigs", args: "pod default/app", told: "the driver on the pod's node"},
		{denied: "deviceclasses", args: "pod default/pending", told: "device class sriov"},
		{denied: "resourceslices", args: "pod default/pending", told: "which devices there are"},
		{denied: "resourceclaimtemplates", args: "pod default/pending", told: "claim template ghost"},
		{denied: "pods", args: "pod default/app", fails: "get pod default/app: "},
		{denied: "resourceclaims", args: "pod default/app", fails: "get claim app-net: "},
	} {
		t.Run(tt.denied+" "+tt.args, func(t *testing.T) {
			api := newFakeAPI(t, "testdata/cluster.yaml")
			api.denied[tt.denied] = true
			out, errOut, err := api.run(strings.Fields(tt.args)...)
			if tt.fails != "" {
				require.ErrorContains(t, err, tt.fails)
				require.ErrorContains(t, err, "needs the ClusterRole "+ViewerRole)
				return
			}
			require.NoError(t, err)
			require.Contains(t, out+errOut, "Not told: "+tt.told)
			require.NotContains(t, out, "Nothing is missing")
		})
	}
}

// TestWrongArguments: what cannot be meant is refused with what can be.
func TestWrongArguments(t *testing.T) {
	api := newFakeAPI(t, "testdata/cluster.yaml")
	for args, want := range map[string]string{
		"-o xml":                `--output: "xml" is none of wide, json, `,
		"pod a/b/c":             `"a/b/c" is no pod: NAME or NAMESPACE/NAME is`,
		"pod /b":                `"/b" is no pod: NAME or NAMESPACE/NAME is`,
		"pod default/app -n x":  "the pod's namespace is given twice",
		"pod default/app other": "accepts 1 arg(s), received 2",
		"pod default/ghost":     `get pod default/ghost: `,
		"devices":               `unknown command "devices"`,
	} {
		_, _, err := api.run(strings.Fields(args)...)
		require.ErrorContains(t, err, want, args)
	}
}

// TestNoDriver: a cluster without devices is told where devices come from.
func TestNoDriver(t *testing.T) {
	api := newFakeAPI(t, "testdata/cluster.yaml")
	for resource := range api.objects {
		api.only(resource, func(*unstructured.Unstructured) bool { return false })
	}
	out, errOut, err := api.run()
	require.NoError(t, err)
	require.Empty(t, out)
	require.Contains(t, errOut, "kubectl get ndnc")
}

// TestSafe: nothing that a terminal acts on, or that pretends to be another line, is left.
func TestSafe(t *testing.T) {
	for text, want := range map[string]string{
		"net0":                 "net0",
		"Zürich 網 …":           "Zürich 網 …",
		"\x1b[31m":             `\x1b[31m`,
		"a\nb\tc\r":            `a\nb\tc\r`,
		"\u009b31m":            `\u009b31m`,
		"a\u202eb\u2066\u200b": `a\u202eb\u2066\u200b`,
		"\xff'\"\x00":          `\xff'"\x00`,
		"\ufffd":               "\ufffd",
	} {
		require.Equal(t, want, safe(text))
	}
	// In JSON the same characters are spelt out, and it stays the same document.
	texts := []string{"\x1b[31m", "\u009b31m", "a\u202eb", "\U000e0001", "Zürich 網"}
	raw, err := json.MarshalIndent(texts, "", "  ")
	require.NoError(t, err)
	var out bytes.Buffer
	n, err := jsonWriter{&out}.Write(raw)
	require.NoError(t, err)
	require.Equal(t, len(raw), n)
	require.NotRegexp(t, "[\\x{80}-\\x{9f}\\x{202e}\\x{e0001}\\x1b]", out.String())
	require.Contains(t, out.String(), "Zürich 網")
	var got []string
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.Equal(t, texts, got)
}

// TestRecord: of the driver's own record, what the plugin reads is what the driver writes.
func TestRecord(t *testing.T) {
	for name, tt := range map[string]struct {
		config  types.DeviceConfig
		network string
		vlan    int
	}{
		"network": {types.DeviceConfig{Network: "storage", Joined: &types.Network{VLAN: 1001}}, "storage", 1001},
		"vlan":    {types.DeviceConfig{Vlan: ptr.To(7)}, "", 7},
		"neither": {types.DeviceConfig{}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := json.Marshal(types.Record{PodUID: "pod", Config: tt.config, Device: json.RawMessage("{}")})
			require.NoError(t, err)
			var use Use
			holder := use.read(&resourceapi.AllocatedDeviceStatus{Data: &runtime.RawExtension{Raw: raw}})
			require.Equal(t, "pod", holder)
			require.Equal(t, tt.network, use.Network)
			require.Equal(t, tt.vlan, use.VLAN)
		})
	}
	// Whoever may write the status may write anything there.
	for _, raw := range []string{"", "null", "[]", `{"config": 1}`, `{"config": {"vlan": "x"}}`} {
		require.Zero(t, recordOf(&resourceapi.AllocatedDeviceStatus{Data: &runtime.RawExtension{Raw: []byte(raw)}}))
	}
}

// TestKrew: Krew's manifest is for the platforms that are built, and leads to what each is packed as.
func TestKrew(t *testing.T) {
	manifest, err := os.ReadFile("../../install/krew/ndev.yaml")
	require.NoError(t, err)
	var plugin struct {
		Spec struct {
			Platforms []struct {
				Selector         struct{ MatchLabels struct{ OS, Arch string } }
				URI, SHA256, Bin string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(manifest, &plugin))
	makefile, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	var platforms []string
	for _, p := range plugin.Spec.Platforms {
		labels := p.Selector.MatchLabels
		platforms = append(platforms, labels.OS+"/"+labels.Arch)
		name := labels.OS + "-" + labels.Arch
		require.Equal(t, "https://github.com/cilium/networkdriver/releases/download/VERSION/kubectl-ndev-"+name+".tar.gz", p.URI)
		require.Equal(t, "SHA256-"+name, p.SHA256, "make fills it in")
		require.Equal(t, "kubectl-ndev", p.Bin)
	}
	require.Contains(t, string(makefile), "\nNDEV_PLATFORMS ?= "+strings.Join(platforms, " ")+"\n")
}

// TestSections: the sections that findings point to exist.
func TestSections(t *testing.T) {
	source, err := os.ReadFile("find.go")
	require.NoError(t, err)
	found := regexp.MustCompile(`"(\w+\.md)#([-\w]+)"`).FindAllStringSubmatch(string(source), -1)
	require.Greater(t, len(found), 10)
	for _, f := range found {
		text, err := os.ReadFile(filepath.Join("..", "..", "Documentation", f[1]))
		require.NoError(t, err)
		headings := ""
		for _, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, "#") {
				words := regexp.MustCompile(`[^-\w ]`).ReplaceAllString(strings.ToLower(strings.TrimLeft(line, "# ")), "")
				headings += "#" + strings.ReplaceAll(words, " ", "-") + "\n"
			}
		}
		assert.Contains(t, headings, "#"+f[2]+"\n", f[1])
	}
}
