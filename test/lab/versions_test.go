// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/modfile"
)

// Each version that can be asked for is what its files pin, and no file is left without its sums.
func TestPinnedVersions(t *testing.T) {
	root, err := moduleRoot()
	require.NoError(t, err)
	kubernetes, containerd, err := Versions()
	require.NoError(t, err)
	require.Equal(t, []string{"1.34.4", "1.35.4", "1.36.3", DefaultKubernetes}, kubernetes)
	require.Equal(t, []string{"1.7.35", "2.0.14", "2.1.9", DefaultContainerd}, containerd)
	for _, v := range kubernetes {
		b := &builder{root: root, opts: BuildOptions{Kubernetes: v}}
		pins := readPins(t, b, b.kube())
		require.Equal(t, "v"+v, pins["k8s.io/kubernetes"])
		require.Equal(t, "v0"+v[1:], pins["k8s.io/kubelet"], "a staging module of %s", v)
	}
	for _, v := range containerd {
		b := &builder{root: root, opts: BuildOptions{Containerd: v}}
		require.Equal(t, "v"+v, readPins(t, b, b.containerd())[containerdModule(v)])
	}
}

// readPins returns the versions of modules that a component is built of.
func readPins(t *testing.T, b *builder, c component) map[string]string {
	t.Helper()
	_, err := b.artifact(c) // reads sums, too
	require.NoError(t, err)
	path := filepath.Join(b.source(c), c.modfile())
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	file, err := modfile.Parse(path, data, nil)
	require.NoError(t, err)
	found := map[string]string{}
	for _, r := range file.Require {
		found[r.Mod.Path] = r.Mod.Version
	}
	for _, r := range file.Replace {
		found[r.Old.Path] = r.New.Version
	}
	return found
}

// Another version is another artifact: the one does not take the place of the other.
func TestVersionsApart(t *testing.T) {
	root, err := moduleRoot()
	require.NoError(t, err)
	seen := map[string]string{}
	for _, opts := range []BuildOptions{
		{Kubernetes: "1.34.4", Containerd: "1.7.35"}, {Kubernetes: "1.36.3", Containerd: "2.1.9"},
		{Kubernetes: DefaultKubernetes, Containerd: DefaultContainerd},
	} {
		b := &builder{root: root, opts: opts}
		for _, c := range []component{b.kube(), b.containerd()} {
			a, err := b.artifact(c)
			require.NoError(t, err)
			path := b.cache.Path(a)
			require.Empty(t, seen[path], "%s of %+v", c.name, opts)
			seen[path] = c.version
		}
	}
}

func TestVersionOfEnvironment(t *testing.T) {
	for _, env := range []string{KubernetesEnv, ContainerdEnv} {
		t.Setenv(env, "")
	}
	b, err := newBuilder(BuildOptions{})
	require.NoError(t, err)
	require.Equal(t, DefaultKubernetes, b.opts.Kubernetes)
	require.Equal(t, DefaultContainerd, b.opts.Containerd)

	t.Setenv(KubernetesEnv, "1.35.4")
	t.Setenv(ContainerdEnv, "2.0.14")
	b, err = newBuilder(BuildOptions{Containerd: "1.7.35"})
	require.NoError(t, err)
	require.Equal(t, "1.35.4", b.opts.Kubernetes)
	require.Equal(t, "1.7.35", b.opts.Containerd)

	t.Setenv(KubernetesEnv, "1.33.0")
	_, err = newBuilder(BuildOptions{})
	require.EqualError(t, err, "Kubernetes 1.33.0 is not pinned: have 1.34.4, 1.35.4, 1.36.3, 1.37.2; `lab pin` adds one")
	_, err = newBuilder(BuildOptions{Kubernetes: "1.34.4", Containerd: "go"})
	require.ErrorContains(t, err, "containerd go is not pinned")
}

func TestPinRefuses(t *testing.T) {
	for _, c := range []struct{ product, version, want string }{
		{"kubernetes", "v1.34.4", `version "v1.34.4"`},
		{"containerd", "2.4", `version "2.4"`},
		{"runc", "1.2.3", `product "runc"`},
		{"containerd", DefaultContainerd, "default version"},
	} {
		require.ErrorContains(t, Pin(t.Context(), c.product, c.version), c.want)
	}
}

