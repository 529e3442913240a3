// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/cilium/networkdriver/test/lab/internal/cache"
)

// component is a Go module of programs that the lab runs, under components/.
// Each pins its programs' sources by its go.mod and go.sum.
type component struct {
	name     string
	packages []string          // what to build
	tags     string            // build tags besides those of all
	ldflags  string            // besides those that strip
	gcflags  string            // for packages that no other component shares
	links    map[string]string // further names of a program
	version  string            // another version than the pinned one
}

var (
	etcdComponent = component{
		name:     "etcd",
		packages: []string{"go.etcd.io/etcd/server/v3"},
		// The package is named for its major version, the program is not.
		links: map[string]string{"etcd": "server"},
	}
	containerdComponent = component{
		name: "containerd",
		packages: []string{
			"github.com/containerd/containerd/v2/cmd/containerd",
			"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
			"github.com/containerd/containerd/v2/cmd/ctr",
		},
		tags: "no_btrfs,no_devmapper,no_zfs,no_aufs",
	}
	cniComponent = component{
		name: "cni",
		packages: []string{
			"github.com/containernetworking/plugins/plugins/main/bridge",
			"github.com/containernetworking/plugins/plugins/main/host-device",
			"github.com/containernetworking/plugins/plugins/main/loopback",
			"github.com/containernetworking/plugins/plugins/main/ptp",
			"github.com/containernetworking/plugins/plugins/ipam/host-local",
			"github.com/containernetworking/plugins/plugins/ipam/static",
			"github.com/containernetworking/plugins/plugins/meta/sbr",
		},
	}
)

const kubeletPackage = "k8s.io/kubernetes/cmd/kubelet"

// kube returns the Kubernetes programs of the wanted version.
func (b *builder) kube() component {
	v := b.opts.Kubernetes
	parts := strings.SplitN(v, ".", 3)
	minor := ""
	if len(parts) == 3 {
		minor = parts[1]
	}
	const pkg = "k8s.io/component-base/version"
	c := component{
		name:     "kube",
		packages: []string{".", kubeletPackage},
		// No other component has these packages; without inlining some of them compile in two fifths less time.
		gcflags: "k8s.io/kubernetes/...=-l",
		ldflags: fmt.Sprintf("-X %s.gitVersion=v%s -X %s.gitMajor=1 -X %s.gitMinor=%s", pkg, v, pkg, pkg, minor),
		links:   map[string]string{},
	}
	for _, name := range []string{APIServer, ControllerManager, Scheduler, "kubectl"} {
		c.links[name] = "kube"
	}
	if v != DefaultKubernetes {
		c.version = v
	}
	return c
}

// artifact returns the cache entry of a component.
func (b *builder) artifact(c component) (cache.Artifact, error) {
	dir := b.source(c)
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return cache.Artifact{}, err
	}
	inputs, err := cache.FileInputs(append(files, filepath.Join(dir, "go.mod"), filepath.Join(dir, "go.sum"))...)
	if err != nil {
		return cache.Artifact{}, err
	}
	inputs = append(inputs, runtime.Version(), c.version, c.tags, c.ldflags, c.gcflags, fmt.Sprint(c.packages, c.links))
	return cache.Artifact{Name: c.name, Inputs: inputs}, nil
}

func (b *builder) source(c component) string {
	return filepath.Join(b.root, "test", "lab", "components", c.name)
}

// build compiles a component and returns the directory of its programs.
func (b *builder) build(ctx context.Context, c component) (string, error) {
	a, err := b.artifact(c)
	if err != nil {
		return "", err
	}
	return b.cache.Ensure(ctx, a, func(ctx context.Context, out string) error {
		b.progress.step("compiling %s %s", c.name, c.version)
		dir := b.source(c)
		if c.version != "" {
			var err error
			if dir, err = b.otherKubernetes(ctx, c, filepath.Join(out, "module")); err != nil {
				return err
			}
		}
		args := []string{"build", "-trimpath", "-ldflags", strings.TrimSpace("-s -w " + c.ldflags), "-gcflags", c.gcflags, "-o", out + "/"}
		args = append(args, "-tags", strings.TrimSuffix(buildTag+","+c.tags, ","))
		if err := run(ctx, dir, goEnv, "go", append(args, c.packages...)...); err != nil {
			return err
		}
		for link, program := range c.links {
			if err := os.Symlink(program, filepath.Join(out, link)); err != nil {
				return err
			}
		}
		return nil
	})
}

// buildTag is what the Makefile has for all programs of the repository: with the same flags and the same versions of
// modules, a package that several programs have is compiled once.
const buildTag = "grpcnotrace"

// goEnv keeps the user's settings for other work out of the build.
var goEnv = []string{"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off"}

var stagingReplace = regexp.MustCompile(`(?m)^\s+(k8s\.io/[a-z0-9-]+) => \./staging/`)

// otherKubernetes writes a module for another Kubernetes version than the
// pinned one. The go.mod of k8s.io/kubernetes replaces its staging modules by
// local paths that the module's zip lacks: each is replaced by the module that
// was published from it.
func (b *builder) otherKubernetes(ctx context.Context, c component, dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	main, err := os.ReadFile(filepath.Join(b.source(c), "main.go"))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "main.go"), main, 0o644); err != nil {
		return "", err
	}
	module := "k8s.io/kubernetes@v" + c.version
	if err := run(ctx, dir, goEnv, "go", "mod", "download", module); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "env", "GOMODCACHE")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMODCACHE: %w", err)
	}
	upstream, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), module, "go.mod"))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(kubeModule(c.version, upstream)), 0o644); err != nil {
		return "", err
	}
	return dir, run(ctx, dir, goEnv, "go", "mod", "tidy")
}

// kubeModule returns a go.mod for the Kubernetes version, given the go.mod of
// k8s.io/kubernetes of that version.
func kubeModule(version string, upstream []byte) string {
	var s strings.Builder
	fmt.Fprintf(&s, "module kube\n\ngo 1.26.0\n\ntool %s\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n", kubeletPackage, version)
	for _, m := range stagingReplace.FindAllSubmatch(upstream, -1) {
		fmt.Fprintf(&s, "\t%s => %s v0.%s\n", m[1], m[1], strings.TrimPrefix(version, "1."))
	}
	s.WriteString(")\n")
	return s.String()
}
