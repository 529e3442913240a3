// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/cilium/networkdriver/test/lab/internal/cache"
)

// The versions that the lab runs if nothing else is asked for: those that the
// go.mod files of components/kube and components/containerd pin.
const (
	DefaultKubernetes = "1.37.2"
	DefaultContainerd = "2.4.2"
)

// CacheEnv names the environment variable with the directory for what Build
// makes. Without it that is .cache/lab in the repository.
const CacheEnv = "NETWORKDRIVER_LAB_CACHE"

// Environment variables with the versions of Kubernetes and containerd.
const (
	KubernetesEnv = "NETWORKDRIVER_LAB_KUBERNETES"
	ContainerdEnv = "NETWORKDRIVER_LAB_CONTAINERD"
)

// ErrNotBuilt says that Build has not made what is asked for. Tests skip then.
var ErrNotBuilt = errors.New("the lab is not built: run `go run ./test/lab/cmd/lab build` first")

// BuildOptions are the options of Build. Their zero value is good.
type BuildOptions struct {
	// Kubernetes is the version without the v, such as 1.34.4. Empty means
	// $NETWORKDRIVER_LAB_KUBERNETES, or else DefaultKubernetes.
	Kubernetes string

	// Containerd is the version without the v, such as 1.7.35. Empty means
	// $NETWORKDRIVER_LAB_CONTAINERD, or else DefaultContainerd.
	Containerd string

	// Cache is the directory for the results. Empty means
	// $NETWORKDRIVER_LAB_CACHE, or else .cache/lab in the repository.
	Cache string

	// ControlPlaneOnly leaves out what only the emulated nodes need.
	ControlPlaneOnly bool

	// Progress gets one line per step; nil means none.
	Progress io.Writer
}

// Artifacts is what Build made.
type Artifacts struct {
	Bin        string // directory with kubectl and the programs of the control plane
	Kubernetes string // version
	Node       *NodeArtifacts
}

// builder holds what all steps of a build share.
type builder struct {
	opts     BuildOptions
	root     string // of the repository
	cache    cache.Cache
	progress *progress
}

func newBuilder(opts BuildOptions) (*builder, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	if opts.Kubernetes, err = pinned(root, kubernetesPins, cmp.Or(opts.Kubernetes, os.Getenv(KubernetesEnv), DefaultKubernetes)); err != nil {
		return nil, err
	}
	if opts.Containerd, err = pinned(root, containerdPins, cmp.Or(opts.Containerd, os.Getenv(ContainerdEnv), DefaultContainerd)); err != nil {
		return nil, err
	}
	if opts.Cache, err = filepath.Abs(cmp.Or(opts.Cache, os.Getenv(CacheEnv), filepath.Join(root, ".cache", "lab"))); err != nil {
		return nil, err
	}
	return &builder{opts: opts, root: root, cache: cache.Cache{Dir: opts.Cache}, progress: newProgress(opts.Progress)}, nil
}

// Build makes what the lab runs, from Go modules and Debian packages: minutes
// at first, less than two seconds when nothing changed.
func Build(ctx context.Context, opts BuildOptions) (*Artifacts, error) {
	b, err := newBuilder(opts)
	if err != nil {
		return nil, fmt.Errorf("lab build: %w", err)
	}
	return b.artifacts(ctx)
}

func (b *builder) artifacts(ctx context.Context) (*Artifacts, error) {
	arts := &Artifacts{Kubernetes: b.opts.Kubernetes}
	var err error
	if !b.opts.ControlPlaneOnly {
		// The packages come first: a machine that cannot have them should say so
		// before it compiles for minutes.
		if arts.Node, err = b.nodeArtifacts(ctx); err != nil {
			return nil, fmt.Errorf("lab build: %w", err)
		}
	}
	if arts.Bin, err = b.bin(ctx); err != nil {
		return nil, fmt.Errorf("lab build: %w", err)
	}
	b.progress.step("built Kubernetes %s and containerd %s in %s", b.opts.Kubernetes, b.opts.Containerd, b.opts.Cache)
	return arts, nil
}

// bin gathers the control plane's programs in one directory of links.
func (b *builder) bin(ctx context.Context) (string, error) {
	for _, c := range controlPlaneComponents(b) {
		if _, err := b.build(ctx, c); err != nil {
			return "", err
		}
	}
	a, err := b.binArtifact()
	if err != nil {
		return "", err
	}
	return b.cache.Ensure(ctx, a, func(_ context.Context, dir string) error {
		for _, from := range a.Inputs {
			entries, err := os.ReadDir(from)
			if err != nil {
				return err
			}
			for _, e := range entries {
				if err := os.Symlink(filepath.Join(from, e.Name()), filepath.Join(dir, e.Name())); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func controlPlaneComponents(b *builder) []component { return []component{b.kube(), etcdComponent} }

// binArtifact has the directories of the components as inputs.
func (b *builder) binArtifact() (cache.Artifact, error) {
	bin := cache.Artifact{Name: "bin"}
	for _, c := range controlPlaneComponents(b) {
		a, err := b.artifact(c)
		if err != nil {
			return bin, err
		}
		bin.Inputs = append(bin.Inputs, b.cache.Path(a))
	}
	return bin, nil
}

// Built returns the control plane's artifacts if Build has made them for these
// options, and ErrNotBuilt otherwise.
func Built(opts BuildOptions) (*Artifacts, error) {
	b, err := newBuilder(opts)
	if err != nil {
		return nil, err
	}
	a, err := b.binArtifact()
	if err != nil {
		return nil, err
	}
	if !b.cache.Has(a) {
		return nil, ErrNotBuilt
	}
	return &Artifacts{Bin: b.cache.Path(a), Kubernetes: b.opts.Kubernetes}, nil
}

// moduleRoot returns the repository's directory, found from the working
// directory upwards: tests run in their package's directory.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		data, err := os.ReadFile(filepath.Join(d, "go.mod"))
		if err == nil && strings.HasPrefix(string(data), "module github.com/cilium/networkdriver\n") {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s is not inside the repository, whose sources the lab is built from", dir)
		}
	}
}

// run runs a program to its end. An error has the end of what it wrote.
func run(ctx context.Context, dir string, env []string, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		text := strings.TrimSpace(string(out))
		return fmt.Errorf("%s %s: %w\n%s", name, args[0], err, text[max(0, len(text)-4000):])
	}
	return nil
}
