// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
	version  string            // pinned by VERSION.mod and VERSION.sum; empty means by go.mod and go.sum
}

var (
	etcdComponent = component{
		name:     "etcd",
		packages: []string{"go.etcd.io/etcd/server/v3"},
		// The package is named for its major version, the program is not.
		links: map[string]string{"etcd": "server"},
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

// containerd returns the runtime of the wanted version.
func (b *builder) containerd() component {
	v := b.opts.Containerd
	c := component{
		name: "containerd", packages: containerdPackages(v), tags: "no_btrfs,no_devmapper,no_zfs,no_aufs",
		// As releases have it: NRI plugins conclude from it which NRI an older containerd has.
		ldflags: "-X " + containerdModule(v) + "/version.Version=v" + v,
	}
	if v != DefaultContainerd {
		c.version = v
	}
	return c
}

func containerdPackages(version string) []string {
	module := containerdModule(version)
	return []string{module + "/cmd/containerd", module + "/cmd/containerd-shim-runc-v2", module + "/cmd/ctr"}
}

func containerdModule(version string) string {
	if strings.HasPrefix(version, "1.") {
		return "github.com/containerd/containerd"
	}
	return "github.com/containerd/containerd/v2"
}

// modfile returns the name of the file that pins a component's sources.
func (c component) modfile() string {
	if c.version == "" {
		return "go.mod"
	}
	return c.version + ".mod"
}

// artifact returns the cache entry of a component.
func (b *builder) artifact(c component) (cache.Artifact, error) {
	dir := b.source(c)
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return cache.Artifact{}, err
	}
	pins := filepath.Join(dir, c.modfile())
	inputs, err := cache.FileInputs(append(files, pins, strings.TrimSuffix(pins, ".mod")+".sum")...)
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
		args := []string{"build", "-modfile", c.modfile(), "-trimpath", "-ldflags", strings.TrimSpace("-s -w " + c.ldflags), "-gcflags", c.gcflags, "-o", out + "/"}
		args = append(args, "-tags", strings.TrimSuffix(buildTag+","+c.tags, ","))
		if err := run(ctx, b.source(c), goEnv, "go", append(args, c.packages...)...); err != nil {
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
