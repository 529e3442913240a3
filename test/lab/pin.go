// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// pins are the versions of a component that can be built: the default one by
// its go.mod and go.sum, each other one by VERSION.mod and VERSION.sum.
type pins struct {
	product        string
	component      string // directory below components/
	defaultVersion string
}

var (
	kubernetesPins = pins{product: "Kubernetes", component: "kube", defaultVersion: DefaultKubernetes}
	containerdPins = pins{product: "containerd", component: "containerd", defaultVersion: DefaultContainerd}
)

func (p pins) dir(root string) string {
	return filepath.Join(root, "test", "lab", "components", p.component)
}

// versions returns the versions in ascending order.
func (p pins) versions(root string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(p.dir(root), "*.mod"))
	if err != nil {
		return nil, err
	}
	found := []string{p.defaultVersion}
	for _, f := range files {
		if name := filepath.Base(f); name != "go.mod" {
			found = append(found, strings.TrimSuffix(name, ".mod"))
		}
	}
	slices.SortFunc(found, func(a, b string) int { return semver.Compare("v"+a, "v"+b) })
	return found, nil
}

// pinned returns the version if it can be built.
func pinned(root string, p pins, version string) (string, error) {
	versions, err := p.versions(root)
	if err != nil {
		return "", err
	}
	if !slices.Contains(versions, version) {
		return "", fmt.Errorf("%s %s is not pinned: have %s; `lab pin` adds one", p.product, version, strings.Join(versions, ", "))
	}
	return version, nil
}

// Versions returns the versions of Kubernetes and of containerd that the lab
// can be built with, each in ascending order.
func Versions() (kubernetes, containerd []string, err error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, nil, err
	}
	kubernetes, kerr := kubernetesPins.versions(root)
	containerd, cerr := containerdPins.versions(root)
	return kubernetes, containerd, errors.Join(kerr, cerr)
}

// Pin writes the files that pin a version of Kubernetes or containerd, with
// the versions of modules that it was released with.
func Pin(ctx context.Context, product, version string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	if semver.Canonical("v"+version) != "v"+version {
		return fmt.Errorf("version %q: want one such as %s", version, DefaultKubernetes)
	}
	var p pins
	var text string
	switch product {
	case "kubernetes":
		p = kubernetesPins
		upstream, err := upstreamModule(ctx, "k8s.io/kubernetes@v"+version)
		if err != nil {
			return err
		}
		text = kubeModule(version, upstream)
	case "containerd":
		p = containerdPins
		text = moduleText(p, containerdPackages(version), containerdModule(version)+" v"+version)
	default:
		return fmt.Errorf("product %q: want kubernetes or containerd", product)
	}
	if version == p.defaultVersion {
		return fmt.Errorf("%s %s is the default version, which go.mod pins", p.product, version)
	}
	path := filepath.Join(p.dir(root), version+".mod")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	if err := run(ctx, p.dir(root), goEnv, "go", "mod", "tidy", "-modfile", filepath.Base(path)); err != nil {
		return errors.Join(err, os.Remove(path)) // nothing that is half made counts as a version
	}
	return nil
}

// upstreamModule returns the go.mod of a module's version.
func upstreamModule(ctx context.Context, module string) ([]byte, error) {
	if err := run(ctx, "", goEnv, "go", "mod", "download", module); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOMODCACHE: %w", err)
	}
	return os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), module, "go.mod"))
}

func moduleText(p pins, tools []string, require string) string {
	return fmt.Sprintf("module github.com/cilium/networkdriver/test/lab/components/%s\n\ngo 1.26.0\n\ntool (\n\t%s\n)\n\nrequire %s\n",
		p.component, strings.Join(tools, "\n\t"), require)
}

var stagingReplace = regexp.MustCompile(`(?m)^\s+(k8s\.io/[a-z0-9-]+) => \./staging/`)

// kubeModule returns a go.mod for the Kubernetes version, given the go.mod of
// k8s.io/kubernetes of that version. That replaces its staging modules by local
// paths that the module's zip lacks: each is replaced by the module that was
// published from it.
func kubeModule(version string, upstream []byte) string {
	var s strings.Builder
	s.WriteString(moduleText(kubernetesPins, []string{kubeletPackage}, "k8s.io/kubernetes v"+version))
	s.WriteString("\nreplace (\n")
	for _, m := range stagingReplace.FindAllSubmatch(upstream, -1) {
		fmt.Fprintf(&s, "\t%s => %s v0.%s\n", m[1], m[1], strings.TrimPrefix(version, "1."))
	}
	s.WriteString(")\n")
	return s.String()
}