func TestNodeOptions(t *testing.T) {
	for _, env := range []string{CDIEnv, PFsEnv, CPUsEnv} {
		t.Setenv(env, "")
	}
	o, err := NodeOptions{}.withDefaults(DefaultContainerd)
	require.NoError(t, err)
	require.Equal(t, NodeOptions{PFs: 1}, o)

	t.Setenv(CDIEnv, "off")
	t.Setenv(PFsEnv, "2")
	t.Setenv(CPUsEnv, "4")
	o, err = NodeOptions{CPUs: 2}.withDefaults("2.1.9")
	require.NoError(t, err)
	require.Equal(t, NodeOptions{CDI: "off", PFs: 2, CPUs: 2}, o)

	_, err = NodeOptions{}.withDefaults(DefaultContainerd)
	require.ErrorContains(t, err, "always has it on")
	t.Setenv(CDIEnv, "no")
	_, err = NodeOptions{}.withDefaults("2.1.9")
	require.EqualError(t, err, `CDI "no": want on or off`)
	for _, c := range []struct {
		options NodeOptions
		want    string
	}{
		{NodeOptions{CDI: "on", PFs: 3}, "3 PFs"},
		{NodeOptions{CDI: "on", PFs: -1}, "-1 PFs"},
		{NodeOptions{CDI: "on", CPUs: 9}, "9 processors"},
	} {
		_, err = c.options.withDefaults("2.1.9")
		require.ErrorContains(t, err, c.want)
	}
	t.Setenv(PFsEnv, "two")
	_, err = NodeOptions{CDI: "on"}.withDefaults("2.1.9")
	require.EqualError(t, err, `$NETWORKDRIVER_LAB_PFS is "two": want a number`)
}

func TestContainerdConfig(t *testing.T) {
	for _, c := range []struct {
		version, cdi string
		has, hasNot  []string
	}{
		{"1.7.35", "", []string{"version = 2", "disable = false", "sandbox_image = '" + pauseImage + "'"}, []string{"enable_cdi"}},
		{"1.7.35", "on", []string{"[plugins.'io.containerd.grpc.v1.cri']", "enable_cdi = true"}, nil},
		{"2.0.14", "off", []string{"version = 3", "[plugins.'io.containerd.cri.v1.runtime']\n  enable_cdi = false"}, []string{"default_validator"}},
		{"2.1.9", "", []string{"version = 3", "sandbox = '" + pauseImage + "'"}, []string{"enable_cdi"}},
		{"2.4.2", "on", []string{"version = 4", "default_validator"}, []string{"enable_cdi"}},
	} {
		config := containerdConfig(c.version, c.cdi)
		for _, text := range c.has {
			require.Contains(t, config, text, "%s %s", c.version, c.cdi)
		}
		for _, text := range c.hasNot {
			require.NotContains(t, config, text, "%s %s", c.version, c.cdi)
		}
	}
}

// A lab that is up with other versions or nodes is not taken for the one that is wanted.
func TestFits(t *testing.T) {
	for _, env := range []string{KubernetesEnv, ContainerdEnv, CDIEnv, PFsEnv, CPUsEnv} {
		t.Setenv(env, "")
	}
	l := &Lab{
		state: "there", nodeOptions: NodeOptions{PFs: 1},
		arts: &Artifacts{Kubernetes: DefaultKubernetes, Node: &NodeArtifacts{Containerd: DefaultContainerd}},
	}
	require.NoError(t, l.fits(Options{}))
	for _, opts := range []Options{
		{BuildOptions: BuildOptions{Kubernetes: "1.34.4"}},
		{BuildOptions: BuildOptions{Containerd: "2.1.9"}},
		{NodeOptions: NodeOptions{PFs: 2}},
		{NodeOptions: NodeOptions{CPUs: 2}},
		{NodeOptions: NodeOptions{CDI: "on"}},
	} {
		require.ErrorContains(t, l.fits(opts), "stop it first", "%+v", opts)
	}
}
